# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Gated DeltaNet in Transformers: Qwen3-Next, Qwen3.5, Qwen4, OLMo Hybrid.

Shapes: B batch, T time, C hidden size, Hk heads of keys and queries, Hv of values, K key dim, V
value dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from ...mixers.parts.decays import decay_steps
from ...recurrences.delta_rule import DeltaInputs, DeltaRecurrence
from .parts import ConvolvedLayer, begin, convolve


class GatedDelta(ConvolvedLayer):
    """Qwen3.5's, and what the others share: projections, one convolution over queries, keys and
    values, the delta rule with a decay per head, a gated norm of its outputs.
    """

    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    norm: nn.Module
    out_proj: nn.Module
    A_log: Tensor
    dt_bias: Tensor
    key_dim: int
    value_dim: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

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

        qkv, z, b, a = self.project(hidden_states)
        qkv = convolve(self.conv1d, qkv, memory)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        _, log_decay = decay_steps(a, self.dt_bias, self.A_log)
        inputs = DeltaInputs(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            self.beta(b),
            log_decay,
        )
        y = memory.run(self.recurrence, inputs)
        memory.write(y.dtype)

        z = z.unflatten(-1, (-1, self.head_v_dim))
        return self.project_out(y, z).view(B, T, -1)

    @property
    def recurrence(self) -> DeltaRecurrence:
        return DeltaRecurrence(
            self.num_v_heads, self.head_k_dim, self.head_v_dim, in_fp64=self.state_in_fp64
        )

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, T, 2 Hk K + Hv V), the gate (B, T, Hv V), and what the write
        strength and the decay are made of, (B, T, Hv) each.
        """
        return (
            self.in_proj_qkv(hidden_states),
            self.in_proj_z(hidden_states),
            self.in_proj_b(hidden_states),
            self.in_proj_a(hidden_states),
        )

    def beta(self, b: Tensor) -> Tensor:
        return b.sigmoid()

    def project_out(self, y: Tensor, z: Tensor) -> Tensor:
        """y and the gate (B, T, Hv, V) -> (B, T, C)"""
        return self.out_proj(self.norm(y, z).flatten(2))


class GatedDeltaOfQwen3Next(GatedDelta):
    """Two projections, in which each head of keys lies beside its heads of values."""

    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module
    fix_query_key_value_ordering: Callable[..., tuple[Tensor, ...]]

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        return torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), z.flatten(2), b, a


class GatedDeltaOfOlmo(GatedDelta):
    """A projection for each, and perhaps write strengths up to 2."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    g_proj: nn.Module
    b_proj: nn.Module
    a_proj: nn.Module
    o_norm: nn.Module
    o_proj: nn.Module
    allow_neg_eigval: bool

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]
        # In Transformers' order, so that an adapter's dropout draws the same numbers.
        b, a = self.b_proj(hidden_states), self.a_proj(hidden_states)
        return torch.cat(qkv, dim=-1), self.g_proj(hidden_states), b, a

    def beta(self, b: Tensor) -> Tensor:
        return b.sigmoid() * 2 if self.allow_neg_eigval else b.sigmoid()

    def project_out(self, y: Tensor, z: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(y, z).flatten(2))
