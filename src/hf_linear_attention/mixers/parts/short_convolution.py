# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution of a mixer's projections."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...cache.layer_state import LayerMemory
from ...recurrences.convolution import ConvolutionInputs, ConvolutionWindow


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the last `kernel_size` real tokens, then SiLU."""

    has_parameters_per_head = True

    def __init__(self, name: str, channels: int, kernel_size: int, bias: bool = False):
        super().__init__()
        self.recurrence = ConvolutionWindow(name, channels, kernel_size)
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))  # as in nn.Conv1d
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset_parameters(self) -> None:
        """Draws weight and bias as nn.Conv1d does; the model's `_init_weights` calls it."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = self.recurrence.kernel_size**-0.5
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, memory: LayerMemory) -> Tensor:
        """x (B, T, C) -> y of that shape."""
        return memory.run(self.recurrence, ConvolutionInputs(x, self.weight, self.bias))
