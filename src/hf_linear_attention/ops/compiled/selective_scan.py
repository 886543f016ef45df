# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan: what calls its compiled ops, their fakes and their gradients.

Shapes: batch, T time, channels, N sums of a state, rows of states.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..arguments import SelectiveArguments
from ..checks import check_stable
from ..numerics import accumulation_dtype
from .gradients import register_gradient
from .library import as_bounds, as_dtype, as_mask, contiguous, ops, register_fake

_forward = ops.selective_scan.default
_backward = ops.selective_scan_backward.default
_step_ = ops.selective_scan_step_.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def forward(
    arguments: SelectiveArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of whole sequences, differentiable once; arguments as in `selective_scan`.

    Returns:
        y (batch, T, channels) of x's dtype and the state, as initial_state.

    Raises:
        RuntimeError: an argument is wrong; it says which and how. ValueError: a state would grow.
    """
    x, dt, A, B, C, D, key_mask = arguments
    dtype = accumulation_dtype(x.dtype)
    key_mask = as_mask(key_mask, x, "x", features=1)
    check_stable(A, dt, key_mask)  # which the kernel asks for single tokens alone
    return _forward(
        x,
        as_dtype(dt, dtype),
        contiguous(as_dtype(A, dtype)),
        B,
        C,
        contiguous(as_dtype(D, dtype)),
        key_mask,
        as_bounds(cu_seqlens),
        contiguous(initial_state),
    )


def step_(
    arguments: SelectiveArguments, state: Tensor, state_indices: Tensor | None = None
) -> Tensor:
    """One token for every row; the state is updated in place. It has no gradient.

    Args:
        arguments: as in `selective_scan_step_`.
        state: (batch, channels, N) of the accumulation dtype, with any strides.
        state_indices: (batch,) int32, all different: which slot of `state`, of any number of them,
            is that of each row. -1: none, y is 0.

    Returns:
        y (batch, channels).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    x, dt, A, B, C, D, key_mask = arguments
    dtype = state.dtype
    if key_mask is not None:
        key_mask = as_mask(key_mask, x, "x", features=1)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
    y = _step_(
        x,
        as_dtype(dt, dtype),
        contiguous(as_dtype(A, dtype)),
        B,
        C,
        contiguous(as_dtype(D, dtype)),
        key_mask,
        state,
        state_indices,
    )
    # Lets autograd notice when a backward pass still needs the state as it was.
    increment_version((state,))
    return y


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


@register_fake("selective_scan", _registrations)
def _fake_forward(x, dt, A, B, C, D, key_mask, cu_seqlens, initial_state):
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), A.new_empty(rows, *A.shape)


@register_fake("selective_scan_backward", _registrations)
def _fake_backward(dy, dstate, x, dt, A, B, C, D, key_mask, cu_seqlens, initial_state):
    return tuple(
        A.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)
        for tensor in (x, dt, A, B, C, D, initial_state)
    )


@register_fake("selective_scan_step_", _registrations)
def _fake_step_(x, dt, A, B, C, D, key_mask, state, state_indices=None):
    return x.new_empty(x.shape)


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy, dstate):
    *of_inputs, dinitial_state = _backward(dy, contiguous(dstate), *ctx.saved_tensors)
    return *of_inputs, None, None, dinitial_state


register_gradient(
    _registrations, "selective_scan", "selective scan", _keep_for_backward, _differentiate
)
