# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The presets: their recurrences against the sources' parallel forms, and that they train.

That each generates, pads, packs, saves and loads is in the tests of all `VARIANTS`.
"""

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
)
from hf_linear_attention.model.configuration import DERIVED
from hf_linear_attention.model.presets import PRESETS
from hf_linear_attention.ops.tokens import Tokens
from tiny import VOCAB_SIZE, random_ids, tiny_config

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "presets.md"
B, T, C, H, LAYERS = 2, 9, 32, 4, 4
D = C // H
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": C,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def sizes(name):
    """With as many layers as the preset's pattern has, or more."""
    return {**SIZES, "num_hidden_layers": max(LAYERS, len(PRESETS[name].layer_pattern))}


def preset_model(name, **overrides):
    torch.manual_seed(0)
    fields = {**sizes(name), **overrides}
    return LinearAttentionForCausalLM(LinearAttentionConfig.from_preset(name, **fields))


# The table


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_fields_and_the_rest_the_defaults(name):
    config = LinearAttentionConfig.from_preset(name, **sizes(name))
    default = tiny_config(**sizes(name), initializer_range=0.02, max_position_embeddings=2048)
    fields = PRESETS[name].fields
    for field in LinearAttentionConfig.__annotations__.keys() - DERIVED.keys():
        assert getattr(config, field) == fields.get(field, getattr(default, field)), field
    pattern = PRESETS[name].layer_pattern
    layers = range(config.num_hidden_layers)
    assert config.layer_types == [pattern[layer % len(pattern)] for layer in layers]
    assert "arXiv" in PRESETS[name].source


def test_the_table_in_the_docs_is_this_one():
    rows = ["| preset | fields | layers | source | what differs |", "|---|---|---|---|---|"]
    for name, preset in PRESETS.items():
        fields = ", ".join(f"`{field}={value!r}`" for field, value in preset.fields.items())
        layers = ", ".join(kind.removesuffix("_attention") for kind in preset.layer_pattern)
        rows.append(f"| `{name}` | {fields} | {layers} | {preset.source} | {preset.differs} |")
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")


def test_the_preset_to_start_with_is_the_default():
    config = LinearAttentionConfig.from_preset("gated_deltanet")
    assert config.to_dict() == LinearAttentionConfig().to_dict()
    assert "| `gated_deltanet` | **Start here**" in README.read_text("utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_is_made_again_of_what_is_saved(name):
    """By the constructor, whose defaults are one preset's, and by from_dict, which knows what
    folders of version 0.1 do not say.
    """
    config = LinearAttentionConfig.from_preset(name)
    saved = config.to_dict()
    assert LinearAttentionConfig.from_dict(saved).to_dict() == saved
    assert LinearAttentionConfig(**saved).to_dict() == saved


def test_overrides_win():
    config = LinearAttentionConfig.from_preset(
        "retnet", gate_act="sigmoid", num_hidden_layers=2, layer_types=["full_attention"] * 2
    )
    assert (config.gate_act, config.decay) == ("sigmoid", "retnet")
    assert config.layer_types == ["full_attention"] * 2


def test_a_preset_is_not_changed_through_a_config():
    config = LinearAttentionConfig.from_preset("hybrid", num_hidden_layers=4)
    config.layer_types[0] = "full_attention"
    again = LinearAttentionConfig.from_preset("hybrid", num_hidden_layers=4)
    assert again.layer_types[0] == "linear_attention"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("mamba", {}, "preset must be one of 'katharopoulos', .*'hybrid', got 'mamba'"),
        ("hybrid", {"num_hidden_layers": "8"}, "num_hidden_layers must be an integer, got '8'"),
        ("hybrid", {"num_hidden_layers": 3}, "at least 4 with preset 'hybrid', .* got 3"),
        ("retnet", {"gate_act": "tanh"}, "gate_act must be one of"),
    ],
)
def test_what_is_wrong_is_said(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionConfig.from_preset(name, **overrides)


# The parallel forms of the sources, from a layer's input to its output, written anew; those of
# gla, hgrn, hgrn2 and mamba2 are loops in tests/mixers/test_linear_forms.py


def rotated(x):
    """x (B, T, H, D), whose features i and i + D / 2 are a complex number, turned by position."""
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    frequencies = 10000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    angles = torch.arange(T, dtype=torch.float64)[:, None, None] * frequencies
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def convolved(x, conv1d):
    """silu of sums over the last tokens."""
    size = conv1d.weight.shape[-1]
    padded = F.pad(x, (0, 0, size - 1, 0))
    return F.silu(sum(padded[:, i : i + T] * conv1d.weight[:, 0, i] for i in range(size)))


def heads(x):
    return x.unflatten(-1, (H, -1))


def powers(remembered):
    """remembered (H,) -> (B, H, T, T): remembered^(t - j) for j <= t, else 0."""
    gap = torch.arange(T)[:, None] - torch.arange(T)
    mask = (remembered[:, None, None] ** gap.clamp(min=0)).tril()
    return mask.expand(B, H, T, T)


def products(remembered):
    """remembered (B, T, H) -> (B, H, T, T): the product of those after j until t."""
    mask = torch.zeros(B, H, T, T, dtype=torch.float64)
    for t in range(T):
        for j in range(t + 1):
            mask[:, :, t, j] = remembered[:, j + 1 : t + 1].prod(1)
    return mask


def retention(q, k, v, mask):
    """(Q K^T * mask) V: arXiv 2307.08621, equation 5."""
    scores = torch.einsum("bthd,bjhd->bhtj", q, k) * mask
    return torch.einsum("bhtj,bjhd->bthd", scores, v)


def gated(layer, y, gate):
    """y, (B, T, H, V) or of all heads at once (B, T, H V), at unit mean square, times a gate."""
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return layer.o_proj(y.reshape(gate.shape) * gate)


def retnet(layer, x):
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(H)], dtype=torch.float64)
    q, k, v = (heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    y = retention(rotated(q), rotated(k), v, powers(gamma))
    return gated(layer, y, F.silu(layer.g_proj(x)))


def lightning(layer, x):
    slope = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.float64)
    slope = slope * (1 - layer.layer_idx / (LAYERS - 1 + 1e-5) + 1e-5)
    q, k, v = (heads(F.silu(proj(x))) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    y = retention(q, k, v, powers((-slope).exp()))
    return gated(layer, y.flatten(2), layer.g_proj(x).sigmoid())


def hybrid(layer, x):
    q = heads(convolved(layer.q_proj(x), layer.q_conv1d))
    k = heads(convolved(layer.k_proj(x), layer.k_conv1d))
    v = heads(convolved(layer.v_proj(x), layer.v_conv1d))
    decay = layer.decay
    step = (1 + (decay.dt_proj(x) + decay.dt_bias).exp()).log()
    y = retention(q, k, v, products((-decay.A_log.exp() * step).exp()))
    return gated(layer, y, layer.g_proj(x).sigmoid())


def normalized(layer, kernel, v):
    weights = kernel.tril()
    weights = weights / weights.sum(-1, keepdim=True)
    return layer.o_proj(torch.einsum("bhtj,bjhd->bthd", weights, v).flatten(2))


def polynomial(layer, x):
    q, k, v = (heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    return normalized(layer, torch.einsum("bthd,bjhd->bhtj", q, k) ** 2, v)


def katharopoulos(layer, x):
    q, k, v = (heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    return normalized(layer, torch.einsum("bthd,bjhd->bhtj", F.elu(q) + 1, F.elu(k) + 1), v)


def aaren(layer, x):
    k, v = heads(layer.k_proj(x)), heads(layer.v_proj(x))
    scores = torch.einsum("hd,bjhd->bhj", layer.query.weight, k) / math.sqrt(D)
    return normalized(layer, scores.exp()[:, :, None].expand(B, H, T, T), v)


PARALLEL = {
    form.__name__: form for form in (retnet, lightning, hybrid, polynomial, katharopoulos, aaren)
}


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("layer_idx", [0, 2])
@pytest.mark.parametrize("how", ["parallel", "recurrent"])
def test_a_layer_is_the_source_s_parallel_form(name, layer_idx, how):
    model = preset_model(name, initializer_range=0.3, attention_eps=0.0).double().eval()
    layer = model.model.layers[layer_idx].self_attn
    x = torch.randn(B, T, C, dtype=torch.float64)
    positions = None
    if name == "retnet":
        positions = model.model.rotary_emb(x, torch.arange(T)[None])
    with torch.no_grad():
        expected = PARALLEL[name](layer, x)
        if how == "parallel":
            y, _ = layer(x, Tokens(is_causal=True, position_embeddings=positions))
        else:
            cache = LinearAttentionCache(model.config)
            steps = []
            for t in range(T):
                turn = None if positions is None else [p[:, t : t + 1] for p in positions]
                tokens = Tokens(is_causal=True, position_embeddings=turn)
                step, _ = layer(x[:, t : t + 1], tokens, past_key_values=cache)
                steps.append(step)
            y = torch.cat(steps, 1)
    # norms and rotary positions compute in float32
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


# Training


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PRESETS)
def test_it_learns_a_sentence_in_a_few_steps(name):
    model = preset_model(name).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ids = random_ids(4, 24)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.6 * losses[0]
