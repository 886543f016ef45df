# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention over a window of the last tokens, and a few first ones, and linear attention
over all older ones, under one denominator: what softmax layers of a trained model are turned into.

Zhang et al., "LoLCATs: On Low-Rank Linearizing of Large Language Models", arXiv 2410.10254; first
tokens that stay as in Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
arXiv 2309.17453.

Shapes: B batch, T time, C hidden size, Hq query heads, Hkv key-value heads, K key dim, V value dim,
F features of a key.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..fast.linear import project
from ..ops.feature_maps import POINTWISE
from ..ops.tokens import Tokens
from ..ops.windowed_softmax import join
from ..ops.windowed_step import join_with_sums, takes_join
from ..recurrences.interface import Recurrence
from ..recurrences.linear_attention import LinearInputs, LinearRecurrence
from ..recurrences.window import WindowInputs, WindowRecurrence
from .linear_attention import MappedAttention
from .parts.decays import build_decay
from .parts.qk_norm import NormsQueriesAndKeys
from .parts.rotary import rotate
from .parts.tensor_parallel import HeadShard, call, find_head_shard

# Older tokens weigh nothing below: 1 / den^2, which a gradient has as a factor, would be infinite
# before it meets a weight that is as small. Learned features of keys and queries that differ come
# to 1e-26 and less.
LEAST_DENOMINATOR = 1e-30


class Mixing(nn.Module):
    """A learned factor per head for the weights of older tokens, by its logarithm: at first 1."""

    has_parameters_per_head = True

    def __init__(self, num_heads: int):
        super().__init__()
        self.log_factor = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes 0; the model's `_init_weights` calls it."""
        init.zeros_(self.log_factor)

    def forward(self, y: Tensor, log_size: Tensor, sums: Tensor) -> Tensor:
        """Attention over recent tokens (B, T, Hq, V), the logarithm of its denominator (B, T, Hq),
        and sums over older ones (B, T, Hq, V + 1), the denominator last -> (B, T, Hq, V).
        """
        sums, log_factor = sums.to(y.dtype), self.log_factor.to(y.dtype)
        if takes_join(y, sums, log_factor):
            return join_with_sums(y, log_size, sums, log_factor, LEAST_DENOMINATOR)
        num, den = sums[..., :-1], sums[..., -1]
        is_there = den > LEAST_DENOMINATOR  # not in a window's first tokens
        den = den.where(is_there, 1)
        older = (den.log() + log_factor).masked_fill(~is_there, -torch.inf)
        return join(y, log_size, num / den[..., None], older)


class WindowedAttention(NormsQueriesAndKeys, MappedAttention):
    """y_t = (sum of exp(q_t.k_j / sqrt(K)) v_j + c sum of d_tj phi(q_t).phi(k_j) v_j) / the same
    sums without v: the first over the last `window_size` tokens, which j = t is one of, and the
    first `window_sinks`; the second over all others. c is learned, one for each query head; d_tj is
    what a decay leaves of a token since it left the window, 1 without.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, config.hidden_size, op_maps=False)
        self.layer_idx = layer_idx
        heads, feature_dim = self.heads, self.recurrence.key_dim
        self.window = WindowRecurrence(
            num_heads=heads.keys,
            key_dim=heads.key_dim,
            value_dim=heads.value_dim,
            feature_dim=feature_dim,
            window=config.window_size,
            num_sinks=config.window_sinks,
        )
        self.recurrence = LinearRecurrence(  # of values, and of 1, which sums the denominator
            heads.values,
            feature_dim,
            heads.value_dim + 1,
            normalize=False,
            in_fp64=config.state_in_fp64,
        )
        self.pointwise = POINTWISE.get(config.feature_map)
        self.has_positions = config.has_positions(layer_idx)
        self.has_local_positions = config.has_local_positions(layer_idx)
        self.add_qk_norms(config, heads.queries, heads.keys)
        self.mixing = Mixing(heads.queries)
        self.add_convolutions(config)
        self.decay = build_decay(config, layer_idx)

    @property
    def recurrences(self) -> list[Recurrence]:
        return [self.window, *super().recurrences]

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, which nobody makes."""
        B, T, C = hidden_states.shape
        hidden_states, positions, memory = self.begin(hidden_states, tokens, past_key_values)

        k, v = project(self.k_proj, hidden_states), project(self.v_proj, hidden_states)
        shard = find_head_shard(k, self.k_proj, self.heads.keys)
        k = self.convolve("k", k, shard, memory)
        v = self.convolve("v", v, shard, memory)
        q = self.convolve("q", project(self.q_proj, hidden_states), shard, memory)
        q, (k, v) = self.by_heads(q, self.heads.key_dim), self.split(k, v)
        q, k = self.norm_queries_and_keys(q, k, shard)
        if positions is not None and self.has_positions:
            q, k = rotate(q, k, positions, 2, self.has_local_positions)
        phi_q, phi_k = self._map(q, k, shard)
        log_decay = self.decay(hidden_states)
        if shard is not None and log_decay is not None:
            log_decay = shard.take(log_decay, 2)

        dtype, Hkv = v.dtype, v.shape[2]
        kvf = torch.cat([x.to(dtype) for x in (k, v, phi_k)], dim=-1)
        out = memory.run(self.window, WindowInputs(q.to(dtype), kvf))
        recent = self.window.outputs(out, Hkv)
        # sums are not divided before they are joined, and outgrow float16
        sums_dtype = torch.float32 if dtype == torch.float16 else dtype
        phi_q, phi_k, v = (x.to(sums_dtype) for x in (phi_q, recent.features, recent.v))
        sums = memory.run(self.recurrence, LinearInputs(phi_q, phi_k, v, log_decay))
        memory.write(dtype)
        y = call(self.mixing, shard, recent.y, recent.log_size, sums).to(dtype)
        return self.project_out(hidden_states, y, shard).view(B, T, C), None

    def _map(self, q: Tensor, k: Tensor, shard: HeadShard | None) -> tuple[Tensor, Tensor]:
        """phi(q) (B, T, Hq, F) and phi(k) (B, T, Hkv, F)."""
        if self.pointwise is not None:
            return self.pointwise(q), self.pointwise(k)
        assert self.feature_map is not None
        return call(self.feature_map, shard, q, k)
