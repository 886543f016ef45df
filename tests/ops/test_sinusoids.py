# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sines and cosines of positions, added to the embeddings of generated tokens."""

import math

import pytest
import torch

from hf_linear_attention.fast import sinusoids
from hf_linear_attention.fast.sinusoids import add_sinusoids, frequencies, sinusoidal_positions
from hf_linear_attention.ops.compiled.library import ops
from hf_linear_attention.ops.numerics import angles_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1, 1, 768), (3, 1, 34), (3, 1, 2)]


def inputs(shape, dtype, rows=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(100_000, (rows, shape[1]), generator=generator)


def in_float64(x, position_ids, scale):
    """With the angles in float32, which they are by definition; no product of it is rounded."""
    C = x.shape[-1]
    angles = angles_of(position_ids, frequencies(C, x.device))
    waves = torch.cat([angles.double().sin(), angles.double().cos()], dim=-1)
    return x.double() * (1 if scale is None else scale) + waves


@pytest.mark.parametrize("scale", [None, math.sqrt(768)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_operation_gives_what_several_give(shape, dtype, scale):
    for rows in {1, shape[0]}:
        x, position_ids = inputs(shape, dtype, rows)
        with torch.no_grad():
            actual = add_sinusoids(x, position_ids, scale)
        assert actual.dtype == dtype and actual.shape == x.shape
        expected = in_float64(x, position_ids, scale)
        # The waves are float32, and there are three roundings.
        precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        assert ((actual - expected).abs() <= 2 * precision * (1 + expected.abs() + x.abs())).all()
        several = add_sinusoids(x.clone().requires_grad_(), position_ids, scale)
        if dtype.itemsize == 2:
            assert (actual != several).double().mean() < 0.01
        torch.testing.assert_close(actual, several.detach(), rtol=precision, atol=precision)


def test_a_gradient_many_tokens_and_graphs_take_several_operations(monkeypatch):
    calls = []
    compiled = sinusoids.compiled_add
    monkeypatch.setattr(
        sinusoids, "compiled_add", lambda *args: calls.append(args[0].shape) or compiled(*args)
    )
    x, position_ids = inputs((1, 1, 8), torch.float32)
    with torch.no_grad():
        add_sinusoids(x, position_ids, None)
        assert calls == [(1, 1, 8)]
        add_sinusoids(x.expand(1, 5, 8), position_ids, None)
        add_sinusoids(x, position_ids.int(), None)
    add_sinusoids(x, position_ids, None)
    assert calls == [(1, 1, 8)]
    leaf = x.clone().requires_grad_()
    add_sinusoids(leaf, position_ids, 3.0).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 3))


LATE = [4096, 65_537, 1_000_003, 10_000_019]


@pytest.mark.parametrize("position", LATE)
def test_late_positions_are_as_exact_as_early_ones(position):
    x, position_ids = torch.zeros(1, 1, 64), torch.tensor([[position]])
    exact = position * frequencies(64, x.device).double()
    exact = torch.cat([exact.sin(), exact.cos()])
    with torch.no_grad():
        by_one = add_sinusoids(x, position_ids, None)
    for waves in (by_one, sinusoidal_positions(position_ids, 64)):
        assert (waves.flatten() - exact).abs().max() < 1e-6


def test_angles_of_early_positions_are_products():
    position_ids, radians = torch.arange(4096), frequencies(64, torch.device("cpu"))
    assert torch.equal(angles_of(position_ids, radians), position_ids[:, None].float() * radians)


def test_positions_have_no_end():
    x, _ = inputs((1, 1, 6), torch.float32)
    position_ids = torch.tensor([[2**40]])
    with torch.no_grad():
        actual = add_sinusoids(x, position_ids, None)
    torch.testing.assert_close(actual, x + sinusoidal_positions(position_ids, 6))


def test_the_op_is_one():
    x, position_ids = inputs((2, 1, 8), torch.bfloat16, rows=2)
    arguments = x, position_ids, frequencies(8, x.device), 2.0
    torch.library.opcheck(ops.add_sinusoids.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(2, 8)}, r"x must have shape \(B, T, C\), got \(2, 8\)"),
        ({0: torch.ones(2, 1, 8).long()}, "x must be float32, bfloat16, float16 or float64"),
        ({0: torch.ones(2, 1, 7)}, "even number of columns, got 7"),
        ({0: torch.ones(8, 1, 2).transpose(0, 2)}, "x must be contiguous"),
        ({1: torch.ones(2).long()}, r"position_ids must have shape \(B or 1, T\), got \(2,\)"),
        ({1: torch.ones(3, 1).long()}, r"position_ids must have shape \(2, 1\), got \(3, 1\)"),
        ({1: torch.ones(1, 2).long()}, r"position_ids must have shape \(1, 1\), got \(1, 2\)"),
        ({1: torch.ones(2, 1)}, "position_ids must be int64"),
        ({2: torch.ones(5)}, r"frequencies must have shape \(4,\), got \(5,\)"),
        ({2: torch.ones(4).double()}, "frequencies must be float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = [torch.ones(2, 1, 8), torch.ones(2, 1).long(), torch.ones(4), 1.0]
    for place, argument in change.items():
        arguments[place] = argument
    with pytest.raises(RuntimeError, match=message):
        ops.add_sinusoids(*arguments)


@pytest.mark.parametrize("shape", [(0, 1, 8), (1, 0, 8), (1, 1, 0)])
def test_nothing_gives_nothing(shape):
    x, position_ids = torch.ones(shape), torch.ones(1, shape[1]).long()
    assert ops.add_sinusoids(x, position_ids, torch.ones(shape[2] // 2), 1.0).shape == shape
