# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention of a few queries on the CPU: its compiled op, and the op's fake."""

import torch
from torch import Tensor

from .library import ops, register_fake

_attention = ops.attention.default
_step = ops.attention_step_.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v, each key and value read once for all queries that share it.

    No gradient. Scores, weights and sums are in float32, or float64 for float64 inputs.

    Args:
        q, k, v: (B, Hq, R, K), (B, Hkv, S, K), (B, Hkv, S, V), of one dtype: float32, bfloat16,
            float16 or float64; Hkv divides Hq; of any strides, but for the last ones of k and v.
        mask: (B, Hq, R, S), of any strides: bool, True where a key is seen, or of q's dtype, added
            to scores; None: all is seen.

    Returns:
        y (B, R, Hq, V), 0 where nothing is seen.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _attention(q, k, v, mask, scale)


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    used: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one token, whose key and value are written behind those of tokens before.

    Args:
        q, k, v: (B, Hq, 1, K), (B, Hkv, 1, K), (B, Hkv, 1, V), as of `attention`.
        keys, values: (B, Hkv, S, K), (B, Hkv, S, V), written in place.
        used: (1,) int64, how many tokens are in these, fewer than S; one more afterwards.

    Returns:
        y (B, 1, Hq, V), of all keys up to the token's own.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _step(q, k, v, keys, values, used, scale)


@register_fake("attention_step_", _registrations)
def _fake_step(q, k, v, keys, values, used, scale):
    return q.new_empty(q.shape[0], 1, q.shape[1], v.shape[-1])


@register_fake("attention", _registrations)
def _fake_attention(q, k, v, mask, scale):
    B, Hq, R, _ = q.shape
    return q.new_empty(B, R, Hq, v.shape[-1])
