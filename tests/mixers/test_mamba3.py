# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-3's layer: what it remembers, for how long it is exact, first values, and what is refused.
tests/checkpoints/test_fla.py has the answers of flash-linear-attention's model.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from hf_linear_attention import LinearAttentionCache, LinearAttentionConfig
from hf_linear_attention.mixers.mamba3 import turned
from hf_linear_attention.ops.tokens import Tokens
from tiny import VARIANTS, random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = VARIANTS["preset_mamba3"]


def test_pairs_of_neighbours_are_turned():
    x = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    angles = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    pairs = torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3)
    y = turned(x, angles)
    torch.testing.assert_close(y[..., :4], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(y[..., 4:], x[..., 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_kept_as_they_are_computed_and_angles_in_float64(dtype):
    model = tiny_model(dtype=dtype, **TINY)
    cache = LinearAttentionCache(model.config)
    with torch.no_grad():
        model(random_ids(2, 5), cache=cache)
    kept = {name: x.dtype for name, x in cache.layers[0].read().items()}
    assert kept == {
        "kv": torch.float32,
        "key_before": dtype,
        "value_before": dtype,
        "step_before": torch.float32,
        "h": torch.float64,
    }


@torch.no_grad()
def test_angles_are_exact_after_many_tokens():
    """A sum in float32 is rounded by up to 0.008 with each token there."""
    T, piece = 40_000, 5_000
    layers = [tiny_model(dtype=x, **TINY).model.layers[0].self_attn for x in (torch.float64,) * 2]
    single = layers[1].float()
    x = torch.zeros(1, piece, 32, dtype=torch.float64)
    for layer in layers:
        layer.angle_proj.weight.zero_()
        layer.dt_proj.weight.zero_()
        layer.dt_bias.fill_(1.5)
    caches = [LinearAttentionCache(tiny_config(**TINY)) for _ in layers]
    tokens = Tokens(is_causal=True)
    generator = torch.Generator().manual_seed(0)
    bias = torch.nn.Parameter(torch.full((layers[0].pairs,), 2.0, dtype=torch.float64))
    layers[0].angle_proj.bias = bias
    single.angle_proj.bias = torch.nn.Parameter(bias.float())
    for _ in range(T // piece):
        x = torch.randn(1, piece, 32, dtype=torch.float64, generator=generator)
        expected, _ = layers[0](x, tokens, caches[0])
        y, _ = single(x.float(), tokens, caches[1])
    assert caches[0].layers[0].read()["h"].max() > 1e5
    assert (y.double() - expected).norm() < 1e-3 * expected.norm()


def test_first_values_are_fla_s():
    model = tiny_model(dtype=torch.float32, **{**TINY, "time_step_floor": 0.3})
    for layer in model.model.layers:
        mixer = layer.self_attn
        for x in (mixer.B_bias, mixer.C_bias, mixer.D, mixer.B_norm.weight, mixer.C_norm.weight):
            assert (x == 1).all()
        steps = F.softplus(mixer.dt_bias)
        assert (steps > 0.3 - 1e-6).all() and (steps < 1 + 1e-6).all()


def test_a_token_forgets_at_least_as_the_floor_says():
    layer = tiny_model(**{**TINY, "A_floor": 0.5}).model.layers[0].self_attn
    with torch.no_grad():
        layer.A_proj.weight.zero_()  # softplus(0) is 0.69
        steps = layer._steps(torch.randn(2, 5, 32).double(), None)
        dt = steps.own + steps.again
        torch.testing.assert_close(steps.log_decay, -math.log(2) * dt)
        layer.smallest_A = 0.9
        steps = layer._steps(torch.randn(2, 5, 32).double(), None)
        torch.testing.assert_close(steps.log_decay, -0.9 * (steps.own + steps.again))


def test_what_it_needs_is_named():
    for fields, message in (
        ({"normalizer": "gated_rms_norm"}, "normalizer must be 'gate' with mixer='mamba3'"),
        ({"conv_kernel_size": 4}, "conv_kernel_size must be 0 with mixer='mamba3', got 4"),
        ({"rope_fraction": 0.25}, "rope_fraction must be 0.5 or 1 with mixer='mamba3', got 0.25"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit must be None with mixer='mamba3'"),
        ({"A_floor": -1.0}, "A_floor=-1.0 must be at least 0 and finite"),
        ({"is_causal": False}, 'mixer must not be "mamba3" with is_causal=False'),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_config(**{**TINY, **fields})
    with pytest.raises(ValueError, match="linear_key_head_dim=2 times rope_fraction=0.5 must be"):
        tiny_model(**{**TINY, "linear_key_head_dim": 2})
    config = LinearAttentionConfig(normalizer="gated_rms_norm")
    with pytest.raises(ValueError, match="normalizer must be .* with mixer='delta_rule'"):
        LinearAttentionConfig(**{**config.to_dict(), "normalizer": "gate"})
