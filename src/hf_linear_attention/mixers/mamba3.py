# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-3's state space with one input and output (SISO) as a layer of a model: Mamba-2's without
convolutions, whose steps are trapezoids, for which each token writes the one before again. Keys and
queries are turned by sums of angles that tokens give.

Source: Lahoti et al., "Mamba-3: Improved Sequence Modeling using State Space Principles", arXiv
2603.15569; sizes, names and first values as in flash-linear-attention.

Shapes: B batch, T time, C hidden size, H heads of values, G groups of heads, which share keys and
queries but for biases, K key dim (there: the size of the state), V value dim (there: the head dim),
A pairs of a key's features that are turned.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..fast.rms_norm import RMSNorm
from ..ops.numerics import at_least_float32, bounded
from ..ops.tokens import Tokens
from ..recurrences.delay import Delay, DelayInputs
from ..recurrences.elementwise_scan import ElementwiseInputs, ElementwiseRecurrence
from ..recurrences.interface import Recurrence
from ..recurrences.linear_attention import LinearInputs, LinearRecurrence
from .linear_attention import Heads, LinearAttentionBase
from .mamba2 import draw_steps, of_own_heads
from .parts.tensor_parallel import HeadShard, find_head_shard


class Steps(NamedTuple):
    """Of this rank's heads, (B, T, H), in float32 or better.

    log_decay: A dt.
    own: lambda dt, by which a token is written for its own step.
    again: (1 - lambda) dt, by which the one before it is.
    """

    log_decay: Tensor
    own: Tensor
    again: Tensor
    turns: Tensor  # (B, T, H, A), of each pair, in radians


class Mamba3(LinearAttentionBase):
    """Self-attention with queries C_t, keys B_t, both turned by the angles of all tokens so far,
    values x_t and step sizes dt_t, for A_t = -softplus(...) and lambda_t = sigmoid(...):

        S_t = exp(A_t dt_t) (S_(t-1) + (1 - lambda_t) dt_t B_(t-1) x_(t-1)^T)
              + lambda_t dt_t B_t x_t^T,
        y_t = S_t^T C_t + D x_t,  gated by z.

    What is in parentheses is the state that is kept, U_t: then each token is written once, a token
    late, and nothing is divided by a decay. S_t is exp(A_t dt_t) U_t and the token's own part.
    """

    B_proj: nn.Linear
    C_proj: nn.Linear

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        heads = Heads.sharing_keys(config)
        super().__init__(config, config.hidden_size, heads, made=("v",))
        self.layer_idx = layer_idx
        self.first_steps = config.time_step_min, config.time_step_max, config.time_step_floor
        C, H, G, K, V = config.hidden_size, heads.values, heads.keys, heads.key_dim, heads.value_dim
        self.pairs = int(K * config.rope_fraction) // 2
        if self.pairs == 0:
            raise ValueError(
                f"linear_key_head_dim={K} times rope_fraction={config.rope_fraction} must be at "
                "least 2, for features are turned in pairs"
            )
        self.smallest_A = config.A_floor
        sizes = {"B": G * K, "C": G * K, "dt": H, "A": H, "trap": H, "angle": self.pairs}
        for name, size in sizes.items():
            self.add_module(f"{name}_proj", nn.Linear(C, size, bias=config.attention_bias))
        for name in ("B", "C"):
            self.add_module(f"{name}_norm", RMSNorm(K, eps=config.output_norm_eps))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(H, 1, K)))
        self.D = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.reset_parameters()
        self.key_before = Delay("key_before", H * K, is_of_heads=True)
        self.value_before = Delay("value_before", H * V, is_of_heads=True)
        self.step_before = Delay("step_before", H * 2, is_exact=True, is_of_heads=True)
        # In float64: sums of millions of angles, of which all that counts is where on the circle.
        self.angle = ElementwiseRecurrence(H, self.pairs, in_fp64=True)
        self.recurrence = LinearRecurrence(
            *(H, K, V), normalize=False, in_fp64=config.state_in_fp64
        )

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        delays = self.key_before, self.value_before, self.step_before
        return [self.recurrence, *delays, self.angle]

    def reset_parameters(self) -> None:
        """Writes dt_bias, as Mamba-2's, and ones to the biases of keys and queries and to D. The
        model's `_init_weights` calls it.
        """
        for x in (self.B_bias, self.C_bias, self.D):
            init.ones_(x)
        draw_steps(self.dt_bias, self.first_steps)

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, for there are none."""
        B, T, C = hidden_states.shape
        hidden_states, _, memory = self.begin(hidden_states, tokens, past_key_values)

        v = project(self.v_proj, hidden_states)
        shard = find_head_shard(v, self.v_proj, self.heads.values, "linear_num_value_heads")
        v = self.by_heads(v, self.heads.value_dim)
        steps = self._steps(hidden_states, shard)
        angles = self._angles(steps.turns, memory)
        k, q = (
            turned(self._of_heads(name, hidden_states, shard), angles).to(v.dtype)
            for name in ("B", "C")
        )
        k_before, v_before = (
            memory.run(delay, DelayInputs(x.flatten(2))).view(x.shape)
            for delay, x in ((self.key_before, k), (self.value_before, v))
        )
        of_steps = torch.stack([steps.log_decay, steps.own], -1)
        before = memory.run(self.step_before, DelayInputs(of_steps.flatten(2)))
        log_decay, own = before.view(of_steps.shape).unbind(-1)
        inputs = LinearInputs(q, k_before, v_before, log_decay, own + steps.again)
        y = memory.run(self.recurrence, inputs)
        memory.write(v.dtype)

        D: Tensor = self.D
        if shard is not None:
            D = shard.take(D, 0)
        of_itself = steps.own * (at_least_float32(q) * k).sum(-1) + D
        y = steps.log_decay.exp()[..., None] * y + of_itself[..., None] * v
        return self.project_out(hidden_states, y.to(v.dtype), shard).view(B, T, C), None

    def _steps(self, hidden_states: Tensor, shard: HeadShard | None) -> Steps:
        names = ("dt", "A", "trap", "angle")
        dt, A, trap, angle = (
            at_least_float32(project(getattr(self, f"{name}_proj"), hidden_states))
            for name in names
        )
        dt = nn.functional.softplus(dt + self.dt_bias)
        A = -bounded(nn.functional.softplus(A), self.smallest_A)
        share = trap.sigmoid()
        if shard is not None:
            dt, A, share = (shard.take(x, 2) for x in (dt, A, share))
            angle = shard.share(angle)
        turns = math.pi * angle.tanh()[:, :, None] * dt[..., None]
        return Steps(A * dt, share * dt, (1 - share) * dt, turns)

    def _of_heads(self, name: str, hidden_states: Tensor, shard: HeadShard | None) -> Tensor:
        """Keys ("B") or queries ("C") of this rank's heads, (B, T, H, K), in float32 or better."""
        x = self.by_heads(project(getattr(self, f"{name}_proj"), hidden_states), self.heads.key_dim)
        x = of_own_heads(getattr(self, f"{name}_norm")(x), self.heads, shard)
        bias = getattr(self, f"{name}_bias")
        if shard is not None:
            bias = shard.take(bias, 0)
        bias = at_least_float32(bias)[:, 0]
        return x.repeat_interleave(len(bias) // x.shape[2], dim=2) + bias

    def _angles(self, turns: Tensor, memory: LayerMemory) -> Tensor:
        """Of every token (B, T, H, A), from 0 to 2 pi."""
        x = turns.flatten(2).double()
        sums = memory.run(self.angle, ElementwiseInputs(x, torch.zeros_like(x)))
        return sums.remainder(2 * math.pi).to(turns.dtype).view(turns.shape)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x (B, T, H, K), with as many pairs of neighbouring features turned as there are angles (B, T,
    H, A).
    """
    size = 2 * angles.shape[-1]
    a, b = x[..., :size:2], x[..., 1:size:2]
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([pairs.flatten(3), x[..., size:]], -1)
