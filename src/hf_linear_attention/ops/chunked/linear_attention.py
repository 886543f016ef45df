# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention in pure PyTorch, on any device: fast enough to train with, linear memory.

Time is cut into chunks. Within a chunk, tokens meet as in masked attention; between chunks, only
the state passes.
Shapes: B batch, T time, Hq query heads, Hkv key-value heads, G = Hq / Hkv, K key dim, V value dim,
N packed sequences, n chunks of C tokens.
"""

import torch
from torch import Tensor

from ..any_length import has_any_length
from ..arguments import LinearArguments
from ..chunks import CHUNK_SIZE, LOWEST_LOG_DECAY, chunks_of, running, sums_between
from ..feature_maps import POINTWISE
from ..numerics import accumulation_dtype, bounded, without_autocast


def chunked_linear_attention(
    arguments: LinearArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor | None] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The recurrence, chunk by chunk; arguments as in `linear_attention`, unchecked.

    Returns y and the state, (kv, z). Accumulates in float32, or float64 for float64 inputs.
    Differentiable any number of times.
    """
    normalize, eps, is_causal = arguments[-3:]
    q, key_mask = arguments.q, arguments.key_mask
    T, Hkv, V = arguments.v.shape[1:]
    # without causality nobody meets anybody, so all may be one chunk
    if cu_seqlens is None and not has_any_length():
        chunk_size = min(chunk_size, T) if is_causal else T
    layout = chunks_of(T, cu_seqlens, chunk_size)

    with without_autocast(q.device.type):  # it would take the sums to half precision
        phi_q, phi_k, value, log_decay = _mapped(arguments)
        initial = None
        if normalize:  # z is one more column of kv, whose values are ones
            value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1)
        if initial_state is not None:
            kv, z = initial_state
            initial = kv if z is None else torch.cat([kv, z[..., None]], -1)

        # X stands for V, or V + 1 with the column of ones.
        queries = layout.split(phi_q).unflatten(3, (Hkv, -1)).permute(0, 1, 3, 4, 2, 5)
        # (B, n, Hkv, G, C, K), and further down the G queries of a key as G * C rows
        keys = layout.split(phi_k).transpose(2, 3)  # (B, n, Hkv, C, K)
        values = layout.split(value).transpose(2, 3)  # (B, n, Hkv, C, X)
        if log_decay is None:
            to_end, from_start, log_leave = keys, queries, None
        else:
            g = layout.split(log_decay).transpose(2, 3)  # (B, n, Hkv, C)
            decay = sums_between(g).exp()  # (B, n, Hkv, C, C)
            so_far = g.cumsum(-1)  # (B, n, Hkv, C)
            to_end = keys * decay[..., -1, :, None]
            from_start = queries * so_far.exp()[:, :, :, None, :, None]
            log_leave = so_far[..., -1, None, None]

        # What a chunk adds to the state, and the state that it reads: (B, n, Hkv, K, X).
        added = to_end.mT @ values
        read, final = layout.carry(running if is_causal else _total, initial, added, log_leave)
        y = from_start.flatten(3, 4) @ read  # (B, n, Hkv, G * C, X)
        if is_causal:
            scores = queries.flatten(3, 4) @ keys.mT
            scores = scores.unflatten(3, (-1, layout.C))  # (B, n, Hkv, G, C, C)
            if log_decay is not None:
                scores = scores * decay[:, :, :, None]
            y = y + scores.tril().flatten(3, 4) @ values

        y = y.unflatten(3, (-1, layout.C)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
        y = layout.join(y)  # (B, T, Hq, X)
        keep = None if key_mask is None else key_mask[..., None, None]
        if normalize:
            den = y[..., V:] + eps
            if keep is not None:  # padding may have 0 here, and 0 / 0 a gradient
                den = torch.where(keep, den, 1)
            y = y[..., :V] / den
        if keep is not None:
            y = torch.where(keep, y, 0)
        kv = final[..., :V].contiguous()
        z = final[..., V].contiguous() if normalize else None
        return y.to(q.dtype), (kv, z)


def _mapped(arguments: LinearArguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """phi(q), phi(k), v and log_decay in the accumulation dtype, without a trace of padding."""
    q, k, v, log_decay, _, key_mask, feature_map, *_ = arguments
    dtype = accumulation_dtype(q.dtype)
    phi = POINTWISE[feature_map or "identity"]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if log_decay is not None:
        log_decay = bounded(log_decay, LOWEST_LOG_DECAY)
    if key_mask is None:
        return phi(q), phi(k), v, log_decay
    keep = key_mask[..., None]
    q, k, v = (torch.where(keep[..., None], x, 0) for x in (q, k, v))
    if log_decay is not None:
        log_decay = torch.where(keep, log_decay, 0)
    return phi(q), torch.where(keep[..., None], phi(k), 0), v, log_decay


def _total(initial: Tensor | None, added: Tensor, decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Not causal, and so without decay: every chunk reads the sum of all."""
    state = added.sum(1) if initial is None else added.sum(1) + initial
    return state[:, None].expand_as(added), state


def chunked_step_(arguments: LinearArguments, state: tuple[Tensor, Tensor | None]) -> Tensor:
    """One token, `state` updated in place, normalised where it has a z.

    Arguments as in `linear_attention_step_`, unchecked.
    """
    q, key_mask = arguments.q, arguments.key_mask
    kv, z = state
    with without_autocast(q.device.type):
        phi_q, phi_k, v, log_decay = _mapped(arguments)
        if log_decay is not None:
            remember = log_decay.exp()
            kv.mul_(remember[..., None, None])
        kv.addcmul_(phi_k[..., None], v[..., None, :])
        phi_q = phi_q.unflatten(1, (kv.shape[1], -1))  # (B, Hkv, G, K)
        y = phi_q @ kv
        if z is not None:
            if log_decay is not None:
                z.mul_(remember[..., None])
            z.add_(phi_k)
            y = y / (phi_q @ z[..., None] + arguments.eps)
        y = y.flatten(1, 2)
        if key_mask is not None:
            y = torch.where(key_mask[:, None, None], y, 0)
        return y.to(q.dtype)
