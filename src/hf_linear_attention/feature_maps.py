# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Feature maps by name: pointwise ones, which the kernels apply themselves, and modules, which run before them."""

from collections.abc import Callable

import torch
from torch import Tensor


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 without its cancellation for very negative x. Katharopoulos et al., arXiv 2006.16236."""
    # exp sees no positive number: its infinite gradient, times the zero of `where`, would be NaN.
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


# In the order of the kernels' enum (FEATURE_MAPS in _ops.py).
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": elu_plus_one,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": lambda x: x * x.sigmoid(),
    "exp": torch.exp,
}
