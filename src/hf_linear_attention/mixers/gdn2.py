# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Gated DeltaNet-2 as a layer of a model: Kimi Delta Attention whose beta is two gates, one of what
is erased for each channel of a key, one of what is written for each channel of a value.

Source: Hatamizadeh, Choi and Kautz, "Gated DeltaNet-2: Decoupling Erase and Write in Linear
Attention", arXiv 2605.22791, as flash-linear-attention's GatedDeltaNet2.

Shapes: B batch, T time, C hidden size, H heads, K key dim, V value dim.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..ops.numerics import at_least_float32, l2_normed
from ..recurrences.delta_rule import ErasingInputs, ErasingRecurrence
from .delta_rule import DeltaRule
from .parts.tensor_parallel import HeadShard


class GatedDeltaNet2(DeltaRule):
    """For each head S_t of (K, V), with keys and queries of norm 1 and a decay a_t per channel,

    S_t = (I - k_t (b_t k_t)^T) Diag(a_t) S_(t-1) + k_t (w_t v_t)^T,  y_t = K^(-1/2) S_t^T q_t
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.heads
        self.b_proj = nn.Linear(config.hidden_size, heads.values * heads.key_dim, bias=False)
        self.w_proj = nn.Linear(config.hidden_size, heads.values * heads.value_dim, bias=False)
        self.recurrence = ErasingRecurrence(
            heads.values, heads.key_dim, heads.value_dim, in_fp64=config.state_in_fp64
        )

    def inputs(
        self, hidden_states: Tensor, shard: HeadShard | None, memory: LayerMemory, *qkv: Tensor
    ) -> ErasingInputs:
        """The recurrence's, of queries, keys and values by heads."""
        q, k, v = qkv
        erase = self.largest_beta * self.gate(self.b_proj, hidden_states, self.heads.key_dim, shard)
        write = self.gate(self.w_proj, hidden_states, self.heads.value_dim, shard)
        log_decay = self.decay(hidden_states)
        if shard is not None:
            log_decay = shard.take(log_decay, 2)
        q, k = l2_normed(at_least_float32(q)), l2_normed(at_least_float32(k))
        beta = torch.ones_like(log_decay[..., 0])
        written = (write * v).to(v.dtype)
        return ErasingInputs(q.to(v.dtype), k.to(v.dtype), written, beta, log_decay, erase * k)

    def gate(
        self, linear: nn.Linear, hidden_states: Tensor, dim: int, shard: HeadShard | None
    ) -> Tensor:
        """(B, T, C) -> (B, T, H, dim) in (0, 1), of this rank's heads."""
        x = self.by_heads(at_least_float32(project(linear, hidden_states)), dim).sigmoid()
        return x if shard is None else shard.take(x, 2)
