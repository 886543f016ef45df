# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention of a few queries on the CPU: its compiled ops, and their fakes."""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..numerics import accumulation_dtype
from .library import as_mask, contiguous, ops, register_fake

_attention = ops.attention.default
_step = ops.attention_step_.default
_window_step = ops.window_step_.default
_join_with_sums = ops.join_with_sums.default
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


def window_step_(
    q: Tensor,
    kvf: Tensor,
    window: Tensor,
    sinks: Tensor | None,
    window_count: Tensor,
    key_mask: Tensor | None,
    value_dim: int,
    state_indices: Tensor | None = None,
) -> Tensor:
    """Attention of one token to the last W tokens, itself included, and to those of the first N
    ("sinks") that are no more among these. It takes the place of the oldest one. No gradient.

    Args:
        q: (B, 1, Hq, K), of any strides: float32, bfloat16, float16 or float64.
        kvf: (B, 1, Hkv, K + V + F), key, value and features, in q's dtype, as window and sinks are.
        window, sinks: (B, W, Hkv, K + V + F) and (B, N, Hkv, K + V), each row contiguous; written
            in place. Without sinks None.
        window_count: (B, 1) in the accumulation dtype: how many tokens were read, W + N for more,
            and W + N + 1 for each token of window before its oldest; those of one more token
            afterwards.
        key_mask: (B, 1), False for a token that changes nothing, whose output is 0.
        value_dim: V.
        state_indices: (B,) int32, all different, with window, sinks and window_count of as many
            slots as there may be: the slot of each row. -1: none, as with key_mask.

    Returns:
        (B, 1, Hq V + Hq + Hkv (V + 1) + Hkv F) in the accumulation dtype: y (Hq, V); the logarithms
        of its denominators; and of the token that leaves the window values with a 1 behind, and
        features, 0 where none leaves, or one of the sinks, which stay.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    key_mask = as_mask(key_mask, q)
    indices = contiguous(state_indices)
    out = _window_step(q, kvf, window, sinks, window_count, key_mask, indices, value_dim)
    # Lets autograd notice when a backward pass still needs the state as it was.
    increment_version((window, window_count) if sinks is None else (window, sinks, window_count))
    return out


def join_with_sums(
    y: Tensor, log_size: Tensor, sums: Tensor, log_factor: Tensor, least: float
) -> Tensor:
    """Attention to some tokens, and to others of which there are sums, under one denominator. No
    gradient.

    Args:
        y, log_size: (B, T, H, V) and the logarithms of its denominators (B, T, H), float32 or
            float64, as all.
        sums: (B, T, H, V + 1), of weighted values and, the last, of weights.
        log_factor: (H,), added to the logarithms of these.
        least: sums of weights that are not more are of nothing.

    Returns:
        (B, T, H, V).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _join_with_sums(y, log_size, sums, log_factor, least)


@register_fake("window_step_", _registrations)
def _fake_window_step(q, kvf, window, sinks, window_count, key_mask, state_indices, value_dim):
    B, _, Hq, K = q.shape
    Hkv, features = kvf.shape[2:]
    size = Hq * (value_dim + 1) + Hkv * (features - K + 1)
    return q.new_empty(B, 1, size, dtype=accumulation_dtype(q.dtype))


@register_fake("join_with_sums", _registrations)
def _fake_join(y, log_size, sums, log_factor, least):
    return y.new_empty(y.shape)


@register_fake("attention_step_", _registrations)
def _fake_step(q, k, v, keys, values, used, scale):
    return q.new_empty(q.shape[0], 1, q.shape[1], v.shape[-1])


@register_fake("attention", _registrations)
def _fake_attention(q, k, v, mask, scale):
    B, Hq, R, _ = q.shape
    return q.new_empty(B, R, Hq, v.shape[-1])
