# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention in pure PyTorch, on any device: fast enough to train with, linear memory.

Time is cut into chunks. Within a chunk, tokens meet as in masked attention; between chunks, only
the state passes.
Shapes: B batch, T time, Hq query heads, Hkv key-value heads, G = Hq / Hkv, K key dim, V value dim,
N packed sequences, n chunks of C tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .feature_maps import POINTWISE, without_autocast

CHUNK_SIZE = 64
LOWEST_LOG_DECAY = -1e30  # forgets everything, as -inf does, and can still be added up


class LinearAttentionState(NamedTuple):
    """All that linear attention remembers: kv (B, Hkv, K, V) and z (B, Hkv, K).

    float32, or float64 for float64 inputs. B is N with `cu_seqlens`. z is None when not normalised.
    """

    kv: Tensor
    z: Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, denominators and sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def chunked_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    feature_map: str | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor | None] | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    is_causal: bool = True,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, LinearAttentionState]:
    """The recurrence, chunk by chunk; arguments as in `linear_attention`, which has checked them.

    Accumulates in float32, or float64 for float64 inputs. Differentiable any number of times.
    """
    Hkv, V = v.shape[2:]
    T = q.shape[1]
    layout: _Padded | _Packed
    if cu_seqlens is not None:
        layout = _Packed(cu_seqlens, T, chunk_size)
    else:  # without causality the whole sequence may be one chunk: nobody meets anybody in it
        layout = _Padded(T, min(chunk_size, T) if is_causal else T)

    with without_autocast(q.device.type):  # it would take the sums to half precision
        phi_q, phi_k, value, log_decay = _mapped(q, k, v, log_decay, feature_map, key_mask)
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
            to_end, from_start, over_chunk = keys, queries, None
        else:
            g = layout.split(log_decay).transpose(2, 3)  # (B, n, Hkv, C)
            decay = _sums_between(g).exp()  # (B, n, Hkv, C, C)
            so_far = g.cumsum(-1).exp()  # (B, n, Hkv, C)
            to_end = keys * decay[..., -1, :, None]
            from_start = queries * so_far[:, :, :, None, :, None]
            over_chunk = so_far[..., -1]

        # What a chunk adds to the state, and the state that it reads: (B, n, Hkv, K, X).
        added = to_end.mT @ values
        read, final = layout.carry(_running if is_causal else _total, added, over_chunk, initial)
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
        return y.to(q.dtype), LinearAttentionState(kv, z)


def _mapped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    feature_map: str | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """phi(q), phi(k), v and log_decay in the accumulation dtype, without a trace of padding."""
    dtype = accumulation_dtype(q.dtype)
    phi = POINTWISE[feature_map or "identity"]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if log_decay is not None:
        log_decay = log_decay.clamp(min=LOWEST_LOG_DECAY)
    if key_mask is None:
        return phi(q), phi(k), v, log_decay
    keep = key_mask[..., None]
    q, k, v = (torch.where(keep[..., None], x, 0) for x in (q, k, v))
    if log_decay is not None:
        log_decay = torch.where(keep, log_decay, 0)
    return phi(q), torch.where(keep[..., None], phi(k), 0), v, log_decay


def _sums_between(g: Tensor) -> Tensor:
    """out[..., t, j] = g[j + 1] + ... + g[t], and -inf for j > t: (..., C) -> (..., C, C).

    Added up for each pair: a difference of two running sums loses digits after a strong decay.
    """
    C = g.shape[-1]
    causal = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    sums = torch.where(causal.tril(-1), g[..., :, None], 0).cumsum(-2)
    return torch.where(causal, sums, -torch.inf)


# (added (B, n, Hkv, K, X): what chunks add to the state, decay (B, n, Hkv) or None: what they leave
# of the state before them, initial (B, Hkv, K, X) or None) -> what chunks read, and the last state.
Carry = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


class _Padded:
    """(B, T, ...) <-> (B, n, C, ...): each row of the batch is one sequence, in whole chunks."""

    def __init__(self, T: int, C: int):
        self.C = max(C, 1)
        self.T, self.n = T, -(-T // self.C)

    def split(self, x: Tensor) -> Tensor:
        padding = self.n * self.C - self.T
        if padding > 0:
            x = nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (self.n, self.C))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)[:, : self.T]

    def carry(
        self, how: Carry, added: Tensor, decay: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return how(added, decay, initial)


class _Packed:
    """(1, T, ...) <-> (1, n, C, ...): sequences end to end, each one in whole chunks of its own."""

    def __init__(self, cu_seqlens: Tensor, T: int, C: int):
        N = max(cu_seqlens.shape[0] - 1, 1)
        C = min(C, max(16, T // N))  # no longer than sequences are on average: less padding
        lengths = cu_seqlens.diff().long()
        chunks = (lengths + C - 1) // C
        first_slots = (chunks.cumsum(0) - chunks) * C - cu_seqlens[:-1]
        shifts = first_slots.repeat_interleave(lengths, output_size=T)
        self.slots = torch.arange(T, device=lengths.device) + shifts
        self.C, self.chunks = C, chunks.tolist()

    def split(self, x: Tensor) -> Tensor:
        n = sum(self.chunks)
        padded = x.new_zeros(1, n * self.C, *x.shape[2:]).index_copy(1, self.slots, x)
        return padded.unflatten(1, (n, self.C))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).index_select(1, self.slots)

    def carry(
        self, how: Carry, added: Tensor, decay: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        no = [None] * len(self.chunks)
        pieces = zip(  # split: N slices would cost N zeroed gradients
            added.split(self.chunks, 1),
            no if decay is None else decay.split(self.chunks, 1),
            no if initial is None else initial.split(1),
            strict=True,
        )
        read, final = [added[:, :0]], [added[0, :0]]  # of N = 0
        for piece in pieces:
            before, after = how(*piece)
            read.append(before)
            final.append(after)
        return torch.cat(read, 1), torch.cat(final)


def _running(added: Tensor, decay: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal: a chunk reads what came before it."""
    if initial is None:
        state = added.new_zeros(added.shape[:1] + added.shape[2:])
    else:
        state = initial.clone()  # the result must not be the caller's tensor where n is 0
    leave = None if decay is None else decay[..., None, None].unbind(1)
    read = []
    for i, new in enumerate(added.unbind(1)):  # n slices would each cost a gradient of all n
        read.append(state)
        state = state + new if leave is None else torch.addcmul(new, state, leave[i])
    return torch.stack(read, 1) if read else added, state


def _total(added: Tensor, decay: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Not causal, and so without decay: every chunk reads the sum of all."""
    state = added.sum(1) if initial is None else added.sum(1) + initial
    return state[:, None].expand_as(added), state


def chunked_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None = None,
    *,
    feature_map: str | None = None,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
) -> Tensor:
    """One token, `state` updated in place, normalised where it has a z.

    Arguments as in `linear_attention_step_`, which has checked them.
    """
    kv, z = state
    with without_autocast(q.device.type):
        phi_q, phi_k, v, log_decay = _mapped(q, k, v, log_decay, feature_map, key_mask)
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
            y = y / (phi_q @ z[..., None] + eps)
        y = y.flatten(1, 2)
        if key_mask is not None:
            y = torch.where(key_mask[:, None, None], y, 0)
        return y.to(q.dtype)
