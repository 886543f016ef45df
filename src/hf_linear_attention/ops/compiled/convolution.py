# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution: what calls its compiled ops, their fakes and their gradients.

Shapes: B batch, T time, C channels, S tokens of a state, N packed sequences.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..arguments import IS_SILU, ConvolutionArguments
from .gradients import register_gradient
from .library import as_bounds, as_mask, contiguous, ops, register_fake

_forward = ops.short_convolution.default
_backward = ops.short_convolution_backward.default
_step_ = ops.short_convolution_step_.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def forward(
    arguments: ConvolutionArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution of whole sequences, differentiable once; arguments as in `short_convolution`.

    Returns:
        y (B, T, C) of x's dtype and the state, as initial_state.

    Raises:
        RuntimeError: an argument is wrong; it says which and how. KeyError: activation is.
    """
    x, weight, bias, key_mask, activation = arguments
    return _forward(
        x,
        weight,
        bias,
        as_mask(key_mask, x, "x", features=1),
        as_bounds(cu_seqlens),
        contiguous(initial_state),
        IS_SILU[activation],
    )


def step_(
    arguments: ConvolutionArguments, state: Tensor, state_indices: Tensor | None = None
) -> Tensor:
    """One token for every row; the state is updated in place. It has no gradient.

    Args:
        arguments: as in `short_convolution_step_`.
        state: (B, S, C) of x's dtype, with any strides.
        state_indices: (B,) int32, all different: which slot of `state`, of any number of them, is
            that of each row. -1: none, y is 0.

    Returns:
        y (B, C).

    Raises:
        RuntimeError: an argument is wrong; it says which and how. KeyError: activation is.
    """
    x, weight, bias, key_mask, activation = arguments
    if key_mask is not None:
        key_mask = as_mask(key_mask, x, "x", features=1)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
    y = _step_(x, weight, bias, key_mask, state, IS_SILU[activation], state_indices)
    # Lets autograd notice when a backward pass still needs the state as it was.
    increment_version((state,))
    return y


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


@register_fake("short_convolution", _registrations)
def _fake_forward(x, weight, bias, key_mask, cu_seqlens, initial_state, silu):
    if initial_state is not None:
        return x.new_empty(x.shape), x.new_empty(initial_state.shape)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(rows, weight.shape[1] - 1, x.shape[2])


@register_fake("short_convolution_backward", _registrations)
def _fake_backward(dy, dstate, x, weight, bias, key_mask, cu_seqlens, initial_state, silu):
    return tuple(
        x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)
        for tensor in (x, weight, bias, initial_state)
    )


@register_fake("short_convolution_step_", _registrations)
def _fake_step_(x, weight, bias, key_mask, state, silu, state_indices=None):
    return x.new_empty(x.shape)


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy, dstate):
    dx, dweight, dbias, dinitial_state = _backward(
        dy, contiguous(dstate), *ctx.saved_tensors, ctx.silu
    )
    return dx, dweight, dbias, None, None, dinitial_state


register_gradient(
    _registrations, "short_convolution", "short convolution", _keep_for_backward, _differentiate
)
