# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The report on compiled CUDA kernels: what it reads of the compiler, and what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "cuda_report.py"
sys.path.insert(0, str(SCRIPT.parent))
from cuda_report import ARCHITECTURES, Kernel, find_nvcc, parse  # noqa: E402

PRINTED = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tidy' for 'sm_90a'
ptxas info    : Function properties for tidy
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compile time = 29.488 ms
ptxas info    : Compiling entry function 'greedy' for 'sm_90a'
ptxas info    : Function properties for greedy
    232 bytes stack frame, 284 bytes spill stores, 4812 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 232 bytes cumulative stack size
"""


def test_the_compilers_numbers_are_read():
    assert parse(PRINTED) == [Kernel("tidy", 40, 0, 0, 0), Kernel("greedy", 255, 232, 284, 4812)]


def test_a_missing_compiler_is_an_error(tmp_path):
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "nvcc is neither on PATH nor in CUDA_HOME" in result.stderr


def test_a_report_is_made_of_what_any_compiler_prints(tmp_path):
    """Shared memory included, which the host's compiler works out, whether nvcc is here or not."""
    names = {
        "tidy": "_ZN4hfla4cuda11walk_kernelIfNS0_10BlockShapeILi64ELi144ELi32EEEEEvNS0_4WalkE",
        "greedy": "_ZN4hfla4cuda11step_kernelIfLi4ELi1EEEvNS_19LinearAttentionStepE",
    }
    printed = PRINTED
    for name, mangled in names.items():
        printed = printed.replace(name, mangled)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\ncat >&2 <<'END'{printed}END\n")
    nvcc.chmod(0o755)
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, SCRIPT, "sm_90a"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    walk, step = (re.search(rf"sm_90a .* {k}_k.*", result.stdout)[0] for k in ("walk", "step"))
    assert walk.split()[1] == "40" and step.split()[1] == "255"  # registers
    assert int(walk.split()[2]) > 1000 and int(step.split()[2]) > 1000  # bytes of shared memory
    assert result.returncode != 0 and "a kernel spills registers" in result.stderr


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_all_kernels_compile_without_spills():
    """On the oldest and the newest architecture, since each takes a minute; the script alone does
    all. PTX has no registers yet; that it compiles, the wheel of test_build.py shows.
    """
    oldest, *_, newest = [name for name in ARCHITECTURES if name.startswith("sm_")]
    command = [sys.executable, SCRIPT, oldest, newest]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in (oldest, newest):
        assert re.search(rf"^{name} .* walk_kernel", result.stdout, re.M)
