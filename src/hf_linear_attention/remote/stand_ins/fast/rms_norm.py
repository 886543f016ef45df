# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Llama's norm."""

from transformers.models.llama.modeling_llama import LlamaRMSNorm


class RMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm, (..., C) -> (..., C)."""

    has_parameters_per_head = False
