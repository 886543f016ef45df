# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' LlamaRMSNorm, faster on the CPU: one operation instead of eight."""

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .backends import has_compiled, native_op
from .linear import are_plain

compiled_rms_norm = native_op("rms_norm", version=1)
IS_COMPILED = has_compiled(compiled_rms_norm)


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
            return compiled_rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)
