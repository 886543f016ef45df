# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution: the public functions, their checks, and what each backend has for it.

Shapes: B batch, T time, C channels, S tokens that a state holds, N packed sequences.
"""

import torch
from torch import Tensor

from .backends import Implementation, Missing, choose, if_compiled, native_op
from .checks import (
    DTYPES,
    check_channels,
    check_cu_seqlens,
    check_key_mask,
    is_readable,
    refuse_lost_gradient,
)
from .chunked.convolution import chunked_short_convolution, chunked_short_convolution_step_
from .loops.convolution import reference_short_convolution
from .slots import check_state_indices, num_slots, rows_with_a_slot, step_on_slots_

IS_SILU = {"silu": True, None: False}  # by activation


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution over the last few real tokens, channel by channel, as gated delta rules
    and state spaces put before their recurrence: with k taps,

        u_t = bias + sum_j weight_j x_{t-k+1+j},  y_t = activation(u_t)

    where the last tap is the present token's, as in nn.Conv1d.

    Args:
        x: (B, T, C): float32, bfloat16, float16 or float64, of any strides.
        weight: (C, k), k >= 1; that of an nn.Conv1d is (C, 1, k): pass weight.squeeze(1).
        bias: (C,). It and weight may be of other float dtypes than x.
        activation: "silu", or None for u itself.
        key_mask: (B, T), bool or 0/1, false for padding: such a token is in no window, its output
            and all its gradients are 0, and whatever x holds there (NaN, too) reaches nothing.
        cu_seqlens: (N + 1,) int32 or int64, bounds of N sequences packed in one row (B = 1): 0,
            ..., T. No window crosses a bound.
        initial_state: (B, S, C), N rows with `cu_seqlens`, of x's dtype: the last S >= k - 1 real
            tokens, the newest last, zeros where there were fewer.
        return_state: also return the state after the last token.
        backend: as in `delta_rule`.

    Returns:
        y (B, T, C) of x's dtype, or (y, state) with `return_state`, the state as initial_state, or
        with S = k - 1. Sums and activation are in float32, or float64 for a float64 x, and rounded
        once.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: So et al., "Primer", arXiv 2109.08668 (depthwise convolutions of queries, keys and
    values); Gu and Dao, "Mamba", arXiv 2312.00752 (causal, with SiLU).
    """
    chosen = choose(IMPLEMENTATIONS, backend, x.device, x.dtype)
    silu = check_convolution(x, weight, bias, activation, 3)
    rows = x.shape[0]
    if cu_seqlens is not None:
        readable = chosen.reads_cu_seqlens or is_readable(cu_seqlens)
        check_cu_seqlens(cu_seqlens, x, readable=readable, name="x")
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if initial_state is not None:
        check_convolution_state("initial_state", initial_state, x, rows, weight.shape[1])
    y, state = chosen.run(
        x,
        weight,
        bias,
        silu=silu,
        key_mask=check_key_mask(key_mask, x, "x", features=1),
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
    )
    return (y, state) if return_state else y


def short_convolution_step_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None = "silu",
    key_mask: Tensor | None = None,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `short_convolution` for every row, without gradient; `state` changes in place.

    Args:
        x: (B, C).
        state: (B, S, C) of x's dtype, of any strides: where an array is (B, C, S), pass its
            transpose(1, 2). No other argument may share memory with it: x may not be one of its
            tokens.
        key_mask: (B,).
        state_indices: (B,) int32, the slot of `state` for each row, as in `linear_attention_step_`.
        The others: as in `short_convolution`.

    Returns:
        y (B, C) of x's dtype.

    Raises:
        ValueError, RuntimeError: as `short_convolution`; RuntimeError also where a gradient would
            be needed.
    """
    refuse_lost_gradient("short_convolution", x, weight, bias, state)
    chosen = choose(IMPLEMENTATIONS, backend, x.device, x.dtype)
    if chosen.step_checks:
        return chosen.step_(x, weight, bias, activation, key_mask, state, state_indices)
    key_mask = _check_step(x, weight, bias, activation, key_mask, state, state_indices)

    def step_(rows: Tensor) -> Tensor:
        return chosen.step_(x, weight, bias, activation, key_mask, rows)

    return step_on_slots_(step_, (state,), state_indices)


def check_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dims: int
) -> bool:
    """Whether the activation is SiLU; x is (B, T, C) for 3 dims, (B, C) for 2."""
    check_channels(x, ("B", "T", "C") if dims == 3 else ("B", "C"))
    C = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != C or weight.shape[1] < 1:
        raise ValueError(
            f"weight must have shape ({C}, kernel size), the size 1 or more, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (C,):
        raise ValueError(f"bias must have shape {(C,)}, got {tuple(bias.shape)}")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")
    if activation not in IS_SILU:
        raise ValueError(f'activation must be "silu" or None, got {activation!r}')
    return IS_SILU[activation]


def check_convolution_state(
    name: str, state: Tensor, x: Tensor, rows: int, kernel_size: int
) -> None:
    """A state called `name` of so many rows or slots."""
    C, least = x.shape[-1], kernel_size - 1
    shape = tuple(state.shape)
    if len(shape) != 3 or (shape[0], shape[2]) != (rows, C) or shape[1] < least:
        raise ValueError(
            f"{name} must have shape ({rows}, S, {C}) with S of {least} or more, got {shape}"
        )
    if state.dtype != x.dtype:
        raise ValueError(f"{name} must have x's dtype {x.dtype}, got {state.dtype}")
    if state.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {state.device}")


def _check_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor | None:
    """Everything about one token's arguments; key_mask as bool, without rows that have no slot."""
    check_convolution(x, weight, bias, activation, 2)
    slots = num_slots(state, state_indices, x.shape[0])
    check_convolution_state("state", state, x, slots, weight.shape[1])
    key_mask = check_key_mask(key_mask, x, "x", features=1)
    if state_indices is None:
        return key_mask
    check_state_indices(state_indices, x.shape[0], slots, x, of="x")
    return rows_with_a_slot(state_indices, key_mask)


_native = native_op("short_convolution")
_native_step_ = native_op("short_convolution_step_")


def _step_compiled_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> Tensor:
    # This runs once per layer and token: what the kernel refuses is explained only afterwards.
    try:
        if key_mask is not None and key_mask.dtype is not torch.bool:
            key_mask = check_key_mask(key_mask, x, "x", features=1)
        token = x, weight, bias, key_mask, state, IS_SILU[activation]
        return _native_step_(*token, state_indices)
    except (RuntimeError, KeyError):
        _check_step(x, weight, bias, activation, key_mask, state, state_indices)
        raise


def _step_chunked_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    key_mask: Tensor | None,
    state: Tensor,
) -> Tensor:
    silu = IS_SILU[activation]
    return chunked_short_convolution_step_(x, weight, bias, key_mask, state, silu)


def _step_reference_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    key_mask: Tensor | None,
    state: Tensor,
) -> Tensor:
    y, after = reference_short_convolution(
        x[:, None],
        weight,
        bias,
        silu=IS_SILU[activation],
        key_mask=None if key_mask is None else key_mask[:, None],
        initial_state=state,
    )
    state.copy_(after)
    return y[:, 0]


IMPLEMENTATIONS = {
    "cuda": Missing("the short convolution has no CUDA kernels"),
    "cpu": if_compiled(Implementation(_native, _step_compiled_, step_checks=True)),
    "chunked": Implementation(chunked_short_convolution, _step_chunked_),
    "reference": Implementation(
        reference_short_convolution, _step_reference_, reads_cu_seqlens=True
    ),
}
