# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule: what calls its compiled ops, their fakes and their gradients.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads and heads of the state, K key
dim, V value dim, N packed sequences. Hq and Hk divide Hv.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..arguments import DeltaArguments
from ..numerics import accumulation_dtype, needs_grad
from .gradients import register_gradient
from .library import as_bounds, as_dtype, as_mask, contiguous, ops, register_fake

_forward = ops.delta_rule.default
_backward = ops.delta_rule_backward.default
_step_ = ops.delta_rule_step_.default
_forward_in_slots_ = ops.delta_rule_.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def forward(
    arguments: DeltaArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule over whole sequences, differentiable once; arguments as in `delta_rule`, but
    for heads: Hq and Hk divide Hv.

    Returns:
        y (B, T, Hv, V) and the state, as initial_state.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    q, k, v, beta, log_decay, key_mask, scale, normalize_qk, delta, *erase = arguments
    # Only a gradient needs what each token found missing, which is as large as v.
    differentiable = q, k, v, beta, log_decay, *erase, initial_state
    keep_errors = delta and torch.is_grad_enabled() and needs_grad(*differentiable)
    dtype = accumulation_dtype(q.dtype)
    y, _, state = _forward(
        q,
        k,
        v,
        as_dtype(beta, dtype),
        as_dtype(log_decay, dtype),
        *(as_dtype(x, dtype) for x in erase),
        as_mask(key_mask, q),
        as_bounds(cu_seqlens),
        contiguous(initial_state),
        scale,
        normalize_qk,
        delta,
        keep_errors,
    )
    return y, state


def step_(arguments: DeltaArguments, state: Tensor, state_indices: Tensor | None = None) -> Tensor:
    """One token for every row; the state is updated in place. It has no gradient.

    Args:
        arguments: as in `delta_rule_step_`, but Hq and Hk divide Hv.
        state: (B, Hv, K, V) in the accumulation dtype, each row contiguous.
        state_indices: (B,) int32, all different: which slot of `state`, of any number of them, is
            that of each row. -1: none, y is 0.

    Returns:
        y (B, Hv, V).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    q, k, v, beta, log_decay, key_mask, scale, normalize_qk, delta, *erase = arguments
    dtype = state.dtype
    if beta is not None and beta.dtype is not dtype:
        beta = as_dtype(beta, dtype)
    if log_decay is not None and log_decay.dtype is not dtype:
        log_decay = as_dtype(log_decay, dtype)
    if erase[0] is not None:
        erase = [as_dtype(x, dtype) for x in erase]
    if key_mask is not None:
        key_mask = as_mask(key_mask, q)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
    options = scale, normalize_qk, delta
    y = _step_(q, k, v, beta, log_decay, *erase, key_mask, state, *options, state_indices)
    # Lets autograd notice when a backward pass still needs the state as it was.
    increment_version((state,))
    return y


def forward_in_slots_(
    arguments: DeltaArguments,
    cu_seqlens: Tensor | None,
    state: Tensor,
    state_indices: Tensor,
    is_new: Tensor | None,
) -> Tensor:
    """`forward` from states in slots, which change in place. It has no gradient.

    Args:
        state: as in `step_`, of any number of slots.
        cu_seqlens: (N + 1,) int32; tokens behind the last bound are no one's, and y is 0 there.
        state_indices: (B or N,) int32, all different: the slot of each sequence. -1: none, y is 0.
        is_new: (B or N,) bool: begins from zero, whatever the slot holds; None: none does.

    Returns:
        y (B, T, Hv, V).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    q, k, v, beta, log_decay, key_mask, *options, erase_key, add_along = arguments
    dtype = accumulation_dtype(q.dtype)
    y = _forward_in_slots_(
        *(q, k, v),
        *(as_dtype(x, dtype) for x in (beta, log_decay, erase_key, add_along)),
        as_mask(key_mask, q),
        as_bounds(cu_seqlens),
        state,
        state_indices.contiguous(),
        contiguous(is_new),
        *options,
    )
    increment_version((state,))
    return y


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


@register_fake("delta_rule", _registrations)
def _fake_forward(
    q,
    k,
    v,
    beta,
    log_decay,
    erase_key,
    add_along,
    key_mask,
    cu_seqlens,
    initial_state,
    scale,
    normalize_qk,
    delta,
    keep_errors,
):
    B, T, Hv, V = v.shape
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    acc = accumulation_dtype(q.dtype)
    y = q.new_empty(B, T, Hv, V)
    errors = q.new_empty((B, T, Hv, V) if delta and keep_errors else (0,), dtype=acc)
    state = q.new_empty(rows, Hv, q.shape[3], V, dtype=acc)
    return y, errors, state


@register_fake("delta_rule_backward", _registrations)
def _fake_backward(dy, dstate, q, k, v, beta, log_decay, erase_key, add_along, *others):
    acc = accumulation_dtype(q.dtype)

    def gradient_of(x):
        return q.new_empty(0, dtype=acc) if x is None else x.new_empty(x.shape)

    _, _, initial_state, *_ = others
    differentiable = q, k, v, beta, log_decay, erase_key, add_along, initial_state
    return tuple(map(gradient_of, differentiable))


@register_fake("delta_rule_step_", _registrations)
def _fake_step_(q, k, v, beta, log_decay, erase_key, add_along, key_mask, state, *others):
    return v.new_empty(v.shape)


@register_fake("delta_rule_", _registrations)
def _fake_forward_in_slots_(q, k, v, *others):
    return v.new_empty(v.shape)


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    *tensors, scale, normalize_qk, delta, keep_errors = inputs
    _, errors, state = output
    ctx.options = scale, normalize_qk, delta
    ctx.save_for_backward(*tensors, errors, state)
    ctx.mark_non_differentiable(errors)


def _differentiate(ctx, dy, derrors, dstate):
    *of_tokens, dinitial_state = _backward(dy, contiguous(dstate), *ctx.saved_tensors, *ctx.options)
    return *of_tokens, None, None, dinitial_state


register_gradient(_registrations, "delta_rule", "delta rule", _keep_for_backward, _differentiate)
