# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the code in folders of format 1 takes from the package in the place of its own."""

from ..model.configuration import LinearAttentionConfig
from ..model.modeling import (
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
