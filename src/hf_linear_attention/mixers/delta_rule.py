# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule as a layer of a model: DeltaNet, Gated DeltaNet, and Kimi Delta Attention.

They differ in fields of the config: how they forget (`decay`: "none", "per_token", "kda"), and
whether a gate follows the norm of their outputs (`normalizer`), and which (`gate_act`,
`low_rank_gate`).

Shapes: B batch, T time, C hidden size, Hk heads of queries and keys, Hv heads of values and states,
K key dim, V value dim.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..ops.numerics import at_least_float32
from ..ops.tokens import Tokens
from ..recurrences.delta_rule import DeltaInputs, DeltaRecurrence
from ..recurrences.interface import Recurrence
from .linear_attention import Heads, LinearAttentionBase
from .parts.decays import build_decay
from .parts.tensor_parallel import HeadShard, find_head_shard


class DeltaRule(LinearAttentionBase):
    """Self-attention by `delta_rule`; keys and queries have norm 1, and no position."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        heads = Heads.sharing_keys(config)
        super().__init__(config, config.hidden_size, heads)
        self.layer_idx = layer_idx
        self.largest_beta = 2.0 if config.linear_allow_neg_eigval else 1.0
        self.b_proj = nn.Linear(config.hidden_size, heads.values, bias=False)
        self.recurrence: Recurrence = DeltaRecurrence(
            heads.values, heads.key_dim, heads.value_dim, in_fp64=config.state_in_fp64
        )
        self.add_convolutions(config)
        self.decay = build_decay(config, layer_idx)

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

        of_each = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(linear, hidden_states) for linear in of_each)
        shard = find_head_shard(k, self.k_proj, self.heads.keys, "linear_num_key_heads")
        k = self.convolve("k", k, shard, memory)
        v = self.convolve("v", v, shard, memory)
        q = self.convolve("q", q, shard, memory)
        q, (k, v) = self.by_heads(q, self.heads.key_dim), self.split(k, v)
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast may have left them in another
        y = memory.run(self.recurrence, self.inputs(hidden_states, shard, memory, q, k, v))
        memory.write(v.dtype)
        return self.project_out(hidden_states, y, shard).view(B, T, C), None

    def inputs(
        self, hidden_states: Tensor, shard: HeadShard | None, memory: LayerMemory, *qkv: Tensor
    ) -> Any:
        """The recurrence's, of queries, keys and values by heads."""
        beta = self.largest_beta * at_least_float32(project(self.b_proj, hidden_states)).sigmoid()
        log_decay = self.decay(hidden_states)
        if shard is not None:
            beta = shard.take(beta, 2)
            log_decay = None if log_decay is None else shard.take(log_decay, 2)
        q, k, v = qkv
        return DeltaInputs(q, k, v, beta, log_decay)
