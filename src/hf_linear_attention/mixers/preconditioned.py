# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The preconditioned delta rule as a layer of a model: Gated DeltaNet or Kimi Delta Attention whose
keys are written with channels that were seldom used enlarged, and others made smaller.

Source: Tumma, Loo and Rus, "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear
Recurrences", arXiv 2604.21100, as flash-linear-attention's PrecondGatedDeltaNet and PrecondKDA.

Shapes: B batch, T time, C hidden size, Hk heads of queries and keys, Hv heads of values and states,
K key dim, V value dim.
"""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..ops.numerics import at_least_float32, l2_normed
from ..recurrences.delta_rule import ErasingInputs, ErasingRecurrence
from ..recurrences.elementwise_scan import ElementwiseInputs, ElementwiseRecurrence
from ..recurrences.interface import Recurrence
from .delta_rule import DeltaRule
from .linear_attention import Heads
from .parts.decays import decay_steps, draw_steps
from .parts.tensor_parallel import HeadShard


class Preconditioner(nn.Module):
    """Keys k_t (B, T, Hk, K) of norm 1 -> M_t k_t, with M_t channel by channel in (1 / x, x):

    c_t = exp(log_decay_t) c_(t-1) + b_t k_t^2,  r_t = log(c_t + eps) - center,
    M_t = x^(-r_t / (1 + |r_t|)), with the config's squash_x and squash_eps for x and eps.
    """

    def __init__(self, config: PreTrainedConfig, heads: Heads):
        super().__init__()
        self.log_x, self.eps = math.log(config.squash_x), config.squash_eps
        self.dt_proj = nn.Linear(config.hidden_size, heads.keys, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, heads.keys, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads.keys))
        self.A_log = nn.Parameter(torch.empty(heads.keys))
        self.center = nn.Parameter(torch.empty(heads.keys))
        self.recurrence = ElementwiseRecurrence(
            heads.keys, heads.key_dim, in_fp64=config.state_in_fp64
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws dt_bias and A_log as a decay's, and writes center; the model's `_init_weights`
        calls it.
        """
        draw_steps(self.dt_bias, self.A_log)
        init.constant_(self.center, -0.2)

    def forward(
        self, hidden_states: Tensor, k: Tensor, shard: HeadShard | None, memory: LayerMemory
    ) -> Tensor:
        """Of hidden states (B, T, C), and k of this rank's heads in float32 or better."""
        b = at_least_float32(project(self.b_proj, hidden_states)).sigmoid()
        x = project(self.dt_proj, hidden_states)
        _, log_decay = decay_steps(x, self.dt_bias, self.A_log)
        center = at_least_float32(self.center)[:, None]
        if shard is not None:
            b, log_decay = shard.take(b, 2), shard.take(log_decay, 2)
            center = shard.take(center, 0)
        added, log_decay = b[..., None] * k.square(), log_decay[..., None].expand_as(k)
        inputs = ElementwiseInputs(added.flatten(2), log_decay.flatten(2))
        c = memory.run(self.recurrence, inputs).view(k.shape)
        r = (c + self.eps).log() - center
        return k * (-self.log_x * r / (1 + r.abs())).exp()


class PreconditionedDeltaRule(DeltaRule):
    """For each head S_t of (K, V), with keys and queries of norm 1,

    S' = Diag(a_t) S_(t-1),  S_t = S' + beta_t M_t k_t (v_t - S'^T k_t)^T,  y_t = K^(-1/2) S_t^T q_t
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.heads
        self.preconditioner = Preconditioner(config, heads)
        self.recurrence = ErasingRecurrence(
            heads.values, heads.key_dim, heads.value_dim, in_fp64=config.state_in_fp64
        )

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        return [*super().recurrences, self.preconditioner.recurrence]

    def inputs(
        self, hidden_states: Tensor, shard: HeadShard | None, memory: LayerMemory, *qkv: Tensor
    ) -> ErasingInputs:
        """The recurrence's: what is asked under k is written under M k."""
        q, k, v, beta, log_decay = super().inputs(hidden_states, shard, memory, *qkv)
        q, k = l2_normed(at_least_float32(q)), l2_normed(at_least_float32(k))
        written = self.preconditioner(hidden_states, k, shard, memory)
        return ErasingInputs(q.to(v.dtype), written.to(v.dtype), v, beta, log_decay, k)
