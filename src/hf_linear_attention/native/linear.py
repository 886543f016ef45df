# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products with a weight on the CPU: the compiled ones for few rows and for many, and oneDNN's."""

import math

import torch
from torch import Tensor

from .library import ops

_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes
# An op of our own around PyTorch's, which has no gradient and does not compile for training.
_registrations.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_registrations.impl(
    "onednn_linear",
    lambda x, w, bias: torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], ""),
    "CPU",
)
_linear = ops.linear.default
_many_rows_linear = ops.many_rows_linear.default
_onednn_linear = ops.onednn_linear.default


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` for few rows, on the CPU. It has no gradient.

    Args:
        x, weight, bias: (..., in), (out, in), (out,), of one dtype: float32, bfloat16, float16 or
            float64. weight and bias are contiguous.

    Returns:
        y (..., out). Sums are in the accumulation dtype, and rounded once. With AMX or AVX512-BF16,
        whatever is smaller than 2^-126 counts as 0 in bfloat16.

    Raises:
        RuntimeError: an argument is wrong, or a gradient would be needed; it says which and how.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise RuntimeError(
            "the compiled linear has no gradient: call it under torch.no_grad(), or use "
            "torch.nn.functional.linear"
        )
    return _linear(x.contiguous(), weight, bias)


def many_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` for many rows, on the CPU; differentiable.

    Args:
        x, weight, bias: (..., in), (out, in), (out,), of one dtype: float32, bfloat16 or float16.
            x and weight may have any strides.

    Returns:
        y (..., out). Sums are float32, also those of gradients, and rounded once.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _many_rows_linear(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` in float32 on the CPU, by oneDNN; differentiable.

    PyTorch multiplies float32 matrices by MKL, which leaves AVX-512 aside on AMD's processors;
    oneDNN, which comes with PyTorch too, takes half the time there.

    Args:
        x, weight, bias: (..., in), (out, in), (out,) float32, of any strides.

    Returns:
        y (..., out).
    """
    return _onednn_linear(x, weight, bias)


@torch.library.register_fake("hf_linear_attention::onednn_linear", lib=_registrations)
@torch.library.register_fake("hf_linear_attention::many_rows_linear", lib=_registrations)
@torch.library.register_fake("hf_linear_attention::linear", lib=_registrations)
def _fake_linear(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep_for_linear_backward(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _make_differentiable(op):
    """Gives an op (x, weight, bias) of any strides gradients, which are the same op's results."""

    def differentiate(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy_rows = dy.flatten(0, -2)
        return (
            op(dy, weight.t(), None) if needs_x else None,
            op(dy_rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
            dy_rows.sum(0) if needs_bias else None,
        )

    torch.library.register_autograd(
        op, differentiate, setup_context=_keep_for_linear_backward, lib=_registrations
    )


_make_differentiable(_onednn_linear)
_make_differentiable(_many_rows_linear)
