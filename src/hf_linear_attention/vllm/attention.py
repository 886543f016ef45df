# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax layers of hybrids, by vLLM's attention and its pages of keys and values.

Shapes: T tokens of all requests, Hq query heads, Hkv key-value heads, D features of queries and
keys, V of values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from ..mixers.softmax import LatentAttention, SoftmaxAttention
from ..model.auto import add_attention

PAGED = "hf_linear_attention_in_vllm"  # as Transformers' interface has `paged_attention`


def paged_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: None,
    *,
    attentions: nn.ModuleDict,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """q (1, Hq, T, D), k (1, Hkv, T, D), v (1, Hkv, T, V) of new tokens -> (1, T, Hq, V).

    attentions: vLLM's, by the layer's number. Which tokens belong together and what came before,
    its forward context says.
    """
    attention: Any = attentions[str(module.layer_idx)]
    size = attention.head_size
    rows = [  # (T, heads * size): features of zeros change no score, and are cut off values again
        F.pad(x[0].transpose(0, 1), (0, size - x.shape[-1])).flatten(1) for x in (q, k, v)
    ]
    y = attention(*rows)
    return y.unflatten(-1, (q.shape[1], size))[None, ..., : v.shape[-1]], None


add_attention(PAGED, paged_attention)


def key_size(config: PreTrainedConfig) -> int:
    """Features of a head's keys in softmax layers; values have no more."""
    if config.softmax_mixer == "mla":
        return max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return config.head_dim


def padded_head_size(size: int) -> int:
    """The smallest size of heads from `size` on that vLLM's attention knows here.

    Raises:
        ValueError: none is as large.
    """
    if not current_platform.is_cpu():
        return -(-size // 8) * 8  # what flash attention's heads must be a multiple of
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    fitting = [known for known in sizes if known >= size]
    if not fitting:
        raise ValueError(
            f"heads of softmax layers must have at most {max(sizes)} features in vLLM, got {size}"
        )
    return min(fitting)


def make_attentions(model: PreTrainedModel, vllm_config: Any) -> nn.ModuleDict:
    """vLLM's attention for each softmax layer of a model, by the layer's number."""
    config, ranks = model.config, vllm_config.parallel_config.tensor_parallel_size
    attentions = nn.ModuleDict()
    for number, layer in enumerate(model.layers):
        mixer = layer.self_attn
        if not isinstance(mixer, SoftmaxAttention):
            continue
        num_heads = config.num_attention_heads
        is_latent = isinstance(mixer, LatentAttention)
        attentions[str(number)] = Attention(
            num_heads // ranks,
            padded_head_size(key_size(config)),
            mixer.scaling,
            num_kv_heads=(num_heads if is_latent else config.num_key_value_heads) // ranks,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.sliding_window,
            prefix=f"model.layers.{number}.self_attn.attn",
        )
    return attentions


def no_masks(config: PreTrainedConfig) -> dict[str, torch.Tensor | None]:
    """For the model's forward: masks of each type of layer, which vLLM makes itself."""
    return dict.fromkeys(config.active_layer_types)
