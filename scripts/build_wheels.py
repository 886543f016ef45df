# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Builds the wheels of a release into dist/: one for x86-64 and one for ARM, on any Linux.

    make wheels                         # with an environment of its own, .venv-wheels
    make wheels WHEELS_FLAGS="--cuda"   # and x86-64 with CUDA kernels, which needs nvcc
    python scripts/build_wheels.py --only aarch64

The compiler is Zig's Clang. It brings the headers and symbols of every glibc, so a wheel runs where
the C library is much older than the one here; and its own C++ library, which goes into the wheel.
Then auditwheel finds out what the library asks of a system, and names the wheel after the oldest
policy that allows this. A newer one than wanted is an error, and the wheel stays out of dist/.

nvcc does not take Zig's compiler, so it compiles CUDA kernels with CUDAHOSTCXX, or g++. Their
objects ask nothing of its C++ library. The version of that wheel names the CUDA: "0.2.0+cu13", say.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
GLIBC = (2, 17)  # of manylinux2014, the oldest policy for ARM; torch's own wheels ask for 2.28
# Known by these names once torch is imported; no system's, so no policy allows it.
FROM_TORCH = "libtorch_cpu.so"


class Target(NamedTuple):
    """What one wheel is for."""

    processor: str  # as wheels' tags name it, and Zig, too
    cuda: bool = False

    @property
    def name(self) -> str:
        """Of its folder in build/wheels."""
        return self.processor + ("-cuda" if self.cuda else "")

    @property
    def compiler(self) -> list[str]:
        triple = "{}-linux-gnu.{}.{}".format(self.processor, *GLIBC)
        return [sys.executable, "-m", "ziglang", "c++", "-target", triple]


PROCESSORS = ("x86_64", "aarch64")


def run(command: list, **environment: str) -> None:
    words = [str(word) for word in command]
    print(shlex.join(words), flush=True)
    if subprocess.run(words, cwd=ROOT, env=os.environ | environment).returncode != 0:
        sys.exit(f"{shlex.join(words[:4])} ... failed, as it says above")


def cuda_version() -> str:
    """As local versions name it: "cu13"."""
    try:
        printed = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    except OSError:
        sys.exit("--cuda needs nvcc on PATH")
    release = re.search(r"release (\d+)\.", printed)
    if release is None:
        sys.exit(f"nvcc --version does not say which release it is: {printed!r}")
    return f"cu{release[1]}"


def build(target: Target) -> Path:
    """A wheel that says "linux" only."""
    folder = BUILT / target.name
    for outdated in (*folder.glob("lib*"), folder / "dist"):  # objects are kept
        shutil.rmtree(outdated, ignore_errors=True)
    local_version = ["egg_info", f"--tag-build=+{cuda_version()}"] if target.cuda else []
    run(
        [
            *(sys.executable, "setup.py", "-q", *local_version, "build", "--build-base", folder),
            *("bdist_wheel", "--dist-dir", folder / "dist"),
        ],
        CXX=shlex.join(target.compiler),
        CUDAHOSTCXX=os.environ.get("CUDAHOSTCXX", "g++"),
        _PYTHON_HOST_PLATFORM=f"linux-{target.processor}",
        HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES="all" if target.cuda else "none",
        HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS="all",
        HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
    )
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def named_by_policy(wheel: Path) -> Path:
    """The same wheel, with the policy that it obeys in its name; ends the program where that is
    newer than GLIBC.
    """
    if "hf_linear_attention/_C.so" not in zipfile.ZipFile(wheel).namelist():
        sys.exit(f"{wheel.name} has no kernels")
    folder = wheel.parent / "named"
    run(
        [
            *(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder),
            # Nothing is to be put into the wheel. Were there something, it would take a patcher.
            *("--exclude", FROM_TORCH, "--patcher", "none", wheel),
        ]
    )
    (named,) = folder.iterdir()
    policies = re.findall(r"manylinux_(\d+)_(\d+)_", named.name)
    glibc = max((int(major), int(minor)) for major, minor in policies)
    if glibc > GLIBC:
        sys.exit(
            "{} asks for glibc {}.{}, and shall run with {}.{}".format(wheel.name, *glibc, *GLIBC)
        )
    return named


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PROCESSORS, help="one wheel in place of both")
    parser.add_argument("--cuda", action="store_true", help="and one with CUDA kernels, of x86-64")
    flags = parser.parse_args()
    targets = [Target(name) for name in PROCESSORS if flags.only in (None, name)]
    targets += [Target("x86_64", cuda=True)] if flags.cuda else []
    DIST.mkdir(exist_ok=True)
    for target in targets:
        wheel = named_by_policy(build(target))
        print(f"built {shutil.copy(wheel, DIST)}: {wheel.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
