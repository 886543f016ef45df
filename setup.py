# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Builds the native library, hf_linear_attention/_C.so, with the C++ compiler, and nvcc if found.

Torch is not needed: the library uses libtorch's stable C ABI as csrc/torch/shim.h declares it, and
finds libtorch when it is loaded. So one library serves every Python and every torch from 2.10 on.

Where it can't be built, the package is installed without it, with a warning, and runs on PyTorch;
where only the CUDA kernels can't, without these. Metadata is in setup.cfg. Environment:

    CXX, CXXFLAGS, LDFLAGS   as usual; CUDAHOSTCXX, where nvcc shall not use CXX
    HF_LINEAR_ATTENTION_REQUIRE_NATIVE=1   makes a warning an error (that about CUDA, where CUDA is
        asked for)
    HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS   "all", as wheels for others have, or "native", the
        default: those that this processor would run, and base for doubles
    HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES   what to compile the CUDA kernels for: "sm_90" or
        "sm_80,compute_80", say, "all", "none", or "native", the default: the GPUs that are here.
        nvcc is looked for in CUDA_HOME, in CUDA_PATH, on PATH and among pip's packages
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
REQUIRE_NATIVE = os.environ.get("HF_LINEAR_ATTENTION_REQUIRE_NATIVE") == "1"

SYSTEM = sysconfig.get_platform().partition("-")[0]  # what is built for, also elsewhere
COMPILE_FLAGS = ["-std=c++17", "-O3", f"-I{CSRC}", f"-ffile-prefix-map={ROOT}/="]
COMPILE_FLAGS += {"linux": ["-fPIC"], "win": []}.get(SYSTEM, ["-fPIC", "-fvisibility=hidden"])
# Neither changes a result: nobody reads errno or floating-point exceptions after the kernels.
SOON = ["-O1"]  # compiled soon, and slower where that costs little
HAS_LOOPS = "plain_operations.cpp"  # over numbers, of all that binds kernels to torch
DOUBLE_ALONE = "-DHFLA_DOUBLE_ALONE"  # of base, where it is not chosen for anything else
KERNEL_FLAGS = ["-fno-math-errno", "-fno-trapping-math"]
LINK_FLAGS = {
    "linux": ["-shared", "-s", "-Wl,-z,now", f"-Wl,--version-script={CSRC / 'exports.map'}"],
    "macosx": ["-dynamiclib", "-Wl,-undefined,dynamic_lookup"],
    "win": ["-shared", "-s"],
}

# Every *_isa.cpp below csrc/cpu is compiled once for each of these, but for those in SOURCES; the
# files of an op's folder together, which saves reading headers and making templates for each.
# csrc/cpu/dispatch.cpp chooses when it runs.
INSTRUCTION_SETS = {"base": []}
if sysconfig.get_platform().endswith(("x86_64", "amd64")):
    avx2 = ["-O2", "-mavx2", "-mfma", "-mf16c"]
    avx2 += ["-DHFLA_WITHOUT_DOUBLE"]  # which are for comparisons: base's kernels take them
    avx512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
    INSTRUCTION_SETS |= {
        "base": ["-O1"],  # for CPUs of before 2013, and for doubles: soon compiled, and no more
        "avx2": avx2,
        "avx512": avx2 + avx512,
        "avx512_vnni": [*avx2, *avx512, "-mavx512vnni"],
        "avx512_bf16": [*avx2, *avx512, "-mavx512bf16"],
    }
    if SYSTEM == "linux":  # whose kernel is asked whether a process may use the tiles
        INSTRUCTION_SETS["amx"] = [*avx2, *avx512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]

FOLDERS_AS_ONE = (
    "convolution",
    "delta_rule",
    "elementwise_scan",
    "linear_attention",
    "selective_scan",
)

# Instruction sets that only some products have a use for, and which. dispatch.cpp takes all other
# kernels from the one before.
SOURCES = {
    "avx512_vnni": ("dense/rounded_*_isa.cpp",),
    "avx512_bf16": ("dense/linear_isa.cpp",),
    "amx": ("dense/*_amx.cpp",),
}

# What is faster with -O3, and products by AMX, which were not measured. By measurements with GCC 12
# on AMD's Zen 4, the rest is as fast with -O2, and compiles in three quarters of the time.
GAINS_BY_O3 = (
    "attention/*_isa.cpp",
    "linear_attention/*_isa.cpp",
    "dense/rms_norm_isa.cpp",
    "dense/cross_entropy_isa.cpp",
    "dense/rounded_*_isa.cpp",
    "dense/*_amx.cpp",
)

# Machine code for the devices of each major version, which those of its later minor versions run,
# too; and PTX that drivers compile for all others.
CUDA_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_80")
CUDA_SETTING = "HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES"
CPU_SETTING = "HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS"
# What a processor must have for each set, as Linux names it in /proc/cpuinfo; only AMD's multiply
# bfloat16 faster that way (csrc/cpu/dispatch.cpp).
NEEDED = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16", "AuthenticAMD"},
    "amx": {"amx_bf16", "amx_int8"},
}


@dataclass
class Compilation:
    """One source file, and what is compiled with it, on its way to one object file."""

    source: Path
    flags: list[str] = field(default_factory=list)
    variant: str = ""  # of several objects that are made of one source
    together_with: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Of the object; the path is in it, so that no two files have the same."""
        path = self.source.relative_to(CSRC).with_suffix("")
        return "-".join(path.parts) + (f"_{self.variant}" if self.variant else "")

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in (self.source, *self.together_with))


@dataclass
class Cuda:
    """What the CUDA kernels are compiled with and for, and linked to."""

    nvcc: Path
    architectures: list[str]
    include: Path
    runtime: Path  # libcudart_static.a

    def nvcc_flags(self) -> list[str]:
        flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC", f"-I{CSRC}"]
        return flags + [gencode(name) for name in self.architectures]


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
    if SYSTEM not in LINK_FLAGS:
        raise CompileError(f"made for {', '.join(LINK_FLAGS)}, and this is {SYSTEM}")
    if SYSTEM != "linux" and not REQUIRE_NATIVE:
        raise CompileError(
            f"for {SYSTEM} they compile, but they have never run there; "
            "HF_LINEAR_ATTENTION_REQUIRE_NATIVE=1 tries"
        )
    if not compiler or not shutil.which(compiler[0]):
        raise CompileError(f"no C++ compiler: {shlex.join(compiler) or 'CXX is empty'} not found")
    return compiler


def cuda_architectures() -> list[str]:
    """What to compile the CUDA kernels for; nothing where there shall be none."""
    setting = os.environ.get(CUDA_SETTING, "") or "native"
    if setting == "none":
        return []
    if setting == "all":
        return list(CUDA_ARCHITECTURES)
    names = local_architectures() if setting == "native" else re.split(r"[,;\s]+", setting)
    for name in names:
        if not re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", name):
            raise CompileError(
                f'{CUDA_SETTING} must be "all", "native", "none" or names such as '
                f'"sm_90,compute_80", got {setting!r}'
            )
    return names


def cpu_instruction_sets(compiler: list[str]) -> dict[str, list[str]]:
    """What to compile the CPU kernels for, as far as the compiler understands: base, which all need
    for doubles, and the others, or of these what the best one here takes kernels from.
    """
    setting = os.environ.get(CPU_SETTING) or "native"
    if setting not in ("all", "native"):
        raise CompileError(f'{CPU_SETTING} must be "all" or "native", got {setting!r}')
    cpuinfo = Path("/proc/cpuinfo")
    chosen = list(INSTRUCTION_SETS)
    if setting == "native" and cpuinfo.exists():
        has = set(cpuinfo.read_text().split())
        chosen = [name for name in chosen if NEEDED.get(name, set()) <= has]
        if "avx512" in chosen:
            chosen.remove("avx2")
    sets = {name: INSTRUCTION_SETS[name] for name in chosen}
    known = {name: flags for name, flags in sets.items() if understands(compiler, flags)}
    if setting == "native" and len(known) > 1:
        known["base"] = [*known["base"], DOUBLE_ALONE]
    return known


def local_architectures() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    return sorted(
        {"sm_" + line.replace(".", "") for line in re.findall(r"^\d+\.\d$", printed, re.M)}
    )


def find_cuda(architectures: list[str]) -> Cuda:
    """Raises CompileError where there is no CUDA toolkit."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(nvcc_home(on_path))
    # nvidia-cuda-nvcc and what it needs; an isolated build has another sys.path.
    for packages in dict.fromkeys([*sys.path, sysconfig.get_path("purelib")]):
        homes += sorted(Path(packages).glob("nvidia/cu[0-9]*"), reverse=True)
    for home in homes:
        nvcc, include = home / "bin" / "nvcc", home / "include"
        libraries = sorted(home.glob("lib*/libcudart_static.a"))
        libraries += home.glob("targets/*/lib/libcudart_static.a")
        if nvcc.exists() and (include / "cuda_runtime.h").exists() and libraries:
            known = [name for name in architectures if compiles_for(nvcc, name)]
            return Cuda(nvcc, known, include, libraries[0])
    looked = ", ".join(map(str, homes)) or "CUDA_HOME, CUDA_PATH, PATH or pip's packages"
    raise CompileError(
        f"no bin/nvcc with include/cuda_runtime.h and libcudart_static.a in {looked}"
    )


def nvcc_home(nvcc: str) -> Path:
    """The directory of its toolkit, which it knows itself: it may be a script far away from it."""
    printed = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True)
    top = re.search(r"^#\$ TOP=(.*)$", printed.stderr.decode(), re.M)
    return Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent


def compiles_for(nvcc: Path, architecture: str) -> bool:
    command = [nvcc, "--dryrun", gencode(architecture), "-x", "cu", "-c", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def gencode(architecture: str) -> str:
    return f"-gencode=arch={architecture.replace('sm_', 'compute_')},code={architecture}"


def understands(compiler: list[str], flags: list[str]) -> bool:
    if not flags:
        return True
    check = [*compiler, *flags, "-E", "-x", "c++", os.devnull]  # Zig can't only check
    return subprocess.run(check, capture_output=True).returncode == 0


def together(sources: list[Path]) -> list[list[Path]]:
    """Those that become one object each."""
    folders = [
        [source for source in sources if source.parent.name == name] for name in FOLDERS_AS_ONE
    ]
    others = [[source] for source in sources if source.parent.name not in FOLDERS_AS_ONE]
    return [*filter(None, folders), *others]


def cpu_kernels(instruction_sets: dict[str, list[str]]) -> list[Compilation]:
    built = [f"-DHFLA_WITH_{name.upper()}" for name in instruction_sets]
    built += [flag for flag in instruction_sets["base"] if flag == DOUBLE_ALONE]
    result = []
    for name, isa_flags in instruction_sets.items():
        flags = [f"-DHFLA_ISA={name}", *KERNEL_FLAGS, *isa_flags]
        for pattern in SOURCES.get(name, ("*_isa.cpp",)):
            for first, *others in together(sorted((CSRC / "cpu").rglob(pattern))):
                gains = "-O2" in flags and any(map(first.match, GAINS_BY_O3))
                result.append(Compilation(first, flags + ["-O3"] * gains, name, tuple(others)))
    for_all = Compilation(CSRC / "cpu" / "expert_linear.cpp")
    return [*result, for_all, Compilation(CSRC / "cpu" / "dispatch.cpp", built)]


def bindings(cuda: Cuda | None) -> list[Compilation]:
    """What depends on whether there are CUDA kernels."""
    for_cuda = sorted((CSRC / "torch" / "cuda").rglob("*.cpp"))
    sources = [
        source for source in sorted((CSRC / "torch").rglob("*.cpp")) if source not in for_cuda
    ]
    if cuda is None:
        return [Compilation(source, binding_flags(source)) for source in sources]
    built = f'-DHFLA_WITH_CUDA="{", ".join(cuda.architectures)}"'
    of_runtime = sorted((CSRC / "cuda").rglob("*.cpp"))
    return [
        *(Compilation(source, [*binding_flags(source), built], "cuda") for source in sources),
        *(Compilation(source, [f"-I{cuda.include}"]) for source in for_cuda + of_runtime),
    ]


def binding_flags(source: Path) -> list[str]:
    return [] if source.name == HAS_LOOPS else SOON


def dependencies(rule: Path) -> list[Path]:
    """The files in a make rule that a compiler wrote (-MF): the source and all that it includes."""
    _, _, prerequisites = rule.read_text().replace("\\\n", " ").partition(": ")
    escaped = re.findall(r"(?:\\.|[^\\\s])+", prerequisites)
    return [Path(re.sub(r"\\(.)", r"\1", name).replace("$$", "$")) for name in escaped]


def is_up_to_date(target: Path, rule: Path) -> bool:
    if not target.exists() or not rule.exists():
        return False
    made = target.stat().st_mtime
    return all(file.exists() and file.stat().st_mtime < made for file in dependencies(rule))


def libtorch(compiler: list[str], directory: Path) -> list[str | Path]:
    """What to link to for the functions of libtorch, which the library finds when it is loaded: a
    library of libtorch's name that has nothing, or, for Windows, functions that do nothing.
    """
    if SYSTEM == "macosx":
        return []  # whose linker takes it that they will be there
    if SYSTEM == "win":
        stub, imports = directory / "torch_cpu.dll", directory / "torch_cpu.lib"
        shim = (CSRC / "torch" / "shim.h").read_text("utf-8")
        declared = shim[shim.index('extern "C" {') : shim.index('}  // extern "C"')]
        names = re.findall(r"\b((?:aoti_)?torch_\w+)\(", declared)
        source = directory / "torch_cpu.cpp"
        source.write_text(
            "".join(f'extern "C" __declspec(dllexport) void {name}() {{}}\n' for name in names)
        )
        run([*compiler, "-shared", source, f"-Wl,--out-implib,{imports}", "-o", stub])
        return [imports]
    stub = directory / "libtorch_cpu.so"
    flags = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libtorch_cpu.so", "-x", "c++"]
    run([*compiler, *flags, os.devnull, "-o", stub])
    return ["-Wl,--no-as-needed", stub, "-Wl,--as-needed"]


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

        cuda, cuda_objects = self.compile_cuda(compiler, objects)
        linked = [*self.compile_host(compiler, cuda, objects), *cuda_objects]
        if cuda:
            linked += [cuda.runtime, "-Wl,--exclude-libs,ALL", "-ldl", "-lrt", "-lpthread"]
        linked += libtorch(compiler, objects)
        user_flags = shlex.split(os.environ.get("LDFLAGS", ""))
        run([*compiler, *LINK_FLAGS[SYSTEM], *linked, *user_flags, "-o", library])

    def compile_host(self, compiler: list[str], cuda: Cuda | None, objects: Path) -> list[Path]:
        """All that the C++ compiler compiles."""
        instruction_sets = cpu_instruction_sets(compiler)
        user_flags = shlex.split(os.environ.get("CXXFLAGS", ""))  # last, for they prevail
        items = [
            replace(item, flags=item.flags + user_flags)
            for item in cpu_kernels(instruction_sets) + bindings(cuda)
        ]
        return self.compile_all([*compiler, *COMPILE_FLAGS], items, objects)

    def compile_cuda(self, compiler: list[str], objects: Path) -> tuple[Cuda | None, list[Path]]:
        """Neither, with a warning, where it can't be done."""
        try:
            architectures = cuda_architectures()
            if not architectures:
                if shutil.which("nvcc") and not os.environ.get(CUDA_SETTING):
                    self.warn(f"no GPU here, so no CUDA kernels: {CUDA_SETTING}=all compiles them")
                return None, []
            cuda = find_cuda(architectures)
            items = [Compilation(source) for source in (CSRC / "cuda").rglob("*.cu")]
            host_compiler = os.environ.get("CUDAHOSTCXX") or compiler[0]
            command = [str(cuda.nvcc), f"-ccbin={host_compiler}", *cuda.nvcc_flags()]
            return cuda, self.compile_all(command, items, objects)
        except CompileError as error:
            if REQUIRE_NATIVE and os.environ.get(CUDA_SETTING):
                raise
            self.warn(f"installing without CUDA kernels ({error})")
            return None, []

    def compile_all(
        self, compiler: list[str], items: list[Compilation], objects: Path
    ) -> list[Path]:
        """Compiles in parallel what is not up to date, and returns all object files."""

        def compile_one(item: Compilation) -> Path:
            target = objects / f"{item.name}.o"
            rule = target.with_suffix(".d")
            command = [*compiler, *item.flags, "-MMD", "-MF", str(rule)]
            command += [word for file in item.together_with for word in ("-include", str(file))]
            command += ["-c", str(item.source), "-o", str(target)]
            made_by = target.with_suffix(".command")  # exists beside a complete object only
            same_command = made_by.exists() and made_by.read_text() == shlex.join(command)
            if self.force or not same_command or not is_up_to_date(target, rule):
                made_by.unlink(missing_ok=True)
                run(command)
                made_by.write_text(shlex.join(command))
            return target

        # The largest first: what is compiled last should not keep one core busy alone.
        items = sorted(items, key=lambda item: (-item.size, item.name))
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(compile_one, items))

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
