# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan: what calls its compiled ops, their fakes and their gradients.

Shapes: B batch, T time, C channels, rows of states.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..arguments import ElementwiseArguments
from ..numerics import accumulation_dtype
from .gradients import register_gradient
from .library import as_bounds, as_dtype, as_mask, contiguous, ops, register_fake

_forward = ops.elementwise_scan.default
_backward = ops.elementwise_scan_backward.default
_step_ = ops.elementwise_scan_step_.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def forward(
    arguments: ElementwiseArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of whole sequences, differentiable once; arguments as in `elementwise_scan`.

    Returns:
        y (B, T, C) of x's dtype and the state, as initial_state.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    x, log_decay, key_mask = arguments
    return _forward(
        x,
        as_dtype(log_decay, accumulation_dtype(x.dtype)),
        as_mask(key_mask, x, "x", features=1),
        as_bounds(cu_seqlens),
        contiguous(initial_state),
    )


def step_(
    arguments: ElementwiseArguments, state: Tensor, state_indices: Tensor | None = None
) -> Tensor:
    """One token for every row; the state is updated in place. It has no gradient.

    Args:
        arguments: as in `elementwise_scan_step_`.
        state: (B, C) of the accumulation dtype, with any strides.
        state_indices: (B,) int32, all different: which slot of `state`, of any number of them, is
            that of each row. -1: none, y is 0.

    Returns:
        y (B, C).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    x, log_decay, key_mask = arguments
    if key_mask is not None:
        key_mask = as_mask(key_mask, x, "x", features=1)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
    y = _step_(x, as_dtype(log_decay, state.dtype), key_mask, state, state_indices)
    # Lets autograd notice when a backward pass still needs the state as it was.
    increment_version((state,))
    return y


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


@register_fake("elementwise_scan", _registrations)
def _fake_forward(x, log_decay, key_mask, cu_seqlens, initial_state):
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), log_decay.new_empty(rows, x.shape[2])


@register_fake("elementwise_scan_backward", _registrations)
def _fake_backward(dy, dstate, x, log_decay, key_mask, cu_seqlens, initial_state):
    shape = (0,) if initial_state is None else initial_state.shape
    return x.new_empty(x.shape), log_decay.new_empty(x.shape), log_decay.new_empty(shape)


@register_fake("elementwise_scan_step_", _registrations)
def _fake_step_(x, log_decay, key_mask, state, state_indices=None):
    return x.new_empty(x.shape)


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy, dstate):
    dx, dlog_decay, dinitial_state = _backward(dy, contiguous(dstate), *ctx.saved_tensors)
    return dx, dlog_decay, None, None, dinitial_state


register_gradient(
    _registrations, "elementwise_scan", "elementwise scan", _keep_for_backward, _differentiate
)
