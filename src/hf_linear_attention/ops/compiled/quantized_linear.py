# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products of few rows with weights of 8 and 4 bits, on the CPU."""

import torch
from torch import Tensor

from .library import ops, register_fake

_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes
_int8_linear = ops.int8_linear.default
_int4_linear = ops.int4_linear.default
_dequantize_int4 = ops.dequantize_int4.default


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    rounds_x: bool = False,
) -> Tensor:
    """x W^T + bias for few rows, on the CPU, with W = (weight - zero_point) scale. No gradient.

    Args:
        x: (..., in) float32, bfloat16 or float16.
        weight: (out, in) int8, contiguous.
        scale: (out, groups), one for each group of consecutive inputs, or (1, 1); float32,
            bfloat16 or float16, of any strides.
        zero_point: of scale's shape, int8 or a dtype of scales; None is 0.
        bias: (out,) of x's dtype.
        rounds_x: round x to 16 bits, so that the products are of integers, which is faster: in each
            block of inputs, a group's or 256 of them where it has more, to multiples of the power
            of two that leaves the largest magnitude 15 bits. So numbers of bfloat16 down to a 128th
            of the largest one's power of two stay what they are, and those of float16 down to a
            16th. Magnitudes below 2^-112 count as 0. NaN or infinity makes its row NaN.

    Returns:
        y (..., out) of x's dtype. W, sums, and x but for `rounds_x` are float32, and sums are
        rounded once. Zero points are multiplied by sums of x: with them, infinity in x may make NaN
        of what W would make infinity of.

    Raises:
        RuntimeError: an argument is wrong, or a gradient would be needed; it says which and how.
    """
    _refuse_gradients(x, bias)
    return _int8_linear(x.contiguous(), weight, scale, zero_point, bias, rounds_x)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    rounds_x: bool = False,
) -> Tensor:
    """x W^T + bias for few rows, on the CPU, with W = weight scale + zero_point. No gradient.

    Args:
        weight: (out, in / 2) int8, contiguous: two values from -8 to 7 in each byte, the one of
            the earlier input in the lower bits.
        scale: (groups, out), one for each group of consecutive inputs, an even number of them;
            float32, bfloat16 or float16, of any strides. Multiples of 32 are fast.
        zero_point: of scale's shape, of a dtype of scales; None is 0.
        x, bias, rounds_x: as of `int8_linear`, and so are results and errors; infinity is as with
            zero points there, also without any.
    """
    _refuse_gradients(x, bias)
    return _int4_linear(x.contiguous(), weight, scale, zero_point, bias, rounds_x)


def dequantize_int4(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """W (out, in) = weight scale + zero_point of x's dtype, computed in float32 and rounded once.

    Args:
        x: (..., in) of which no number is read; float32, bfloat16 or float16.
        weight, scale, zero_point: as of `int4_linear`.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    like = x.new_empty(0, x.shape[-1])
    return _dequantize_int4(like, weight, scale, zero_point)


def _refuse_gradients(x: Tensor, bias: Tensor | None) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise RuntimeError(
            "the compiled products of quantised weights have no gradient: call them under "
            "torch.no_grad()"
        )


@register_fake("dequantize_int4", _registrations)
def _fake_dequantize_int4(x, weight, scale, zero_point):
    return x.new_empty(weight.shape[0], x.shape[-1])


@register_fake("int8_linear", _registrations)
@register_fake("int4_linear", _registrations)
def _fake_linear(x, weight, scale, zero_point, bias, rounds_x=False):
    return x.new_empty(*x.shape[:-1], weight.shape[0])
