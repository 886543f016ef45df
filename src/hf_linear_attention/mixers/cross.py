# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear cross attention: a memory of any length, folded into one state.

Shapes: B batch, T time, M tokens of the memory, C hidden size, Hq query heads, Hkv key-value heads,
D head dim, K key dim.
"""

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache.layers import memory_layer
from ..fast.linear import project
from ..ops.numerics import accumulation_dtype
from ..recurrences.interface import State
from .linear_attention import MappedAttention
from .parts.tensor_parallel import HeadShard, call, find_head_shard


class CrossAttention(MappedAttention):
    """Linear attention to a memory of M tokens, which is folded into one state, once, so that
    reading it costs the same for any M. Without decay, convolution and positions.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, config.cross_attention_hidden_size or config.hidden_size)
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor | None:
        """hidden_states (B, T, C) -> (B, T, C); None where there is no memory.

        encoder_hidden_states (B, M, memory size) and their mask (B, M) are looked at only where the
        cache has no state of them yet.
        """
        cache = None if past_key_values is None else memory_layer(past_key_values, self.layer_idx)
        state = {} if cache is None else cache.read()
        if not state:
            if encoder_hidden_states is None:
                return None
            state = self._fold(encoder_hidden_states, encoder_attention_mask)
            if cache is not None:
                cache.keep(state, hidden_states.dtype)
        q = project(self.q_proj, hidden_states)
        shard = find_head_shard(q, self.q_proj, self.heads.queries)
        phi_q = self._map("q", q, shard)
        y = self.recurrence.read(phi_q, state).to(q.dtype)
        return self.project_out(hidden_states, y, shard)

    def _fold(self, memory: Tensor, mask: Tensor | None) -> State:
        """The state of the whole memory (B, M, memory size)."""
        hidden = None if mask is None else (mask == 0).to(memory.device)[..., None]
        if hidden is not None:
            memory = memory.masked_fill(hidden, 0)  # NaN, too
        k = project(self.k_proj, memory)
        shard = find_head_shard(k, self.k_proj, self.heads.keys)
        v = project(self.v_proj, memory).unflatten(-1, (-1, self.heads.value_dim))
        if self.value_act is not None:
            v = self.value_act(v)
        phi_k = self._map("k", k, shard)
        if hidden is not None:
            phi_k = phi_k.masked_fill(hidden[..., None], 0)
        return self.recurrence.fold(phi_k, v)

    def _map(self, name: str, x: Tensor, shard: HeadShard | None) -> Tensor:
        """phi of queries ("q") or keys ("k"), (B, T, H D) -> (B, T, H, K), in the dtype of sums."""
        x = x.unflatten(-1, (-1, self.heads.key_dim))
        if self.feature_map is None:
            return self.recurrence.mapped(x)
        G = self.heads.queries // self.heads.keys
        B, _, H, D = x.shape
        if name == "q":
            phi, _ = call(self.feature_map, shard, x, x.new_zeros(B, 0, H // G, D))
        else:
            _, phi = call(self.feature_map, shard, x.new_zeros(B, 0, H * G, D), x)
        return phi.to(accumulation_dtype(x.dtype))
