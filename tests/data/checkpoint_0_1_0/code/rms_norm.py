# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' LlamaRMSNorm, faster on the CPU: one operation instead of eight."""

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .linear import IS_COMPILED, are_plain

try:
    from hf_linear_attention import _ops
except ImportError:
    pass  # IS_COMPILED is False


class RMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm: the same parameters, the same answers but for rounding.

    For float64 it computes in float64 throughout, where LlamaRMSNorm takes the mean in float32.
    What the compiled op does not know, as autocast and quantised weights, goes the usual way.
    Transformers recognises norms by "RMSNorm" in the name of the class.
    """

    has_parameters_per_head = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        if IS_COMPILED and are_plain(hidden_states, self.weight, None):
            return _ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)
