# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""nn.Linear, faster on the CPU: for few rows, as in generation, and in some dtypes for many."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .backends import has_compiled, native_op
from .quantized import quantized_product

few_rows_product = native_op("linear", version=1)
many_rows_product = native_op("many_rows_linear", version=1)
onednn_product = native_op("onednn_linear", version=1)
IS_COMPILED = has_compiled(few_rows_product, onednn_product)


def products_of_many_rows() -> dict[torch.dtype, tuple[int, Callable[..., Tensor]]]:
    """What beats torch's products on this processor, by dtype: a number of multiplications, by
    benchmarks of both, and the product that is faster from there on.

    torch multiplies float32 by MKL, which leaves AVX-512 aside on AMD's processors, where oneDNN
    takes half the time. It multiplies bfloat16 and float16 by oneDNN, and where that lacks the
    instructions by plain loops, at a tenth of the speed of float32.
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    products: dict[torch.dtype, tuple[int, Callable[..., Tensor]]] = {}
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if "AuthenticAMD" in text and "avx512f" in flags and has_both:
        products[torch.float32] = 2**21, onednn_product
    if "avx2" in flags and has_compiled(many_rows_product):
        if "avx512f" not in flags:
            products[torch.bfloat16] = 2**20, many_rows_product
        if "avx512_fp16" not in flags:
            products[torch.float16] = 2**20, many_rows_product
    return products


MANY_ROWS = products_of_many_rows()
TORCH = (0, F.linear)

# Up to so many rows the product of few rows is the faster one, by benchmarks of all: those of many
# rows read the weights less often, but prepare them first.
MAX_ROWS = {
    torch.float32: 32,
    torch.bfloat16: 16 if torch.bfloat16 in MANY_ROWS else 8,
    torch.float16: 32,
    torch.float64: 8,
}


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
    least, product = MANY_ROWS.get(x.dtype, TORCH)
    return product if x.numel() * weight.shape[0] >= least else F.linear


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
