# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the CUDA kernels are tried on, emulated and on a GPU."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attention_cases
from attention_cases import Case

# Of on_gpu.py and its like. On "cpu" they run with the CPU's kernels, or emulated ones.
DEVICE = os.environ.get("ON_GPU_DEVICE", "cuda")
SEED = int(os.environ.get("ON_GPU_SEED", "1"))
RELATIVE_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of a norm
needs_a_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has graphs and streams")

# In the order of the enumerations in csrc/kernels.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEATURE_MAPS = ("identity", "elu+1", "relu", "relu2", "silu", "exp")

PACKED = dict(B=1, T=75, lengths=(0, 33, 1, 0, 41, 0))
CASES = [
    Case(),
    *(Case(T=T, decay="mild", initial=True) for T in (0, 1, 31, 32, 33)),
    Case(B=0),
    *(Case(T=40, feature_map=name) for name in FEATURE_MAPS if name not in ("identity", "silu")),
    *(Case(T=40, feature_map=name, normalize=False) for name in (None, "silu")),
    Case(decay="resets", normalize=False, feature_map=None),
    Case(decay="resets", initial=True),
    *(Case(mask=mask, decay="mild", initial=True) for mask in ("left", "middle", "all")),
    Case(Hq=6, decay="mild", mask="right", initial=True),
    Case(Hq=4, Hkv=1, normalize=False),
    Case(is_causal=False, initial=True, mask="middle", Hq=4),
    Case(is_causal=False, normalize=False),
    Case(**PACKED, decay="mild", initial=True, Hq=4),
    Case(**PACKED, is_causal=False, initial=True),
    Case(strided=True, decay="mild", T=40),
    Case(K=1, V=1, T=40),
    Case(K=32, V=32, T=40, B=1, decay="mild"),
]

# Narrow tiles, or wide ones; a tile and a bit; several tiles of columns and of rows.
SIZES = [(32, 33), (33, 64), (65, 5), (5, 150), (150, 70), (129, 256)]

HALF_CASES = [
    Case(),
    Case(decay="mild", mask="left", Hq=4, initial=True),
    Case(normalize=False, feature_map="silu", decay="resets"),
    Case(is_causal=False, strided=True),
]

STEP_CASES = [
    Case(T=3, initial=True),
    *(Case(T=3, initial=True, feature_map=name) for name in FEATURE_MAPS[2:]),
    Case(T=3, initial=True, decay="resets", mask="middle", strided=True),
    Case(T=2, initial=True, Hq=10, K=16, V=16, decay="mild"),
    Case(T=2, initial=True, normalize=False, K=150, V=260),
    Case(T=2, initial=True, K=64, V=600, Hq=3, Hkv=1, B=1),
    Case(T=2, initial=True, K=1, V=1),
]


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype):
    """As attention_cases has it; but sums may be off by what is small beside the largest number in
    them: y that no normaliser divides; and in half precision, in which tensor cores take φ(k),
    final states.
    """
    sums = set() if "final z" in expected else {"y"}
    if dtype != torch.float32:
        sums |= {"final kv", "final z"}
    actual, expected = (
        {f"d {name}" if name in sums else name: x for name, x in results.items()}
        for results in (actual, expected)
    )
    attention_cases.assert_all_close(actual, expected, dtype)


def errors_where_much_cancels(
    attend: Callable[..., tuple[Tensor, object]], D: int, dtype: torch.dtype, device: str
) -> dict[str, float]:
    """Of gradients by y itself: the relative error of each one's norm. The normaliser takes away
    most of what the gradient of q and k is the sum of, and the more the longer the sequence.
    """
    inputs = attention_cases.make_inputs(Case(B=1, T=500, K=D, V=D), dtype, device, SEED)
    leaves = attention_cases.require_grad(inputs)
    y, _ = attend(**inputs)
    gradients = torch.autograd.grad(y, list(leaves.values()), y.detach())
    exact = attention_cases.to_float64(inputs)
    exact_leaves = attention_cases.require_grad(exact)
    exact_y, _ = attention_cases.reference(**exact)
    wanted = torch.autograd.grad(exact_y, list(exact_leaves.values()), exact_y.detach())
    return {
        name: ((x.cpu().double() - right).norm() / right.norm()).item()
        for name, x, right in zip(leaves, gradients, wanted, strict=True)
    }
