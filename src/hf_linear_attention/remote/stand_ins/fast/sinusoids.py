# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Positions as sines and cosines that are added to embeddings: Vaswani et al., "Attention Is All
You Need", arXiv 1706.03762, section 3.5; sines come first.
"""

import math

import torch
from torch import Tensor

from ....ops.numerics import angles_of


def add_sinusoids(x: Tensor, position_ids: Tensor, scale: float | None) -> Tensor:
    """x (B, T, C), times a scale or not, + sinusoidal positions (B or 1, T) of x's dtype."""
    C = x.shape[-1]
    pair = torch.arange(0, C, 2, device=x.device, dtype=torch.float32)
    frequencies = torch.exp(pair * (-math.log(10000.0) / C))
    angles = angles_of(position_ids, frequencies)
    if scale is not None:
        x = x * scale
    return x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)
