# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A recurrence that the package does not have, added as docs/adding_a_recurrence.md says.

m_t = 0.9 m_(t-1) + x_t, channel by channel; padding neither adds nor fades.

Shapes: B batch, T time, C channels.
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn

from hf_linear_attention.cache.layer_state import LayerMemory
from hf_linear_attention.mixers.facts import MixerFacts
from hf_linear_attention.ops.numerics import at_least_float32
from hf_linear_attention.recurrences.interface import Recurrence, StateSize, sum_of_later

MovingInputs = namedtuple("MovingInputs", "x")  # (B, T, C)


@dataclass(frozen=True)
class MovingSum(Recurrence):
    """The state is "m" (B, C)."""

    channels: int

    def state_sizes(self):
        return {"m": StateSize((self.channels,), is_sum=True)}

    def start(self, inputs):
        return {"m": at_least_float32(torch.zeros_like(inputs.x[:, 0]))}

    def run(self, inputs, state, tokens):
        x = at_least_float32(inputs.x)
        m = state["m"] if "m" in state else torch.zeros_like(x[:, :1].sum(1))
        real = x.new_ones(x.shape[:2]) if tokens.key_mask is None else tokens.key_mask.to(x.dtype)
        first, outputs = first_tokens(x.shape[1], tokens.cu_seqlens, x.device), []
        for t in range(x.shape[1]):
            now = real[:, t, None]
            m = torch.where(now != 0, (0.0 if first[t] else 0.9) * m + x[:, t], m)
            outputs.append(m * now)
        return torch.stack(outputs, 1) if outputs else x, {"m": m.clone()}

    def piece(self, inputs, tokens):
        real = torch.ones_like(inputs.x[..., 0]) if tokens.key_mask is None else tokens.key_mask
        state = super().piece(inputs, tokens)
        return {**state, "tokens": real.sum(1).to(state["m"].dtype)}

    def combine(self, pieces):
        return {"m": (pieces["m"] * 0.9 ** sum_of_later(pieces["tokens"])[..., None]).sum(0)}


def first_tokens(T, cu_seqlens, device):
    """Whether each token (T,) begins a packed sequence after another."""
    is_first = torch.zeros(T + 1, dtype=torch.bool, device=device)
    return is_first if cu_seqlens is None else is_first.index_fill(0, cu_seqlens.long(), True)


class MovingSumMixer(nn.Module):
    """In, summed, and out."""

    facts = MixerFacts(reads_the_past=False)

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.recurrences = [MovingSum(config.hidden_size)]

    def forward(self, hidden_states, tokens, past_key_values=None, **kwargs):
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        memory = LayerMemory(cache, tokens, hidden_states.shape[1])
        x = self.v_proj(tokens.one_row(hidden_states)[0])
        y = memory.run(self.recurrences[0], MovingInputs(x)).to(x.dtype)
        memory.write(x.dtype)
        return self.o_proj(y).view(hidden_states.shape), None
