# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' LlamaRMSNorm, faster on the CPU: one operation instead of eight."""

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..ops.backends import has_compiled, native_op
from .linear import are_plain

compiled_rms_norm = native_op("rms_norm")
IS_COMPILED = has_compiled()


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` takes x (..., C) and a weight (C,). Autocast changes no norm."""
    return IS_COMPILED and are_plain(x, weight, None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), by the compiled op.

    x / sqrt(...) is rounded to x's dtype before it is multiplied, as in LlamaRMSNorm. Where the
    dtypes differ, as under autocast, all is in the one that both fit in, and not rounded between.
    """
    if x.dtype is not weight.dtype:
        dtype = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(dtype), weight.to(dtype)
    return compiled_rms_norm(x, weight, eps)


class RMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm: the same parameters, the same answers but for rounding.

    For float64 it computes in float64 throughout, where LlamaRMSNorm takes the mean in float32.
    What the compiled op does not know, as quantised weights, goes the usual way.
    Transformers recognises norms by "RMSNorm" in the name of the class.
    """

    has_parameters_per_head = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        if takes(hidden_states, self.weight):
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)
