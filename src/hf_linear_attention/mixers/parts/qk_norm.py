# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Norms of queries and keys, of each head or of all heads at once.

Shapes: B batch, T time, H heads, D head dim.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ...fast.rms_norm import RMSNorm
from .tensor_parallel import HeadShard, call


class NormsQueriesAndKeys:
    """Of a mixer, if its config wants them: Qwen3's are of each head, OLMo 2's of all."""

    def add_qk_norms(self, config: PreTrainedConfig, query_heads: int, key_heads: int) -> None:
        """Makes them."""
        self.has_qk_norm = config.use_qk_norm
        self.norms_all_heads = config.qk_norm_of_all_heads
        if self.has_qk_norm:
            D = config.head_dim
            sizes = (query_heads * D, key_heads * D) if self.norms_all_heads else (D, D)
            self.q_norm, self.k_norm = (RMSNorm(size, eps=config.qk_norm_eps) for size in sizes)

    def norm_queries_and_keys(
        self, q: Tensor, k: Tensor, shard: HeadShard | None
    ) -> tuple[Tensor, Tensor]:
        """q and k (B, T, H, D), the same. A norm of all heads has no form for ranks' shares."""
        if not self.has_qk_norm:
            return q, k
        norms: Any = self.q_norm, self.k_norm
        if not self.norms_all_heads:
            return call(norms[0], shard, q), call(norms[1], shard, k)
        if shard is not None:
            raise ValueError(
                "qk_norm_of_all_heads must be False with tensor parallelism: no rank has all heads"
            )
        return norms[0](q.flatten(2)).view(q.shape), norms[1](k.flatten(2)).view(k.shape)
