# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention as layers ask for it, by PyTorch alone.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....ops.chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_
from ....ops.chunked.linear_attention import chunked_linear_attention, chunked_step_
from ....ops.feature_maps import POINTWISE
from ....ops.numerics import accumulation_dtype, at_least_float32

LinearState = tuple[Tensor, Tensor | None]  # kv (B, Hv, K, V) and z (B, Hv, K)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    write_strength: Tensor | None = None,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LinearState | None,
    return_state: bool,
    is_causal: bool = True,
) -> tuple[Tensor, LinearState]:
    """Linear attention over whole sequences, Katharopoulos et al., arXiv 2006.16236, with decays
    and write strengths: for each value head, with phi the feature map,

        S_t = exp(log_decay_t) S_{t-1} + write_strength_t phi(k_t) v_t^T
        z_t = exp(log_decay_t) z_{t-1} + write_strength_t phi(k_t)
        y_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + eps)          (the division only with `normalize`)
    """
    tokens: dict[str, Any] = {"key_mask": key_mask, "cu_seqlens": cu_seqlens}
    if log_decay is not None:
        log_decay = at_least_float32(log_decay)
    if write_strength is None and has_plain_heads(q, k, v, log_decay):
        return chunked_linear_attention(
            q,
            k,
            v,
            log_decay,
            **tokens,
            feature_map=feature_map,
            initial_state=initial_state,
            normalize=normalize,
            eps=eps,
            is_causal=is_causal,
        )
    dtype = q.dtype
    if normalize or feature_map is not None or not is_causal:
        q, k, v = mapped(q, k, v, feature_map, key_mask)
    if not is_causal:  # without decays, so that strengths may be part of the keys
        Hv = v.shape[2]
        k = k.repeat_interleave(Hv // k.shape[2], 2)
        q = q.repeat_interleave(max(Hv // q.shape[2], 1), 2)
        if write_strength is not None:
            k = k * at_least_float32(write_strength)[..., None]
        y, state = chunked_linear_attention(
            q,
            k,
            v,
            **tokens,
            initial_state=initial_state,
            normalize=normalize,
            eps=eps,
            is_causal=False,
        )
        return y.to(dtype), state

    def run(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        G = max(q.shape[2] // v.shape[2], 1)  # queries of a state, which get copies of it
        values = values.repeat_interleave(G, 2)
        strength, decay = (
            None if x is None else x.repeat_interleave(G, 2) for x in (write_strength, log_decay)
        )
        if state is not None:
            state = state.repeat_interleave(G, 1)
        if strength is not None:
            strength = at_least_float32(strength)
        y, after = chunked_delta_rule(
            q, k, values, strength, decay, **tokens, initial_state=state, delta=False
        )
        return y, after[:, ::G].contiguous()

    kv, z = (None, None) if initial_state is None else initial_state
    y, kv = run(v, kv)
    if normalize:  # z is a state, too: that of values which are 1
        den, z = run(ones_like(v), None if z is None else z[..., None])
        if key_mask is not None:  # padding has 0 here, and 0 / 0 a gradient
            den = torch.where(key_mask[..., None, None], den, 1)
        y, z = y / (den + eps), z[..., 0]
    return y.to(dtype), (kv, z)


def linear_attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    log_decay: Tensor | None,
    *,
    write_strength: Tensor | None = None,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float,
    key_mask: Tensor | None,
    state_indices: None,
) -> Tensor:
    """One token of it for every row; `state` changes in place."""
    if log_decay is not None:
        log_decay = at_least_float32(log_decay)
    if write_strength is None and has_plain_heads(q, k, v, log_decay):
        return chunked_step_(
            q, k, v, state, log_decay, feature_map=feature_map, eps=eps, key_mask=key_mask
        )
    dtype = q.dtype
    if normalize or feature_map is not None:
        q, k, v = mapped(q, k, v, feature_map, key_mask)

    def step_(values: Tensor, rows: Tensor) -> Tensor:
        G = max(q.shape[1] // v.shape[1], 1)
        values = values.repeat_interleave(G, 1)
        strength, decay = (
            None if x is None else x.repeat_interleave(G, 1) for x in (write_strength, log_decay)
        )
        if strength is not None:
            strength = at_least_float32(strength)
        own = rows.repeat_interleave(G, 1) if G > 1 else rows
        token = q, k, values, strength, decay, key_mask, own
        y = chunked_delta_rule_step_(*token, 1.0, False, False)
        if G > 1:
            rows.copy_(own[:, ::G])
        return y

    kv, z = state
    y = step_(v, kv)
    if z is not None:
        y = y / (step_(ones_like(v), z[..., None]) + eps)
        if key_mask is not None:
            y = torch.where(key_mask[:, None, None], y, 0)
    return y.to(dtype)


def has_plain_heads(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> bool:
    """Whether decays are one for each head, and there are as many keys as values, each read by one
    query head or several.
    """
    Hv = v.shape[-2]
    per_head = log_decay is None or log_decay.dim() < k.dim()
    return per_head and k.shape[-2] == Hv and q.shape[-2] >= Hv


def mapped(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k) and v in the accumulation dtype."""
    phi: Callable[[Tensor], Tensor] = POINTWISE[feature_map or "identity"]
    dtype = accumulation_dtype(q.dtype)
    if key_mask is not None:  # phi of padding has a gradient, which may be NaN
        q, k = (torch.where(key_mask[..., None, None], x, 0) for x in (q, k))
    return phi(q.to(dtype)), phi(k.to(dtype)), v.to(dtype)


def ones_like(v: Tensor) -> Tensor:
    """Values of one feature, which is 1."""
    return v.new_ones(()).expand(*v.shape[:-1], 1)
