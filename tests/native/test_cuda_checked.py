# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The emulated CUDA kernels under checks of the compiler and the system: races, alignment, memory
next to tensors, the order of blocks, tensors of more than 2^31 elements; and that each check finds
a fault that is planted for it.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from emulated_kernels import CSRC, CXX, WITH_CHECKS, compiled_kernels

pytestmark = pytest.mark.thorough  # the kernels take a minute to compile with these checks

SOURCES = Path(__file__).parent / "checked"
OPS = ["linear_attention", "delta_rule"]  # of which checked/*_cases.h has calls
if not shutil.which(CXX[0]):
    pytest.skip("there is no C++ compiler", allow_module_level=True)

OPTIONS = {  # every race is reported, however alike, and none explained: that would take long
    "TSAN_OPTIONS": "suppress_equal_stacks=0:suppress_equal_addresses=0:symbolize=0:exitcode=0",
    "UBSAN_OPTIONS": "print_stacktrace=0",
}

# ThreadSanitizer's fibers, and an address space in which it can place its own memory.
PROBE = """
extern "C" void* __tsan_create_fiber(unsigned);
extern "C" void __tsan_destroy_fiber(void*);
int main() { __tsan_destroy_fiber(__tsan_create_fiber(0)); }
"""


def run(*command: object) -> subprocess.CompletedProcess:
    environment = os.environ | OPTIONS
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def compile_with_checks(*arguments: object) -> subprocess.CompletedProcess:
    return run(*CXX, *WITH_CHECKS, *arguments)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> list[str]:
    """What comes before a program that ThreadSanitizer checks, on this machine."""
    directory = tmp_path_factory.mktemp("probe")
    source, program = directory / "probe.cpp", directory / "probe"
    source.write_text(PROBE)
    result = compile_with_checks(source, "-o", program)
    if result.returncode != 0:
        pytest.skip("the compiler has no ThreadSanitizer with fibers")
    # Its own memory has to be where it looks for it, which some kernels place at random.
    for before in ([], ["setarch", platform.machine(), "--addr-no-randomize"]):
        if not before or shutil.which(before[0]):
            if run(*before, program).returncode == 0:
                return before
    pytest.skip("ThreadSanitizer does not run on this machine")


@pytest.fixture(scope="module")
def checked(start, tmp_path_factory):
    """Calls the program with the emulated kernels (checked/checked.cpp)."""
    directory = tmp_path_factory.mktemp("checked")
    sources = [SOURCES / "checked.cpp", CSRC / "cuda" / "kernels.cpp"]
    objects = [
        kernels
        for op in OPS
        for kernels in compiled_kernels(tmp_path_factory, WITH_CHECKS, op, ("f32", "bf16"))
    ]
    program = directory / "checked"
    # float16 is left to `make sanitize`: its kernels are not there, and
    # not called. Nor are those of other ops.
    linked = compile_with_checks(
        *sources, *objects, "-Wl,--unresolved-symbols=ignore-in-object-files", "-o", program
    )
    assert linked.returncode == 0, linked.stderr
    return lambda *arguments: run(*start, program, *arguments)


@pytest.fixture(scope="module")
def kernels(checked):
    return checked("kernels")


def test_nothing_is_found_in_the_kernels_as_they_are(kernels):
    lines = re.findall(r"^.*: nothing found$", kernels.stdout, re.M)
    assert kernels.returncode == 0 and len(lines) > 15, kernels.stdout + kernels.stderr


def test_every_barrier_of_every_kernel_is_missed(kernels):
    found = set(re.findall(r"^(\S+):(\d+) left out of .*: a race$", kernels.stdout, re.M))
    assert found == {
        (path.name, str(number))
        for op in OPS
        for path in (CSRC / "cuda" / op).glob("*.cuh")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "sync_block();" in line
    }


def test_operands_of_tensor_cores_are_as_published(checked):
    result = checked("fragments")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["nothing", "nothing_after_a_race"])
def test_without_a_fault_none_is_found(checked, name):
    result = checked("planted", name)
    assert (result.returncode, result.stdout) == (0, f"{name}: nothing found\n"), result.stderr


OUTSIDE = "a kernel touched memory outside of its tensors"
PLANTED = {
    "no_barrier": "no_barrier: a race",
    "no_barrier_in_warp": "no_barrier_in_warp: a race",
    "race_of_blocks": "race_of_blocks: a race",
    "order_of_blocks": "order_of_blocks: another order: y differs",
    "misaligned": "misaligned: a misaligned access",
    "one_further": OUTSIDE,
    "one_before": OUTSIDE,
    "one_token_more": OUTSIDE,
    "narrow_offset": OUTSIDE,
    "swapped_a": "load_a: value 2 of lane 0",
    "swapped_b": "load_b_transposed: value 0 of lane 0",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(checked, fault):
    result = checked("planted", fault)
    assert result.returncode != 0
    assert PLANTED[fault] in result.stdout + result.stderr
