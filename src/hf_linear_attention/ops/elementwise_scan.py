# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan: the public functions, their checks, and what each backend has for it.

Shapes: B batch, T time, C channels, N packed sequences.
"""

from torch import Tensor

from .arguments import ElementwiseArguments
from .backends import Implementation, Missing, kernels
from .calls import Implementations, Op, run, step_, step_by
from .checks import (
    check_channels,
    check_key_mask,
    check_not_positive,
    check_per_token,
    check_state,
)
from .chunked.elementwise_scan import chunked_elementwise_scan, chunked_elementwise_scan_step_
from .loops.elementwise_scan import reference_elementwise_scan


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
    arguments = ElementwiseArguments(x, log_decay, key_mask)
    y, state = run(OP, arguments, cu_seqlens, initial_state, backend)
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
    arguments = ElementwiseArguments(x, log_decay, key_mask)
    return step_(OP, arguments, state, state_indices, backend)


def _check_arguments(arguments: ElementwiseArguments, has_time: bool) -> ElementwiseArguments:
    x, log_decay, key_mask = arguments
    check_channels(x, ("B", "T", "C") if has_time else ("B", "C"))
    key_mask = check_key_mask(key_mask, x, "x", features=1)
    checked = check_per_token("log_decay", log_decay, x, tuple(x.shape), of="x")
    check_not_positive("log_decay", log_decay, key_mask)
    return ElementwiseArguments(x, checked, key_mask)


def _check_state(
    name: str, state: Tensor, arguments: ElementwiseArguments, rows: int, in_place: bool = False
) -> None:
    check_state(name, state, arguments.x, (rows, arguments.x.shape[-1]), of="x")


IMPLEMENTATIONS: Implementations = {
    "cuda": Missing("the elementwise scan has no CUDA kernels"),
    "cpu": kernels("elementwise_scan"),
    "chunked": Implementation(chunked_elementwise_scan, chunked_elementwise_scan_step_),
    "reference": Implementation(
        reference_elementwise_scan, step_by(reference_elementwise_scan), reads_cu_seqlens=True
    ),
}


OP = Op(
    "elementwise_scan",
    _check_arguments,
    _check_state,
    for_sequences=lambda _: IMPLEMENTATIONS,
    for_tokens=lambda _: IMPLEMENTATIONS,
)
