# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Functions of PyTorch's of which torch.onnx, or ONNX Runtime, makes less exact ones. All of them
are of decays, whose errors add up over a sequence: log(sigmoid(x)) is 6e-8 off where it is close to
0, and so is log(1 + exp(x)).
"""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset23 as op


def log1p(x: Any) -> Any:
    """log(1 + x), by w = 1 + x as it is rounded: log(w) x / (w - 1)."""
    one = op.CastLike(1.0, x)
    rounded = op.Add(x, one)
    added = op.Sub(rounded, one)
    is_none = op.Equal(added, op.CastLike(0.0, x))
    divisor = op.Where(is_none, one, added)
    return op.Where(is_none, x, op.Div(op.Mul(op.Log(rounded), x), divisor))


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """max(x, 0) + log(1 + y), y = exp(-|x|), by log(1 + y) = 2 atanh(y / (2 + y)); PyTorch's for
    beta = 1, whose threshold changes nothing.
    """
    y = op.Exp(op.Neg(op.Abs(x)))
    two = op.CastLike(2.0, x)
    return op.Add(op.Relu(x), op.Mul(two, op.Atanh(op.Div(y, op.Add(y, two)))))


def log_sigmoid(x: Any) -> Any:
    return op.Neg(softplus(op.Neg(x)))


def expm1(x: Any) -> Any:
    """exp(x) - 1, by w = exp(x) as it is rounded: (w - 1) x / log(w); for x of at most 0, -1 where
    w is 0.
    """
    one = op.CastLike(1.0, x)
    rounded = op.Exp(x)
    added = op.Sub(rounded, one)
    is_all = op.LessOrEqual(added, op.CastLike(-0.75, x))  # where nothing cancels
    is_none = op.Equal(added, op.CastLike(0.0, x))
    divisor = op.Where(op.Or(is_all, is_none), one, op.Log(rounded))
    exact = op.Div(op.Mul(added, x), divisor)
    return op.Where(is_none, x, op.Where(is_all, added, exact))


TRANSLATIONS: dict[Callable, Callable] = {
    torch.ops.aten.softplus.default: softplus,
    torch.ops.aten.log_sigmoid.default: log_sigmoid,
    torch.ops.aten.log1p.default: log1p,
    torch.ops.aten.expm1.default: expm1,
}
