# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The preconditioned delta rule beside the layers that it is without a preconditioner, and the
latter beside its formula. tests/checkpoints has whole models beside flash-linear-attention's.
"""

import pytest
import torch

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.cache.layer_state import LayerMemory
from hf_linear_attention.ops.tokens import Tokens

EXACT = {"rtol": 0, "atol": 1e-10}
B, T, C = 2, 11, 16


def make_layer(preset: str, **fields):
    sizes = {"hidden_size": C, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 9}
    config = LinearAttentionConfig.from_preset(preset, **{**sizes, **heads, **fields})
    torch.manual_seed(0)
    return LinearAttentionForCausalLM(config).double().eval().model.layers[0].self_attn


def hidden_states(*shape: int):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(B, T, *shape, dtype=torch.float64, generator=draw)


@torch.no_grad()
@pytest.mark.parametrize(
    ("preset", "of_what"), [("precond_gdn", "gated_deltanet"), ("precond_kda", "kda")]
)
def test_without_squashing_it_is_the_plain_layer(preset, of_what):
    plain = make_layer(of_what)
    layers = [make_layer(preset, squash_x=x) for x in (1, 1.5)]
    for layer in layers:
        layer.load_state_dict({**layer.state_dict(), **plain.state_dict()})
    x, tokens = hidden_states(C), Tokens(is_causal=True)
    (same, _), (other, _), (expected, _) = (y(x, tokens) for y in (*layers, plain))
    torch.testing.assert_close(same, expected, **EXACT)
    assert (other - expected).abs().max() > 1e-3


@torch.no_grad()
def test_keys_are_squashed_by_the_formula():
    layer = make_layer("precond_gdn", squash_x=1.7, squash_eps=1e-4).preconditioner
    x, k = hidden_states(C), hidden_states(2, 6)
    written = layer(x, k, None, LayerMemory(None, Tokens(is_causal=True), T))
    b = layer.b_proj(x).sigmoid()
    decay = (-layer.A_log.exp() * (layer.dt_proj(x) + layer.dt_bias).exp().log1p()).exp()
    c = torch.zeros(B, 2, 6, dtype=torch.float64)
    for t in range(T):
        c = decay[:, t, :, None] * c + b[:, t, :, None] * k[:, t] ** 2
        r = (c + 1e-4).log() - layer.center[:, None]
        torch.testing.assert_close(written[:, t], k[:, t] * 1.7 ** (-r / (1 + r.abs())), **EXACT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay": "none"}, "decay must be 'per_token' or 'kda' or 'kda_bounded' with mixer='prec"),
        ({"squash_x": 0}, "squash_x=0 must be more than 0"),
        ({"squash_eps": 0.0}, "squash_eps=0.0 must be more than 0"),
        ({"squash_x": -1.5}, "squash_x=-1.5 must be more than 0 and finite"),
    ],
)
def test_what_it_needs_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer("precond_gdn", **fields)
