# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""scripts/build_wheels.py: names of wheels, and which ones its check refuses."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import build_wheels  # noqa: E402
from build_wheels import PROCESSORS, Target  # noqa: E402

from idle_compiler import idle_compiler  # noqa: E402

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(COMPILER[0]) is None,
    reason="without a C++ compiler on Linux there is no native library",
)


def compile_library(file, source, *flags):
    command = [*COMPILER, "-shared", "-fPIC", "-nostdlib", "-o", file, "-x", "c++", "-"]
    command += ["-x", "none", *flags]  # which may be libraries
    subprocess.run(list(map(str, command)), input=source, text=True, check=True)
    return file


def library_that_needs(folder, name, symbol_version=None):
    """A library that calls a function of the library `name`, where it may have a version."""
    needed, versions = folder / "needed.so", folder / "versions"
    versions.write_text(f"{symbol_version or 'ANY'} {{ global: *; }};")
    flags = [f"-Wl,--version-script={versions}"] if symbol_version else []
    compile_library(needed, 'extern "C" void f() {}', f"-Wl,-soname,{name}", *flags)
    return compile_library(
        folder / "_C.so", 'extern "C" { void f(); void g() { f(); } }', "-Wl,--no-as-needed", needed
    )


def wheel_of(library, platform):
    wheel = library.parent / f"p-1-py3-none-{platform}.whl"
    files = {
        "hf_linear_attention/_C.so": library.read_bytes() if library.exists() else None,
        "p-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: p\nVersion: 1\n",
        "p-1.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: py3-none-{platform}\n",
    }
    there = {name: content for name, content in files.items() if content is not None}
    there["p-1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in there)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in there.items():
            archive.writestr(name, content)
    return wheel


HERE = os.uname().machine  # what COMPILER compiles for


@pytest.mark.parametrize(
    "needs",
    [("libc.so.6", "GLIBC_2.17"), ("libm.so.6", "GLIBC_2.2.5"), ("libtorch_cpu.so", None)],
    ids=lambda needs: needs[0],
)
def test_a_wheel_that_asks_for_what_every_system_has_is_named_so(needs, tmp_path):
    wheel = wheel_of(library_that_needs(tmp_path, *needs), f"linux_{HERE}")
    named = build_wheels.named_by_policy(wheel)
    assert re.fullmatch(rf"p-1-py3-none-(\.?manylinux[\d_]+_{HERE})+\.whl", named.name)
    assert f"_{HERE}\n" in zipfile.ZipFile(named).read("p-1.dist-info/WHEEL").decode()


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (("libc.so.6", "GLIBC_2.18"), "asks for glibc 2.24, and shall run with 2.17"),
        (("libstdc++.so.6", "GLIBCXX_3.4.20"), "asks for glibc 2.24, and shall run with 2.17"),
        (("libc.so.6", "GLIBC_2.99"), "auditwheel repair"),
        (("libtorch_cuda.so", None), "auditwheel repair"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_wheel_that_asks_for_more_is_refused(needs, reason, tmp_path):
    wheel = wheel_of(library_that_needs(tmp_path, *needs), f"linux_{HERE}")
    with pytest.raises(SystemExit, match=reason):
        build_wheels.named_by_policy(wheel)


def test_a_wheel_without_kernels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="has no kernels"):
        build_wheels.named_by_policy(wheel_of(tmp_path / "_C.so", f"linux_{HERE}"))


@pytest.fixture
def sources_only(tmp_path, monkeypatch):
    """A copy of the sources, which a compiler makes nothing of."""
    source = tmp_path / "source"
    source.mkdir()
    not_built = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=not_built)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    monkeypatch.setattr(build_wheels, "ROOT", source)
    monkeypatch.setattr(build_wheels, "BUILT", source / "build")
    monkeypatch.setattr(Target, "compiler", [str(idle_compiler(tmp_path))])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_wheel_is_built_for_the_processor(processor, sources_only, capfd):
    wheel = build_wheels.build(Target(processor))
    assert re.fullmatch(rf"hf_linear_attention-[\d.]+-py3-none-linux_{processor}\.whl", wheel.name)
    assert ("-mavx2" in capfd.readouterr().out) == (processor == "x86_64")


def test_zig_is_told_of_the_processor_and_the_c_library():
    assert Target("aarch64").compiler[-2:] == ["-target", "aarch64-linux-gnu.2.17"]
