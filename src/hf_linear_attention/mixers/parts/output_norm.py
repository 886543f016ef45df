# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The norm of a layer's outputs, over each head, some, or all, and the gate beside it.

Shapes: B batch, T time, H heads of the outputs, V value dim, G groups of heads.
"""

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ...fast.rms_norm import RMSNorm
from ...ops.numerics import at_least_float32
from .normalizers import NORMALIZERS, Normalizer
from .tensor_parallel import HeadShard, call


class HeadsRMSNorm(RMSNorm):
    """RMSNorm of heads (B, T, H, V), each or in G groups. A weight for each of V features, which
    all heads share, or for each of the H V channels of groups.
    """

    def __init__(
        self,
        normalizer: Normalizer,
        num_heads: int,
        value_dim: int,
        num_key_heads: int,
        eps: float,
    ):
        num_groups = {"group": num_key_heads, "all": 1}.get(normalizer.over or "head")
        super().__init__(value_dim if num_groups is None else num_heads * value_dim, eps=eps)
        self.normalizer = normalizer
        self.num_groups = num_groups  # None: every head by itself

    def forward(self, y: Tensor) -> Tensor:
        """(B, T, H, V) -> (B, T, H, V)"""
        if self.num_groups is None:
            return super().forward(y)
        if self.num_groups == 1:
            return super().forward(y.flatten(2)).view(y.shape)
        groups = at_least_float32(y).flatten(2).unflatten(2, (self.num_groups, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.variance_epsilon)
        return (self.weight * normed.flatten(2).to(y.dtype)).view(y.shape)


def build_norm(
    config: PreTrainedConfig, num_heads: int, value_dim: int, num_key_heads: int
) -> HeadsRMSNorm | None:
    """The norm of config.normalizer for heads that share so many keys."""
    normalizer = NORMALIZERS[config.normalizer]
    if normalizer is None or normalizer.over is None:
        return None
    return HeadsRMSNorm(normalizer, num_heads, value_dim, num_key_heads, config.output_norm_eps)


def normalize(
    norm: HeadsRMSNorm | None, y: Tensor, gate: Tensor | None, shard: HeadShard | None
) -> Tensor:
    """y (B, T, H, V) normalised by `build_norm`'s norm, and gated where there is a gate (B, T, H,
    V); with a shard, H are the heads of this rank.
    """
    if norm is None:
        return y if gate is None else y * gate
    dtype = y.dtype
    if gate is not None and norm.normalizer.gate_is_first:
        y = at_least_float32(y) * gate  # not rounded before the norm
    if shard is None or norm.num_groups is None:
        y = call(norm, shard, y)
    else:
        y = shard.take(norm(shard.whole(y, 2)), 2)
    return y.to(dtype) if gate is None or norm.normalizer.gate_is_first else y * gate
