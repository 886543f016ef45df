# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Step sizes and what they forget, by one operation and by several."""

import pytest
import torch

from hf_linear_attention.mixers.parts import decays as module
from hf_linear_attention.mixers.parts.decays import decay_steps
from hf_linear_attention.ops.compiled.library import ops
from hf_linear_attention.ops.numerics import rates_of

HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 24), (3, 1, 16), (2, 70, 6), (1, 5, 256), (2, 0, 3), (0, 4, 3)]


def inputs(shape, dtype, of_parameters, heads=None):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    bias = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    A_log = torch.randn(heads or shape[-1], generator=generator, dtype=torch.float64)
    return x.to(dtype), bias.to(of_parameters), A_log.to(of_parameters)


def in_float64(x, bias, A_log):
    steps = torch.nn.functional.softplus(x.double() + bias.double(), threshold=40)
    rates = A_log.double().exp().repeat_interleave(x.shape[-1] // A_log.shape[0])
    return steps, -rates * steps


@pytest.fixture
def calls(monkeypatch):
    """How often the compiled operation is called."""
    calls, compiled = [], module.compiled_decay_steps
    spy = lambda *args: calls.append(args) or compiled(*args)  # noqa: E731
    monkeypatch.setattr(module, "compiled_decay_steps", spy)
    return calls


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_operation_gives_what_several_give(shape, dtype, is_mixed, calls):
    for heads in {shape[-1], shape[-1] // 2 if shape[-1] % 2 == 0 else 1}:
        given = inputs(shape, dtype, torch.float32 if is_mixed else dtype, heads)
        with torch.no_grad():
            one = decay_steps(*given)
        assert len(calls) == 1
        several = decay_steps(given[0].clone().requires_grad_(), *given[1:])
        assert len(calls) == 1
        calls.clear()
        for actual, other, expected in zip(one, several, in_float64(*given), strict=True):
            assert actual.dtype == torch.float32 and actual.shape == shape
            torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=0)
            torch.testing.assert_close(other.detach().double(), expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounded_steps_are_those_of_halves(dtype, calls):
    given = inputs((2, 9, 40), dtype, torch.float32)
    with torch.no_grad():
        one = decay_steps(*given, rounds=True)
    assert len(calls) == 1
    several = decay_steps(given[0].clone().requires_grad_(), *given[1:], rounds=True)
    assert (one[0] != several[0].detach()).double().mean() < 0.02
    for actual, other in zip(one, several, strict=True):
        torch.testing.assert_close(actual, other.detach(), rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert torch.equal(one[0], one[0].to(dtype).float())


def test_parts_of_rows_are_read_where_they_are(calls):
    x, bias, A_log = inputs((2, 7, 20), torch.float32, torch.float32, 4)
    with torch.no_grad():
        for part in (x[:, :, 4:16], x[:, ::2, 4:16], x[:, :1, 4:16], x.mT[:, 3:15].mT):
            actual = decay_steps(part, bias[:12], A_log)
            expected = decay_steps(part.contiguous(), bias[:12], A_log)
            assert all(map(torch.equal, actual, expected))
    assert len(calls) == 8


def test_extremes(calls):
    x = torch.tensor([[[-torch.inf, -1e30, -200, -88, 88, 1e30, torch.inf, torch.nan]]])
    bias, A_log = torch.zeros(8), torch.tensor([-torch.inf, -200, 0, 62, 80, 1e30, 3, 3])
    with torch.no_grad():
        steps, log_decay = decay_steps(x, bias, A_log)
    expected = torch.tensor([0, 0, 0, 6.0546e-39, 88, 1e30, torch.inf, torch.nan])
    torch.testing.assert_close(steps[0, 0], expected, rtol=1e-4, atol=1e-44, equal_nan=True)
    rates = rates_of(A_log)
    expected = rates * steps[0, 0]
    torch.testing.assert_close(log_decay[0, 0], expected, rtol=1e-5, atol=1e-44, equal_nan=True)


def test_a_gradient_float64_and_graphs_take_several_operations(calls):
    given = inputs((1, 2, 4), torch.float32, torch.float32)
    decay_steps(*given)
    assert len(calls) == 1
    for i in range(3):
        leaf = [x.clone().requires_grad_(i == j) for j, x in enumerate(given)]
        sum(decay_steps(*leaf)).sum().backward()
        assert leaf[i].grad.abs().sum() > 0
    exact = [x.double() for x in given]
    steps, log_decay = decay_steps(*exact)
    assert steps.dtype == log_decay.dtype == torch.float64
    torch.func.jvp(lambda x: decay_steps(x, *given[1:])[0], (given[0],), (given[0],))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(1, 2, 4).double()}, "x must not be float64"),
        ({"x": torch.ones(2, 3, 4).transpose(0, 1)}, "x must have rows that are equally far apart"),
        ({"x": torch.tensor(1.0)}, "x must have rows"),
        ({"bias": torch.ones(3)}, r"bias must have shape \(4,\)"),
        ({"bias": torch.ones(4).half()}, "bias must"),
        ({"A_log": torch.ones(3)}, r"A_log must have shape \(H,\) where 4 columns"),
        ({"A_log": torch.ones(0)}, r"A_log must have shape \(H,\)"),
        ({"A_log": torch.ones(2, 2)}, r"A_log must have shape \(H,\)"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    given = {"x": torch.ones(1, 2, 4), "bias": torch.ones(4), "A_log": torch.ones(2)}
    with pytest.raises(RuntimeError, match=f"decay_steps: {message}"):
        ops.decay_steps(*(given | changes).values(), False)
