# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products with torchao's weights of 8 and 4 bits on the CPU, and 4 bits packed there.

torchao's tensors are known by their names, and are read as they lie: nothing is kept beside them.

Products of integers are the faster ones. They take x rounded to 16 bits, which leaves most numbers
of half precision what they are: so rows of these dtypes get them, unless ROUNDING_SETTING in the
environment says otherwise.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.backends import FORCED_BACKEND, Missing, has_compiled, instruction_set, native_op
from ..ops.numerics import is_transformed

int8_product = native_op("int8_linear")
int4_product = native_op("int4_linear")
compiled_dequantize_int4 = native_op("dequantize_int4")
IS_COMPILED = has_compiled()

FEW_ROWS = 64  # with more, torchao makes floats of the weight, once for all of them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of x

ROUNDING_CHOICES = {"half": (torch.bfloat16, torch.float16), "always": DTYPES, "never": ()}
ROUNDING_SETTING = "HF_LINEAR_ATTENTION_ROUND_ACTIVATIONS"

Product = Callable[[Tensor, Any, Tensor | None], Tensor]


def quantized_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product | None:
    """What computes x (..., in), weight (out, in), bias (out,) -> (..., out) where the weight is
    one of torchao's that we multiply here; None where torchao, or torch, does.
    """
    if torch.compiler.is_compiling():
        return None
    kind = _kind(type(weight))
    if kind is None or not x.is_cpu:
        return None
    if _runs_compiled(x, bias) and kind.is_known(weight):
        return kind.product
    return kind.other_product


def bits_of(weight: Tensor) -> int | None:
    """How many bits our product reads of each of a weight's values; None where it is not ours."""
    kind = _kind(type(weight))
    return None if kind is None or not kind.is_known(weight) else kind.bits


def rounded_dtypes() -> tuple[torch.dtype, ...]:
    """Of x that is rounded: what the environment says, or half precision.

    Raises:
        ValueError: it says something else.
    """
    choice = os.environ.get(ROUNDING_SETTING) or "half"
    if choice not in ROUNDING_CHOICES:
        choices = ", ".join(map(repr, ROUNDING_CHOICES))
        raise ValueError(f"{ROUNDING_SETTING} must be one of {choices}, got {choice!r}")
    return ROUNDING_CHOICES[choice]


ROUNDED_DTYPES = rounded_dtypes()  # read once, at import

# Up to how many rows of half precision products of integers take less time, by measurements, where
# that is more. Without AMX torch multiplies half precision more slowly than floats, by whichever
# processor's instructions.
ANY = sys.maxsize
MOST_ROUNDED_ROWS = {"avx2": ANY, "avx512": ANY, "avx512_vnni": ANY, "amx": 256}


def rows_that_are_ours() -> dict[torch.dtype, int]:
    """By x's dtype, up to how many rows our products are the faster ones."""
    halves = set(ROUNDED_DTYPES) - {torch.float32}
    most = MOST_ROUNDED_ROWS.get(instruction_set(), FEW_ROWS)
    return dict.fromkeys(DTYPES, FEW_ROWS) | dict.fromkeys(halves, most)


MAX_ROWS = rows_that_are_ours()


def is_rounded(x: Tensor) -> bool:
    """Whether compiled products take x (..., in) rounded to 16 bits."""
    return x.dtype in ROUNDED_DTYPES


def are_products_compiled() -> bool:
    return IS_COMPILED


def quantized_report() -> dict[str, str]:
    """By bits of the weight, which product a linear layer takes on the CPU, and why."""
    missing = [f.reason for f in (int8_product, int4_product) if isinstance(f, Missing)]
    why = missing[0] if missing else f"HF_LINEAR_ATTENTION_BACKEND={FORCED_BACKEND}"
    compiled = "the compiled product, which reads the values as they are"
    first = f"up to {FEW_ROWS} rows without gradients {compiled}"
    if ROUNDED_DTYPES:
        first += f", of {_names(ROUNDED_DTYPES)} as integers, with x rounded to 16 bits"
    more = {dtype: rows for dtype, rows in MAX_ROWS.items() if rows > FEW_ROWS}
    if more:
        [most] = set(more.values())
        how_many = "any number of" if most == ANY else f"up to {most}"
        first += f"; {how_many} rows of {_names(list(more))}, too"
    first += "; else "
    return {
        f"{kind.bits} bits": f"{first}{kind.other}" if IS_COMPILED else f"{kind.other} ({why})"
        for kind in (Int8, Int4)
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(dtype_name, dtypes))


def _runs_compiled(x: Tensor, bias: Tensor | None) -> bool:
    return (
        IS_COMPILED
        and type(x) is Tensor
        and x.dim() > 0
        and x.numel() <= MAX_ROWS.get(x.dtype, 0) * x.shape[-1]
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype is x.dtype))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed()
    )


# ---- torchao's tensors ----
#
# Only the plain tensors that they are made of are asked for anything: an attribute of a tensor that
# torchao's own class answers takes many microseconds.


class Int8:
    """Values (out, in) of 8 bits, W = (qdata - zero_point) scale: Int8WeightOnlyConfig's, for each
    output, group of inputs, or all together; and IntxWeightOnlyConfig's, of 1 to 8 bits, each in a
    byte.
    """

    bits = 8
    other_product: Product | None = None
    other = "torchao's"

    @staticmethod
    def is_known(weight: Any) -> bool:
        return (
            getattr(weight, "act_quant_kwargs", None) is None
            and getattr(weight, "activation_quantization", None) is None
            and getattr(weight, "act_pre_scale", None) is None
            and weight.qdata.is_contiguous()
            and weight.scale.dim() == 2
            and (weight.block_size[0] == 1 or weight.scale.numel() == 1)
        )

    @staticmethod
    def product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return int8_product(x, weight.qdata, weight.scale, weight.zero_point, bias, is_rounded(x))


class Int4:
    """Values (out, in / 2), two in a byte, W = qdata scale + zero_point, which are (groups, out):
    Int4WeightOnlyConfig's in its plain format.
    """

    bits = 4
    other = "torch's, of floats that are made of them"

    @staticmethod
    def is_known(weight: Any) -> bool:
        return (
            weight.activation_dtype == torch.bfloat16  # not: float8
            and weight.act_pre_scale is None
            and weight.qdata.dim() == 2
            and weight.block_size[0] == 1
            and weight.block_size[1] % 2 == 0
            and weight.qdata.is_contiguous()
        )

    @staticmethod
    def product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return int4_product(x, weight.qdata, weight.scale, weight.zero_point, bias, is_rounded(x))

    @staticmethod
    def other_product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """torchao's own needs mslk, a package for GPUs, so on the CPU there is none."""
        if weight.act_pre_scale is not None:
            x = x * weight.act_pre_scale
        return F.linear(x, Int4.floats(x, weight), bias)

    @staticmethod
    def floats(x: Tensor, weight: Any) -> Tensor:
        """The weight in x's dtype."""
        is_taken = IS_COMPILED and x.dtype in DTYPES and type(x) is Tensor and not is_transformed()
        if is_taken and Int4.is_known(weight):
            return compiled_dequantize_int4(x, weight.qdata, weight.scale, weight.zero_point)
        return dequantize_int4(weight).to(x.dtype)


KINDS: dict[str, Any] = {"Int8Tensor": Int8, "IntxUnpackedToInt8Tensor": Int8, "Int4Tensor": Int4}


@cache
def _kind(weight_class: type) -> Any:
    is_torchaos = weight_class.__module__.partition(".")[0] == "torchao"
    return KINDS.get(weight_class.__name__) if is_torchaos else None


def dequantize_int4(weight: Any) -> Tensor:
    """What an Int4Tensor (out, in) stands for, in float32."""
    low, high = (weight.qdata << 4) >> 4, weight.qdata >> 4
    values = torch.stack((low, high), dim=-1).flatten(-2).float()
    groups = values.unflatten(-1, (-1, weight.block_size[-1]))
    scale, zero = (x.float().t().unsqueeze(-1) for x in (weight.scale, weight.zero_point))
    return (groups * scale + zero).flatten(-2)
