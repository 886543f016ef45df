# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear-attention language models, from a layer to the heads.

Shapes: B batch, T time, C hidden size, Hq query heads, Hkv key-value heads, D head dim,
N sequences packed into a batch.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    EncoderDecoderModel,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    SpeechEncoderDecoderModel,
    VisionEncoderDecoderModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_linear_attention import (
    LinearAttentionCache,
    RecurrentLayer,
    active_layer_types,
    cache_for_model,
    count_rows,
    memory_layer,
    padding_first,
)
from .chunked import LinearAttentionState, accumulation_dtype
from .configuration_linear_attention import LinearAttentionConfig
from .decays import Decay, build_decay
from .feature_maps import (
    POINTWISE,
    FavorPlus,
    FeatureMap,
    build_feature_map,
    without_autocast,
)
from .linear import Linear
from .linear_attention import linear_attention, linear_attention_step_
from .loss_linear_attention import causal_lm_loss
from .model_card import TAGS, is_placeholder, make_model_card
from .rms_norm import RMSNorm
from .sequence_parallel import inputs_before, largest_before, state_before, tokens_before
from .tensor_parallel import HeadShard, call, find_head_shard

CACHE_IMPLEMENTATIONS = (None, "dynamic", "offloaded", "static", "offloaded_static")
# the ways of generate() that never take a token back, nor move a row
ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def sinusoidal_positions(position_ids: Tensor, dim: int) -> Tensor:
    """sin and cos of each position at dim / 2 wavelengths, (..., dim) float32, for any position.

    Vaswani et al., "Attention Is All You Need", arXiv 1706.03762, section 3.5; sines come first.
    """
    pair = torch.arange(0, dim, 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[..., None].float() * torch.exp(pair * (-math.log(10000.0) / dim))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the last `kernel_size` real tokens, then SiLU."""

    has_parameters_per_head = True

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))  # as in nn.Conv1d

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x (B, T, channels) -> y of that shape, and the state after x.

        The state is the last kernel_size - 1 real tokens, (B, kernel_size - 1, channels), zeros
        where there were fewer. key_mask (B, T) is False for padding; cu_seqlens bounds the
        sequences packed into one row.
        """
        if state is None:
            state = x.new_zeros(x.shape[0], self.kernel_size - 1, x.shape[2])
        if x.shape[1] == 0:
            return x, state
        if x.shape[1] == 1 and cu_seqlens is None:
            return self._step(x, state, key_mask)
        tokens, place = self._in_order(x, state, key_mask, cu_seqlens)
        y = F.conv1d(tokens.transpose(1, 2), self.weight, groups=x.shape[2]).transpose(1, 2)
        if place is not None:
            y = y.gather(1, place[..., None].expand(x.shape))
        return F.silu(y), tokens[:, tokens.shape[1] - state.shape[1] :]

    def _step(self, x: Tensor, state: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`forward` for one token."""
        tokens = torch.cat([state, x], dim=1)
        y = (tokens * self.weight[:, 0].t().to(x.dtype)).sum(1, keepdim=True)
        new_state = tokens[:, 1:]
        if key_mask is not None:
            new_state = torch.where(key_mask[..., None], new_state, state)
        return F.silu(y), new_state

    def _in_order(
        self, x: Tensor, state: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """All tokens, each real one right after its predecessors, and what undoes that: where
        each token of x (B, T) is in the convolution of them, which is shorter by the state.
        """
        B, T, channels = x.shape
        past = state.shape[1]
        if cu_seqlens is not None:  # zeros before every sequence
            place = torch.arange(T, device=x.device) + past * sequence_of_each_token(cu_seqlens, T)
            tokens = x.new_zeros(B, T + past * (len(cu_seqlens) - 1), channels)
            return tokens.index_copy(1, place + past, x), place[None]
        # Padding goes to the front. The state follows it, so no real token's window sees padding.
        tokens, order = padding_first(torch.cat([state, x], dim=1), key_mask)
        if order is None:
            return tokens, None
        place = order.argsort(dim=1)[:, past:] - past
        return tokens, place.clamp(min=0)  # where padding looks does not matter


class LinearAttentionBase(nn.Module):
    """What all linear attention has: projections and a feature map, and a gate or none after it."""

    def __init__(self, config: LinearAttentionConfig, kv_input_size: int, has_q: bool = True):
        super().__init__()
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        if has_q:
            self.q_proj = Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = Linear(kv_input_size, kv_size, bias=bias)
        self.v_proj = Linear(kv_input_size, kv_size, bias=bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=bias)
        self.value_act = None if config.value_act is None else ACT2FN[config.value_act]
        self.feature_map = build_feature_map(config)  # None: a pointwise one
        self.is_gated = config.normalizer == "gated_rms_norm"
        if self.is_gated:
            self.g_proj = Linear(config.hidden_size, q_size, bias=bias)
            self.gate_act = ACT2FN[config.gate_act]
            self.o_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.options: dict[str, Any] = {  # of the op
            "feature_map": config.feature_map if self.feature_map is None and has_q else None,
            "normalize": config.normalizer == "z",
            "eps": config.attention_eps,
        }

    def project_out(self, hidden_states: Tensor, y: Tensor, shard: HeadShard | None) -> Tensor:
        """y (B, T, Hq, D) -> (B, T, C), gated by what was attended from, (B, T, C), or not."""
        if self.is_gated:
            gate = self.gate_act(self.g_proj(hidden_states))
            y = call(self.o_norm, shard, y) * gate.view(y.shape)
        return self.o_proj(y.flatten(2))


class LinearAttention(LinearAttentionBase):
    """Linear attention, with Llama's projections around it."""

    def __init__(self, config: LinearAttentionConfig, layer_idx: int):
        has_q = config.decay != "aaren"  # whose query is the same for all tokens
        super().__init__(config, config.hidden_size, has_q)
        self.layer_idx = layer_idx
        self.has_q = has_q
        self.has_conv = config.conv_kernel_size > 0
        if self.has_conv:
            q_size = config.num_attention_heads * config.head_dim
            kv_size = config.num_key_value_heads * config.head_dim
            if self.has_q:
                self.q_conv1d = ShortConvolution(q_size, config.conv_kernel_size)
            self.k_conv1d = ShortConvolution(kv_size, config.conv_kernel_size)
            self.v_conv1d = ShortConvolution(kv_size, config.conv_kernel_size)
        self.decay = build_decay(config, layer_idx)
        self.float16_is_enough = self.feature_map is None or self.feature_map.float16_is_enough

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, ...] | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        is_causal: bool = True,
        sequence_group: Any = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, for there are none.

        key_mask (B, T) is False for padding; cu_seqlens (N + 1,) are the bounds of packed
        sequences in all B T tokens.
        """
        B, T, C = hidden_states.shape
        if cu_seqlens is not None:  # one long row, as the op wants it
            hidden_states = hidden_states.flatten(0, 1)[None]
            if position_embeddings is not None:
                position_embeddings = tuple(
                    x.expand(B, -1, -1).flatten(0, 1)[None] for x in position_embeddings
                )
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]

        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        shard = find_head_shard(k, self.k_proj.weight, self.num_key_value_heads, self.head_dim)
        if self.has_conv:
            k = self._convolve("k", k, cache, key_mask, cu_seqlens, shard, sequence_group)
            v = self._convolve("v", v, cache, key_mask, cu_seqlens, shard, sequence_group)
        if self.value_act is not None:
            v = self.value_act(v)
        k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))
        if self.has_q:
            q = self.q_proj(hidden_states)
            if self.has_conv:
                q = self._convolve("q", q, cache, key_mask, cu_seqlens, shard, sequence_group)
            q = q.unflatten(-1, (-1, self.head_dim))
            if position_embeddings is not None:
                q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
            if self.feature_map is not None:
                q, k = call(self.feature_map, shard, q, k)
            log_decay = self.decay(hidden_states)
            if shard is not None and log_decay is not None:
                log_decay = shard.take(log_decay, 2)
        else:
            q, k, log_decay = self._score(k, cache, key_mask, cu_seqlens, shard, sequence_group)
        dtype = v.dtype
        if dtype == torch.float16 and not self.float16_is_enough:  # for the features
            v = v.float()
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast may have left them in float32

        y = self._attend(
            q, k, v, log_decay, key_mask, cu_seqlens, cache, is_causal, sequence_group
        ).to(dtype)
        if cache is not None:
            cache.dtype = dtype
        return self.project_out(hidden_states, y, shard).view(B, T, C), None

    def _convolve(
        self,
        name: str,
        x: Tensor,
        cache: RecurrentLayer | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        shard: HeadShard | None,
        sequence_group: Any,
    ) -> Tensor:
        conv1d = getattr(self, f"{name}_conv1d")
        state = None if cache is None else cache.conv_state(name)
        if sequence_group is not None:
            state = inputs_before(x, conv1d.kernel_size - 1, key_mask, sequence_group)
        y, state = call(conv1d, shard, x, state, key_mask, cu_seqlens)
        if cache is not None:
            cache.write_conv(name, state, x)
        return y

    def _score(
        self,
        k: Tensor,
        cache: RecurrentLayer | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        shard: HeadShard | None,
        sequence_group: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """phi(q) and phi(k) (B, T, Hkv, 1) and the log decay (B, T, Hkv) of decay="aaren"."""
        past_max = None if cache is None else cache.running_max
        if sequence_group is not None:
            with torch.no_grad():
                _, _, running_max = call(self.decay, shard, k, key_mask)
            past_max = largest_before(running_max[:, -1], sequence_group)
        phi_k, log_decay, running_max = call(self.decay, shard, k, key_mask, cu_seqlens, past_max)
        if cache is not None:
            cache.write_running_max(running_max)
        return torch.ones_like(phi_k), phi_k, log_decay

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: RecurrentLayer | None,
        is_causal: bool,
        sequence_group: Any,
    ) -> Tensor:
        """The op, from the cached state and to it, or from the state of the ranks before."""
        state = None if cache is None else cache.state
        if sequence_group is not None:
            state = state_before(
                k, v, log_decay, key_mask, sequence_group, is_causal=is_causal, **self.options
            )
        is_step = q.shape[1] == 1 and not torch.is_grad_enabled()
        if cache is not None and is_step and cache.may_change("kv"):
            # a token is generated: the state changes in place
            k1, v1 = k[:, 0], v[:, 0]
            if state is None:
                state = cache.start(k1, v1, accumulation_dtype(v.dtype), self.options["normalize"])
            y = linear_attention_step_(
                q[:, 0],
                k1,
                v1,
                state,
                None if log_decay is None else log_decay[:, 0],
                key_mask=None if key_mask is None else key_mask[:, 0],
                **self.options,
            )[:, None]
        else:
            y, state = linear_attention(
                q,
                k,
                v,
                log_decay,
                key_mask=key_mask,
                cu_seqlens=cu_seqlens,
                initial_state=state,
                return_state=True,
                is_causal=is_causal,
                **self.options,
            )
            if cache is not None:
                cache.write_state(state)
        if cache is not None:
            cache.count(k, v, log_decay, key_mask, self.options)
        return y


class CrossAttention(LinearAttentionBase):
    """Linear attention to a memory of M tokens, which is folded into one state S, z, once, so that
    reading it costs the same for any M. Without decay, convolution and positions.
    """

    def __init__(self, config: LinearAttentionConfig, layer_idx: int):
        super().__init__(config, config.cross_attention_hidden_size or config.hidden_size)
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads

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
        state = None if cache is None else cache.state
        if state is None:
            if encoder_hidden_states is None:
                return None
            state = self._fold(encoder_hidden_states, encoder_attention_mask)
            if cache is not None:
                cache.keep(state, hidden_states.dtype)
        q = self.q_proj(hidden_states)
        shard = find_head_shard(q, self.q_proj.weight, self.num_heads, self.head_dim)
        return self.project_out(hidden_states, self._read(q, state, shard), shard)

    def _fold(self, memory: Tensor, mask: Tensor | None) -> LinearAttentionState:
        """S = sum of phi(k) v^T and z = sum of phi(k) over the memory (B, M, memory size)."""
        hidden = None if mask is None else (mask == 0).to(memory.device)[..., None]
        if hidden is not None:
            memory = memory.masked_fill(hidden, 0)  # NaN, too
        k = self.k_proj(memory)
        shard = find_head_shard(k, self.k_proj.weight, self.num_key_value_heads, self.head_dim)
        k = k.unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(memory).unflatten(-1, (-1, self.head_dim))
        if self.value_act is not None:
            v = self.value_act(v)
        no_q = k.new_zeros(k.shape[0], 0, k.shape[2] * self.num_key_value_groups, self.head_dim)
        _, phi_k = self._map(no_q, k, shard)
        if hidden is not None:
            phi_k = phi_k.masked_fill(hidden[..., None], 0)
        with without_autocast(k.device.type):
            kv = phi_k.permute(0, 2, 3, 1) @ v.to(phi_k.dtype).transpose(1, 2)
        return LinearAttentionState(kv, phi_k.sum(1) if self.options["normalize"] else None)

    def _read(self, q: Tensor, state: LinearAttentionState, shard: HeadShard | None) -> Tensor:
        """phi(q)^T S / (phi(q)^T z + eps), the division only with z: (B, T, Hq D) -> (B, T, Hq, D).

        A head of S serves its G query heads by one product.
        """
        B, Hkv, _, V = state.kv.shape
        no_k = q.new_zeros(B, 0, Hkv, self.head_dim)
        phi_q, _ = self._map(q.unflatten(-1, (-1, self.head_dim)), no_k, shard)
        T, Hq = phi_q.shape[1:3]
        G = Hq // Hkv
        phi_q = phi_q.unflatten(2, (Hkv, G)).transpose(1, 2).flatten(2, 3)  # (B, Hkv, T G, K)
        with without_autocast(q.device.type):
            y = phi_q @ state.kv
            if state.z is not None:
                y = y / (phi_q @ state.z[..., None] + self.options["eps"])
        return y.view(B, Hkv, T, G, V).transpose(1, 2).flatten(2, 3).to(q.dtype)

    def _map(self, q: Tensor, k: Tensor, shard: HeadShard | None) -> tuple[Tensor, Tensor]:
        """phi(q) (B, T, Hq, K) and phi(k) (B, M, Hkv, K), in the dtype of sums."""
        dtype = accumulation_dtype(q.dtype)
        if self.feature_map is None:
            phi = POINTWISE[self.options["feature_map"]]
            return phi(q.to(dtype)), phi(k.to(dtype))
        q, k = call(self.feature_map, shard, q, k)
        return q.to(dtype), k.to(dtype)


class SoftmaxAttention(nn.Module):
    """Softmax attention over all tokens or a sliding window, through Transformers' interface."""

    def __init__(self, config: LinearAttentionConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = config.is_causal
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
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
        position_embeddings: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, T, C) -> (B, T, C), and the weights (B, Hq, T, T) where eager."""
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        find_head_shard(k, self.k_proj.weight, self.num_key_value_heads, self.head_dim)  # or error
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
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
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(y.flatten(2)), weights


ATTENTIONS = {
    "linear_attention": LinearAttention,
    "full_attention": SoftmaxAttention,
    "sliding_attention": SoftmaxAttention,
}


class LinearAttentionMLP(nn.Module):
    """Llama's: a gate, a product, and back."""

    def __init__(self, config: LinearAttentionConfig):
        super().__init__()
        C, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(C, size, bias=bias)
        self.up_proj = Linear(C, size, bias=bias)
        self.down_proj = Linear(size, C, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LinearAttentionDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), where there is a memory + cross attention, then x + mlp(norm(x))."""

    def __init__(self, config: LinearAttentionConfig, layer_idx: int):
        super().__init__()
        self.self_attn = ATTENTIONS[config.layer_types[layer_idx]](config, layer_idx)
        self.has_cross_attn = config.add_cross_attention
        if self.has_cross_attn:
            self.cross_attn = CrossAttention(config, layer_idx)
            self.cross_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LinearAttentionMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # by position, for gradient checkpointing
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states), past_key_values=past_key_values, **kwargs
        )
        hidden_states = hidden_states + attended
        if self.has_cross_attn:
            attended = self.cross_attn(
                self.cross_attention_layernorm(hidden_states),
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values,
            )
            if attended is not None:
                hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def can_look_at(tensor: Tensor, T: int) -> bool:
    """Whether values may be read: not in a compiled graph, nor for one token where a GPU waits."""
    return not torch.compiler.is_compiling() and (T > 1 or tensor.device.type == "cpu")


def is_traced() -> bool:
    """Whether a graph is being made, by the compiler or for export: no value can be read."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def count_past(past_key_values: Cache | None) -> int | Tensor:
    """The number of tokens in the cache; that of a static one is a tensor ()."""
    return 0 if past_key_values is None else past_key_values.get_seq_length()


def find_padding(
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    B: int,
    T: int,
    past: int | Tensor,
    is_causal: bool,
) -> Tensor | None:
    """The mask of real tokens, (B, T ... past + T), for its last tokens; None where all are."""
    if isinstance(attention_mask, dict):  # one per layer type, as generate() may make them
        attention_mask = attention_mask.get("linear_attention")
    if attention_mask is None:
        return None
    if attention_mask.dim() == 4:
        return find_padding_in_4d(attention_mask, T, is_causal)
    shape = tuple(attention_mask.shape)
    longest = past + T if isinstance(past, int) else shape[1]
    if len(shape) != 2 or shape[0] != B or not T <= shape[1] <= longest:
        raise ValueError(
            f"attention_mask must have shape (B, T) = {(B, T)}, or (B, past + T) with past = "
            f"{past} tokens in the cache, or 4 dimensions, got {shape}"
        )
    return attention_mask


def find_padding_in_4d(attention_mask: Tensor, T: int, is_causal: bool) -> Tensor:
    """The mask of real tokens (B, T) in one of (B, 1, T, past + T), bool or added to the scores.

    Raises:
        ValueError: it says more than that. Linear attention can only leave out whole tokens.
    """
    if attention_mask.dtype != torch.bool:
        attention_mask = attention_mask == 0
    seen = attention_mask[..., -T:]
    key_mask = seen.diagonal(dim1=2, dim2=3)[:, 0]  # a real token sees itself
    expected = key_mask[:, None, None, :].expand(seen.shape)
    if is_causal:
        expected = expected.tril()
    if not torch.equal(seen & key_mask[:, None, :, None], expected & key_mask[:, None, :, None]):
        raise ValueError(
            "attention_mask with 4 dimensions must hide only padding"
            f"{' and the future' if is_causal else ''} from linear-attention layers"
        )
    return key_mask


def find_packed_sequences(
    B: int,
    T: int,
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor | None:
    """Bounds (N + 1,) int32 of the sequences packed into B T tokens; None where rows hold one each.

    Transformers' collators say it in three ways: with the bounds, with each token's sequence, or
    with positions that restart.
    """
    if cu_seq_lens_q is not None:
        if can_look_at(cu_seq_lens_q, 1) and cu_seq_lens_q[-1] != B * T:
            raise ValueError(f"cu_seq_lens_q must end with B T = {B * T}, got {cu_seq_lens_q}")
        return cu_seq_lens_q.to(torch.int32)
    if seq_idx is not None:
        is_next = seq_idx[:, 1:] == seq_idx[:, :-1]
    elif position_ids is not None and attention_mask is None and T > 1:
        is_next = position_ids[:, 1:] == position_ids[:, :-1] + 1
    else:
        return None
    if is_next.all():
        return None
    starts = F.pad(~is_next, (1, 0), value=True).expand(B, T).flatten().nonzero().squeeze(1)
    return F.pad(starts, (0, 1), value=B * T).to(torch.int32)


def sequence_of_each_token(cu_seqlens: Tensor, T: int) -> Tensor:
    """The number (T,) of the packed sequence that each token belongs to."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True)


def count_positions(
    padding: Tensor | None,
    cu_seqlens: Tensor | None,
    B: int,
    T: int,
    past: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Positions (B, T) or (1, T), counting real tokens from the start of their sequence."""
    if cu_seqlens is not None:
        starts = cu_seqlens[sequence_of_each_token(cu_seqlens, B * T)]
        return (torch.arange(B * T, device=device) - starts).view(B, T)
    if padding is None:
        return torch.arange(T, device=device)[None] + past
    before = past + T - padding.shape[1]  # tokens that the mask does not cover are real
    return (before + (padding != 0).cumsum(-1) - 1).clamp(min=0)[:, padding.shape[1] - T :]


def softmax_masks(
    config: LinearAttentionConfig,
    hidden_states: Tensor,
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    past_key_values: Cache | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Tensor | None]:
    """For each type of softmax layer the mask that its attention function takes."""
    layer_types = active_layer_types(config)
    if isinstance(attention_mask, dict):
        missing = set(layer_types) - set(attention_mask)
        if missing:
            raise ValueError(f"attention_mask must have every layer type, and has no {missing}")
        return attention_mask
    B, T, _ = hidden_states.shape
    past = count_past(past_key_values)
    is_number = isinstance(past, int) or not is_traced()
    if attention_mask is not None and attention_mask.dim() == 2 and is_number:
        past = int(past)
        attention_mask = F.pad(attention_mask, (past + T - attention_mask.shape[1], 0), value=1)
    only_within = None
    if cu_seqlens is not None:
        if B > 1 and is_flash_attention_requested(config):
            raise ValueError("flash attention takes packed sequences in one row only, B = 1")
        sequence = sequence_of_each_token(cu_seqlens, B * T).view(B, T)
        attention_mask = None

        def only_within(b, head, q, k):
            return sequence[b, q] == sequence[b, k]

    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    return {
        layer_type: make(
            config=config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            and_mask_function=only_within,
        )
        for layer_type, make in makers.items()
        if layer_type in layer_types
    }


def check_memory(
    config: LinearAttentionConfig, B: int, memory: Tensor | None, mask: Tensor | None
) -> None:
    """Raises a ValueError where a memory for cross attention is none for B rows."""
    if memory is None:
        return
    if not config.add_cross_attention:
        raise ValueError("encoder_hidden_states need a config with add_cross_attention=True")
    size = config.cross_attention_hidden_size or config.hidden_size
    if memory.dim() != 3 or memory.shape[0] != B or memory.shape[2] != size:
        raise ValueError(
            f"encoder_hidden_states must have shape (B, M, memory size) = ({B}, M, {size}), got "
            f"{tuple(memory.shape)}"
        )
    if mask is not None and mask.shape != memory.shape[:2]:
        raise ValueError(
            f"encoder_attention_mask must have shape (B, M) = {tuple(memory.shape[:2])}, got "
            f"{tuple(mask.shape)}"
        )


def slice_logits_to_keep(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The hidden states (B, T, C) whose logits are wanted, as in transformers' newest releases."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


class LinearAttentionPreTrainedModel(PreTrainedModel):
    config: LinearAttentionConfig
    config_class = LinearAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LinearAttentionDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": LinearAttentionDecoderLayer,
        "attentions": SoftmaxAttention,
    }

    def __init__(self, config: LinearAttentionConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.model_tags = list(TAGS)
        self.card_metadata: dict[str, Any] = {}  # of the model card: license, language, ...
        # The heads ask AutoModel for their base. Transformers may load a folder's config.py and its
        # modeling.py from two copies, and then this config's class is not the one registered below.
        AutoModel.register(type(config), LinearAttentionModel, exist_ok=True)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))  # as nn.Conv1d does it
        elif isinstance(module, (FeatureMap, Decay)):
            module.reset_parameters()

    def redraw_features(self):
        """Draws the random features of feature_map="favor+" anew, in training and on request.

        Raises:
            RuntimeError: the model is in eval mode, or has none.
        """
        maps = [module for module in self.modules() if isinstance(module, FavorPlus)]
        if not maps:
            raise RuntimeError(
                'redraw_features() needs a model with feature_map="favor+", got '
                f"{self.config.feature_map!r}"
            )
        for feature_map in maps:
            feature_map.redraw()

    def save_pretrained(self, save_directory, is_main_process=True, *args, **kwargs):
        """As in Transformers. The directory also holds this code, for every Auto class, and a model
        card, README.md, unless there is one: `card_metadata` says what its header has beside our
        own fields.
        """
        self.config.auto_map = {
            auto_class.__name__: f"{model_class.__module__.split('.')[-1]}.{model_class.__name__}"
            for auto_class, model_class in AUTO_CLASSES.items()
        }
        readme = Path(save_directory, "README.md")
        self._card_before = readme.read_text("utf-8") if readme.is_file() else None
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        is_saved = is_main_process and readme.parent.is_dir() and not self._saves_adapters
        if is_saved and not readme.exists():
            make_model_card(self, readme.parent.resolve().name, self.card_metadata).save(readme)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """As in Transformers, which has just written the repository's card into the directory, or a
        form to be filled in. In place of the form goes the card that was there, or ours.
        """
        readme = Path(working_dir, "README.md")
        form = ModelCard.load(readme)
        if is_placeholder(form) and not self._saves_adapters:
            metadata = {**self.card_metadata, "tags": form.data.tags}
            card = make_model_card(self, repo_id, metadata)
            if self._card_before is not None:
                card = ModelCard(self._card_before)
            card.save(readme)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @property
    def _saves_adapters(self) -> bool:
        """Whether save_pretrained saves PEFT's adapters instead of the model."""
        return getattr(self, "_hf_peft_config_loaded", False)


class LinearAttentionModel(LinearAttentionPreTrainedModel):
    """Embeddings, positions, layers and a last norm."""

    def __init__(self, config: LinearAttentionConfig):
        super().__init__(config)
        config.validate_architecture()  # it may have been changed since it was made
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding_type == "rotary":
            self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LinearAttentionDecoderLayer(config, layer_idx)
            for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        sequence_group: Any = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """input_ids (B, T) or inputs_embeds (B, T, C) -> last_hidden_state (B, T, C).

        Args:
            attention_mask: (B, T) or (B, past + T), 0 for padding, anywhere; or (B, 1, T, past + T)
                as long as it only hides padding and the future; or a dict of one per layer type.
            position_ids: (B, T); by default they count real tokens.
            past_key_values: a LinearAttentionCache or an empty DynamicCache.
            encoder_hidden_states: the memory (B, M, hidden size or cross_attention_hidden_size) for
                cross attention. A cache keeps what is read of it: later forwards do not look at it.
            encoder_attention_mask: (B, M), 0 for padding in the memory.
            cu_seq_lens_q, seq_idx: bounds (N + 1,) or numbers (B, T) of sequences packed into the
                batch. `position_ids` that restart, without mask and cache, say the same.
            sequence_group: torch.distributed's ProcessGroup of ranks that hold consecutive pieces
                of these sequences, in order (`split_sequence`).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        B, T, _ = inputs_embeds.shape
        check_memory(self.config, B, encoder_hidden_states, encoder_attention_mask)

        cu_seqlens = find_packed_sequences(
            B, T, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        )
        if cu_seqlens is not None and encoder_hidden_states is not None:
            raise ValueError("encoder_hidden_states must be None with packed sequences")
        if sequence_group is not None:
            self._check_sequence_parallel(cu_seqlens)
        without_cache = {  # what goes without one
            "sequence_group": sequence_group is not None,
            "packed sequences": cu_seqlens is not None,
            "is_causal=False": not self.config.is_causal,
        }
        if past_key_values is not None:
            for what, is_so in without_cache.items():
                if is_so:
                    raise ValueError(f"past_key_values must be None with {what}")
            past_key_values = cache_for_model(past_key_values, self.config)
        elif use_cache and not any(without_cache.values()):
            past_key_values = LinearAttentionCache(self.config)
        past = count_past(past_key_values)

        padding = find_padding(attention_mask, B, T, past, self.config.is_causal)
        key_mask = None
        if padding is not None:
            key_mask = padding[:, padding.shape[1] - T :].to(inputs_embeds.device) != 0
        if key_mask is not None and can_look_at(key_mask, T) and key_mask.all():
            key_mask = None  # all is simpler without
        if key_mask is not None:
            if cu_seqlens is not None:
                raise ValueError("attention_mask must hide nothing where sequences are packed")
            inputs_embeds = inputs_embeds.masked_fill(~key_mask[..., None], 0)  # NaN, too
        if position_ids is None:
            if sequence_group is not None:
                past = tokens_before(key_mask, inputs_embeds, sequence_group)
            position_ids = count_positions(padding, cu_seqlens, B, T, past, inputs_embeds.device)

        hidden_states, position_embeddings = self._embed_positions(inputs_embeds, position_ids)
        masks = softmax_masks(
            self.config, hidden_states, attention_mask, past_key_values, cu_seqlens
        )
        if cu_seqlens is not None:  # flash attention recognises sequences by their positions
            position_ids = count_positions(None, cu_seqlens, B, T, 0, hidden_states.device)
        layer_types = active_layer_types(self.config)
        for layer, layer_type in zip(self.layers[: len(layer_types)], layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                attention_mask=masks.get(layer_type),
                key_mask=key_mask,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                sequence_group=sequence_group,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )

    def _check_sequence_parallel(self, cu_seqlens: Tensor | None):
        """Raises a ValueError where a sequence can't be shared by ranks."""
        others = sorted(set(active_layer_types(self.config)) - {"linear_attention"})
        if others:
            raise ValueError(
                f"sequence_group must be None where layer_types has {others}: softmax attention "
                "needs the keys of the whole sequence"
            )
        if cu_seqlens is not None:
            raise ValueError("sequence_group must be None with packed sequences")

    def _embed_positions(
        self, inputs_embeds: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The first layer's input, and (cos, sin) (B, T, D) for the layers to rotate q and k."""
        kind = self.config.position_embedding_type
        C = inputs_embeds.shape[-1]
        if self.config.scale_embeddings:
            inputs_embeds = inputs_embeds * math.sqrt(C)
        if kind == "sinusoidal":
            positions = sinusoidal_positions(position_ids, C).to(inputs_embeds.dtype)
            return inputs_embeds + positions, None
        if kind == "learned":
            limit = self.config.max_position_embeddings
            if not torch.compiler.is_compiling() and (position_ids >= limit).any():
                raise ValueError(
                    f"position_ids must be less than max_position_embeddings={limit} with learned "
                    f"positions, got {position_ids.max().item()}"
                )
            return inputs_embeds + self.embed_positions(position_ids), None
        if kind == "rotary":
            return inputs_embeds, self.rotary_emb(inputs_embeds, position_ids)
        return inputs_embeds, None


def check_generation(generation_config: GenerationConfig, mode: GenerationMode) -> None:
    """Raises a ValueError for what `generate()` would do wrong, or can't do, with these models."""
    kind = generation_config.cache_implementation
    if kind not in CACHE_IMPLEMENTATIONS:
        raise ValueError(
            f"cache_implementation must be one of {CACHE_IMPLEMENTATIONS} here, got {kind!r}"
        )
    guidance = generation_config.guidance_scale
    if guidance not in (None, 1) and mode not in ONE_BY_ONE:
        raise ValueError(
            f"guidance_scale must be None or 1 with beams or drafts, got {guidance}: Transformers' "
            "unguided pass would go on from other tokens than the text's, with any model"
        )


def repeat_rows(cache: Cache, generation_config: GenerationConfig, batch_size: int) -> None:
    """Makes of a cache for batch_size rows one for all that `generate()` will make of them."""
    beams, sequences = generation_config.num_beams, generation_config.num_return_sequences
    copies = max(beams or 1, sequences or 1)
    rows = count_rows(cache)
    if rows == batch_size and copies > 1 and not cache.is_compileable:
        cache.batch_repeat_interleave(copies)
    elif rows not in (None, batch_size * copies):
        raise ValueError(
            f"past_key_values must have {batch_size * copies} rows, or {batch_size} if it is not "
            f"static, got {rows}"
        )


class LinearAttentionForCausalLM(LinearAttentionPreTrainedModel, GenerationMixin):
    """The language model: next-token logits, loss, and `generate()`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LinearAttentionConfig):
        if not config.is_causal:
            raise ValueError(
                "a causal language model needs a config with is_causal=True, got is_causal=False; "
                "LinearAttentionModel and the other heads take it"
            )
        super().__init__(config)
        self.model = LinearAttentionModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss
        self.post_init()

    def _get_name(self) -> str:
        """The same where FSDP2 puts a class of its own before this one: by this name Trainer knows
        that labels are to be shifted for label smoothing.
        """
        return LinearAttentionForCausalLM.__name__

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions:
        """As `LinearAttentionModel.forward`, then logits (B, T, vocab_size).

        Args:
            labels: (B, T), -100 where there is none; token t is compared with logits t - 1.
            logits_to_keep: compute logits only for so many last tokens (0: for all), or for the
                positions in a tensor: (n,), (B, n), or bool (B, T).
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithCrossAttentions(  # which EncoderDecoderModel asks for
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # generate() looks whether it is here
        position_ids: Tensor | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """As in Transformers, which would read again what a cache has read when drafts begin."""
        past = int(count_past(past_key_values)) if next_sequence_length is None else 0
        if past > 0:
            T = input_ids.shape[1]
            if attention_mask is not None:
                is_whole = attention_mask.shape[-1] == T
            else:  # a mask of ones was left out; a piece of a prompt has later positions
                is_whole = position_ids is not None and T == position_ids.shape[-1]
                is_whole = is_whole and bool((position_ids[..., 0] == 0).all())
            if is_whole:
                next_sequence_length = T - past
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **kwargs,
        )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Gives `generate()` this model's cache instead of a DynamicCache or StaticCache."""
        check_generation(generation_config, generation_mode)
        if model_kwargs.get("inputs_embeds") is not None:
            # Transformers cuts the tokens into chunks and would read all embeddings with each
            generation_config.prefill_chunk_size = None
        if model_kwargs.get("past_key_values") is not None:
            cache = cache_for_model(model_kwargs["past_key_values"], self.config)
            repeat_rows(cache, generation_config, batch_size)
            model_kwargs["past_key_values"] = cache
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif generation_config.use_cache is not False:
            kind = generation_config.cache_implementation or "dynamic"
            max_cache_len = None
            if "static" in kind:  # as long as ever before: another length would be compiled again
                wanted = getattr(generation_config, "max_cache_len", None) or 0
                longest = getattr(self, "_previous_max_cache_length", 0)
                max_cache_len = max(max_cache_length, wanted, longest)
                self._previous_max_cache_length = max_cache_len
            cache = LinearAttentionCache(
                self.config,
                # on a CPU, the cache is where it would be brought to
                offloading="offloaded" in kind and self.device.type != "cpu",
                max_cache_len=max_cache_len,
            )
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache

    def init_continuous_batching(self, *args, **kwargs):
        """Refuses, for `generate_batch()`, too: Transformers' paged cache holds keys and values of
        softmax layers, page by page, and has no place for a state.
        """
        raise NotImplementedError(
            "continuous batching (generate_batch, init_continuous_batching) needs a model that "
            "keeps all it remembers in Transformers' PagedAttentionCache, which has no place for "
            "the state of linear attention. generate() takes left-padded batches, and rows of a "
            "cache come and go by LinearAttentionCache.join and batch_select_indices"
        )


class LinearAttentionForMaskedLM(LinearAttentionPreTrainedModel):
    """A bidirectional encoder (is_causal=False) that fills in masked tokens."""

    _tied_weights_keys = LinearAttentionForCausalLM._tied_weights_keys
    _tp_plan = LinearAttentionForCausalLM._tp_plan
    _pp_plan = LinearAttentionForCausalLM._pp_plan
    _fsdp_plan = LinearAttentionForCausalLM._fsdp_plan

    def __init__(self, config: LinearAttentionConfig):
        if config.is_causal:
            raise ValueError(
                "a masked language model needs a config with is_causal=False, got is_causal=True"
            )
        super().__init__(config)
        self.model = LinearAttentionModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """As `LinearAttentionModel.forward`, then logits (B, T, vocab_size).

        Args:
            labels: (B, T), the tokens that are hidden in input_ids, -100 elsewhere.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:  # of the tokens themselves, not of those that follow
            loss = self.loss_function(
                logits=logits,
                labels=None,
                vocab_size=self.config.vocab_size,
                shift_labels=labels,
                **kwargs,
            )
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def of_whole_sequences(forward: Callable) -> Callable:
    """The forward of a head that can't do with a piece of its input."""

    @functools.wraps(forward)
    def checked(self, *args, sequence_group: Any = None, **kwargs):
        if sequence_group is not None:
            raise ValueError(f"sequence_group must be None for {type(self).__name__}")
        return forward(self, *args, **kwargs)

    return checked


class LinearAttentionForSequenceClassification(
    GenericForSequenceClassification, LinearAttentionPreTrainedModel
):
    """One label for a sequence, from its last real token."""

    forward = of_whole_sequences(GenericForSequenceClassification.forward)


class LinearAttentionForTokenClassification(
    GenericForTokenClassification, LinearAttentionPreTrainedModel
):
    """One label for each token."""

    forward = of_whole_sequences(GenericForTokenClassification.forward)


class LinearAttentionForQuestionAnswering(
    GenericForQuestionAnswering, LinearAttentionPreTrainedModel
):
    """The first and the last token of an answer within the sequence."""

    forward = of_whole_sequences(GenericForQuestionAnswering.forward)


def prepare_cache_of_decoder(self, generation_config, model_kwargs, *args) -> None:
    """Gives `generate()` of an encoder-decoder model the cache of a decoder of ours: the one of
    Transformers can't be made of linear-attention layers.
    """
    if self.config.decoder.model_type == LinearAttentionConfig.model_type:
        self.decoder._prepare_cache_for_generation(generation_config, model_kwargs, *args)
    else:
        GenerationMixin._prepare_cache_for_generation(self, generation_config, model_kwargs, *args)


for _model_class in (EncoderDecoderModel, SpeechEncoderDecoderModel, VisionEncoderDecoderModel):
    _model_class._prepare_cache_for_generation = prepare_cache_of_decoder

AUTO_CLASSES = {
    AutoModel: LinearAttentionModel,
    AutoModelForCausalLM: LinearAttentionForCausalLM,
    AutoModelForMaskedLM: LinearAttentionForMaskedLM,
    AutoModelForSequenceClassification: LinearAttentionForSequenceClassification,
    AutoModelForTokenClassification: LinearAttentionForTokenClassification,
    AutoModelForQuestionAnswering: LinearAttentionForQuestionAnswering,
}
for _auto_class, _model_class in AUTO_CLASSES.items():
    # from_pretrained finds these classes, and save_pretrained saves their code
    _auto_class.register(LinearAttentionConfig, _model_class, exist_ok=True)
    _model_class.register_for_auto_class(_auto_class)
LinearAttentionConfig.register_for_auto_class()
# Trainer shifts the labels for label smoothing only where this table has the class's name
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LinearAttentionConfig.model_type] = "LinearAttentionForCausalLM"

__all__ = ["LinearAttentionPreTrainedModel", *(model.__name__ for model in AUTO_CLASSES.values())]
