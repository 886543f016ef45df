# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention, for hybrids and for comparison, through Transformers' interface.

Shapes: B batch, T time, S tokens attended to, C hidden size, Hq query heads, Hkv key-value heads, D
head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from ..fast.attention import hastened
from ..fast.linear import project
from ..fast.rms_norm import RMSNorm
from ..ops.tokens import Tokens
from .parts.qk_norm import NormsQueriesAndKeys
from .parts.rotary import rotate
from .parts.shared_attention import attend_across
from .parts.tensor_parallel import HeadShard, find_head_shard


class SoftmaxAttention(NormsQueriesAndKeys, nn.Module):
    """Attention over all tokens or a sliding window. It has no recurrence: its cache grows."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.is_causal: bool = config.is_causal  # for Transformers' functions
        self.has_positions = config.has_positions(layer_idx)
        self.has_local_positions = config.has_local_positions(layer_idx)
        is_sliding = self.layer_type == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.add_projections(config)
        self.is_gated = config.attn_output_gate
        if self.is_gated:
            size = self.o_proj.in_features
            self.g_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)

    def add_projections(self, config: PreTrainedConfig) -> None:
        """Makes q, k, v and what comes back, and says how heads share keys."""
        C, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = D
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = D**-0.5
        self.num_cached = 2 * self.num_key_value_heads * D  # numbers of each token
        self.q_proj = nn.Linear(C, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=config.attention_out_bias)
        self.add_qk_norms(config, config.num_attention_heads, config.num_key_value_heads)

    def project(
        self, hidden_states: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor, HeadShard | None]:
        """Queries (B, Hq, T, D), and what a cache keeps of keys and values, (B, Hkv, T, D) each."""
        of_each = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(linear, hidden_states) for linear in of_each)
        shard = find_head_shard(k, self.k_proj, self.num_key_value_heads)  # or error
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, k = self.norm_queries_and_keys(q, k, shard)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if tokens.position_embeddings is not None and self.has_positions:
            q, k = rotate(q, k, tokens.position_embeddings, 1, self.has_local_positions)
        return q, k, v, shard

    def expand(self, k: Tensor, v: Tensor, shard: HeadShard | None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, S, features), of what a cache keeps: these themselves."""
        return k, v

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, T, C) -> (B, T, C), and the weights (B, Hq, T, S) where eager.

        kwargs go to the attention function; the cache of an engine changes them.
        """
        q, k, v, shard = self.project(hidden_states, tokens)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, kwargs=kwargs)
        if tokens.shards is not None:
            k, v = tokens.shards.gather(k, 2), tokens.shards.gather(v, 2)
        k, v = self.expand(k, v, shard)
        attention: Callable = hastened(
            ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
        )
        options = {
            "dropout": self.config.attention_dropout if self.training else 0.0,
            "scaling": self.scaling,
            "sliding_window": self.sliding_window,
            "position_ids": tokens.position_ids,
            **kwargs,
        }
        if tokens.shards is not None:
            weights = None
            y = attend_across(
                lambda *args: attention(self, *args, **options)[0],
                *(q, k, v, tokens.shards, self.is_causal, self.sliding_window),
            )
        else:
            mask = tokens.attention_masks.get(self.layer_type)
            y, weights = attention(self, q, k, v, mask, **options)
        y = y.flatten(2)
        if self.is_gated:
            y = y * project(self.g_proj, hidden_states).sigmoid()
        return project(self.o_proj, y), weights


class LatentAttention(SoftmaxAttention):
    """Multi-head latent attention without positions: a cache keeps a latent vector of each token,
    of which every head makes its keys and values, and a part of the keys that all heads share.

    DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434; without positions in Kimi Linear, arXiv
    2510.26692.
    """

    def add_projections(self, config: PreTrainedConfig) -> None:
        """As there, with the names that Transformers has for them."""
        C, H, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.num_heads = H
        self.num_key_value_groups = 1
        self.latent_size, self.shared_size = config.kv_lora_rank, config.qk_rope_head_dim
        self.own_size, self.value_size = config.qk_nope_head_dim, config.v_head_dim
        self.key_size = self.own_size + self.shared_size
        self.scaling = self.key_size**-0.5
        self.num_cached = self.latent_size + self.shared_size
        self.q_proj = nn.Linear(C, H * self.key_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(C, self.latent_size + self.shared_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_size, eps=1e-6)  # as there, always
        out_size = H * (self.own_size + self.value_size)
        self.kv_b_proj = nn.Linear(self.latent_size, out_size, bias=False)
        self.o_proj = nn.Linear(H * self.value_size, C, bias=config.attention_out_bias)

    def project(
        self, hidden_states: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor, HeadShard | None]:
        """Queries (B, Hq, T, key_size), the latent vectors (B, 1, T, latent_size) and the keys'
        shared part (B, 1, T, shared_size).
        """
        q = project(self.q_proj, hidden_states)
        shard = find_head_shard(q, self.q_proj, self.num_heads, "num_attention_heads")
        q = q.unflatten(-1, (-1, self.key_size)).transpose(1, 2)
        latent, shared = project(self.kv_a_proj_with_mqa, hidden_states).split(
            [self.latent_size, self.shared_size], dim=-1
        )
        return q, self.kv_a_layernorm(latent)[:, None], shared[:, None], shard

    def expand(
        self, latent: Tensor, shared: Tensor, shard: HeadShard | None
    ) -> tuple[Tensor, Tensor]:
        """Keys (B, Hq, S, key_size) and values (B, Hq, S, value_size)."""
        if shard is not None:
            shared = shard.share(shared)
        own = project(self.kv_b_proj, latent[:, 0])
        own = own.unflatten(-1, (-1, self.own_size + self.value_size))
        k, v = own.transpose(1, 2).split([self.own_size, self.value_size], dim=-1)
        return torch.cat([k, shared.expand(-1, k.shape[1], -1, -1)], dim=-1), v
