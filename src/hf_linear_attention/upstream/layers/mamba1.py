# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba's state space in Transformers: Mamba, Falcon-Mamba, Jamba and Zamba.

Shapes: B batch, T time, C hidden size, I channels, N sums of a state for each channel, R rank of
the step sizes, H heads of P channels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from ...ops.numerics import at_least_float32
from ...recurrences.selective_scan import SelectiveInputs, SelectiveScanRecurrence
from .parts import ConvolvedLayer, begin, convolve


class Mamba1(ConvolvedLayer):
    """S_t = exp(-dt_t exp(A_log)) S_(t-1) + dt_t x_t B_t,  y_t = S_t . C_t + D x_t, channel by
    channel, where dt_t, B_t and C_t are made of x_t; then a gate.
    """

    in_proj: nn.Module
    x_proj: nn.Module
    dt_proj: nn.Module
    out_proj: nn.Module
    A_log: Tensor
    D: Tensor
    time_step_rank: int
    ssm_state_size: int

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

        x, gate = self.split(self.in_proj(hidden_states))
        x = convolve(self.conv1d, x, memory)
        y = memory.run(self.recurrence, self.inputs_of_scan(x))
        memory.write(y.dtype)

        y = (y.flatten(2) * F.silu(gate)).to(hidden_states.dtype)
        return self.out_proj(y).view(B, T, -1)

    @property
    def mended(self) -> set[str]:
        return super().mended | {"pieces"}

    @property
    def recurrence(self) -> SelectiveScanRecurrence:
        return SelectiveScanRecurrence(self.A_log, self.D, in_fp64=self.state_in_fp64)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, 2 I) -> what is convolved, and the gate, (B, T, I) each."""
        x, gate = projected.chunk(2, dim=-1)
        return x, gate

    def inputs_of_scan(self, x: Tensor) -> SelectiveInputs:
        """What SelectiveScanRecurrence reads, made of x (B, T, I)."""
        N = self.ssm_state_size
        dt, write, read = self.x_proj(x).split([self.time_step_rank, N, N], dim=-1)
        dt, write, read = self.normed(dt, write, read)
        dt = F.softplus(at_least_float32(self.dt_proj(dt)))
        return SelectiveInputs(x, dt, write.to(x.dtype), read.to(x.dtype))

    def normed(self, dt: Tensor, write: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dt, write, read


class Mamba1WithNorms(Mamba1):
    """Falcon-Mamba's and Jamba's."""

    dt_layernorm: nn.Module
    b_layernorm: nn.Module
    c_layernorm: nn.Module

    def normed(self, dt: Tensor, write: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.dt_layernorm(dt), self.b_layernorm(write), self.c_layernorm(read)


class Mamba1OfZamba(Mamba1):
    """With heads, each of which makes dt, B and C of its own channels."""

    x_proj_weight: Tensor  # (H, R + 2 N, P)
    dt_proj_weight: Tensor  # (H, P, R)
    dt_proj_bias: Tensor  # (H, P)
    n_mamba_heads: int

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = projected.unflatten(-1, (-1, 2)).unbind(-1)
        return x, gate

    def inputs_of_scan(self, x: Tensor) -> SelectiveInputs:
        N = self.ssm_state_size
        x = x.unflatten(-1, (self.n_mamba_heads, -1))
        of_heads = torch.einsum("bthp,hrp->bthr", x, self.x_proj_weight)
        dt, write, read = of_heads.split([self.time_step_rank, N, N], dim=-1)
        dt = torch.einsum("bthr,hpr->bthp", dt, self.dt_proj_weight)
        dt = F.softplus(at_least_float32(dt) + self.dt_proj_bias)
        return SelectiveInputs(x, dt, write.to(x.dtype), read.to(x.dtype))
