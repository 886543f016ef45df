# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Builds tests/native/replay.cpp, which computes recorded calls again, without torch."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBTORCH = "libtorch_cpu.so"


def build_replay(compiler: Sequence[str], folder: Path) -> Path:
    """The program, which wants `folder` in LD_LIBRARY_PATH: beside it is an empty library of the
    name that libtorch has.

    Raises:
        subprocess.CalledProcessError: the compiler, which has said why, could not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    empty = ["-shared", "-fPIC", f"-Wl,-soname,{LIBTORCH}", "-x", "c++", os.devnull]
    subprocess.run([*compiler, *empty, "-o", folder / LIBTORCH], check=True)
    program = folder / "replay"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-rdynamic"]
    source = ROOT / "tests" / "native" / "replay.cpp"
    subprocess.run([*compiler, *flags, source, "-o", program, "-ldl"], check=True)
    return program
