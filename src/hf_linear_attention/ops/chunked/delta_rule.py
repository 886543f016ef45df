# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule in pure PyTorch, on any device: fast enough to train with, linear memory.

Within a chunk, what each token writes, u_t = beta_t (v_t - S'^T k_t), depends on what the tokens
before it wrote: a triangular system, solved for all chunks at once. Yang et al., arXiv 2406.06484.

Shapes: B batch, T time, Hq query heads, Hk key heads, G = Hv / Hk value heads of a key head, K key
dim, V value dim, N packed sequences, n chunks of C tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import DeltaArguments
from ..chunks import CHUNK_SIZE, LOWEST_LOG_DECAY, chunks_of, running, sums_between
from ..numerics import (
    L2_NORM_EPS,
    accumulation_dtype,
    bounded,
    is_transformed,
    without_autocast,
)
from ..tokens import behind


def chunked_delta_rule(
    arguments: DeltaArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """The recurrence, chunk by chunk; arguments as in `delta_rule`, unchecked.

    Hq and Hk divide Hv. Without `delta` a value is written as it is, times beta (None: 1).
    Returns y (B, T, Hv, V) and the state (B or N, Hv, K, V). Accumulates in float32, or float64 for
    float64 inputs. Differentiable any number of times.
    """
    adds_along = arguments.add_along is not None
    if adds_along:
        arguments = _in_two(arguments)
        cu_seqlens = None if cu_seqlens is None else 2 * cu_seqlens
    (_, T, Hk, _), Hv, key_mask = arguments.k.shape, arguments.v.shape[2], arguments.key_mask
    if not torch.compiler.is_exporting():  # for any T
        chunk_size = min(chunk_size, 1 << max(T - 1, 0).bit_length())
    layout = chunks_of(T, cu_seqlens, chunk_size)
    dtype = arguments.q.dtype
    with without_autocast(arguments.q.device.type):  # it would take the sums to half precision
        q, k, v, beta, g, erase_key, _ = _prepared(arguments)
        if q.shape[2] != Hk or erase_key is not None:
            q, k = (x.repeat_interleave(Hv // x.shape[2], 2) for x in (q, k))
            Hk = Hv

        def of_chunks(x: Tensor) -> Tensor:
            """(B, T, heads, ...) -> (B, n, Hk, heads / Hk, C, ...)"""
            return layout.split(x).unflatten(3, (Hk, -1)).movedim(2, 4)

        queries, keys, values = of_chunks(q), of_chunks(k), of_chunks(v)
        decays = None if g is None else of_chunks(g)  # (B, n, Hk, G, C), and K with channels
        strength = None if beta is None else of_chunks(beta)[..., None]

        rows = queries[..., None, :, :]
        if arguments.delta:  # where a value is corrected by what the state holds, keys meet keys
            asking = keys_in = keys if erase_key is None else of_chunks(erase_key)
            if adds_along:  # asks as a key of the token before would
                asking = keys_in.roll(-1, -2)
            rows = torch.stack([queries, asking], -3)
        between, from_start, to_end = _products(rows, keys, decays)
        of_queries, *of_rows = between.unbind(-3)  # (B, n, Hk, G, C, C) each
        log_leave, queries_in, keys_out = None, queries, keys
        if from_start is not None and to_end is not None:
            log_leave = from_start[..., -1, :, None]  # (B, n, Hk, G, K or 1, 1)
            from_start, to_end = from_start.exp(), to_end.exp()
            queries_in, keys_out = queries * from_start, keys * to_end
            if adds_along:
                from_start = nn.functional.pad(from_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
            if arguments.delta:
                keys_in = keys_in * from_start

        written = values if strength is None else strength * values
        mixed = None
        if arguments.delta:
            # u = inverse beta (v - S^T k): a part from values, and one to take from S
            of_keys = of_rows[0].roll(1, -2) if adds_along else of_rows[0]
            if strength is not None:
                of_keys, keys_in = strength * of_keys, strength * keys_in
            invert = _inverse_of_unit_lower if is_transformed() else _InverseOfUnitLower.apply
            inverse = invert(of_keys.tril(-1))
            written, asked = inverse @ written, inverse @ keys_in
            mixed = keys_out.mT @ asked  # (B, n, Hk, G, K, K)
        initial = None if initial_state is None else initial_state.unflatten(1, (Hk, -1))
        read, final = layout.carry(running, initial, keys_out.mT @ written, log_leave, mixed)
        if arguments.delta:
            written = written - asked @ read
        y = queries_in @ read + of_queries.tril() @ written

        y = layout.join(y.movedim(4, 2).flatten(3, 4))  # (B, T, Hv, V)
        if key_mask is not None:
            y = torch.where(key_mask[..., None, None], y, 0)
        if adds_along:
            y = y[:, 1::2]
        return y.to(dtype), final.flatten(1, 2)


def _in_two(arguments: Any) -> DeltaArguments:
    """From arguments with `add_along` to those of 2 T tokens without it: of each two the first
    asks, before it decays, and writes what it finds, the second writes its value and reads.
    """
    q, k, v, _, log_decay, key_mask, scale, _, _, a, b = arguments

    def alternately(first: Tensor, second: Tensor) -> Tensor:
        """(B, T, ...) both -> (B, 2 T, ...)"""
        return torch.stack([first, second], 2).flatten(1, 2)

    return DeltaArguments(
        alternately(torch.zeros_like(q), q),
        alternately(b, k.to(b.dtype)),
        alternately(torch.zeros_like(v), v),
        log_decay=None
        if log_decay is None
        else alternately(log_decay, torch.zeros_like(log_decay)),
        key_mask=None if key_mask is None else key_mask.repeat_interleave(2, 1),
        scale=scale,
        erase_key=alternately(-a, torch.zeros_like(a)),
    )


def _prepared(
    arguments: DeltaArguments,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """All in the accumulation dtype, without a trace of padding; q scaled, q and k normed."""
    q, k, v, beta, log_decay, key_mask, scale, normalize_qk, _, erase_key, add_along = arguments
    dtype = accumulation_dtype(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if log_decay is not None:
        log_decay = bounded(log_decay.to(dtype), LOWEST_LOG_DECAY)
    if key_mask is not None:
        q, k, v = (torch.where(behind(key_mask, x), x, 0) for x in (q, k, v))
        beta, log_decay, erase_key, add_along = (
            None if x is None else torch.where(behind(key_mask, x), x, 0)
            for x in (beta, log_decay, erase_key, add_along)
        )
    if normalize_qk:
        # divided: in the gradient x would meet that of the norm, which may be as large
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2_NORM_EPS).sqrt() for x in (q, k))
    return q * scale, k, v, beta, log_decay, erase_key, add_along


def _products(
    rows: Tensor, keys: Tensor, g: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What tokens of a chunk are to each other, and to its start and end.

    Args:
        rows: (B, n, Hk, 1, R, C, K): queries, and keys, too, where R is 2.
        keys: (B, n, Hk, 1, C, K).
        g: (B, n, Hk, G, C) or (B, n, Hk, G, C, K), log decays.

    Returns:
        (B, n, Hk, G, R, C, C), of i and j the sum over channels of row i times k_j, decayed by
        g_{j+1} + ... + g_i, for j <= i; and the log decays from the chunk's start to each token,
        and from each to its end, (B, n, Hk, G, C, 1 or K), None without g.
    """
    if g is None:
        return rows @ keys.mT[..., None, :, :], None, None
    if is_by_channel(g, keys):
        return _products_by_channel(rows, keys, g)
    sums = sums_between(g)
    from_start = g.cumsum(-1)
    return (
        rows @ keys.mT[..., None, :, :] * sums.exp()[..., None, :, :],
        from_start[..., None],
        sums[..., -1, :, None],
    )


def is_by_channel(g: Tensor, keys: Tensor) -> bool:
    return g.dim() == keys.dim()


def _products_by_channel(rows: Tensor, keys: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As _products. Blocks of tokens double from 1 to C. Of two neighbours, rows of the second meet
    keys of the first by one product, both decayed to the bound between them: so no exponent is
    above 0, nothing is a difference of sums, and no array is larger than the inputs.
    """
    from_start, to_end = g, torch.zeros_like(g)  # of each token's own block
    rows, keys = (x.expand(*g.shape[:4], *x.shape[4:]) for x in (rows, keys))
    products = (rows * keys[..., None, :, :]).sum(-1)[..., None, None]  # blocks of 1 x 1
    size, C = 1, g.shape[-2]
    while size < C:
        pairs = (C // (2 * size), 2, size)  # of blocks, first and second, tokens
        first_keys = (keys * to_end.exp()).unflatten(-2, pairs)[..., 0, :, :]
        second_rows = (rows * from_start.exp()[..., None, :, :]).unflatten(-2, pairs)[..., 1, :, :]
        lower = second_rows @ first_keys.mT[..., None, :, :, :]  # (..., R, pairs, size, size)
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        products = torch.cat(
            [
                torch.cat([first, torch.zeros_like(first)], -1),
                torch.cat([lower, second], -1),
            ],
            -2,
        )
        from_first, from_second = from_start.unflatten(-2, pairs).unbind(-3)
        to_first, to_second = to_end.unflatten(-2, pairs).unbind(-3)
        over_first, over_second = from_first[..., -1:, :], from_second[..., -1:, :]
        from_start = torch.stack([from_first, from_second + over_first], -3).flatten(-4, -2)
        to_end = torch.stack([to_first + over_second, to_second], -3).flatten(-4, -2)
        size *= 2
    return products[..., 0, :, :], from_start, to_end


def _inverse_of_unit_lower(A: Tensor) -> Tensor:
    """A strictly lower triangular (..., C, C) -> (1 + A)^-1."""
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_triangular(A + one, one.expand_as(A), upper=False, unitriangular=True)


class _InverseOfUnitLower(torch.autograd.Function):
    """The same, with a gradient of two products, where that of the solution solves again."""

    @staticmethod
    def forward(ctx, A: Tensor) -> Tensor:
        inverse = _inverse_of_unit_lower(A)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, dinverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ dinverse @ inverse.mT).tril(-1)


def chunked_delta_rule_step_(arguments: DeltaArguments, state: Tensor) -> Tensor:
    """One token, `state` updated in place; arguments as in `delta_rule_step_`, unchecked."""
    Hv, dtype, key_mask = arguments.v.shape[1], arguments.q.dtype, arguments.key_mask
    with without_autocast(arguments.q.device.type):
        q, k, v, beta, log_decay, erase_key, add_along = _prepared(arguments)
        q, k = (x.repeat_interleave(Hv // x.shape[1], 1)[..., None, :] for x in (q, k))
        written = v[..., None, :]
        if add_along is not None and erase_key is not None:
            found = erase_key[..., None, :] @ state
        if log_decay is not None:
            if log_decay.dim() == 2:
                log_decay = log_decay[..., None]
            state.mul_(log_decay.exp()[..., None])
        if arguments.delta and add_along is None:
            written = written - (k if erase_key is None else erase_key[..., None, :]) @ state
        if beta is not None:
            written = beta[..., None, None] * written
        state.addcmul_(k.mT, written)
        if add_along is not None:
            state.addcmul_(add_along[..., None], found)
        y = (q @ state).squeeze(-2)
        if key_mask is not None:
            y = torch.where(key_mask[:, None, None], y, 0)
        return y.to(dtype)
