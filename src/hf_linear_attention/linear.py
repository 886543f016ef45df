# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""nn.Linear, and where it runs faster: on the CPU for few rows, as when tokens are generated."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear_attention import FORCED_BACKEND, WHY_NO_COMPILED_OPS

IS_COMPILED = WHY_NO_COMPILED_OPS is None and FORCED_BACKEND in (None, "cpu")
try:
    from hf_linear_attention import _ops
except ImportError:
    pass  # WHY_NO_COMPILED_OPS says why

# Up to so many rows the compiled product is the faster one, by benchmarks of both; for more rows,
# torch's reads the weights less often.
MAX_ROWS = {torch.float32: 32, torch.bfloat16: 8, torch.float16: 32, torch.float64: 8}


class Linear(nn.Linear):
    """nn.Linear: the same parameters, the same answers but for rounding.

    Nobody knows the compiled product but this package, so it takes plain tensors only, where no
    gradient, autocast or exported program is wanted; all else goes the usual way.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if may_run_compiled(input, weight, bias):
            return _ops.linear(input, weight, bias)
        return F.linear(input, weight, bias)


def may_run_compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the compiled product takes x (..., in), weight (out, in), bias (out,), and pays."""
    return (
        IS_COMPILED
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and type(weight) is nn.Parameter
        and x.is_cpu
        and x.numel() <= MAX_ROWS.get(x.dtype, 0) * weight.shape[-1]
        and weight.dtype is x.dtype
        and weight.is_contiguous()
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype is x.dtype))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_exporting()
    )
