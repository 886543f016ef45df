# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The root-mean-square norm on the CPU: its compiled ops, their fakes and their gradient."""

import math

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from .library import ops, register_fake

_rms_norm = ops.rms_norm.default
_rms_norm_forward = ops.rms_norm_forward.default
_rms_norm_backward = ops.rms_norm_backward.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) on the CPU, the mean over the last dimension.

    Differentiable; second derivatives are left to PyTorch.

    Args:
        x, weight: (..., C), (C,), of one dtype: float32, bfloat16, float16 or float64.

    Returns:
        y (..., C). It is computed in the accumulation dtype; x / sqrt(...) is rounded to x's dtype
        before it is multiplied, as in Transformers' LlamaRMSNorm.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _rms_norm_forward(x.contiguous(), weight.contiguous(), eps)[0]
    return _rms_norm(x.contiguous(), weight.contiguous(), eps)  # which costs less to call


@register_fake("rms_norm", _registrations)
def _fake_rms_norm(x, weight, eps):
    return x.new_empty(x.shape)


@register_fake("rms_norm_forward", _registrations)
def _fake_rms_norm_forward(x, weight, eps):
    rows = math.prod(x.shape[:-1])
    return x.new_empty(x.shape), x.new_empty(rows, dtype=accumulation_dtype(x.dtype))


@register_fake("rms_norm_backward", _registrations)
def _fake_rms_norm_backward(dy, x, weight, inverse_rms):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep_for_rms_norm_backward(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    _, inverse_rms = output
    ctx.save_for_backward(x, weight, inverse_rms)
    ctx.mark_non_differentiable(inverse_rms)
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx, dy, dinverse_rms):
    if dy is None:
        return None, None, None
    x, weight, inverse_rms = ctx.saved_tensors
    if torch.is_grad_enabled():  # a second derivative may be wanted
        dx, dweight = _differentiable_rms_norm_backward(dy, x, weight, ctx.eps)
    else:
        dx, dweight = _rms_norm_backward(dy.contiguous(), x, weight, inverse_rms)
    needs_x, needs_weight, _ = ctx.needs_input_grad
    return dx if needs_x else None, dweight if needs_weight else None, None


def _differentiable_rms_norm_backward(dy, x, weight, eps):
    acc = accumulation_dtype(x.dtype)
    inverse_rms = torch.rsqrt(x.to(acc).square().mean(-1, keepdim=True) + eps)
    n = x.to(acc) * inverse_rms
    g = weight.to(acc) * dy.to(acc)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * inverse_rms
    dweight = (dy.to(acc) * n).sum_to_size(weight.shape)
    return dx.to(x.dtype), dweight.to(weight.dtype)


torch.library.register_autograd(
    "hf_linear_attention::rms_norm_forward",
    _differentiate_rms_norm,
    setup_context=_keep_for_rms_norm_backward,
    lib=_registrations,
)
