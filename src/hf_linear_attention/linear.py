# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""nn.Linear, faster on the CPU: for few rows, as in generation, and on AMD's for many, too."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .backends import has_compiled, native_op
from .quantized import quantized_product

few_rows_product = native_op("linear", version=1)
onednn_product = native_op("onednn_linear", version=1)
IS_COMPILED = has_compiled(few_rows_product, onednn_product)

# Up to so many rows the compiled product is the faster one, by benchmarks of both; for more rows,
# torch's reads the weights less often.
MAX_ROWS = {torch.float32: 32, torch.bfloat16: 8, torch.float16: 32, torch.float64: 8}


def mkl_leaves_avx512_aside() -> bool:
    """Whether torch multiplies float32 matrices at half of what this processor can do: by MKL, on
    one of AMD's that has AVX-512.
    """
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpuinfo.exists()
        and "AuthenticAMD" in cpuinfo.read_text()
    )


# From so many multiplications on, oneDNN's product is the faster one.
MIN_ONEDNN_WORK = 2**21 if mkl_leaves_avx512_aside() else math.inf


class Linear(nn.Linear):
    """nn.Linear: the same parameters, the same answers but for rounding.

    Nobody knows the other products but this package, so they take plain tensors only, and torchao's
    weights, where no autocast or exported program is wanted; all else goes the usual way.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias  # each a search among the module's parameters
        return fastest_product(input, weight, bias)(input, weight, bias)


def fastest_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """What computes x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    if not (IS_COMPILED and are_plain(x, weight, bias)):
        return quantized_product(x, weight, bias) or F.linear
    if x.numel() <= MAX_ROWS.get(x.dtype, 0) * weight.shape[1] and not torch.is_grad_enabled():
        return few_rows_product
    if x.dtype == torch.float32 and x.numel() * weight.shape[0] >= MIN_ONEDNN_WORK:
        return onednn_product
    return F.linear


def are_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether other products than torch's take these."""
    return (
        type(x) is Tensor
        and type(weight) is nn.Parameter
        and x.is_cpu
        and weight.dtype is x.dtype
        and weight.is_contiguous()
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype is x.dtype))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_exporting()
    )
