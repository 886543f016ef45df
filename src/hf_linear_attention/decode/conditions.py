# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The conditions under which a forward may be traced, as far as they are known before it runs."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache.growing import GrowingLayer
from ..cache.layers import RecurrentLayer, left_padding_of
from ..cache.protocol import StepCache
from ..cache.slots import SlotCache, SlotLayer
from ..ops.checks import is_traced
from ..ops.numerics import is_transformed
from ..ops.tokens import Tokens

RECORD_SETTING = "HF_LINEAR_ATTENTION_RECORD_TOKENS"
ARE_TOKENS_RECORDED = os.environ.get(RECORD_SETTING, "1") != "0"  # read once, at import


def may_be_recorded(
    inputs: Tensor, key_mask: Tensor | None, is_causal: bool, past_key_values: Any
) -> bool:
    """Whether layers do the same with these inputs (B, T, ...) as with those of other tokens, as
    far as can be told here: slots know whether each of their tokens is a step.
    """
    return (
        ARE_TOKENS_RECORDED
        and type(inputs) is Tensor
        and (inputs.shape[1:2] == (1,) or isinstance(past_key_values, SlotCache))
        and key_mask is None
        and is_causal
        and inputs.is_cpu
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not is_traced()
        and not is_transformed()
        and not _has_any_global_hook()
        and _get_current_dispatch_mode() is None  # else somebody looks at operations
    )


def recordable_caches(
    config: PreTrainedConfig,
    past_key_values: Cache | SlotCache | None,
    num_layers: int,
    tokens: Tokens,
) -> list[StepCache | None]:
    """Of each layer, None where a token does more than to change tensors in place, or has a mask
    for keys, which no trace knows.
    """
    if past_key_values is None:
        return [None] * num_layers
    if isinstance(past_key_values, SlotCache):
        caches = map(past_key_values.layers.get, range(num_layers))
    else:
        caches = past_key_values.layers[:num_layers]
    has_mask = tokens.attention_masks.get("full_attention") is not None
    untraced: tuple[type, ...] = (GrowingLayer,) if has_mask else ()
    return [
        cache if is_recordable(config, cache) and not isinstance(cache, untraced) else None
        for cache in caches
    ]


def is_recordable(config: PreTrainedConfig, cache: Any) -> bool:
    """Whether all that a token does to one layer's cache is to change tensors in place."""
    if isinstance(cache, GrowingLayer):  # into which the compiled attention writes
        is_known = config._attn_implementation == "sdpa" and config.softmax_mixer == "softmax"
        return is_known and cache.may_be_recorded
    return isinstance(cache, (RecurrentLayer, SlotLayer)) and cache.may_be_recorded


def caches_of_a_step(
    config: PreTrainedConfig, input_ids: Tensor, past_key_values: Any
) -> list[StepCache] | None:
    """Of all layers, where all that a whole model of `config` does with one token in each row
    (B, 1) is to give logits and to change states in place, as far as can be told here.
    """
    if not may_be_recorded(input_ids, None, True, past_key_values):
        return None
    layers = getattr(past_key_values, "layers", None)
    if not layers or left_padding_of(past_key_values) is not None:
        return None
    if getattr(past_key_values, "config", config) is not config:
        return None  # may be of another model: the model looks, and makes it its own
    return layers if all(is_recordable(config, layer) for layer in layers) else None
