# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention for Transformers. Importing this makes the Auto classes know the models."""

from transformers import AutoConfig

from .bounded_caches import SinkCache, TOVACache
from .cache_linear_attention import LinearAttentionCache, StaticLinearAttentionCache
from .configuration_linear_attention import LinearAttentionConfig
from .decays import Decay, register_decay
from .feature_maps import FeatureMap, register_feature_map
from .linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_step_,
)
from .modeling_linear_attention import (
    LinearAttentionForCausalLM,
    LinearAttentionForMaskedLM,
    LinearAttentionForQuestionAnswering,
    LinearAttentionForSequenceClassification,
    LinearAttentionForTokenClassification,
    LinearAttentionModel,
    LinearAttentionPreTrainedModel,
)
from .sequence_parallel import split_sequence

AutoConfig.register(LinearAttentionConfig.model_type, LinearAttentionConfig, exist_ok=True)

__all__ = [
    "Decay",
    "FeatureMap",
    "LinearAttentionCache",
    "LinearAttentionConfig",
    "LinearAttentionForCausalLM",
    "LinearAttentionForMaskedLM",
    "LinearAttentionForQuestionAnswering",
    "LinearAttentionForSequenceClassification",
    "LinearAttentionForTokenClassification",
    "LinearAttentionModel",
    "LinearAttentionPreTrainedModel",
    "LinearAttentionState",
    "SinkCache",
    "StaticLinearAttentionCache",
    "TOVACache",
    "linear_attention",
    "linear_attention_step_",
    "register_decay",
    "register_feature_map",
    "split_sequence",
]
