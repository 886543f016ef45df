# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention in pure PyTorch, on any device: fast enough to train with, in memory linear in
time.

Time is cut into chunks. Within a chunk, tokens meet as in masked attention; between chunks, only
the state passes.
Shapes: B batch, T time, Hq query heads, Hkv key-value heads, G = Hq / Hkv, K key dim, V value dim,
N packed sequences, n chunks of C tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .feature_maps import POINTWISE, without_autocast

CHUNK_SIZE = 64
LOWEST_LOG_DECAY = -1e30  # forgets everything, as -inf does, and can still be added up


class LinearAttentionState(NamedTuple):
    """All that linear attention remembers: kv (B, Hkv, K, V) and z (B, Hkv, K), float32 (float64
    for float64 inputs).

    B is N with `cu_seqlens`. z is None when not normalised.
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
    with without_autocast(q.device.type):
        phi_q, phi_k, v_sum, log_decay = _map_and_mask(q, k, v, log_decay, feature_map, key_mask)
        Hkv, V = v.shape[2:]
        C = max(1, min(chunk_size, q.shape[1]))
        chunks = _Padded(q.shape[1], C) if cu_seqlens is None else _Packed(cu_seqlens, C)
        Q = (
            chunks.split(phi_q).unflatten(3, (Hkv, -1)).permute(0, 1, 3, 4, 2, 5)
        )  # (B, n, Hkv, G, C, K)
        K = chunks.split(phi_k).transpose(2, 3)  # (B, n, Hkv, C, K)
        X = chunks.split(v_sum).transpose(2, 3)  # (B, n, Hkv, C, V)
        writes, reads, total = K, Q, None
        if log_decay is not None:
            g = chunks.split(log_decay).transpose(2, 3)  # (B, n, Hkv, C)
            between = _sums_between(g)  # (B, n, Hkv, C, C)
            writes = K * between[..., -1, :, None].exp()  # forgotten until the chunk's end
            since_start = g.cumsum(-1)
            reads = Q * since_start[..., None, :, None].exp()
            total = since_start[..., -1]  # (B, n, Hkv)

        # What each chunk adds to the state, and the state that it starts from.
        kv = writes.mT @ X  # (B, n, Hkv, K, V)
        z = writes.sum(-2)  # (B, n, Hkv, K)
        initial_kv, initial_z = initial_state if initial_state is not None else (None, None)
        carry = chunks.running if is_causal else chunks.total
        kv_before, final_kv = carry(kv, total, initial_kv)
        Y = reads.flatten(3, 4) @ kv_before  # (B, n, Hkv, G * C, V)
        if normalize:
            z_before, final_z = carry(
                z[..., None], total, None if initial_z is None else initial_z[..., None]
            )
            final_z = final_z[..., 0]
            den = reads.flatten(3, 4) @ z_before
        else:
            den, final_z = None, None
        if is_causal:
            scores = (Q.flatten(3, 4) @ K.mT).unflatten(3, (-1, C))
            if log_decay is not None:
                scores = scores * between[:, :, :, None].exp()
            scores = scores.tril().flatten(3, 4)
            Y = Y + scores @ X
            if normalize:
                den = den + scores.sum(-1, keepdim=True)

        Y = chunks.join(Y.unflatten(3, (-1, C)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4))
        if normalize:
            den = (
                chunks.join(den.unflatten(3, (-1, C)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)) + eps
            )
            if key_mask is not None:
                den = torch.where(key_mask.bool()[..., None, None], den, 1)
            Y = Y / den
        if key_mask is not None:
            Y = torch.where(key_mask.bool()[..., None, None], Y, 0)
        return Y.to(q.dtype), LinearAttentionState(final_kv, final_z)


def _map_and_mask(q, k, v, log_decay, feature_map, key_mask):
    """phi(q), phi(k), v and log_decay in the accumulation dtype; nothing of a masked token is left
    in them.
    """
    acc = accumulation_dtype(q.dtype)
    phi = POINTWISE[feature_map or "identity"]
    q, k, v = q.to(acc), k.to(acc), v.to(acc)
    if log_decay is not None:
        log_decay = log_decay.to(acc).clamp(min=LOWEST_LOG_DECAY)
    if key_mask is None:
        return phi(q), phi(k), v, log_decay
    keep = key_mask.bool()[..., None]
    q, k, v = (torch.where(keep[..., None], x, 0) for x in (q, k, v))
    if log_decay is not None:
        log_decay = torch.where(keep, log_decay, 0)
    return phi(q), torch.where(keep[..., None], phi(k), 0), v, log_decay


def _sums_between(g: Tensor) -> Tensor:
    """out[..., t, j] = g[j + 1] + ... + g[t], and -inf for j > t: (..., C) -> (..., C, C).

    Added up for each pair: a difference of two running sums would lose digits after a strong decay.
    """
    C = g.shape[-1]
    causal = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    summands = torch.where(causal.tril(-1), g[..., :, None], 0)
    return torch.where(causal, summands.cumsum(-2), -torch.inf)


class _Padded:
    """(B, T, ...) <-> (B, n, C, ...): each row of the batch is one sequence, padded to whole
    chunks.
    """

    def __init__(self, T: int, C: int):
        self.T, self.C, self.n = T, C, -(-T // C)

    def split(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, self.n * self.C - self.T))
        return x.unflatten(1, (self.n, self.C))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)[:, : self.T]

    def running(
        self, added: Tensor, log_decay: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _running_state(added, log_decay, initial)

    def total(
        self, added: Tensor, log_decay: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _total_state(added, initial)


def _running_state(added, log_decay, initial):
    """The state before each chunk and after the last: added (B, n, H, ...), log_decay (B, n, H),
    initial (B, H, ...).
    """
    state = torch.zeros_like(added[:, :1].sum(1)) if initial is None else initial.clone()
    before = []
    for i in range(added.shape[1]):
        before.append(state)
        if log_decay is not None:
            state = state * log_decay[:, i, :, None, None].exp()
        state = state + added[:, i]
    return torch.stack(before, 1) if before else added, state


def _total_state(added, initial):
    state = added.sum(1)
    if initial is not None:
        state = state + initial
    return state[:, None].expand(added.shape), state


class _Packed:
    """(1, T, ...) <-> (1, n, C, ...): sequences end to end, each one padded to whole chunks."""

    def __init__(self, cu_seqlens: Tensor, C: int):
        starts = cu_seqlens[:-1].long()
        lengths = cu_seqlens.diff().long()
        ends = (-(-lengths // C)).cumsum(0)
        self.C, self.n = C, ends[-1:].sum().item()
        self.bounds = [0, *ends.tolist()]
        T = int(cu_seqlens[-1])
        shift = (ends - (-(-lengths // C))) * C - starts
        self.slots = torch.arange(T, device=starts.device) + shift.repeat_interleave(lengths)

    def split(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(1, self.n * self.C, *x.shape[2:])
        return padded.index_copy(1, self.slots, x).unflatten(1, (self.n, self.C))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).index_select(1, self.slots)

    def running(self, added, log_decay, initial):
        return self._each(_running_state, added, log_decay, initial)

    def total(self, added, log_decay, initial):
        return self._each(
            lambda added, _, initial: _total_state(added, initial), added, log_decay, initial
        )

    def _each(self, carry, added, log_decay, initial):
        before, final = [], []
        for row, (a, b) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            x, y = carry(
                added[:, a:b],
                None if log_decay is None else log_decay[:, a:b],
                None if initial is None else initial[row : row + 1],
            )
            before.append(x)
            final.append(y)
        if not final:
            return added, added.sum(1)[:0]
        return torch.cat(before, 1), torch.cat(final)


def chunked_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None = None,
    *,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
) -> Tensor:
    """One token of the recurrence, `state` updated in place; arguments as in
    `linear_attention_step_`.
    """
    kv, z = state
    with without_autocast(q.device.type):
        # A step is a sequence of one token.
        if log_decay is not None:
            log_decay = log_decay[:, None]
        if key_mask is not None:
            key_mask = key_mask[:, None]
        phi_q, phi_k, v, log_decay = _map_and_mask(
            q[:, None], k[:, None], v[:, None], log_decay, feature_map, key_mask
        )
        phi_q, phi_k, v = phi_q[:, 0], phi_k[:, 0], v[:, 0]
        if log_decay is not None:
            remember = log_decay[:, 0].exp()
            kv.mul_(remember[..., None, None])
        kv.addcmul_(phi_k[..., None], v[..., None, :])
        phi_q = phi_q.unflatten(1, (kv.shape[1], -1))  # (B, Hkv, G, K)
        y = phi_q @ kv
        if normalize:
            if log_decay is not None:
                z.mul_(remember[..., None])
            z.add_(phi_k)
            y = y / (phi_q @ z[..., None] + eps)
        y = y.flatten(1, 2)
        if key_mask is not None:
            y = torch.where(key_mask.bool()[..., None], y, 0)
        return y.to(q.dtype)
