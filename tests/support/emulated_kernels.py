# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The CUDA kernels compiled for the CPU (csrc/cuda/common/emulator.h), for libraries with them."""

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CXX = shlex.split(os.environ.get("CXX", "c++"))
# Of each function that asks for the emulator's state, a lock would take as long as what it does:
# it runs on one thread.
COMMON = ["-std=c++17", "-O1", "-fno-threadsafe-statics", f"-I{CSRC}"]
WITH_WARNINGS = [*COMMON, "-fPIC", "-Wall", "-Wextra", "-Werror"]
WITH_CHECKS = [*COMMON, "-fsanitize=thread,alignment"]


def compiled_kernels(
    factory: pytest.TempPathFactory,
    flags: list[str],
    op: str = "*",
    dtypes: tuple[str, ...] = ("f32", "bf16", "f16"),
) -> list[Path]:
    """The objects of an op's kernels, or of all: compiled once, by whichever of the processes that
    share the tests asks for them first.
    """
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    of_these_flags = shared / ("checked" if flags == WITH_CHECKS else "emulated")
    of_these_flags.mkdir(exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = of_these_flags / f"{source.parent.name}-{source.name}.o"
        with FileLock(target.with_suffix(".lock")):
            if not target.exists():
                unfinished = target.with_suffix(".unfinished")
                command = [*CXX, *flags, "-c", "-x", "c++", source, "-o", unfinished]
                subprocess.run(command, check=True)
                unfinished.rename(target)
        return target

    sources = [x for name in dtypes for x in sorted(CSRC.glob(f"cuda/{op}/{name}.cu"))]
    assert sources
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))
