# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Layers of a short convolution between two gates in Transformers: LFM2, LFM2-MoE and LFM3.

Shapes: B batch, T time, C hidden size.
"""

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from ...recurrences.interface import Recurrence
from .parts import ReplacedLayer, begin, convolve, window_of


class GatedConvolution(ReplacedLayer):
    """y_t = g_t sum_j weight_j (h x)_{t-k+1+j}, channel by channel, where x and the gates g and h
    are projections of the hidden state.
    """

    in_proj: nn.Module
    out_proj: nn.Module
    conv: nn.Conv1d
    layer_idx: int

    @force_accelerate_hooks("conv")  # its weights are read without calling it
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """hidden_states (B, T, C) -> (B, T, C)"""
        B, T, _ = hidden_states.shape
        hidden_states, memory = begin(self, hidden_states, cache, attention_mask, kwargs)
        gate_in, gate_out, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        y = gate_out * convolve(self.conv, gate_in * x, memory, activation=None)
        memory.write(y.dtype)
        return self.out_proj(y).view(B, T, -1)

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        return [window_of(self.conv, activation=None)]
