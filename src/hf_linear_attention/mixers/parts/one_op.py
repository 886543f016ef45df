# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""When several operations on the CPU, element by element, become one of the compiled library."""

import torch
from torch import Tensor, nn

from ...ops.backends import has_compiled
from ...ops.numerics import is_transformed, needs_grad

IS_COMPILED = has_compiled()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes_one_op(x: Tensor, *alike: Tensor, floats: tuple[Tensor, ...] = ()) -> bool:
    """Whether no gradient is wanted of these, nor a graph, and all but x are contiguous: `alike` in
    x's dtype, `floats` in this or float32.
    """
    others = *alike, *floats
    return (
        IS_COMPILED
        and x.is_cpu
        and x.dtype in DTYPES
        and all(type(y) is Tensor or type(y) is nn.Parameter for y in (x, *others))
        and all(y.dtype is x.dtype for y in alike)
        and all(y.dtype in (x.dtype, torch.float32) for y in floats)
        and all(y.is_contiguous() for y in others)
        and not (torch.is_grad_enabled() and needs_grad(x, *others))
        and not torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not is_transformed()
    )
