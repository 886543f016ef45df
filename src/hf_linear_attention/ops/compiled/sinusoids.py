# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sines and cosines of positions, added to embeddings on the CPU: the compiled op and its fake."""

import torch
from torch import Tensor

from .library import ops, register_fake

_add_sinusoids = ops.add_sinusoids.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def add_sinusoids(x: Tensor, position_ids: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """x scale + sines, then cosines, of position_ids frequencies on the CPU, without gradient.

    Args:
        x: (B, T, C) of float32, bfloat16, float16 or float64.
        position_ids: (B, T) or (1, T) int64.
        frequencies: (C / 2,) float32.

    Returns:
        y (B, T, C). Angles, sines and cosines are float32; these, and x scale, are rounded to x's
        dtype before they are added, as PyTorch does it.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _add_sinusoids(x.contiguous(), position_ids.contiguous(), frequencies, scale)


@register_fake("add_sinusoids", _registrations)
def _fake_add_sinusoids(x, position_ids, frequencies, scale):
    return x.new_empty(x.shape)
