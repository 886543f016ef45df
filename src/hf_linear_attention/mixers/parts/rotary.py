# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Rotary positions of a part of a head's features, or of all: Llama's, and Qwen3-Next's.

Shapes: B batch, T time, D head dim, R features that are turned.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ...ops.numerics import ExactBuffers, angles_of


class RotaryEmbedding(ExactBuffers, LlamaRotaryEmbedding):
    """Llama's cos and sin (B, T, R), of R = head_dim partial_rotary_factor features: Llama's reads
    that factor where `rope_type` is not "default".
    """

    @staticmethod
    def compute_default_rope_parameters(
        config: PreTrainedConfig, device: None = None, **kwargs
    ) -> tuple[Tensor, float]:
        """Frequencies (R / 2,), and a factor of 1. Transformers 5.17 passes a device, too: None."""
        fields = config.rope_parameters
        R = int(config.head_dim * (fields.get("partial_rotary_factor") or 1))
        pair = torch.arange(0, R, 2, dtype=torch.float)
        return 1.0 / (fields["rope_theta"] ** (pair / R)), 1.0

    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As Llama's, of x's dtype and device; angles of any position are exact."""
        inv_freq: Any = self.inv_freq
        angles = angles_of(position_ids, inv_freq.to(x.device))
        angles = torch.cat([angles, angles], -1)
        scale: Any = self.attention_scaling
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def with_local_positions(config: Any) -> Any:
    """A config whose rope_parameters are the local ones of another."""
    config = copy.copy(config)
    default = {"rope_type": "default", "rope_theta": 10000.0}
    config.rope_parameters = {**default, **config.local_rope_parameters}
    return config


def rotate(
    q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, ...], heads_at: int, is_local: bool
) -> tuple[Tensor, Tensor]:
    """q and k (..., D) with their first R features turned by cos and sin (B, T, R), the first of
    position_embeddings or the local ones behind them; dimension `heads_at` counts heads.
    """
    cos, sin = position_embeddings[2:] if is_local else position_embeddings[:2]
    R = cos.shape[-1]
    turned = apply_rotary_pos_emb(q[..., :R], k[..., :R], cos, sin, unsqueeze_dim=heads_at)
    if R == q.shape[-1]:
        return turned
    q, k = (torch.cat([x, y[..., R:]], -1) for x, y in zip(turned, (q, k), strict=True))
    return q, k
