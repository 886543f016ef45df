# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention as a layer of a model: Llama's projections around the recurrence.

Shapes: B batch, T time, C hidden size, Hq query heads, Hkv key-value heads, D head dim.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .decays import build_decay
from .feature_maps import build_feature_map
from .linear import Linear
from .memory import LayerMemory
from .recurrence import Recurrence
from .recurrence_linear import LinearRecurrence
from .rms_norm import RMSNorm
from .short_convolution import ShortConvolution
from .tensor_parallel import HeadShard, call, find_head_shard
from .tokens import Tokens


class LinearAttentionBase(nn.Module):
    """What all linear attention has: projections and a feature map, and a gate or none after it."""

    def __init__(self, config: PreTrainedConfig, kv_input_size: int, has_q: bool = True):
        super().__init__()
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.q_size = config.num_attention_heads * config.head_dim
        self.kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        if has_q:
            self.q_proj = Linear(config.hidden_size, self.q_size, bias=bias)
        self.k_proj = Linear(kv_input_size, self.kv_size, bias=bias)
        self.v_proj = Linear(kv_input_size, self.kv_size, bias=bias)
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=bias)
        self.value_act = None if config.value_act is None else ACT2FN[config.value_act]
        self.is_gated = config.normalizer == "gated_rms_norm"
        if self.is_gated:
            self.g_proj = Linear(config.hidden_size, self.q_size, bias=bias)
            self.gate_act = ACT2FN[config.gate_act]
            self.o_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def project_out(self, hidden_states: Tensor, y: Tensor, shard: HeadShard | None) -> Tensor:
        """y (B, T, Hq, D) -> (B, T, C), gated by what was attended from, (B, T, C), or not."""
        if self.is_gated:
            gate = self.gate_act(self.g_proj(hidden_states))
            y = call(self.o_norm, shard, y) * gate.view(y.shape)
        return self.o_proj(y.flatten(2))


class MappedAttention(LinearAttentionBase):
    """Linear attention with queries and keys that a feature map prepares for the recurrence."""

    def __init__(self, config: PreTrainedConfig, kv_input_size: int):
        super().__init__(config, kv_input_size)
        self.feature_map = build_feature_map(config)  # None: a pointwise one, which the op applies
        D = config.head_dim
        self.recurrence = LinearRecurrence(
            num_heads=config.num_key_value_heads,
            key_dim=D if self.feature_map is None else self.feature_map.feature_dim,
            value_dim=D,
            feature_map=config.feature_map if self.feature_map is None else None,
            normalize=config.normalizer == "z",
            eps=config.attention_eps,
        )


class LinearAttention(MappedAttention):
    """Self-attention by the recurrence of `linear_attention`."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, config.hidden_size)
        self.layer_idx = layer_idx
        self.has_conv = config.conv_kernel_size > 0
        if self.has_conv:
            self.q_conv1d = ShortConvolution("q_conv", self.q_size, config.conv_kernel_size)
            self.k_conv1d = ShortConvolution("k_conv", self.kv_size, config.conv_kernel_size)
            self.v_conv1d = ShortConvolution("v_conv", self.kv_size, config.conv_kernel_size)
        self.decay = build_decay(config, layer_idx)
        self.float16_is_enough = self.feature_map is None or self.feature_map.float16_is_enough

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        convolutions = [self.q_conv1d, self.k_conv1d, self.v_conv1d] if self.has_conv else []
        return [self.recurrence, *(convolution.recurrence for convolution in convolutions)]

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, for there are none."""
        B, T, C = hidden_states.shape
        hidden_states, position_embeddings = tokens.one_row(hidden_states)
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        memory = LayerMemory(cache, tokens, T)

        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        shard = find_head_shard(k, self.k_proj, self.num_key_value_heads)
        if self.has_conv:
            k = call(self.k_conv1d, shard, k, memory)
            v = call(self.v_conv1d, shard, v, memory)
        if self.value_act is not None:
            v = self.value_act(v)
        k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))
        q = self.q_proj(hidden_states)
        if self.has_conv:
            q = call(self.q_conv1d, shard, q, memory)
        q = q.unflatten(-1, (-1, self.head_dim))
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        if self.feature_map is not None:
            q, k = call(self.feature_map, shard, q, k)
        log_decay = self.decay(hidden_states)
        if shard is not None and log_decay is not None:
            log_decay = shard.take(log_decay, 2)

        dtype = v.dtype
        if dtype == torch.float16 and not self.float16_is_enough:  # for the features
            v = v.float()
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast may have left them in float32
        y = memory.run(self.recurrence, {"q": q, "k": k, "v": v, "log_decay": log_decay})
        memory.write(dtype)
        return self.project_out(hidden_states, y.to(dtype), shard).view(B, T, C), None
