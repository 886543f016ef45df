# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution: the public functions, their checks, and what each backend has for it.

Shapes: B batch, T time, C channels, S tokens that a state holds, N packed sequences.
"""

from torch import Tensor

from .arguments import IS_SILU, ConvolutionArguments
from .backends import Implementation, Missing, kernels
from .calls import Implementations, Op, run, step_, step_by
from .checks import DTYPES, check_channels, check_key_mask
from .chunked.convolution import chunked_short_convolution, chunked_short_convolution_step_
from .loops.convolution import reference_short_convolution


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
    arguments = ConvolutionArguments(x, weight, bias, key_mask, activation)
    y, state = run(OP, arguments, cu_seqlens, initial_state, backend)
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
    arguments = ConvolutionArguments(x, weight, bias, key_mask, activation)
    return step_(OP, arguments, state, state_indices, backend)


def _check_arguments(arguments: ConvolutionArguments, has_time: bool) -> ConvolutionArguments:
    x, weight, bias, key_mask, activation = arguments
    check_channels(x, ("B", "T", "C") if has_time else ("B", "C"))
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
    return arguments._replace(key_mask=check_key_mask(key_mask, x, "x", features=1))


def _check_state(
    name: str, state: Tensor, arguments: ConvolutionArguments, rows: int, in_place: bool = False
) -> None:
    x, weight, *_ = arguments
    C, least = x.shape[-1], weight.shape[1] - 1
    shape = tuple(state.shape)
    if len(shape) != 3 or (shape[0], shape[2]) != (rows, C) or shape[1] < least:
        raise ValueError(
            f"{name} must have shape ({rows}, S, {C}) with S of {least} or more, got {shape}"
        )
    if state.dtype != x.dtype:
        raise ValueError(f"{name} must have x's dtype {x.dtype}, got {state.dtype}")
    if state.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {state.device}")


IMPLEMENTATIONS: Implementations = {
    "cuda": Missing("the short convolution has no CUDA kernels"),
    "cpu": kernels("short_convolution"),
    "chunked": Implementation(chunked_short_convolution, chunked_short_convolution_step_),
    "reference": Implementation(
        reference_short_convolution, step_by(reference_short_convolution), reads_cu_seqlens=True
    ),
}


OP = Op(
    "short_convolution",
    _check_arguments,
    _check_state,
    for_sequences=lambda _: IMPLEMENTATIONS,
    for_tokens=lambda _: IMPLEMENTATIONS,
)
