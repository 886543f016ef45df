# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention as a layer of a model: Llama's projections around the recurrence.

Shapes: B batch, T time, C hidden size, Hq query heads, Hkv key-value heads, K key dim, V value dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..ops.feature_maps import POINTWISE, build_feature_map
from ..ops.tokens import Tokens
from ..recurrences.interface import Recurrence
from ..recurrences.linear_attention import LinearInputs, LinearRecurrence
from .facts import facts_of
from .parts.decays import build_decay, decay_class
from .parts.output_norm import build_norm, normalize
from .parts.rotary import rotate
from .parts.short_convolution import ShortConvolution
from .parts.tensor_parallel import HeadShard, call, find_head_shard


class Heads(NamedTuple):
    """How many heads a layer has, and their features."""

    queries: int
    keys: int
    values: int  # and of states
    key_dim: int
    value_dim: int

    @classmethod
    def sharing_queries(cls, config: PreTrainedConfig) -> "Heads":
        """Of layers whose queries share keys and values, as softmax's do. Those of cross attention
        have softmax's numbers where the mixer's do not share.
        """
        Hq, Hkv = config.num_attention_heads, config.num_key_value_heads
        if facts_of(config.mixer).queries_share_keys:
            Hq, Hkv = config.linear_num_value_heads, config.linear_num_key_heads
        return cls(Hq, Hkv, Hkv, config.linear_key_head_dim, config.linear_value_head_dim)

    @classmethod
    def sharing_keys(cls, config: PreTrainedConfig) -> "Heads":
        """Of layers whose values share keys, and those the queries."""
        Hk, Hv = config.linear_num_key_heads, config.linear_num_value_heads
        return cls(Hk, Hk, Hv, config.linear_key_head_dim, config.linear_value_head_dim)


class LinearAttentionBase(nn.Module):
    """What all linear attention has: projections, convolutions on them or none, and after it a norm
    and a gate, or neither.
    """

    layer_idx: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(
        self,
        config: PreTrainedConfig,
        kv_input_size: int,
        heads: Heads,
        made: tuple[str, ...] = ("q", "k", "v"),
    ):
        """made: what is projected to heads; a subclass makes the rest in another way."""
        super().__init__()
        C, bias = config.hidden_size, config.attention_bias
        gate_bias = config.gate_bias
        self.heads = heads
        sizes = {
            "q": heads.queries * heads.key_dim,
            "k": heads.keys * heads.key_dim,
            "v": heads.values * heads.value_dim,
        }
        self.sizes = {name: sizes[name] for name in made}  # of what has a convolution
        out_heads = max(heads.queries, heads.values)
        out_size = out_heads * heads.value_dim
        for name, size in self.sizes.items():
            in_size = C if name == "q" else kv_input_size
            self.add_module(f"{name}_proj", nn.Linear(in_size, size, bias=bias))
        self.o_proj = nn.Linear(out_size, C, bias=config.attention_out_bias)
        self.has_conv = False  # unless a subclass adds them
        self.value_act = None if config.value_act is None else ACT2FN[config.value_act]
        self.is_gated = config.is_gated
        self.has_low_rank_gate = self.is_gated and config.low_rank_gate
        if self.has_low_rank_gate:
            self.g_a_proj = nn.Linear(C, heads.value_dim, bias=bias)
            self.g_b_proj = nn.Linear(heads.value_dim, out_size, bias=gate_bias)
        elif self.is_gated:
            self.g_proj = nn.Linear(C, out_size, bias=gate_bias)
        if self.is_gated:
            self.gate_act = ACT2FN[config.gate_act]
        self.o_norm = build_norm(config, out_heads, heads.value_dim, heads.keys)

    def begin(
        self, hidden_states: Tensor, tokens: Tokens, past_key_values: Cache | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, LayerMemory]:
        """What a forward begins with: hidden states (B, T, C) in one row where they are packed, the
        positions of that, and what the layer remembers.
        """
        T = hidden_states.shape[1]
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        return *tokens.one_row(hidden_states), LayerMemory(cache, tokens, T)

    def add_convolutions(self, config: PreTrainedConfig) -> None:
        """Makes convolutions on what is projected, if the config wants them."""
        self.has_conv = config.conv_kernel_size > 0
        for name, size in self.sizes.items() if self.has_conv else ():
            kernel = config.conv_kernel_size, config.conv_bias
            self.add_module(f"{name}_conv1d", ShortConvolution(f"{name}_conv", size, *kernel))

    def convolve(
        self, name: str, x: Tensor, shard: HeadShard | None, memory: LayerMemory
    ) -> Tensor:
        """A projected one of `sizes` (B, T, features) after its convolution, if there is one."""
        return call(getattr(self, f"{name}_conv1d"), shard, x, memory) if self.has_conv else x

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        names = self.sizes if self.has_conv else ()
        return [self.recurrence, *(getattr(self, f"{name}_conv1d").recurrence for name in names)]

    def split(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Features of all heads' keys and values, (B, T, features) -> (B, T, heads, K or V)."""
        return self.by_heads(k, self.heads.key_dim), self.by_heads(v, self.heads.value_dim)

    @staticmethod
    def by_heads(x: Tensor, dim: int) -> Tensor:
        """(B, T, features) -> (B, T, heads, dim). A view takes half as long as `unflatten`."""
        B, T, features = x.shape
        return x.view(B, T, features // dim, dim)

    def project_out(self, hidden_states: Tensor, y: Tensor, shard: HeadShard | None) -> Tensor:
        """y (B, T, heads, V) -> (B, T, C), normalised or not, and gated or not by what was attended
        from, (B, T, C).
        """
        gate = None
        if self.has_low_rank_gate:
            gate = project(self.g_b_proj, project(self.g_a_proj, hidden_states))
        elif self.is_gated:
            gate = project(self.g_proj, hidden_states)
        if gate is not None:
            gate = self.gate_act(gate).view(y.shape)
        if self.o_norm is not None or gate is not None:
            y = normalize(self.o_norm, y, gate, shard)
        return project(self.o_proj, y.flatten(2))


class MappedAttention(LinearAttentionBase):
    """Linear attention with queries and keys that a feature map prepares for the recurrence."""

    def __init__(self, config: PreTrainedConfig, kv_input_size: int, op_maps: bool = True):
        """op_maps: whether a pointwise feature map, which is no module, is left to the op."""
        heads = Heads.sharing_queries(config)
        super().__init__(config, kv_input_size, heads)
        self.feature_map = build_feature_map(config)  # None: a pointwise one
        self.recurrence = LinearRecurrence(
            num_heads=heads.values,
            key_dim=heads.key_dim if self.feature_map is None else self.feature_map.feature_dim,
            value_dim=heads.value_dim,
            feature_map=config.feature_map if self.feature_map is None and op_maps else None,
            normalize=config.normalizer == "z",
            eps=config.attention_eps,
            in_fp64=config.state_in_fp64,
        )


class LinearAttention(MappedAttention):
    """Self-attention by the recurrence of `linear_attention`."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        gives_keys = decay_class(config.decay).gives_keys
        super().__init__(config, config.hidden_size, op_maps=not gives_keys)
        self.layer_idx = layer_idx
        # Keys that the decay gives have their last form; a pointwise phi is then of queries alone.
        self.query_map = config.feature_map if gives_keys else None
        self.has_positions = config.has_positions(layer_idx)
        self.has_local_positions = config.has_local_positions(layer_idx)
        self.add_convolutions(config)
        self.decay = build_decay(config, layer_idx)
        self.float16_is_enough = self.feature_map is None or self.feature_map.float16_is_enough

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, for there are none."""
        B, T, C = hidden_states.shape
        hidden_states, positions, memory = self.begin(hidden_states, tokens, past_key_values)

        k, v = project(self.k_proj, hidden_states), project(self.v_proj, hidden_states)
        shard = find_head_shard(k, self.k_proj, self.heads.keys)
        k = self.convolve("k", k, shard, memory)
        v = self.convolve("v", v, shard, memory)
        if self.value_act is not None:
            v = self.value_act(v)
        q = self.convolve("q", project(self.q_proj, hidden_states), shard, memory)
        q, (k, v) = self.by_heads(q, self.heads.key_dim), self.split(k, v)
        k, log_decay = self._forgetting(hidden_states, k, shard)
        if positions is not None and self.has_positions:
            q, k = rotate(q, k, positions, 2, self.has_local_positions)
        if self.feature_map is not None:
            q, k = call(self.feature_map, shard, q, k)
        elif self.query_map is not None:
            q = POINTWISE[self.query_map](q)

        dtype = v.dtype
        if dtype == torch.float16 and not self.float16_is_enough:  # for the features
            v = v.float()
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast may have left them in float32
        y = memory.run(self.recurrence, LinearInputs(q, k, v, log_decay))
        memory.write(dtype)
        return self.project_out(hidden_states, y.to(dtype), shard).view(B, T, C), None

    def _forgetting(
        self, hidden_states: Tensor, k: Tensor, shard: HeadShard | None
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and log decays of this rank's heads, from projected keys k (B, T, Hkv, K)."""
        if self.decay.gives_keys:
            return self.decay(k, shard)
        log_decay = self.decay(hidden_states)
        if shard is not None and log_decay is not None:
            log_decay = shard.take(log_decay, 2)
        return k, log_decay
