# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-2's state space (SSD) in Transformers: Mamba-2, Bamba, Granite 4, Nemotron-H, Zamba 2 and
Falcon-H1.

Shapes: B batch, T time, C hidden size, H heads, G groups of heads, which share keys and queries, K
key dim (there: the size of the state), V value dim (there: the head dim).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from ...mixers.parts.decays import decay_steps
from ...ops.numerics import decay_of_steps
from ...recurrences.linear_attention import LinearInputs, LinearRecurrence
from .parts import ConvolvedLayer, begin, convolve


class SSD(ConvolvedLayer):
    """S_t = exp(-exp(A_log) dt_t) S_(t-1) + dt_t B_t x_t^T,  y_t = S_t^T C_t + D x_t, which is
    linear attention with queries C_t, keys B_t, values x_t and write strengths dt_t.
    """

    limits: ClassVar[Mapping[str, Any]] = {"time_step_limit": (0.3, 1.0)}

    in_proj: nn.Module
    out_proj: nn.Module
    norm: nn.Module
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    num_heads: int
    head_dim: int
    ssm_state_size: int
    intermediate_size: int
    conv_dim: int
    n_groups: int
    time_step_limit: tuple[float, float]

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
        hidden_states, memory = begin(
            self, hidden_states, cache, attention_mask, kwargs, is_transposed=True
        )

        gate, xkq, dt = self.project(hidden_states).split(
            [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
        )
        xkq = convolve(self.conv1d, xkq, memory)
        group_dim = self.n_groups * self.ssm_state_size
        x, k, q = xkq.split([self.intermediate_size, group_dim, group_dim], dim=-1)
        x = x.unflatten(-1, (-1, self.head_dim))
        dt, log_decay = self.steps(dt)
        q, k = (y.unflatten(-1, (self.n_groups, -1)) for y in (q, k))
        y = memory.run(self.recurrence, LinearInputs(q, k, x, log_decay, write_strength=dt))
        memory.write(y.dtype)

        y = (y + x * self.D[:, None].to(x.dtype)).flatten(2)
        y = self.gated_norm(y, gate)
        return self.out_proj(y.to(hidden_states.dtype)).view(B, T, -1)

    @property
    def recurrence(self) -> LinearRecurrence:
        return LinearRecurrence(
            self.num_heads,
            self.ssm_state_size,
            self.head_dim,
            normalize=False,
            in_fp64=self.state_in_fp64,
        )

    def project(self, hidden_states: Tensor) -> Tensor:
        return self.in_proj(hidden_states)

    def steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Step sizes and log decays (B, T, H), float32 or better. Transformers limits the former in
        prompts, and not in steps.
        """
        dt, log_decay = decay_steps(dt, self.dt_bias, self.A_log, rounds=True)
        if self.has_limits:
            dt = dt.clamp(*self.time_step_limit)
            log_decay = decay_of_steps(self.A_log, dt)
        return dt, log_decay

    @property
    def has_limits(self) -> bool:
        low, high = self.time_step_limit
        return low > 0 or high < math.inf

    @property
    def mended(self) -> set[str]:
        return super().mended | ({"steps"} if self.has_limits else set())

    def gated_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.norm(y, gate)


class SSDOfFalcon(SSD):
    """With multipliers before and behind the projection, and perhaps a gate without a norm."""

    mup_vector: Tensor
    ssm_in_multiplier: float
    mamba_rms_norm: bool

    def project(self, hidden_states: Tensor) -> Tensor:
        return self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector

    def gated_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.norm(y, gate) if self.mamba_rms_norm else y * F.silu(gate)
