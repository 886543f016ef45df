# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan: the public functions, their checks, and what each backend has for it.

Shapes: batch, T time, channels, N sums of a state for each channel, rows of states: one for each
row of the batch, or for each packed sequence.
"""

from functools import partial

import torch
from torch import Tensor

from .backends import Implementation, Missing, choose, if_compiled, native_op
from .checks import (
    check_channels,
    check_cu_seqlens,
    check_key_mask,
    check_per_token,
    check_state,
    is_readable,
    refuse_lost_gradient,
    to_dtype,
)
from .chunked.selective_scan import chunked_selective_scan, chunked_selective_scan_step_
from .loops.selective_scan import reference_selective_scan
from .slots import check_rows_of_channels, step_on_slots_
from .tokens import behind


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba's state space: N sums for each channel, each with a decay of its own,

        S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t,  y_t = S_t . C_t + D x_t

    where B_t and C_t (N,) are shared by all channels.

    Args:
        x: (batch, T, channels): float32, bfloat16, float16 or float64, of any strides.
        dt: (batch, T, channels), step sizes >= 0, as softplus gives them. It, A and D are computed
            with in float32, or float64 for a float64 x, and may be of other float dtypes.
        A: (channels, N), at most 0.
        B, C: (batch, T, N) of x's dtype: what tokens write with, and read by.
        D: (channels,), or None for 0.
        key_mask: (batch, T), bool or 0/1, false for padding: such a token neither writes, forgets
            nor reads, its output and gradients are 0, and whatever the inputs hold there (NaN, too)
            reaches nothing.
        cu_seqlens: (sequences + 1,) int32 or int64, bounds of sequences packed in one row
            (batch = 1): 0, ..., T. No state crosses a bound.
        initial_state: (rows, channels, N), float32, or float64 for a float64 x.
        return_state: also return the state after the last token.
        backend: as in `delta_rule`.

    Returns:
        y (batch, T, channels) of x's dtype, or (y, state) with `return_state`, the state as
        initial_state. Sums are in float32, or float64 for a float64 x, and y is rounded once.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: Gu and Dao, "Mamba", arXiv 2312.00752, eq. 2, discretised as in its code: exp(dt A), and
    dt B for the input.
    """
    chosen = choose(IMPLEMENTATIONS, backend, x.device, x.dtype)
    dt, A, D, key_mask = _check_tensors(x, dt, A, B, C, D, key_mask, 3)
    rows = x.shape[0]
    if cu_seqlens is not None:
        readable = chosen.reads_cu_seqlens or is_readable(cu_seqlens)
        check_cu_seqlens(cu_seqlens, x, readable=readable, name="x")
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if initial_state is not None:
        check_state("initial_state", initial_state, x, (rows, *A.shape), of="x")
    y, state = chosen.run(
        x,
        dt,
        A,
        B,
        C,
        D,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
    )
    return (y, state) if return_state else y


def selective_scan_step_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    *,
    key_mask: Tensor | None = None,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `selective_scan` for every row, without gradient; `state` changes in place.

    Args:
        x, dt: (batch, channels).
        B, C: (batch, N).
        state: (batch, channels, N), of any strides. No other argument may share memory with it.
        key_mask: (batch,).
        state_indices: (batch,) int32, the slot of `state` for each row, as in
            `linear_attention_step_`.
        The others: as in `selective_scan`.

    Returns:
        y (batch, channels) of x's dtype.

    Raises:
        ValueError, RuntimeError: as `selective_scan`; RuntimeError also where a gradient would be
            needed.
    """
    refuse_lost_gradient("selective_scan", x, dt, A, B, C, D, state)
    chosen = choose(IMPLEMENTATIONS, backend, x.device, x.dtype)
    if not chosen.step_checks:
        dt, A, D, key_mask = _check_step(x, dt, A, B, C, D, key_mask, state, state_indices)
    return chosen.step_(x, dt, A, B, C, D, key_mask, state, state_indices)


def _check_tensors(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    key_mask: Tensor | None,
    dims: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dt, A and D in the dtype of sums, key_mask as bool; x is (batch, T, channels) for 3 dims,
    (batch, channels) for 2.
    """
    check_channels(x, ("batch", "T", "channels") if dims == 3 else ("batch", "channels"))
    channels = x.shape[-1]
    if A.dim() != 2 or A.shape[0] != channels or A.shape[1] < 1:
        raise ValueError(f"A must have shape ({channels}, N), N of 1 or more, got {tuple(A.shape)}")
    expected = (*x.shape[:-1], A.shape[1])
    for name, tensor in (("B", B), ("C", C)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must have x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")
    key_mask = check_key_mask(key_mask, x, "x", features=1)
    of_sums = (
        check_per_token("dt", dt, x, tuple(x.shape), of="x"),
        check_per_token("A", A, x, tuple(A.shape), of="x"),
        None if D is None else check_per_token("D", D, x, (channels,), of="x"),
    )
    if is_readable(A) and (A.detach() > 0).any():
        raise ValueError(f"A must be at most 0, got {A.max().item()}")
    if is_readable(dt):
        real = dt.detach()
        if key_mask is not None:
            real = torch.where(behind(key_mask, real), real, 0)
        if real.numel() > 0 and (least := real.min().item()) < 0:
            raise ValueError(f"dt must be at least 0, got {least}")
    return *of_sums, key_mask


def _check_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """All about one token's arguments: dt, A and D in the dtype of sums, key_mask as bool and
    without the rows that have no slot.
    """
    slots, key_mask = check_rows_of_channels(x, key_mask, state, state_indices)
    checked = _check_tensors(x, dt, A, B, C, D, key_mask, 2)
    check_state("state", state, x, (slots, *A.shape), of="x")
    return checked


_native = native_op("selective_scan")
_native_step_ = native_op("selective_scan_step_")


def _step_compiled_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    # This runs once per layer and token: what the kernel refuses is explained only afterwards.
    try:
        if key_mask is not None and key_mask.dtype is not torch.bool:
            key_mask = check_key_mask(key_mask, x, "x", features=1)
        dtype = state.dtype
        dt_, A_ = to_dtype(dt, dtype), to_dtype(A, dtype)
        D_ = None if D is None else to_dtype(D, dtype)
        token = x, dt_, A_, B, C, D_, key_mask, state
        return _native_step_(*token, state_indices)
    except RuntimeError:
        _check_step(x, dt, A, B, C, D, key_mask, state, state_indices)
        raise


def _step_chunked_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    step_ = partial(chunked_selective_scan_step_, x, dt, A, B, C, D, key_mask)
    return step_on_slots_(step_, (state,), state_indices)


def _step_reference_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    def step_(rows: Tensor) -> Tensor:
        y, after = reference_selective_scan(
            *(x[:, None], dt[:, None], A, B[:, None], C[:, None], D),
            key_mask=None if key_mask is None else key_mask[:, None],
            initial_state=rows,
        )
        rows.copy_(after)
        return y[:, 0]

    return step_on_slots_(step_, (state,), state_indices)


IMPLEMENTATIONS = {
    "cuda": Missing("the selective scan has no CUDA kernels"),
    "cpu": if_compiled(Implementation(_native, _step_compiled_, step_checks=True)),
    "chunked": Implementation(chunked_selective_scan, _step_chunked_),
    "reference": Implementation(reference_selective_scan, _step_reference_, reads_cu_seqlens=True),
}
