# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Aaren: softmax attention of one learned query, for any scores, pieces, padding and packing."""

import pytest
import torch

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    StaticLinearAttentionCache,
)
from hf_linear_attention.mixers.aaren import (
    AarenInputs,
    AarenRecurrence,
    LearnedQuery,
    below_maximum,
)
from hf_linear_attention.ops.tokens import Tokens

B, T, H, D = 2, 5, 4, 4


def build() -> LearnedQuery:
    return LearnedQuery(H, D)


def aaren_attention(query, k, v, pieces=None, key_mask=None, cu_seqlens=None):
    """The recurrence, in pieces of so many tokens."""
    recurrence, state, outputs = AarenRecurrence(H, D, eps=0.0), {}, []
    tokens = Tokens(is_causal=True, key_mask=key_mask, cu_seqlens=cu_seqlens)
    for k_piece, v_piece in zip(*(x.split(pieces or T, 1) for x in (k, v)), strict=True):
        y, state = recurrence.run(AarenInputs(query(k_piece), v_piece), state, tokens)
        outputs.append(y)
    return torch.cat(outputs, 1)


def learned_query_softmax(module, k, v):
    scores = torch.einsum("hd,bjhd->bhj", module.weight, k) * k.shape[-1] ** -0.5
    scores = scores[:, :, None].expand(-1, -1, k.shape[1], -1)
    future = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhtj,bjhd->bthd", weights, v)


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small", "large"])
@pytest.mark.parametrize("pieces", [None, [1] * T, [2, 3], [4, 1]], ids=str)
def test_aaren_is_softmax_attention_of_a_learned_query(scale, pieces):
    module = build().double()
    k, v = torch.randn(2, B, T, H, D, dtype=torch.float64)
    k = k * scale
    torch.testing.assert_close(
        aaren_attention(module, k, v, pieces), learned_query_softmax(module, k, v)
    )


def scores_of(module, *scores):
    """Keys (1, T, H, D) with these scores for every head."""
    query = module.weight.detach()
    unit = query / query.square().sum(-1, keepdim=True) * query.shape[-1] ** 0.5
    return torch.tensor(scores)[None, :, None, None] * unit


@pytest.mark.parametrize("scores", [(1e4, -1e4, 1e4, 9999.0), (-1e4, -9999.0, 0.0, 1e4)])
def test_aaren_survives_scores_of_any_size_in_float32(scores):
    module = build()
    k = scores_of(module, *scores).requires_grad_()
    v = torch.randn(1, 4, H, 3, requires_grad=True)
    y = aaren_attention(module, k, v)
    expected = learned_query_softmax(module, k, v)
    torch.testing.assert_close(y, expected, rtol=0.01, atol=0.01)  # 1e4 has few digits left
    gradients = torch.autograd.grad(y.square().sum(), [k, v, module.weight])
    assert all(x.isfinite().all() for x in gradients)
    phi_k, log_decay, _ = below_maximum(module(k), None, None)
    assert phi_k.max() <= 1 and log_decay.max() <= 0


def test_the_gradient_is_that_of_softmax_though_the_maximum_has_none():
    module = build().double()
    k, v = torch.randn(2, B, T, H, D, dtype=torch.float64).requires_grad_().unbind()
    leaves = [k, v, module.weight]
    weights = torch.randn(B, T, H, D, dtype=torch.float64)
    actual, expected = (
        torch.autograd.grad((attention(module, k, v) * weights).sum(), leaves)
        for attention in (aaren_attention, learned_query_softmax)
    )
    torch.testing.assert_close(actual, expected)


def test_aaren_does_not_see_padding():
    module = build().double()
    k, v = torch.randn(2, 1, T, H, D, dtype=torch.float64)
    key_mask = torch.tensor([[False, True, False, True, True]])
    k[:, ~key_mask[0]] = 1e6
    k.requires_grad_()
    y = aaren_attention(module, k, v, key_mask=key_mask)
    real = key_mask[0]
    expected = learned_query_softmax(module, k[:, real], v[:, real])
    torch.testing.assert_close(y[:, real], expected)
    for gradient in torch.autograd.grad(y.sum(), [k, module.weight]):
        assert gradient.isfinite().all()


def test_aaren_begins_anew_in_every_packed_sequence():
    module = build().double()
    bounds = [0, 1, 1, 10, 16]
    k, v = torch.randn(2, 1, 16, H, D, dtype=torch.float64)
    k[:, 3] *= 1e4  # beside which all of the next sequence would be 0
    cu_seqlens = torch.tensor(bounds)
    phi_k, log_decay, running_max = below_maximum(module(k), None, None, cu_seqlens)
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        alone = below_maximum(module(k[:, start:end]), None, None)
        packed = (x[:, start:end] for x in (phi_k, log_decay, running_max))
        torch.testing.assert_close(tuple(packed), alone, rtol=0, atol=0)


def test_aaren_keeps_the_digits_of_its_scores_under_autocast():
    module = build()
    k = torch.randn(B, T, H, D)
    expected = module(k)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(k), expected, rtol=0, atol=0)


def test_aaren_s_maximum_is_part_of_the_cache_and_of_its_size():
    config = LinearAttentionConfig.from_preset(
        "aaren", vocab_size=11, hidden_size=H * D, num_hidden_layers=2, num_attention_heads=H
    )
    model = LinearAttentionForCausalLM(config)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        size = cache.nbytes
        layer = cache.layers[1]
        address = layer.tensors["running_max"].data_ptr()
        assert layer.tensors["kv"].shape == (1, H, 1, D)
        assert layer.tensors["running_max"].shape == (1, H)
        model(tokens[:, :1], past_key_values=cache)
    assert cache.nbytes == size
    assert layer.tensors["running_max"].data_ptr() == address


def test_a_static_cache_forgets_the_maximum_too():
    config = LinearAttentionConfig.from_preset(
        "aaren", vocab_size=11, hidden_size=H * D, num_hidden_layers=1, num_attention_heads=H
    )
    model = LinearAttentionForCausalLM(config)
    with torch.no_grad():
        # scores of which a maximum of 0 would leave nothing
        model.model.layers[0].self_attn.query.weight.mul_(1e4)
        cache = StaticLinearAttentionCache(config, max_cache_len=16)
        first, second = torch.randint(11, (2, 1, 6))
        for tokens in (first, second):
            expected = model(tokens).logits
            cache.reset()
            pieces = [model(x, past_key_values=cache).logits for x in tokens.split([3, 1, 2], 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)
        assert cache.layers[0].tensors["running_max"].isfinite().all()
        cache.reset()
        assert (cache.layers[0].tensors["running_max"] == -torch.inf).all()
