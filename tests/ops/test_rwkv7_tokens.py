# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7's operations between products: one of the compiled library, and several of PyTorch's."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_linear_attention.mixers.parts import rwkv7_tokens as module
from hf_linear_attention.ops.compiled.library import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 2, 8), (2, 17, 3, 5), (1, 40, 2, 64), (3, 2, 1, 1), (2, 0, 2, 8), (0, 3, 2, 8)]
COMPILED = ("token_mix", "values", "keys", "read", "squared_relu")


@pytest.fixture
def calls(monkeypatch):
    """Names of the compiled operations that are called."""
    calls = []
    for name in COMPILED:
        compiled = getattr(module, f"compiled_{name}")

        def spy(*args, name=name, compiled=compiled):
            calls.append(name)
            return compiled(*args)

        monkeypatch.setattr(module, f"compiled_{name}", spy)
    return calls


def inputs(shape, dtype, value_dim=None):
    """By the function's name: a call of it on tensors, and these. Biases are floats."""
    B, T, H, K = shape
    V = K if value_dim is None else value_dim
    generator = torch.Generator().manual_seed(0)

    def some(*sizes, dtype=dtype):
        x = 2 * torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return x.to(torch.float64 if dtype is torch.float64 else dtype)

    in_float = torch.float64 if dtype is torch.float64 else torch.float32
    keys, values = (B, T, H, K), (B, T, H, V)

    def keys_of(k, w, a, w_bias, a_bias, k_k, k_a):
        return module.keys_of(k, w, a, (w_bias, a_bias), (k_k, k_a))

    def read_out(y, r, k, v, gate, bonus, weight, bias):
        return [module.read_out(y, (r, k), v, gate, bonus, module.Norm(weight, bias, 1e-3))]

    return {
        "token_mix": (
            lambda x, before, *mixes: list(module.mixed_tokens(x, before, mixes)),
            [some(B, T, H * K), some(B, T, H * K), *(some(1, 1, H * K) for _ in range(6))],
        ),
        "values": (
            lambda *args: [module.mixed_values(*args)],
            [*(some(B, T, H * V) for _ in range(3)), some(H * V, dtype=in_float)],
        ),
        "keys": (
            keys_of,
            [some(*keys), some(*keys), some(*keys)]
            + [some(H * K, dtype=in_float), some(H * K, dtype=in_float), some(H * K), some(H * K)],
        ),
        "read": (
            read_out,
            [some(*values), some(*keys), some(*keys), some(*values), some(*values)]
            + [some(H, K), some(H * V), some(H * V)],
        ),
        "squared_relu": (
            lambda x: [module.activated(x, ACT2FN["relu2"])],
            [some(B, T, H * K)],
        ),
    }


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_operation_gives_what_several_give(shape, dtype, calls):
    exact = inputs(shape, torch.float64, 7)
    for name, (function, tensors) in inputs(shape, dtype, 7).items():
        with torch.no_grad():
            one = function(*tensors)
        assert calls == [name]
        several = function(tensors[0].clone().requires_grad_(), *tensors[1:])
        assert calls == [name]
        calls.clear()
        # in float64, of the same numbers
        expected = exact[name][0](*(x.double() for x in tensors))
        for actual, other, right in zip(one, several, expected, strict=True):
            assert actual.dtype == other.dtype and actual.shape == other.shape == right.shape
            eps = torch.finfo(actual.dtype).eps
            scale = right.abs().amax() if right.numel() else torch.zeros(())
            tolerance = {"rtol": 0, "atol": 8 * eps * float(scale)}
            torch.testing.assert_close(actual.double(), right, **tolerance)
            torch.testing.assert_close(other.detach().double(), right, **tolerance)


def test_tensors_need_not_be_contiguous():
    for function, tensors in inputs((2, 6, 2, 8), torch.float32).values():
        with torch.no_grad():
            apart = [
                x.mT.contiguous().mT if x.dim() == 3 and x.shape[0] > 1 else x for x in tensors
            ]
            for actual, expected in zip(function(*apart), function(*tensors), strict=True):
                torch.testing.assert_close(actual, expected)


def test_extremes(calls):
    x = torch.tensor([-torch.inf, -1e30, -88, -1, 0, 1, 1e30, torch.inf]).view(1, 1, 1, 8)
    zeros = torch.zeros(8)
    with torch.no_grad():
        keys = module.keys_of(0 * x.nan_to_num(), x, x, (zeros, zeros), (zeros, zeros))
        values = module.mixed_values(
            *(y.flatten(2) for y in (0 * x.nan_to_num(), 1 + 0 * x.nan_to_num(), x)), zeros
        )
    assert calls == ["keys", "values"]
    expected = torch.tensor([0, 0, 0, 0.2689414, 0.5, 0.7310586, 1, 1])
    torch.testing.assert_close(values.flatten(), expected, atol=1e-7, rtol=0)
    decays = keys.log_decay.flatten()
    torch.testing.assert_close(decays, -module.LARGEST_DECAY * expected, atol=1e-7, rtol=0)
    assert not any(y.isnan().any() or y.abs().sum() for y in keys[1:])  # kappa of no keys is 0


def test_a_gradient_float64_and_mixed_dtypes_take_several_operations(calls):
    for function, tensors in inputs((1, 2, 2, 8), torch.float32).values():
        for i, x in enumerate(tensors):
            leaf = nn.Parameter(x.clone())
            sum(y.float().sum() for y in function(*tensors[:i], leaf, *tensors[i + 1 :])).backward()
            assert leaf.grad.abs().sum() > 0
        function(*(x.double() for x in tensors))
    with torch.no_grad():
        function, (y, *others) = inputs((1, 2, 2, 8), torch.bfloat16)["read"]
        function(y, *(x.float() for x in others))
    assert not calls


WRONG = {
    "token_mix": (
        lambda x, before, mix: ops.token_mix(x, before, [mix]),
        {"x": torch.ones(1, 2, 4), "before": torch.ones(1, 2, 4), "mix": torch.ones(4)},
        [
            ({"x": torch.ones(1, 2, 4).double()}, "x must not be float64"),
            ({"x": torch.tensor(1.0)}, "x must have 1 to"),
            ({"before": torch.ones(1, 3, 4)}, "before must be contiguous, and like x"),
            ({"before": torch.ones(1, 2, 4).half()}, "before must"),
            ({"mix": torch.ones(3)}, r"mixes must have shape \(4,\)"),
        ],
    ),
    "rwkv7_values": (
        ops.rwkv7_values,
        {"v": torch.ones(1, 2, 4), "first": torch.ones(1, 2, 4), "share": torch.ones(1, 2, 4)}
        | {"bias": torch.ones(4)},
        [
            ({"v": torch.ones(2, 4)}, "v must have shape"),
            ({"first": torch.ones(1, 2, 5)}, "first must have shape"),
            ({"share": torch.ones(1, 2, 4).half()}, "share must"),
            ({"bias": torch.ones(4).half()}, "bias must"),
        ],
    ),
    "rwkv7_keys": (
        lambda *given: ops.rwkv7_keys(*given, 0.6, 1e-12),
        {name: torch.ones(1, 2, 2, 4) for name in "kwa"}
        | {name: torch.ones(8) for name in ("w_bias", "a_bias", "k_k", "k_a")},
        [
            ({"k": torch.ones(1, 2, 8)}, "k must have shape"),
            ({"w": torch.ones(1, 2, 2, 5)}, "w must have shape"),
            ({"a": torch.ones(1, 2, 4, 2).mT}, "a must be contiguous"),
            ({"w_bias": torch.ones(7)}, "w_bias must have shape"),
            ({"k_k": torch.ones(8).half()}, "k_k must"),
        ],
    ),
    "rwkv7_read": (
        lambda *given: ops.rwkv7_read(*given, 1e-3),
        {name: torch.ones(1, 2, 2, 4) for name in ("y", "r", "k", "v", "gate")}
        | {name: torch.ones(8) for name in ("r_k", "weight", "bias")},
        [
            ({"y": torch.ones(1, 2, 8)}, "y must have shape"),
            ({"r": torch.ones(2, 8)}, "r must have shape"),
            ({"k": torch.ones(1, 2, 2, 5)}, "k must have shape"),
            ({"gate": torch.ones(1, 2, 1, 4)}, "gate must have shape"),
            ({"bias": torch.ones(4)}, "bias must have shape"),
        ],
    ),
    "squared_relu": (
        ops.squared_relu,
        {"x": torch.ones(2, 4)},
        [({"x": torch.ones(2, 4).double()}, "x must not"), ({"x": torch.ones(4, 2).mT}, "x must")],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    call, given, wrong = WRONG[name]
    call(*given.values())
    for changes, message in wrong:
        with pytest.raises(RuntimeError, match=f"{name}: {message}"):
            call(*(given | changes).values())
