# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Compiles the native library for macOS and Windows, on any Linux, and reads what it made.

    make cross-check                 # with the environment of `make wheels`
    python scripts/cross_check.py --only aarch64-macos

The compiler is Zig's Clang, which brings what it needs of those systems. Nothing runs: that a
library is linked, shows the functions that Python calls, and asks libtorch for nothing but what
csrc/torch/shim.h declares, is all that can be seen here. It is not optimised, for the sake of time.
What it builds is in build/cross.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lief

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "cross"
# Zig's names, and Python's. There is no PyTorch for Macs with Intel's processors.
TARGETS = {
    "aarch64-macos.11.0": "macosx-11.0-arm64",
    "x86_64-windows-gnu": "win-amd64",
    "aarch64-windows-gnu": "win-arm64",
}


def build(target: str) -> Path:
    folder = BUILT / target
    library = folder / "lib" / "hf_linear_attention" / "_C.so"
    library.unlink(missing_ok=True)
    variables = {
        "CXX": shlex.join([sys.executable, "-m", "ziglang", "c++", "-target", target]),
        "CXXFLAGS": "-O0 -Dalways_inline=unused",
        "_PYTHON_HOST_PLATFORM": TARGETS[target],
        "HF_LINEAR_ATTENTION_CPU_INSTRUCTION_SETS": "all",
        "HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES": "none",
        "HF_LINEAR_ATTENTION_REQUIRE_NATIVE": "1",
    }
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-temp", str(folder), "--build-lib", str(folder / "lib")]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True)
    if built.returncode != 0:
        sys.exit(f"{target}: {built.stdout.decode()}{built.stderr.decode()}")
    return library


def names(functions: list, of: str) -> set[str]:
    """Those that begin so; macOS puts an underscore before every name."""
    found = {function.name.removeprefix("_") for function in functions}
    return {name for name in found if re.match(of, name)}


def functions_in(folder: Path, declaration: str) -> set[str]:
    texts = [path.read_text("utf-8") for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]
    return set(re.findall(declaration, "\n".join(texts)))


def check(library: Path) -> str:
    """What it is; ends the program where it is not what Python and libtorch need."""
    binary = lief.parse(library)
    shown = names(binary.exported_functions, "hfla_")
    wanted = functions_in(ROOT / "csrc", r"HFLA_EXPORT .*\b(hfla_\w+)\(")
    if not wanted or shown != wanted:
        sys.exit(f"{library} shows {sorted(shown)}, and shall show {sorted(wanted)}")
    asked = names(binary.imported_functions, "(aoti_)?torch_")
    there = functions_in(ROOT / "csrc" / "torch", r"\b((?:aoti_)?torch_\w+)\(")
    if not asked or asked - there:
        sys.exit(f"{library} asks libtorch for {sorted(asked - there) or 'nothing'}")
    return f"{binary.format.name}, shows {len(shown)} functions, asks libtorch for {len(asked)}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=TARGETS, help="one in place of all")
    flags = parser.parse_args()
    lief.logging.disable()
    for target in [flags.only] if flags.only else TARGETS:
        print(f"{target}: {check(build(target))}", flush=True)


if __name__ == "__main__":
    main()
