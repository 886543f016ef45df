# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Builds the native library, hf_linear_attention/_C.so, with the C++ compiler and nothing else.

Torch is not needed: the library uses libtorch's stable C ABI as csrc/torch/shim.h declares it, and
finds libtorch when it is loaded. So one library serves every Python and every torch from 2.10 on.

Where it can't be built, the package is installed without it, with a warning, and runs on PyTorch.
Environment: CXX, CXXFLAGS, LDFLAGS as usual; HF_LINEAR_ATTENTION_REQUIRE_NATIVE=1 turns the warning
into an error. Metadata is in setup.cfg.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
REQUIRE_NATIVE = os.environ.get("HF_LINEAR_ATTENTION_REQUIRE_NATIVE") == "1"

COMPILE_FLAGS = ["-std=c++17", "-O3", "-fPIC", f"-I{CSRC}", f"-ffile-prefix-map={ROOT}/="]
# Neither changes a result: nobody reads errno or floating-point exceptions after the kernels.
KERNEL_FLAGS = ["-fno-math-errno", "-fno-trapping-math"]
LINK_FLAGS = ["-shared", "-s", "-Wl,-z,now", f"-Wl,--version-script={CSRC / 'exports.map'}"]

# Every *_isa.cpp is compiled once for each of these; csrc/cpu/dispatch.cpp chooses when it runs.
INSTRUCTION_SETS = {"base": []}
if platform.machine() in ("x86_64", "AMD64"):
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    avx512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
    INSTRUCTION_SETS |= {"avx2": avx2, "avx512": avx2 + avx512}


@dataclass
class Compilation:
    """One source file on its way to one object file."""

    source: Path
    name: str
    flags: list[str] = field(default_factory=list)


def run(command: list) -> None:
    """Runs a compiler command, which says itself what is wrong when it fails."""
    words = [str(word) for word in command]
    print(shlex.join(words), flush=True)
    try:
        subprocess.run(words, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{words[0]} failed, as it says above") from error


def find_compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if sys.platform != "linux":
        raise CompileError(f"it is made for Linux only, so far, and this is {sys.platform}")
    if not compiler or not shutil.which(compiler[0]):
        raise CompileError(f"no C++ compiler: {shlex.join(compiler) or 'CXX is empty'} not found")
    return compiler


def understands(compiler: list[str], flags: list[str]) -> bool:
    if not flags:
        return True
    check = [*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(check, capture_output=True).returncode == 0


def compilations(instruction_sets: dict[str, list[str]]) -> list[Compilation]:
    """Everything to compile. CUDA sources will come in here, from csrc/cuda through nvcc."""
    built = [f"-DHFLA_WITH_{name.upper()}" for name in instruction_sets]
    result = [Compilation(CSRC / "torch" / "bindings.cpp", "bindings")]
    for source in sorted((CSRC / "cpu").glob("*.cpp")):
        if source.stem.endswith("_isa"):
            for name, isa_flags in instruction_sets.items():
                flags = [f"-DHFLA_ISA={name}", *KERNEL_FLAGS, *isa_flags]
                result.append(Compilation(source, f"{source.stem}_{name}", flags))
        else:
            result.append(Compilation(source, source.stem, built))
    return result


def is_newer(target: Path, sources: list[Path]) -> bool:
    return target.exists() and target.stat().st_mtime > max(s.stat().st_mtime for s in sources)


def libtorch_stub(compiler: list[str], directory: Path) -> Path:
    """An empty library of libtorch's name: what is linked to it finds the real one when loaded."""
    stub = directory / "libtorch_cpu.so"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "-x", "c++"]
    run([*compiler, *flags, os.devnull, "-o", stub])
    return stub


class BuildNativeLibrary(build_ext):
    """For a library that has nothing of Python or torch in it."""

    command_name = "build_ext"  # in messages

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name: any Python can load it."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)  # of an earlier build; this one may fail
        try:
            self.build_library(library)
        except CompileError as error:
            if REQUIRE_NATIVE:
                raise
            self.warn(
                f"installing without compiled kernels ({error}). Linear attention will run on "
                "PyTorch alone, more slowly. "
                "HF_LINEAR_ATTENTION_REQUIRE_NATIVE=1 makes this an error"
            )

    def build_library(self, library: Path) -> None:
        compiler = find_compiler()
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)

        linked = self.compile(compiler, objects)
        libtorch = ["-Wl,--no-as-needed", libtorch_stub(compiler, objects), "-Wl,--as-needed"]
        user_flags = shlex.split(os.environ.get("LDFLAGS", ""))
        run([*compiler, *LINK_FLAGS, *linked, *libtorch, *user_flags, "-o", library])

    def compile(self, compiler: list[str], objects: Path) -> list[Path]:
        """Compiles in parallel what is not up to date, and returns all object files."""
        flags = [*COMPILE_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        instruction_sets = {
            name: isa_flags
            for name, isa_flags in INSTRUCTION_SETS.items()
            if understands(compiler, isa_flags)
        }
        headers = list(CSRC.rglob("*.h"))

        def compile_one(item: Compilation) -> Path:
            target = objects / f"{item.name}.o"
            command = [*compiler, *flags, *item.flags, "-c", str(item.source), "-o", str(target)]
            made_by = target.with_suffix(".command")  # exists beside a complete object only
            same_command = made_by.exists() and made_by.read_text() == shlex.join(command)
            if self.force or not same_command or not is_newer(target, [item.source, *headers]):
                made_by.unlink(missing_ok=True)
                run(command)
                made_by.write_text(shlex.join(command))
            return target

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(compile_one, compilations(instruction_sets)))

    def copy_extensions_to_source(self) -> None:
        """For --inplace: a library of an earlier build must not outlive a build that failed."""
        for ext in self.extensions:
            (ROOT / "src" / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class WheelForAnyPython(bdist_wheel):
    """py3-none-<platform> with the native library, py3-none-any without."""

    def run(self) -> None:
        self.run_command("build")  # first, since its outcome decides about the tag
        self.skip_build = True
        build_lib = Path(self.get_finalized_command("build").build_lib)
        if not any(build_lib.rglob("_C.so")):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("hf_linear_attention._C", sources=[], optional=not REQUIRE_NATIVE)],
    cmdclass={"build_ext": BuildNativeLibrary, "bdist_wheel": WheelForAnyPython},
)
