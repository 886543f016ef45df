# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products with a weight on the CPU: for few rows, for many, and for few rows of each expert."""

import math

import torch
from torch import Tensor

from .library import ops, register_fake

_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes
_linear = ops.linear.default
_many_rows_linear = ops.many_rows_linear.default
_expert_linear = ops.expert_linear.default


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
    _check_without_gradient(x, weight, bias)
    return _linear(x.contiguous(), weight, bias)


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` by the weight of each row's own expert, for few rows of each, on
    the CPU. It has no gradient.

    Args:
        x, weight, bias: (rows, in), (num_experts, out, in), (num_experts, out), of one dtype:
            float32, bfloat16, float16 or float64. weight and bias are contiguous.
        experts: (rows,) int64, in rising order; num_experts for a row that no expert multiplies.

    Returns:
        y (rows, out), zeros in rows of no expert. What `linear` gives for each expert by itself.

    Raises:
        RuntimeError: an argument is wrong, or a gradient would be needed; it says which and how.
    """
    _check_without_gradient(x, weight, bias)
    return _expert_linear(x.contiguous(), weight, experts, bias)


def _check_without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise RuntimeError(
            "the compiled linear has no gradient: call it under torch.no_grad(), or use "
            "torch.nn.functional.linear"
        )


# The dtypes as numbers, as torch's C interface has them.
CODE_OF = {torch.float32: 6, torch.float16: 5, torch.bfloat16: 15}
_DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}


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
    return many_rows_linear_in(x, weight, bias, x.dtype)


def many_rows_linear_in(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`many_rows_linear` as under autocast to `dtype`: x, weight and bias may be float32 as well,
    and are rounded to that while they are read. Gradients have the dtypes of what they are of.

    Args:
        x, weight, bias: (..., in), (out, in), (out,), x and weight of `dtype` or float32, bias as
            the weight.
        dtype: float32, bfloat16 or float16.

    Returns:
        y (..., out), of `dtype`.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    if dtype not in CODE_OF:
        raise RuntimeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    code = CODE_OF[dtype]
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _many_rows_linear(rows, weight, bias, code, code)
    return y.view(*x.shape[:-1], weight.shape[0])


@register_fake("many_rows_linear", _registrations)
def _fake_many_rows_linear(x, weight, bias, dtype, y_dtype):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=_DTYPE_OF[y_dtype])


@register_fake("linear", _registrations)
def _fake_linear(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@register_fake("expert_linear", _registrations)
def _fake_expert_linear(x, weight, experts, bias):
    return x.new_empty(x.shape[0], weight.shape[1])


def _keep_for_linear_backward(ctx, inputs, output):
    x, weight, bias, ctx.dtype, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _differentiate_linear(ctx, dy):
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad

    def product(a, b, like):
        return _many_rows_linear(a, b, None, ctx.dtype, CODE_OF[like.dtype])

    return (
        product(dy, weight.t(), like=x) if needs_x else None,
        product(dy.t(), x.t(), like=weight) if needs_weight else None,
        dy.sum(0, dtype=ctx.bias_dtype) if needs_bias else None,
        None,
        None,
    )


torch.library.register_autograd(
    _many_rows_linear,
    _differentiate_linear,
    setup_context=_keep_for_linear_backward,
    lib=_registrations,
)
