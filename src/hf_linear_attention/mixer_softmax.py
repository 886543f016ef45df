# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention, for hybrids and for comparison, through Transformers' interface.

Shapes: B batch, T time, C hidden size, Hq query heads, D head dim.
"""

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from .linear import Linear
from .tensor_parallel import find_head_shard
from .tokens import Tokens


class SoftmaxAttention(nn.Module):
    """Attention over all tokens or a sliding window. It has no recurrence: its cache grows."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = config.is_causal
        is_sliding = self.layer_type == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=bias)

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, T, C) -> (B, T, C), and the weights (B, Hq, T, T) where eager.

        kwargs go to the attention function.
        """
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        find_head_shard(k, self.k_proj, self.num_key_value_heads)  # or error
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if tokens.position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *tokens.position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, weights = attention(
            self,
            q,
            k,
            v,
            tokens.attention_masks.get(self.layer_type),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=tokens.position_ids,
            **kwargs,
        )
        return self.o_proj(y.flatten(2)), weights
