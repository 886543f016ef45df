# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-2's state space as a layer of a model: linear attention of convolved projections, whose
step size says how strongly a token is written and how much is forgotten for it.

Source: Dao and Gu, "Transformers are SSMs" (Mamba-2), arXiv 2405.21060, section 7; sizes, names and
first values as in Transformers' Mamba2Mixer.

Shapes: B batch, T time, C hidden size, H heads of values, G groups of heads, which share keys and
queries, K key dim (there: the size of the state), V value dim (there: the head dim).
"""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..fast.linear import project
from ..ops.numerics import bounded, decay_of_steps
from ..ops.tokens import Tokens
from ..recurrences.linear_attention import LinearInputs, LinearRecurrence
from .linear_attention import Heads, LinearAttentionBase
from .parts.decays import decay_steps, inverse_softplus
from .parts.tensor_parallel import HeadShard, find_head_shard


class Mamba2(LinearAttentionBase):
    """Self-attention with queries C_t, keys B_t, values x_t and step sizes dt_t:

        S_t = exp(-exp(A_log) dt_t) S_(t-1) + dt_t B_t x_t^T,  y_t = S_t^T C_t + D x_t

    and a norm of y, gated by z, over each group of heads. x and z are the values (v_proj) and the
    gate (g_proj) of other layers, and split by heads where ranks share them. B and C are small: all
    ranks compute them, were there a single group.
    """

    B_proj: nn.Linear
    C_proj: nn.Linear

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        heads = Heads.sharing_keys(config)
        super().__init__(config, config.hidden_size, heads, made=("v",))
        self.layer_idx = layer_idx
        self.limits = tuple(config.time_step_limit or (0.0, math.inf))
        self.first_steps = config.time_step_min, config.time_step_max, config.time_step_floor
        C, bias = config.hidden_size, config.attention_bias
        for name in ("B", "C"):
            self.sizes[name] = heads.keys * heads.key_dim
            self.add_module(f"{name}_proj", nn.Linear(C, self.sizes[name], bias=bias))
        self.dt_proj = nn.Linear(C, heads.values, bias=bias)
        self.add_convolutions(config)
        self.A_log = nn.Parameter(torch.empty(heads.values))
        self.D = nn.Parameter(torch.empty(heads.values))
        self.dt_bias = nn.Parameter(torch.empty(heads.values))
        self.reset_parameters()
        self.recurrence = LinearRecurrence(
            num_heads=heads.values,
            key_dim=heads.key_dim,
            value_dim=heads.value_dim,
            normalize=False,
            in_fp64=config.state_in_fp64,
        )

    def reset_parameters(self) -> None:
        """Writes A_log, D and dt_bias: A = 1 ... H, D = 1, and steps log-uniform between the
        config's time_step_min and time_step_max. The model's `_init_weights` calls it.
        """
        H = self.heads.values
        init.copy_(self.A_log, torch.arange(1, H + 1, device="cpu").float().log())
        init.ones_(self.D)
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

        of_each = self.v_proj, self.B_proj, self.C_proj
        v, k, q = (project(linear, hidden_states) for linear in of_each)
        shard = find_head_shard(v, self.v_proj, self.heads.values, "linear_num_value_heads")
        v = self.convolve("v", v, shard, memory)
        k, q = self.convolve("B", k, None, memory), self.convolve("C", q, None, memory)
        q, (k, v) = self.by_heads(q, self.heads.key_dim), self.split(k, v)
        k, q = of_own_heads(k, self.heads, shard), of_own_heads(q, self.heads, shard)
        log_decay, write_strength, skip = self._steps(hidden_states, shard)

        q, k = q.to(v.dtype), k.to(v.dtype)
        y = memory.run(self.recurrence, LinearInputs(q, k, v, log_decay, write_strength))
        memory.write(v.dtype)
        y = y + v * skip.to(v.dtype)
        return self.project_out(hidden_states, y, shard).view(B, T, C), None

    def _steps(
        self, hidden_states: Tensor, shard: HeadShard | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's heads: log decays and write strengths (B, T, H), float32 or better, and D
        (H, 1).
        """
        x = project(self.dt_proj, hidden_states)
        dt, log_decay = decay_steps(x, self.dt_bias, self.A_log)
        if self.limits != (0.0, math.inf):  # which it can't leave
            dt = bounded(dt, *self.limits)
            log_decay = decay_of_steps(self.A_log, dt)
        D = self.D[:, None]
        if shard is not None:
            log_decay, dt, D = shard.take(log_decay, 2), shard.take(dt, 2), shard.take(D, 0)
        return log_decay, dt, D


def draw_steps(dt_bias: Tensor, sizes: tuple[float, float, float]) -> None:
    """Writes biases (H,) of steps whose softplus is log-uniform between the first two sizes, and at
    least the third.
    """
    smallest, largest, floor = sizes
    steps = torch.empty_like(dt_bias, dtype=torch.float32, device="cpu")
    steps = steps.uniform_(math.log(smallest), math.log(largest)).exp()
    init.copy_(dt_bias, inverse_softplus(steps.clamp(min=floor)))


def of_own_heads(x: Tensor, heads: Heads, shard: HeadShard | None) -> Tensor:
    """Of all groups' keys or queries (B, T, G, K) those that this rank's heads share."""
    if shard is None:
        return x
    ranks = shard.num_ranks
    parts = math.lcm(heads.keys, ranks)
    if heads.values % parts != 0:
        raise ValueError(
            f"linear_num_value_heads={heads.values} must be a multiple of {parts}, so "
            f"that {ranks} ranks of tensor parallelism have equal shares of "
            f"linear_num_key_heads={heads.keys} groups"
        )
    return shard.take(x.repeat_interleave(parts // heads.keys, dim=2), 2)
