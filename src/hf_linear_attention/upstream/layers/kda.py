# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Kimi Delta Attention in Transformers: Kimi Linear, GLM-5 Next, Bailing hybrid.

Shapes: B batch, T time, C hidden size, H heads, K dim of keys, queries and values.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from ...ops.numerics import at_least_float32
from ...recurrences.delta_rule import DeltaInputs, DeltaRecurrence
from .parts import ConvolvedLayer, begin, convolve


class KDA(ConvolvedLayer):
    """The delta rule with a decay per channel, which a module of its own computes."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    b_proj: nn.Module
    g_a_proj: nn.Module
    g_b_proj: nn.Module
    forget_gate: nn.Module
    o_norm: nn.Module
    o_proj: nn.Module
    num_heads: int
    head_dim: int

    @force_accelerate_hooks("conv1d")  # its weights are read without calling it
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

        of_each = [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]
        qkv = convolve(self.conv1d, torch.cat(of_each, dim=-1), memory)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        # In Transformers' order, so that an adapter's dropout draws the same numbers.
        log_decay = at_least_float32(self.forget_gate(hidden_states))
        beta = self.b_proj(hidden_states).sigmoid()
        y = memory.run(self.recurrence, DeltaInputs(q, k, v, beta, log_decay))
        memory.write(y.dtype)

        y = self.o_norm(y, self.gate(hidden_states).unflatten(-1, (-1, self.head_dim)))
        return self.o_proj(y.flatten(2)).view(B, T, -1)

    @property
    def recurrence(self) -> DeltaRecurrence:
        return DeltaRecurrence(
            self.num_heads, self.head_dim, self.head_dim, in_fp64=self.state_in_fp64
        )

    def gate(self, hidden_states: Tensor) -> Tensor:
        """(B, T, H K)"""
        return self.g_b_proj(self.g_a_proj(hidden_states))


class KDAOfBailing(KDA):
    """With a gate of full rank."""

    g_proj: nn.Module

    def gate(self, hidden_states: Tensor) -> Tensor:
        return self.g_proj(hidden_states)
