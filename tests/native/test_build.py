# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The build: sdist, wheels with and without a compiler, and what is in the native library."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from hf_linear_attention.ops.compiled.library import cpu_instruction_set
from idle_compiler import idle_compiler
from new_python import run_python

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CUDA = "HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(COMPILER[0]) is None,
    reason="without a C++ compiler on Linux there is no native library",
)


def run(*command, cwd=ROOT, **environment):
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


# For what is built only to be looked at: compiled as it is written. Functions that are always
# inlined are like any other then, which are compiled once.
QUICKLY = "-O0 -Dalways_inline=unused"


def build(kind, source, destination, **environment):
    """Builds an "sdist" or a "wheel" of `source` as pip does, without fetching anything."""
    destination.mkdir(exist_ok=True)
    environment = {CUDA: "none"} | environment  # for the sake of time
    hook = f"from setuptools import build_meta; build_meta.build_{kind}({str(destination)!r})"
    result = run(sys.executable, "-c", hook, cwd=source, **environment)
    results = list(destination.iterdir())
    return result, results[0] if results else None


@pytest.fixture(scope="session")
def unpacked_sdist(tmp_path_factory):
    """The source tree as someone gets it who downloads the sdist."""
    directory = tmp_path_factory.mktemp("sdist with spaces in its path")
    source = directory / "checkout"
    untouched = shutil.ignore_patterns(
        ".*", "build", "outputs", "*.so", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, source, ignore=untouched)
    result, sdist = build("sdist", source, directory / "dist")
    assert sdist is not None, result.stdout
    shutil.unpack_archive(sdist, directory)
    return directory / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="session")
def native_wheel(unpacked_sdist, tmp_path_factory):
    """The wheel with the native library, and the objects that it was linked from.

    Not optimised, for the sake of time; and the inline functions that an optimiser might have
    removed are still there for test_objects_of_an_instruction_set_have_no_weak_symbols.
    """
    result, wheel = build(
        "wheel", unpacked_sdist, tmp_path_factory.mktemp("native"), CXXFLAGS=QUICKLY
    )
    assert wheel is not None, result.stdout
    return wheel, sorted(unpacked_sdist.glob("build/temp*/*.o"))


@pytest.fixture(scope="session")
def pure_build(unpacked_sdist, tmp_path_factory):
    """What a build without a compiler says, and its wheel."""
    source = tmp_path_factory.mktemp("no_compiler") / "source"
    shutil.copytree(unpacked_sdist, source, ignore=shutil.ignore_patterns("build"))
    return build("wheel", source, source.parent / "dist", CXX="/nonexistent/c++")


@needs_compiler
def test_where_there_is_a_compiler_the_native_library_is_installed():
    from hf_linear_attention.ops.compiled.library import LIBRARY_PATH

    assert LIBRARY_PATH.exists()


def test_sdist_has_the_sources_of_the_native_library(unpacked_sdist):
    def sources(root):
        return {path.relative_to(root) for path in (root / "csrc").rglob("*") if path.is_file()}

    assert sources(unpacked_sdist) == sources(ROOT)


@pytest.mark.thorough
@needs_compiler
def test_wheel_with_the_native_library_is_for_any_python_on_this_platform(native_wheel):
    wheel, _ = native_wheel
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    files = zipfile.ZipFile(wheel).namelist()
    assert "hf_linear_attention/_C.so" in files
    package = ROOT / "src"
    code = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert code <= set(files)  # that in folders, too
    assert "Root-Is-Purelib: false" in wheel_metadata(wheel)


@pytest.mark.thorough
@needs_compiler
def test_wheel_with_the_native_library_runs_on_it(native_wheel, tmp_path):
    wheel, _ = native_wheel
    report = run_report_from(wheel, tmp_path)
    assert re.search(r"^native library .*_C\.so$", report, re.MULTILINE), report
    assert re.search(r"^  cpu +available$", report, re.MULTILINE), report


@pytest.mark.thorough
@needs_compiler
def test_a_library_for_another_processor_is_left_out_with_the_reason(native_wheel, tmp_path):
    wheel, objects = native_wheel
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for_none = tmp_path / "for_none.o"
    flags = ("-std=c++17", "-fPIC", f"-I{CSRC}", "-DHFLA_DOUBLE_ALONE")
    made = run(*COMPILER, *flags, "-c", CSRC / "cpu" / "dispatch.cpp", "-o", for_none)
    assert made.returncode == 0, made.stdout
    others = [path for path in objects if path.name != "cpu-dispatch.o"]
    library = tmp_path / "hf_linear_attention" / "_C.so"
    torchs = ("-Wl,--no-as-needed", objects[0].parent / "libtorch_cpu.so")
    linked = run(*COMPILER, "-shared", *others, for_none, *torchs, "-o", library)
    assert linked.returncode == 0, linked.stdout

    report = run_report_in(tmp_path)
    assert "none: the kernels were built for another processor" in report
    assert re.search(r"^  cpu tensors +chunked$", report, re.MULTILINE), report


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("processor", "has_avx2"), [("x86_64", True), ("aarch64", False)], ids=["x86_64", "aarch64"]
)
def test_a_wheel_is_for_the_processor_that_python_is_told_of(
    processor, has_avx2, unpacked_sdist, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(unpacked_sdist, source, ignore=shutil.ignore_patterns("build"))
    result, wheel = build(
        *("wheel", source, tmp_path / "dist"),
        CXX=str(idle_compiler(tmp_path)),
        _PYTHON_HOST_PLATFORM=f"linux-{processor}",
        HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
    )
    assert wheel is not None, result.stdout
    assert wheel.name.endswith(f"-py3-none-linux_{processor}.whl")
    assert "-DHFLA_ISA=base" in result.stdout
    assert ("-mavx2" in result.stdout) == has_avx2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("target", "flag"), [("macosx-11.0-arm64", "-dynamiclib"), ("win-amd64", "--out-implib")]
)
def test_macos_and_windows_have_kernels_only_where_they_are_asked_for(
    target, flag, unpacked_sdist, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(unpacked_sdist, source, ignore=shutil.ignore_patterns("build"))
    machine = {"CXX": str(idle_compiler(tmp_path)), "_PYTHON_HOST_PLATFORM": target}
    result, wheel = build("wheel", source, tmp_path / "default", **machine)
    assert wheel is not None and wheel.name.endswith("-py3-none-any.whl"), result.stdout
    assert result.stdout.count("compile, but they have never run there") == 1

    machine["HF_LINEAR_ATTENTION_REQUIRE_NATIVE"] = "1"
    machine[CUDA] = "none"
    result = run(sys.executable, "setup.py", "build_ext", cwd=source, **machine)
    assert result.returncode == 0, result.stdout
    assert flag in result.stdout and "libtorch_cpu.so" not in result.stdout
    assert "HFLA_WITH_AMX" not in result.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have one set only")
@needs_compiler
def test_a_build_for_this_machine_has_base_and_what_runs_here(unpacked_sdist, tmp_path):
    built = {}
    for setting in ("all", "native", "some"):
        result = run(
            *(sys.executable, "setup.py", "build_ext", "--build-temp", tmp_path / setting),
            cwd=unpacked_sdist,
            CXX=str(idle_compiler(tmp_path)),
            HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS=setting,
            HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES="none",
            HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
        )
        built[setting] = set(re.findall(r"-DHFLA_ISA=(\w+)", result.stdout))
        # Base's kernels, and the choice, in which base is none then.
        for_doubles = [line for line in result.stdout.splitlines() if "-DHFLA_DOUBLE_ALONE" in line]
        assert bool(for_doubles) == (setting == "native" and len(built["native"]) > 1)
        assert all("HFLA_ISA=base" in x or "dispatch.cpp" in x for x in for_doubles)
    assert built["all"] == {"base", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"}
    assert {"base", cpu_instruction_set()} <= built["native"] <= built["all"]
    assert "avx512" not in built["native"] or "avx2" not in built["native"]
    is_amds = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    assert is_amds or "avx512_bf16" not in built["native"]  # which others run slower
    assert 'SETS must be "all" or "native", got \'some\'' in result.stdout and not built["some"]


def test_wheel_without_a_compiler_is_pure_python_with_one_warning(pure_build):
    result, wheel = pure_build
    assert wheel is not None, result.stdout
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Root-Is-Purelib: true" in wheel_metadata(wheel)
    assert "hf_linear_attention/_C.so" not in zipfile.ZipFile(wheel).namelist()
    warning = "installing without compiled kernels (no C++ compiler: /nonexistent/c++ not found)"
    assert result.stdout.count(warning) == 1


def test_wheel_without_a_compiler_runs_on_pytorch_and_says_why(pure_build, tmp_path):
    report = run_report_from(pure_build[1], tmp_path)
    assert re.search(r"^native library +none: .*was not built", report, re.MULTILINE), report
    assert re.search(r"^  cpu tensors +chunked$", report, re.MULTILINE), report


@needs_compiler
def test_a_library_that_torch_is_too_old_for_is_left_out_with_the_reason(pure_build, tmp_path):
    _, wheel = pure_build
    zipfile.ZipFile(wheel).extractall(tmp_path)
    source = tmp_path / "future.cpp"
    source.write_text('extern "C" void torch_of_2099(); void use() { torch_of_2099(); }')
    library = tmp_path / "hf_linear_attention" / "_C.so"
    built = run(*COMPILER, "-shared", "-fPIC", source, "-o", library)
    assert built.returncode == 0, built.stdout

    report = run_report_in(tmp_path)
    assert f"can't be loaded with torch {torch.__version__}" in report
    assert "undefined symbol: torch_of_2099" in report
    assert re.search(r"^  cpu tensors +chunked$", report, re.MULTILINE), report


def test_a_required_native_library_that_cannot_be_built_is_an_error(unpacked_sdist, tmp_path):
    result, wheel = build(
        "wheel",
        unpacked_sdist,
        tmp_path,
        CXX="/nonexistent/c++",
        HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
    )
    assert wheel is None
    assert result.returncode != 0
    assert "no C++ compiler: /nonexistent/c++ not found" in result.stdout


# ---- CUDA ----


def build_with_cuda(source, destination, architectures, **environment):
    """As native_wheel, whose objects for the CPU are there already; nvcc's own compiler optimises
    as little, and test_cuda_report.py has it do all it can.
    """
    environment |= {"NVCC_APPEND_FLAGS": "-Xcicc=-O0"}
    environment |= {CUDA: architectures, "CXXFLAGS": QUICKLY}
    return build("wheel", source, destination, **environment)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_wheel_with_cuda_kernels_says_so_and_runs_where_torch_has_no_cuda(
    native_wheel, unpacked_sdist, tmp_path
):
    result, wheel = build_with_cuda(unpacked_sdist, tmp_path / "dist", "compute_80")
    assert wheel is not None, result.stdout
    report = run_report_from(wheel, tmp_path / "installed")
    assert re.search(r"^CUDA kernels +compute_80$", report, re.MULTILINE), report
    assert re.search(r"^  cpu +available$", report, re.MULTILINE), report
    if not torch.cuda.is_available():
        assert re.search(r"^  cuda +not here: torch finds no CUDA", report, re.MULTILINE), report


BROKEN_CUDA = {
    "no_toolkit": ("sm_90", "no bin/nvcc with include/cuda_runtime.h and libcudart_static.a"),
    "failing_nvcc": ("sm_90", "nvcc failed, as it says above"),
    "no_architecture": ("H100", 'must be "all", "native", "none" or names such as "sm_90'),
}


@pytest.fixture
def broken_cuda(tmp_path):
    """What makes CUDA_HOME the only toolkit, and its nvcc one that fails except for --dryrun."""
    home = tmp_path / "cuda"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text('#!/bin/sh\n[ "$1" = --dryrun ]\n')
    (home / "bin" / "nvcc").chmod(0o755)
    path = os.pathsep.join(
        directory
        for directory in os.environ["PATH"].split(os.pathsep)
        if not (Path(directory) / "nvcc").exists() or (Path(directory) / COMPILER[0]).exists()
    )
    return {"CUDA_HOME": str(home), "PATH": path}


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("trouble", BROKEN_CUDA)
def test_wheel_whose_cuda_kernels_cannot_be_built_is_for_the_cpu_with_one_warning(
    trouble, native_wheel, unpacked_sdist, broken_cuda, tmp_path
):
    architectures, reason = BROKEN_CUDA[trouble]
    if trouble == "no_toolkit":
        broken_cuda["CUDA_HOME"] = str(tmp_path)
        if shutil.which("nvcc", path=broken_cuda["PATH"]):
            pytest.skip("nvcc is beside the C++ compiler")
    result, wheel = build_with_cuda(unpacked_sdist, tmp_path / "dist", architectures, **broken_cuda)
    assert wheel is not None, result.stdout
    assert result.stdout.count("installing without CUDA kernels (") == 1
    assert reason in result.stdout
    report = run_report_from(wheel, tmp_path / "installed")
    assert re.search(r"^CUDA kernels +none$", report, re.MULTILINE), report

    required, wheel = build_with_cuda(
        *(unpacked_sdist, tmp_path / "required", architectures),
        **broken_cuda,
        HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
    )
    assert wheel is None
    assert reason in required.stdout


# ---- what is compiled again ----


def compiled(printed):
    """What a build compiled: the sources, relative to csrc, in the order of their names. Of those
    that are compiled as one, all.
    """
    return sorted(re.findall(r"/csrc/([\w/]+\.cpp)'? -(?:o|c|include) ", printed))


def includers(csrc, header):
    """The sources that include a header of csrc, directly or through others."""
    texts = {
        p.relative_to(csrc).as_posix(): p.read_text() for p in csrc.rglob("*.*") if p.is_file()
    }
    found, grown = set(), {header}
    while grown != found:
        found = grown
        grown = found | {
            name for name, text in texts.items() if any(f'#include "{h}"' in text for h in found)
        }
    return sorted(name for name in found if name.endswith(".cpp"))


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    "header", ["cpu/dense/quantized_values.h", "cpu/selective_scan/kernels.h", "torch/sequences.h"]
)
def test_a_header_that_changed_is_compiled_into_what_includes_it_and_nothing_else(
    header, native_wheel, unpacked_sdist, tmp_path
):
    csrc = unpacked_sdist / "csrc"
    again, _ = build("wheel", unpacked_sdist, tmp_path / "again", CXXFLAGS=QUICKLY)
    assert compiled(again.stdout) == []

    os.utime(csrc / header)
    changed, wheel = build("wheel", unpacked_sdist, tmp_path / "changed", CXXFLAGS=QUICKLY)
    assert wheel is not None, changed.stdout
    wanted = includers(csrc, header)
    assert wanted and set(compiled(changed.stdout)) == set(wanted)
    rules = [path.with_suffix(".d").read_text() for path in native_wheel[1]]
    for source in wanted:  # once for every object that is made of it
        made_of_it = [rule for rule in rules if f"/csrc/{source}" in rule]
        assert compiled(changed.stdout).count(source) == len(made_of_it)


def wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(n for n in archive.namelist() if n.endswith("/WHEEL"))).decode()


def run_report_from(wheel, directory):
    """`python -m hf_linear_attention` of this wheel."""
    zipfile.ZipFile(wheel).extractall(directory)
    return run_report_in(directory)


def run_report_in(directory):
    """`python -m hf_linear_attention` of the package in this directory."""
    result = run_python("-m", "hf_linear_attention", cwd=directory, PYTHONPATH=str(directory))
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- the C++ sources ----


def compile_with_torch(tmp_path, source, *flags):
    """Checks C++ source, as torch 2.10 would see it, with this project's and torch's headers."""
    file = tmp_path / "check.cpp"
    file.write_text(source)
    includes = [f"-I{CSRC}", f"-I{Path(torch.__file__).parent / 'include'}"]
    return run(
        *(*COMPILER, "-std=c++17", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
        *(*includes, *flags, file),
    )


# The stable interface, and the operators of the one for compiled models: torch takes none of them
# away, either.
HEADERS = ("stable/c/shim.h", "inductor/aoti_torch/generated/c_shim_cpu.h")
TORCH_HEADER = "".join(f"#include <torch/csrc/{header}>\n" for header in HEADERS)


@needs_compiler
def test_shim_agrees_with_the_headers_of_torch(tmp_path):
    result = compile_with_torch(tmp_path, '#include "torch/shim.h"\n' + TORCH_HEADER)
    assert result.returncode == 0, result.stdout


@needs_compiler
def test_shim_agrees_with_the_headers_of_torch_2_11_on_what_is_new_there(tmp_path):
    version = ("-UTORCH_TARGET_VERSION", "-DTORCH_TARGET_VERSION=0x020b000000000000")
    shim = (CSRC / "torch" / "shim.h").read_text()
    assert "deleter" in shim
    result = compile_with_torch(tmp_path, shim + TORCH_HEADER, *version)
    assert result.returncode == 0, result.stdout
    wrong = shim.replace("void (*deleter)(void* data, void* context)", "void (*deleter)(void*)")
    result = compile_with_torch(tmp_path, wrong + TORCH_HEADER, *version)
    assert "torch_from_blob" in result.stdout


@needs_compiler
def test_a_wrong_prototype_in_the_shim_would_be_noticed(tmp_path):
    shim = (CSRC / "torch" / "shim.h").read_text()
    wrong = shim.replace(
        "aoti_torch_get_dim(AtenTensorHandle tensor, int64_t*",
        "aoti_torch_get_dim(AtenTensorHandle tensor, int32_t*",
    )
    assert wrong != shim
    assert "aoti_torch_get_dim" in compile_with_torch(tmp_path, wrong + TORCH_HEADER).stdout


@needs_compiler
def test_every_function_of_the_shim_is_declared_by_torch_2_10(tmp_path):
    shim = (CSRC / "torch" / "shim.h").read_text()
    declared = re.search(r'extern "C" \{(.*?)\}  // extern "C"', shim, re.DOTALL).group(1)
    names = re.findall(r"\b((?:aoti_)?torch_\w+)\(", declared)
    assert len(names) > 15
    uses = "".join(f"auto* use_{name} = &{name};\n" for name in names)
    result = compile_with_torch(tmp_path, TORCH_HEADER + uses)
    assert result.returncode == 0, result.stdout


@pytest.mark.thorough
@needs_compiler
def test_objects_of_an_instruction_set_have_no_weak_symbols(native_wheel):
    """The linker keeps one of several weak definitions: it could put AVX-512 code into "base"."""
    objects = [path for path in native_wheel[1] if path.name.startswith("cpu-")]
    objects = [path for path in objects if path.name != "cpu-dispatch.o"]
    assert objects
    symbols = run("nm", "--defined-only", *objects).stdout
    weak = re.findall(r"^\w+ [WVu] (?!DW\.ref\.)(.*)$", symbols, re.MULTILINE)
    assert weak == []


@pytest.mark.thorough
@needs_compiler
def test_library_exports_only_its_own_functions(native_wheel, tmp_path):
    library = zipfile.ZipFile(native_wheel[0]).extract("hf_linear_attention/_C.so", tmp_path)
    exported = run("nm", "--dynamic", "--defined-only", library).stdout.split("\n")
    names = [line.split()[-1] for line in exported if line]
    assert names
    assert all(name.startswith("hfla_") for name in names), names


@pytest.mark.thorough
@needs_compiler
def test_library_needs_torch_and_what_every_linux_has(native_wheel, tmp_path):
    library = zipfile.ZipFile(native_wheel[0]).extract("hf_linear_attention/_C.so", tmp_path)
    printed = run("readelf", "--dynamic", "--wide", library).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", printed))
    loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    everywhere = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6"}
    assert needed - everywhere - loaders == {"libtorch_cpu.so"}
