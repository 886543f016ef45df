# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Positions as sines and cosines that are added to embeddings.

Vaswani et al., "Attention Is All You Need", arXiv 1706.03762, section 3.5; sines come first.

Shapes: B batch, T time, C hidden size.
"""

import math

import torch
from torch import Tensor

from ..ops.backends import has_compiled, native_op
from ..ops.numerics import angles_of, is_transformed

compiled_add = native_op("add_sinusoids")
IS_COMPILED = has_compiled()


def frequencies(dim: int, device: torch.device) -> Tensor:
    """Radians per position of dim / 2 waves, float32."""
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    return torch.exp(pair * (-math.log(10000.0) / dim))


def sinusoidal_positions(position_ids: Tensor, dim: int) -> Tensor:
    """sin and cos of each position at dim / 2 wavelengths, (..., dim) float32, for any position."""
    angles = angles_of(position_ids, frequencies(dim, position_ids.device))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def add_sinusoids(x: Tensor, position_ids: Tensor, scale: float | None) -> Tensor:
    """x (B, T, C), times a scale or not, + sinusoidal positions (B or 1, T) of x's dtype; by one
    operation for a generated token.
    """
    C = x.shape[-1]
    if is_generated(x, position_ids):
        return compiled_add(x, position_ids, frequencies(C, x.device), scale or 1.0)
    if scale is not None:
        x = x * scale
    return x + sinusoidal_positions(position_ids, C).to(x.dtype)


def is_generated(x: Tensor, position_ids: Tensor) -> bool:
    """Whether this is one token in each row, for which no gradient and no graph is wanted."""
    return (
        IS_COMPILED
        and x.shape[1] == 1
        and x.is_cpu
        and type(x) is Tensor
        and type(position_ids) is Tensor
        and position_ids.dtype == torch.long
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not is_transformed()
    )
