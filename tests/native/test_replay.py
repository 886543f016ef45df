# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What scripts/arm_check.py does for ARM, for this processor: recorded calls, computed again."""

import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attention.ops.compiled.library import LIBRARY_PATH

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from replay_program import build_replay  # noqa: E402

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which(COMPILER[0]) is None,
        reason="without a C++ compiler on Linux there is no native library",
    ),
]


def run(*command, **environment):
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_replay(COMPILER, tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What one test asks: norms of float32 first, with their gradients."""
    file = tmp_path_factory.mktemp("calls") / "calls.bin"
    status, printed = run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "recorded_calls", "-p", "no:cacheprovider"),
        *("-k", "values_and_gradients", "tests/ops/test_rms_norm.py"),
        RECORDED_CALLS=str(file),
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests" / "support"), *filter(None, sys.path)]),
    )
    assert status == 0, printed
    return file.read_bytes()


def replay(program, folder, calls):
    file = folder / "calls.bin"
    file.write_bytes(calls)
    return run(program, LIBRARY_PATH, file, LD_LIBRARY_PATH=str(program.parent))


def test_recorded_calls_give_the_same_numbers_again(program, calls, tmp_path):
    status, printed = replay(program, tmp_path, calls)
    assert status == 0, printed
    assert "rms_norm_backward" in printed and " 0 wrong" in printed


def test_a_number_that_differs_is_reported(program, calls, tmp_path):
    # "CALL", the op's name, how many arguments; of the first its kind, dtype and dimensions.
    (length,) = struct.unpack_from("<i", calls, 4)
    at = 8 + length + 12
    (dimensions,) = struct.unpack_from("<i", calls, at)
    first = at + 4 + 16 * dimensions + 8
    changed = bytearray(calls)
    changed[first : first + 4] = b"\x00\x42\x00\x42"  # no small number in any dtype
    status, printed = replay(program, tmp_path, bytes(changed))
    assert status == 1
    assert "times the tolerance" in printed


def test_a_file_that_ends_too_early_is_an_error(program, calls, tmp_path):
    status, printed = replay(program, tmp_path, calls[:-3])
    assert status == 2
    assert "the file ends too early" in printed
