# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The product of a linear layer, which the package has faster ones for."""

from torch import Tensor, nn


def project(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x)
