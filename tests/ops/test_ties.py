# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Gradients where a formula has a corner, or a number lies on a bound: the same from every backend,
and in every release of PyTorch.
"""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attention_cases import TOLERANCE
from hf_linear_attention import linear_attention
from hf_linear_attention.mixers.parts.decays import HGRN2
from hf_linear_attention.ops import backends
from hf_linear_attention.ops.feature_maps import POINTWISE
from hf_linear_attention.ops.numerics import bounded
from tiny import VARIANTS, random_ids, shallow, tiny_config, tiny_model

BACKENDS = ["cpu", "chunked", "reference"]
# phi(0), and what its derivative is there, on both sides or by convention.
AT_0 = {
    "identity": (0, 1),
    "elu+1": (1, 1),
    "relu": (0, 0),
    "relu2": (0, 0),
    "silu": (0, 0.5),
    "exp": (1, 1),
}
# Functions whose gradients at a bound are 1 or 0, by PyTorch's release.
CLAMPS = {"clamp", "clamp_", "clamp_min", "clamp_max", "clip", "fmax", "fmin", "normalize"}


def gradients_of_attention(q, k, v, log_decay, dy, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    y = linear_attention(*leaves, log_decay, **options)
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", POINTWISE)
def test_every_backend_has_the_derivative_of_a_pointwise_map_at_0(feature_map, backend):
    """That of the line that touches it there, in float64."""
    generator = torch.Generator().manual_seed(0)
    value, slope = AT_0[feature_map]
    for zeros, has_decay, normalize in [("q", 0, 1), ("k", 1, 0), ("qk", 1, 1), ("qk", 0, 0)]:
        q, k, v, dy = torch.randn(4, 2, 70, 2, 5, generator=generator, dtype=torch.float64)
        log_decay = -torch.rand(2, 70, 2, generator=generator) if has_decay else None
        options = {"normalize": bool(normalize), "eps": 0.5}
        lines = []
        for name, x in (("q", q), ("k", k)):
            x.abs_()  # so that no sum of weights comes near 0
            if name in zeros:
                lines.append((x.zero_() * slope + value, slope))
            else:
                x.requires_grad_()
                (of_x,) = torch.autograd.grad(POINTWISE[feature_map](x).sum(), x)
                lines.append((POINTWISE[feature_map](x), of_x))
        (phi_q, of_q), (phi_k, of_k) = lines
        decay = None if log_decay is None else log_decay.double()
        dq, dk, dv = gradients_of_attention(
            *(phi_q, phi_k, v, decay, dy), backend="reference", **options
        )
        for dtype in (torch.float32, torch.float64):
            q, k, v, dy = (x.to(dtype) for x in (q, k, v, dy))
            actual = gradients_of_attention(
                *(q, k, v, log_decay, dy), feature_map=feature_map, backend=backend, **options
            )
            for x, exact in zip(actual, (dq * of_q, dk * of_k, dv), strict=True):
                torch.testing.assert_close(x.double(), exact, **TOLERANCE[torch.float32])


def test_what_is_at_a_bound_has_a_gradient_of_1_and_beyond_it_0():
    x = torch.tensor([-2.0, -1.0, 0.0, 3.0, 4.0, -math.inf, math.nan], requires_grad=True)
    y = bounded(x, -1.0, 3.0)
    expected = torch.tensor([-1.0, -1.0, 0.0, 3.0, 3.0, -1.0, math.nan])
    torch.testing.assert_close(y, expected, equal_nan=True)
    (gradient,) = torch.autograd.grad(y[:6].sum(), x)
    assert gradient.tolist() == [0, 1, 1, 1, 0, 0, 0]
    (gradient,) = torch.autograd.grad(bounded(x, -1.0)[:6].sum(), x)
    assert gradient.tolist() == [0, 1, 1, 1, 1, 0, 0]


def test_a_step_of_mamba2_that_starts_at_its_limit_is_learned():
    bias = -3.0
    at_bias = torch.nn.functional.softplus(torch.tensor(bias)).item()
    for limits in [(at_bias, 1.0), (1e-4, at_bias)]:
        variant = VARIANTS["mamba2_alone"] | {"time_step_limit": limits, "num_hidden_layers": 1}
        model = tiny_model(dtype=torch.float32, **variant).train()
        mixer = model.model.layers[0].self_attn
        mixer.dt_bias.data.fill_(bias)
        mixer.dt_proj.weight.data.zero_()
        ids = random_ids(2, 9)
        model(ids, labels=ids).loss.backward()
        assert (mixer.dt_bias.grad != 0).all()


def test_a_lower_bound_of_hgrn2_that_is_all_but_1_has_a_gradient():
    k = torch.zeros(1, 1, 2, 3)
    bound = torch.full((2, 3), 1 - torch.finfo(torch.float32).eps, requires_grad=True)
    decay = HGRN2(tiny_config(decay="hgrn2"), 1)
    decay.lower_bounds = (lambda layer_idx: bound,)
    _, log_decay = decay(k)
    (gradient,) = torch.autograd.grad(log_decay.sum(), bound)
    torch.testing.assert_close(gradient, torch.full((2, 3), 0.5))  # (1 - sigmoid(0)) / f, f = 1


@pytest.mark.sample(16)
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_and_queries_that_are_0_learn_alike_on_every_backend(variant, monkeypatch):
    ids = random_ids(2, 9)
    of_backends = []
    for backend in BACKENDS:
        monkeypatch.setattr(backends, "FORCED_BACKEND", backend)
        model = tiny_model(dtype=torch.float32, **shallow(variant)).train()
        for name, weight in model.named_parameters():
            if name.rpartition(".")[0].endswith(("k_proj", "q_proj", "B_proj", "C_proj")):
                weight.data.zero_()
        with WithoutClamps():
            loss = model(ids, labels=ids).loss
        names, weights = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        of_backends.append(dict(zip(names, gradients, strict=True)))
    for other in of_backends[1:]:
        for name, gradient in of_backends[0].items():
            if gradient is not None:
                tolerance = 1e-5 + 1e-4 * gradient.abs().max().item()
                torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_model_trains_from_keys_that_are_0(backend, monkeypatch):
    monkeypatch.setattr(backends, "FORCED_BACKEND", backend)
    model = tiny_model(dtype=torch.float32).train()
    ids = random_ids(2, 9)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.zero_()
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.k_proj.weight.grad.abs().max() > 1e-4


class WithoutClamps(TorchFunctionMode):
    """Raises where a function of CLAMPS is called with what has a gradient."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in CLAMPS:
            assert not any(torch.is_tensor(x) and x.requires_grad for x in args), function
        return function(*args, **(kwargs or {}))
