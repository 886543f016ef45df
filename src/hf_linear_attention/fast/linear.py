# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The product of nn.Linear, faster on the CPU: for few rows, as in generation, and in some dtypes
for many. Modules keep torch's class, by which quantisers and counters find them.
"""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from ..ops.backends import FORCED_BACKEND, Missing, has_compiled, instruction_set, native_op
from ..ops.numerics import is_transformed
from .quantized import are_products_compiled, dtype_name, quantized_product

few_rows_product = native_op("linear")
many_rows_product = native_op("many_rows_linear")
many_rows_product_in = native_op("many_rows_linear_in")  # a dtype that it rounds to
IS_COMPILED = has_compiled()


def processor() -> tuple[str, frozenset[str]]:
    """All that Linux says of the processor, and the flags in it; nothing elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    return text, frozenset(found[1].split() if found else ())


def multiplications_that_are_many() -> dict[torch.dtype, int]:
    """By dtype, from how many multiplications on the compiled product of many rows beats torch's on
    this processor, by benchmarks of both; without a dtype, never.

    torch multiplies float32 by MKL, which leaves AVX-512 aside on AMD's processors. It multiplies
    bfloat16 and float16 by oneDNN, and where that lacks the instructions by plain loops, at a tenth
    of the speed of float32. For bfloat16 it has code for any AVX-512, which takes 4 times as long
    as float32, and on Intel's processors 1.5 times even with AVX512-BF16. (For float32 oneDNN is no
    faster than the compiled product, and keeps code of half a MiB or more for each number of rows
    that it has met.)
    """
    text, flags = processor()
    many = {}
    if "avx2" in flags and IS_COMPILED:
        if "avx512f" in flags and "AuthenticAMD" in text and torch.backends.mkl.is_available():
            many[torch.float32] = 2**24
        has_fast_bfloat16 = "AuthenticAMD" in text and "avx512_bf16" in flags
        if not (has_fast_bfloat16 or "amx_bf16" in flags):
            many[torch.bfloat16] = 2**20
        if "avx512_fp16" not in flags:
            many[torch.float16] = 2**20
    return many


# Up to so many rows the product of few rows is the faster one, by benchmarks of all: those of many
# rows read the weights less often, but prepare them first.
ROWS_ELSEWHERE = {torch.float32: 32, torch.bfloat16: 8, torch.float16: 32, torch.float64: 8}
ROWS_ON = {
    "avx2": {torch.float32: 64, torch.bfloat16: 64, torch.float16: 64, torch.float64: 8},
    **dict.fromkeys(
        ("avx512", "avx512_vnni"),
        {torch.float32: 128, torch.bfloat16: 128, torch.float16: 128, torch.float64: 8},
    ),
    # Weights of bfloat16 are multiplied as they lie, where oneDNN copies them first.
    "avx512_bf16": ROWS_ELSEWHERE | {torch.float32: 128, torch.bfloat16: 96},
    "amx": ROWS_ELSEWHERE | {torch.float32: 128, torch.bfloat16: 128},
}


def rows_that_are_few() -> dict[torch.dtype, int]:
    """By dtype, for the instruction set that the compiled product uses."""
    return ROWS_ON.get(instruction_set(), ROWS_ELSEWHERE)


MANY = multiplications_that_are_many()
MAX_ROWS = rows_that_are_few()

# What `python -m hf_linear_attention` says of each product, and of torch's in its place.
REASONS = {
    few_rows_product: "the compiled product for few rows, which reads the weights at full speed",
    many_rows_product: "the compiled product for many rows, since torch's is slower here",
}
# What multiplies few rows of bfloat16, by instruction set; elsewhere they become floats.
BFLOAT16_BY = {"avx512_bf16": "AVX512-BF16", "amx": "AMX tiles"}


def product_report() -> dict[str, str]:
    """By dtype of x and the weight, which product a linear layer takes on the CPU, and why."""
    if not IS_COMPILED:
        missing = [
            f.reason for f in (few_rows_product, many_rows_product) if isinstance(f, Missing)
        ]
        why = missing[0] if missing else f"HF_LINEAR_ATTENTION_BACKEND={FORCED_BACKEND}"
        return dict.fromkeys(map(dtype_name, MAX_ROWS), f"torch's product ({why})")
    report = {}
    for dtype, rows in MAX_ROWS.items():
        choices = [f"up to {rows} rows without gradients {REASONS[few_rows_product]}"]
        if dtype == torch.bfloat16 and instruction_set() in BFLOAT16_BY:
            choices[0] += f" and multiplies them as they are, by {BFLOAT16_BY[instruction_set()]}"
        if dtype in MANY:
            choices.append(f"from {MANY[dtype]:,} multiplications on {REASONS[many_rows_product]}")
        report[dtype_name(dtype)] = "; ".join([*choices, "else torch's"])
    return report


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """linear(x), for what was made as an nn.Linear: the same but for rounding.

    Nobody knows the other products but this package, so they take plain tensors only, and torchao's
    weights, where no exported program is wanted; all else goes the usual way. Under autocast only
    the product of many rows is taken.
    """
    if is_bare(linear):
        weight, bias = linear.weight, linear.bias  # each a search among the module's parameters
        product = fastest_product(x, weight, bias)
        if product is not F.linear:
            return product(x, weight, bias)
    elif not torch.compiler.is_compiling():
        (hasten if x.is_cpu else restore)(innermost(linear))
    return linear(x)


def is_bare(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is an nn.Linear, and a call of it the product and nothing else."""
    if type(linear) is not nn.Linear:
        return False
    own = vars(linear)
    forward = own.get("forward")
    if forward is not None and (torch.compiler.is_compiling() or not is_fast(forward, linear)):
        return False
    return not (any(own[name] for name in HOOKS) or _has_any_global_hook())


def is_fast(forward: Any, linear: nn.Module) -> bool:
    """Whether a forward is the module's own FastForward: torch's replicas have the original's."""
    return isinstance(forward, FastForward) and forward.args[0]() is linear


def is_hastened(linear: nn.Linear) -> bool:
    return is_fast(vars(linear).get(_name_of_forward(linear)), linear)


def innermost(linear: nn.Module) -> nn.Module:
    """What PEFT's adapters are put around."""
    while (inner := linear._modules.get("base_layer")) is not None:
        linear = inner
    return linear


class FastForward(functools.partial):
    """An nn.Linear's `forward` as an attribute of its own, by the fastest product: for modules that
    others call.
    """

    def __new__(cls, linear: nn.Linear):
        # By a weak reference, or the two would stay until garbage is collected.
        return super().__new__(cls, _forward, ref(linear))

    def __reduce__(self):
        return FastForward, (self.args[0](),)  # of copies and pickles, the copy's


def _forward(reference: Callable[[], Any], input: Tensor) -> Tensor:
    linear = reference()
    if type(linear) is not nn.Linear:  # but what a parametrization, or FSDP2, has made of it
        return type(linear).forward(linear, input)
    weight, bias = linear.weight, linear.bias
    return fastest_product(input, weight, bias)(input, weight, bias)


def hasten(linear: nn.Module) -> nn.Module:
    """The module itself: an nn.Linear has a FastForward now, unless its forward was replaced."""
    name = _name_of_forward(linear)
    forward = vars(linear).get(name)
    is_stock = forward is None or getattr(forward, "__func__", None) is nn.Linear.forward
    if type(linear) is nn.Linear and (is_stock or isinstance(forward, FastForward)):
        if not is_fast(forward, linear):
            setattr(linear, name, FastForward(linear))
    return linear


def restore(linear: nn.Module) -> None:
    """Undoes `hasten`."""
    name = _name_of_forward(linear)
    if isinstance(vars(linear).get(name), FastForward):
        delattr(linear, name)
        if name != "forward":
            setattr(linear, name, MethodType(nn.Linear.forward, linear))


def _name_of_forward(linear: nn.Module) -> str:
    """Of the attribute by which a module computes: accelerate's hooks put their own before it."""
    return "_old_forward" if "_old_forward" in vars(linear) else "forward"


def fastest_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """What computes x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    if not (IS_COMPILED and are_plain(x, weight, bias)):
        return quantized_product(x, weight, bias) or F.linear
    if torch.is_autocast_enabled("cpu"):
        return product_under_autocast(x, weight, bias)
    if weight.dtype is not x.dtype or (bias is not None and bias.dtype is not x.dtype):
        return F.linear
    if x.numel() <= MAX_ROWS.get(x.dtype, 0) * weight.shape[1] and not torch.is_grad_enabled():
        return few_rows_product
    return many_rows_product if is_worth_many(x, weight, x.dtype) else F.linear


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """x (n, in), weight (out, in) -> (n, out), by the fastest product of many rows in their dtype.
    Inside of an autograd function, with plain tensors of any strides.
    """
    is_ours = IS_COMPILED and x.is_cpu and type(x) is Tensor and type(weight) is Tensor
    if is_ours and is_worth_many(x, weight, x.dtype):
        return many_rows_product(x, weight, None)
    return F.linear(x, weight)


def product_under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """That of many rows or torch's, whichever is faster in autocast's dtype."""
    dtype = torch.get_autocast_dtype("cpu")
    is_taken = (
        IS_COMPILED
        and {x.dtype, weight.dtype} <= {torch.float32, dtype}
        and (bias is None or bias.dtype is weight.dtype)
    )
    is_many = is_taken and is_worth_many(x, weight, dtype)
    return many_rows_under_autocast if is_many else F.linear


def is_worth_many(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the product of many rows is the fastest one in this dtype."""
    return x.numel() * weight.shape[0] >= MANY.get(dtype, math.inf)


def many_rows_under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of many rows in autocast's dtype, which F.linear would be computed in. It rounds
    x and the weight while it reads them, and keeps them as they are for gradients, so nothing is
    copied.
    """
    return many_rows_product_in(x, weight, bias, torch.get_autocast_dtype("cpu"))


def products_in_use() -> tuple[bool, bool]:
    """Whether the compiled ones are, of plain weights and of quantised ones."""
    return IS_COMPILED, are_products_compiled()


def are_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether other products than torch's take these, if their dtypes allow it."""
    return (
        type(x) is Tensor
        and type(weight) is nn.Parameter
        and x.is_cpu
        and weight.is_contiguous()
        and (bias is None or type(bias) is nn.Parameter)
        and not torch.compiler.is_exporting()
        and not torch.jit.is_tracing()  # by whom operations are counted
        and not is_transformed()
    )
