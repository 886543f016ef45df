# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan: the public functions, their checks, and what each backend has for it.

Shapes: B batch, T time, C channels, N packed sequences.
"""

import torch
from torch import Tensor

from .backends import Implementation, Missing, choose, if_compiled, native_op
from .checks import (
    check_channels,
    check_cu_seqlens,
    check_key_mask,
    check_not_positive,
    check_per_token,
    check_state,
    is_readable,
    refuse_lost_gradient,
    to_dtype,
)
from .chunked.elementwise_scan import chunked_elementwise_scan, chunked_elementwise_scan_step_
from .loops.elementwise_scan import reference_elementwise_scan
from .slots import check_rows_of_channels, step_on_slots_


def elementwise_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A sum for each channel, which decays as each token says:

        h_t = exp(log_decay_t) h_{t-1} + x_t,  y_t = h_t

    the recurrence of HGRN, of RG-LRU (Griffin, RecurrentGemma) and of minGRU, whose gates x and
    log_decay are made of.

    Args:
        x: (B, T, C): float32, bfloat16, float16 or float64, of any strides.
        log_decay: (B, T, C), at most 0; -inf forgets everything. It is computed with in float32, or
            float64 for a float64 x, and may be of another float dtype.
        key_mask: (B, T), bool or 0/1, false for padding: such a token neither writes, forgets nor
            reads, its output and gradients are 0, and whatever the inputs hold there (NaN, too)
            reaches nothing.
        cu_seqlens: (N + 1,) int32 or int64, bounds of N sequences packed in one row (B = 1): 0,
            ..., T. No state crosses a bound.
        initial_state: (B, C), (N, C) with `cu_seqlens`, float32, or float64 for a float64 x.
        return_state: also return the state after the last token.
        backend: as in `delta_rule`.

    Returns:
        y (B, T, C) of x's dtype, or (y, state) with `return_state`, the state as initial_state.
        Sums are in float32, or float64 for a float64 x, and y is rounded once.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: Qin et al., "Hierarchically Gated Recurrent Neural Network" (HGRN), arXiv 2311.04823,
    eq. 4; De et al., "Griffin", arXiv 2402.19427, eq. 4, with sqrt(1 - a_t^2) (i_t x_t) for x.
    """
    chosen = choose(IMPLEMENTATIONS, backend, x.device, x.dtype)
    log_decay, key_mask = _check_tensors(x, log_decay, key_mask, 3)
    rows = x.shape[0]
    if cu_seqlens is not None:
        readable = chosen.reads_cu_seqlens or is_readable(cu_seqlens)
        check_cu_seqlens(cu_seqlens, x, readable=readable, name="x")
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if initial_state is not None:
        check_state("initial_state", initial_state, x, (rows, x.shape[2]), of="x")
    y, state = chosen.run(
        x, log_decay, key_mask=key_mask, cu_seqlens=cu_seqlens, initial_state=initial_state
    )
    return (y, state) if return_state else y


def elementwise_scan_step_(
    x: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    key_mask: Tensor | None = None,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `elementwise_scan` for every row, without gradient; `state` changes in place.

    Args:
        x, log_decay: (B, C).
        state: (B, C), of any strides. No other argument may share memory with it.
        key_mask: (B,).
        state_indices: (B,) int32, the slot of `state` for each row, as in `linear_attention_step_`.
        The others: as in `elementwise_scan`.

    Returns:
        y (B, C) of x's dtype.

    Raises:
        ValueError, RuntimeError: as `elementwise_scan`; RuntimeError also where a gradient would be
            needed.
    """
    refuse_lost_gradient("elementwise_scan", x, log_decay, state)
    chosen = choose(IMPLEMENTATIONS, backend, x.device, x.dtype)
    if not chosen.step_checks:
        log_decay, key_mask = _check_step(x, log_decay, key_mask, state, state_indices)
    return chosen.step_(x, log_decay, key_mask, state, state_indices)


def _check_tensors(
    x: Tensor, log_decay: Tensor, key_mask: Tensor | None, dims: int
) -> tuple[Tensor, Tensor | None]:
    """log_decay in the dtype of sums, key_mask as bool; x is (B, T, C) for 3 dims, (B, C) for 2."""
    check_channels(x, ("B", "T", "C") if dims == 3 else ("B", "C"))
    key_mask = check_key_mask(key_mask, x, "x", features=1)
    checked = check_per_token("log_decay", log_decay, x, tuple(x.shape), of="x")
    check_not_positive("log_decay", log_decay, key_mask)
    return checked, key_mask


def _check_step(
    x: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """All about one token's arguments: log_decay in the dtype of sums, key_mask as bool and without
    the rows that have no slot.
    """
    slots, key_mask = check_rows_of_channels(x, key_mask, state, state_indices)
    checked = _check_tensors(x, log_decay, key_mask, 2)
    check_state("state", state, x, (slots, x.shape[1]), of="x")
    return checked


_native = native_op("elementwise_scan")
_native_step_ = native_op("elementwise_scan_step_")


def _step_compiled_(
    x: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    # This runs once per layer and token: what the kernel refuses is explained only afterwards.
    try:
        if key_mask is not None and key_mask.dtype is not torch.bool:
            key_mask = check_key_mask(key_mask, x, "x", features=1)
        return _native_step_(x, to_dtype(log_decay, state.dtype), key_mask, state, state_indices)
    except RuntimeError:
        _check_step(x, log_decay, key_mask, state, state_indices)
        raise


def _step_chunked_(
    x: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    def step_(rows: Tensor) -> Tensor:
        return chunked_elementwise_scan_step_(x, log_decay, key_mask, rows)

    return step_on_slots_(step_, (state,), state_indices)


def _step_reference_(
    x: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    def step_(rows: Tensor) -> Tensor:
        y, after = reference_elementwise_scan(
            x[:, None],
            log_decay[:, None],
            key_mask=None if key_mask is None else key_mask[:, None],
            initial_state=rows,
        )
        rows.copy_(after)
        return y[:, 0]

    return step_on_slots_(step_, (state,), state_indices)


IMPLEMENTATIONS = {
    "cuda": Missing("the elementwise scan has no CUDA kernels"),
    "cpu": if_compiled(Implementation(_native, _step_compiled_, step_checks=True)),
    "chunked": Implementation(chunked_elementwise_scan, _step_chunked_),
    "reference": Implementation(
        reference_elementwise_scan, _step_reference_, reads_cu_seqlens=True
    ),
}
