# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the code in folders of format 1 takes from the package in the place of its own."""

from ..configuration_linear_attention import LinearAttentionConfig
from ..modeling_linear_attention import (
    LinearAttentionForCausalLM,
    LinearAttentionForMaskedLM,
    LinearAttentionForQuestionAnswering,
    LinearAttentionForSequenceClassification,
    LinearAttentionForTokenClassification,
    LinearAttentionModel,
    LinearAttentionPreTrainedModel,
)

__all__ = [
    "LinearAttentionConfig",
    "LinearAttentionForCausalLM",
    "LinearAttentionForMaskedLM",
    "LinearAttentionForQuestionAnswering",
    "LinearAttentionForSequenceClassification",
    "LinearAttentionForTokenClassification",
    "LinearAttentionModel",
    "LinearAttentionPreTrainedModel",
]
