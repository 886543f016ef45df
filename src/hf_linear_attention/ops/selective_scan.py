# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan: the public functions, their checks, and what each backend has for it.

Shapes: batch, T time, channels, N sums of a state for each channel, rows of states: one for each
row of the batch, or for each packed sequence.
"""

from torch import Tensor

from .arguments import SelectiveArguments
from .backends import Implementation, Missing, kernels
from .calls import Implementations, Op, run, step_, step_by
from .checks import (
    check_channels,
    check_key_mask,
    check_per_token,
    check_stable,
    check_state,
)
from .chunked.selective_scan import chunked_selective_scan, chunked_selective_scan_step_
from .loops.selective_scan import reference_selective_scan


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
    arguments = SelectiveArguments(x, dt, A, B, C, D, key_mask)
    y, state = run(OP, arguments, cu_seqlens, initial_state, backend)
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
    arguments = SelectiveArguments(x, dt, A, B, C, D, key_mask)
    return step_(OP, arguments, state, state_indices, backend)


def _check_arguments(arguments: SelectiveArguments, has_time: bool) -> SelectiveArguments:
    x, dt, A, B, C, D, key_mask = arguments
    check_channels(x, ("batch", "T", "channels") if has_time else ("batch", "channels"))
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
    checked = SelectiveArguments(
        x,
        check_per_token("dt", dt, x, tuple(x.shape), of="x"),
        check_per_token("A", A, x, tuple(A.shape), of="x"),
        B,
        C,
        None if D is None else check_per_token("D", D, x, (channels,), of="x"),
        key_mask,
    )
    check_stable(A, dt, key_mask)
    return checked


def _check_state(
    name: str, state: Tensor, arguments: SelectiveArguments, rows: int, in_place: bool = False
) -> None:
    check_state(name, state, arguments.x, (rows, *arguments.A.shape), of="x")


IMPLEMENTATIONS: Implementations = {
    "cuda": Missing("the selective scan has no CUDA kernels"),
    "cpu": kernels("selective_scan"),
    "chunked": Implementation(chunked_selective_scan, chunked_selective_scan_step_),
    "reference": Implementation(
        reference_selective_scan, step_by(reference_selective_scan), reads_cu_seqlens=True
    ),
}


OP = Op(
    "selective_scan",
    _check_arguments,
    _check_state,
    for_sequences=lambda _: IMPLEMENTATIONS,
    for_tokens=lambda _: IMPLEMENTATIONS,
)
