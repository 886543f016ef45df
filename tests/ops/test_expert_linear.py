# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The product of few rows with the weights of their own experts."""

import random

import pytest
import torch
from torch.nn import functional as F

from hf_linear_attention.fast.linear import MAX_ROWS
from hf_linear_attention.ops.compiled.linear import expert_linear, linear
from seeds import over_seeds

OP = torch.ops.hf_linear_attention.expert_linear.default
TOLERANCE = {
    torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12,
}  # fmt: skip


def arguments_of(counts, inputs, outputs, dtype=torch.float32, bias=True):
    """x, weight, experts and bias: `counts` rows for each expert, the last count for none."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(counts)
    sizes = [(counts.sum(), inputs), (len(counts) - 1, outputs, inputs), (len(counts) - 1, outputs)]
    x, weight, b = (torch.randn(tuple(size), generator=generator).to(dtype) for size in sizes)
    experts = torch.arange(len(counts)).repeat_interleave(counts)
    return x, weight, experts, b if bias else None


def one_by_one(x, weight, experts, bias):
    """The product of each expert by itself."""
    y = x.new_zeros(len(x), weight.shape[1])
    for i in range(len(weight)):
        y[experts == i] = linear(x[experts == i], weight[i], None if bias is None else bias[i])
    return y


# Experts with one row and many, without rows, with outputs of one part and of several.
CASES = [
    ([1], 5, 3),
    ([0, 0, 4], 5, 3),
    ([0, 1, 0], 5, 3),
    ([1, 3, 0], 0, 7),
    ([2, 1, 1], 3, 0),
    ([1, 1, 1, 1, 2], 33, 29),
    ([0, 7, 40, 0, 1, 0], 70, 45),
    ([1, 0, 1, 0], 1300, 801),
    ([0, 9, 0, 20, 3], 1025, 700),
    ([1] * 9 + [0], 520, 260),
]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", MAX_ROWS)
@pytest.mark.parametrize("counts, inputs, outputs", CASES)
def test_it_is_the_product_of_each_expert_by_itself(counts, inputs, outputs, dtype):
    for bias in (True, False):
        arguments = arguments_of(counts, inputs, outputs, dtype, bias)
        y = expert_linear(*arguments)
        assert y.dtype == dtype and y.shape == (sum(counts), outputs)
        assert torch.equal(y, one_by_one(*arguments))
        assert not y[sum(counts[:-1]) :].any()


def among_nan(x):
    """x, contiguous, in memory that has NaN before and behind it."""
    memory = torch.full((x.numel() + 71,), torch.nan, dtype=x.dtype)
    place = memory[37 : 37 + x.numel()].view(x.shape)
    place.copy_(x)
    return place


@pytest.mark.kernel_numbers
@over_seeds(40)
def test_random_calls_match_float64(seed):
    rng = random.Random(seed)
    dtype = rng.choice(list(TOLERANCE))
    counts = [rng.choice((0, 1, rng.randint(1, 12))) for _ in range(rng.randint(1, 20))]
    sizes = rng.choice((rng.randint(1, 90), rng.randint(1, 2000))), rng.randint(1, 500)
    x, weight, experts, bias = arguments_of(counts, *sizes, dtype, rng.random() < 0.5)
    bias = None if bias is None else among_nan(bias)
    y = expert_linear(among_nan(x), among_nan(weight), experts, bias)
    exact = torch.zeros_like(y, dtype=torch.float64)
    for i in range(len(weight)):
        b = None if bias is None else bias[i].double()
        exact[experts == i] = F.linear(x[experts == i].double(), weight[i].double(), b)
    largest = exact.abs().max().item() if exact.numel() else 0
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize("counts", [[1, 1, 0], [3, 0, 1, 9, 1]])
def test_threads_change_no_bit(counts):
    arguments, before = arguments_of(counts, 600, 1001), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(expert_linear(*arguments))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("bias", [True, False])
def test_it_passes_opcheck(bias):
    torch.library.opcheck(OP, arguments_of([2, 0, 1, 1], 20, 7, bias=bias))


WRONG = {
    "x_dims": (0, lambda x: x[None], r"x must have shape \(rows, in\), got \(1, 4, 20\)"),
    "x_dtype": (0, lambda x: x.int(), "x must be float32, bfloat16, float16 or float64"),
    "x_inputs": (0, lambda x: x[:, 1:], r"weight must have shape \(3, 7, 19\), got \(3, 7, 20\)"),
    "weight_dims": (1, lambda x: x[0], r"weight must have shape \(experts, out, in\), got"),
    "weight_dtype": (1, lambda x: x.double(), "weight must be float32 here, got float64"),
    "weight_layout": (1, lambda x: x.mT.contiguous().mT, "weight must be contiguous"),
    "experts_dtype": (2, lambda x: x.int(), "experts must be int64 here, got int32"),
    "experts_rows": (2, lambda x: x[1:], r"experts must have shape \(4,\), got \(3,\)"),
    "experts_layout": (2, lambda x: x.repeat_interleave(2)[::2], "experts must be contiguous"),
    "experts_fall": (2, lambda x: x.flip(0), "at most their number, 3, got 2 in row 1"),
    "experts_few": (2, lambda x: x - 1, "experts must rise from 0 to at .*, got -1 in row 0"),
    "experts_many": (2, lambda x: x + 1, "at most their number, 3, got 4 in row 3"),
    "bias_shape": (3, lambda x: x[1:], r"bias must have shape \(3, 7\), got \(2, 7\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_does_not_take_is_an_error(name):
    place, change, message = WRONG[name]
    arguments = list(arguments_of([1, 0, 2, 1], 20, 7))
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError, match=message):
        expert_linear(*arguments)


def test_a_gradient_is_refused():
    x, *others = arguments_of([1, 1, 0], 20, 7)
    with pytest.raises(RuntimeError, match="the compiled linear has no gradient"):
        expert_linear(x.requires_grad_(), *others)
    with torch.no_grad():
        expert_linear(x, *others)
