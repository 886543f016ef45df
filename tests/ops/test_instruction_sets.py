# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The CPU kernels of every instruction set that was built, where other tests run those of the best.

Tests that are marked `kernel_numbers` hold kernels against the reference over sizes, dtypes and
extremes. For each of the other instruction sets they run again, in one process that is made to use
it; but not on kernels that are another set's, or base's for doubles, which have been held against
the reference there.
"""

import functools
import os
import re
from pathlib import Path

import pytest

from hf_linear_attention.ops.compiled.library import cpu_instruction_set, cpu_instruction_sets_built
from new_python import run_python

MARK = "kernel_numbers"
FORCE = "HF_LINEAR_ATTENTION_CPU_ISA"
ACTIVE = (
    "from hf_linear_attention.ops.compiled.library import cpu_instruction_set; "
    "print(cpu_instruction_set())"
)
CPUINFO = Path("/proc/cpuinfo")
OTHERS = sorted(set(cpu_instruction_sets_built()) - {cpu_instruction_set()})

# Of each set that has all kernels but some from another: that one, and which are its own.
DISPATCH = Path(__file__).parents[2] / "csrc" / "cpu" / "dispatch.cpp"
SHARING = {
    name: (other, re.findall(rf"kernels\.(\w+) = {name}::\1;", body))
    for name, other, body in re.findall(
        r"CpuKernels (\w+)_kernels\(\) {\n"
        r"  CpuKernels kernels = (\w+?)(?:_kernels\(\)|::kernels);\n(.*?)^}",
        DISPATCH.read_text(),
        re.DOTALL | re.MULTILINE,
    )
}


@functools.cache
def run_forced(name):
    """A process that is made to use this set, and prints which it uses."""
    return run_python("-c", ACTIVE, **{FORCE: name})


def with_those_it_shares_with(name):
    return {name} | (with_those_it_shares_with(SHARING[name][0]) if name in SHARING else set())


def test_sets_that_share_kernels_have_products_of_their_own_and_nothing_else():
    """So that tests of products are those of what is not shared."""
    assert set(SHARING) == {"avx512_vnni", "avx512_bf16", "amx"}
    for _, own in SHARING.values():
        assert own and all(kernel.endswith("linear") for kernel in own)
    changed = [kernel for _, own in SHARING.values() for kernel in ("instruction_set", *own)]
    assert sorted(re.findall(r"^  kernels\.(\w+) =", DISPATCH.read_text(), re.M)) == sorted(changed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_the_numbers_are_the_reference_s_on_every_instruction_set(name):
    active = run_forced(name)
    if "this CPU can't run it" in active.stderr:
        return
    assert active.stdout.strip() == name, active.stderr
    here = sorted(Path(__file__).parent.glob("test_*.py"))
    files = [path for path in here if MARK in path.read_text()]
    chosen = "not chunked and not torch.float64"
    if name in SHARING or name in with_those_it_shares_with(cpu_instruction_set()):
        chosen += " and linear"
    result = run_python(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-m", MARK, "-k", chosen),
        timeout=3000,
        **{FORCE: name},
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"\b[1-9]\d\d+ passed", result.stdout), result.stdout


def test_the_best_that_runs_here_is_used_where_none_is_forced():
    runs = {name: run_forced(name) for name in cpu_instruction_sets_built()}
    can_run = [name for name, active in runs.items() if active.returncode == 0]  # best first
    # On other vendors' processors its instruction is slow.
    is_amds = CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text()
    fast = [name for name in can_run if name != "avx512_bf16" or is_amds]
    assert cpu_instruction_set() == (os.environ.get(FORCE) or fast[0])
    assert "base" in can_run or "base" not in runs  # a build for one processor


# What /proc/cpuinfo lists where they run. Tiles ("amx") the system may refuse all the same.
AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
VNNI = AVX512 | {"avx512_vnni"}
NEEDS = {
    "base": set(),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "avx512_bf16": VNNI | {"avx512_bf16"},
}


@pytest.mark.skipif(not CPUINFO.exists(), reason="Linux says what its CPU has")
@pytest.mark.parametrize("name", sorted(NEEDS.keys() & set(cpu_instruction_sets_built())))
def test_an_instruction_set_runs_where_the_cpu_has_it_and_nowhere_else(name):
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    assert (run_forced(name).returncode == 0) == (NEEDS[name] <= set(flags[1].split()))


DOUBLES = """
import torch
from hf_linear_attention import delta_rule, elementwise_scan, selective_scan
from hf_linear_attention import short_convolution

x = torch.randn(2, 37, 3, 9, dtype=torch.float64, requires_grad=True)
channels = x.flatten(2)
y = delta_rule(x, x, x, x[..., 0].sigmoid(), backend="cpu")
y = y.flatten(2) + short_convolution(channels, channels[0, :4].T, backend="cpu")
A = -channels[0, :5].T.exp()
y = y + selective_scan(channels, channels.exp(), A, x[:, :, 0, :5], x[:, :, 1, :5], backend="cpu")
y = y + elementwise_scan(channels, -channels.exp(), backend="cpu")
y.square().sum().backward()
print(y.sum().item().hex(), x.grad.square().sum().item().hex())
"""


@pytest.mark.thorough
def test_doubles_are_computed_by_base_on_every_instruction_set():
    results = {
        name: run_python("-c", "import torch; torch.manual_seed(0)" + DOUBLES, **{FORCE: name})
        for name in cpu_instruction_sets_built()
    }
    ran = {
        name: result.stdout
        for name, result in results.items()
        if "this CPU can't run it" not in result.stderr
    }
    assert len(set(ran.values())) <= 1 and all(ran.values()), results


def test_an_unknown_one_is_refused_when_it_is_used():
    program = (
        "import torch; from hf_linear_attention import linear_attention;"
        "x = torch.ones(1, 2, 1, 4); print('imported');"
        "linear_attention(x, x, x, backend='cpu')"
    )
    result = run_python("-c", program, **{FORCE: "mmx"})
    assert "imported\n" in result.stdout
    assert f"{FORCE}=mmx, but this build has" in result.stderr
