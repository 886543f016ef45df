# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism in vLLM: its linear layers in place of the package's, for those that the
model's plan names, and for what else belongs to heads the share of this rank.
"""

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from ..mixers.parts.tensor_parallel import modules_of_layers, style_of

LINEARS = {"colwise": ColumnParallelLinear, "rowwise": RowParallelLinear}


class HeadsOfRank(NamedTuple):
    """As `tensor_parallel.HeadShard`, for ranks of vLLM, and without gradients."""

    rank: int
    num_ranks: int

    def take(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.num_ranks, dim)[self.rank]

    def whole(self, x: Tensor, dim: int) -> Tensor:
        return tensor_model_parallel_all_gather(x.contiguous(), dim)

    def share(self, x: Tensor) -> Tensor:
        return x


def parallelize(model: PreTrainedModel) -> LogitsProcessor | None:
    """Replaces, in a language model without weights, what ranks share: projections to heads and
    features and back, embeddings, head.

    Returns what makes logits of all the vocabulary with such a head; None for one rank, where
    nothing is replaced.
    """
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return None
    shard = HeadsOfRank(get_tensor_model_parallel_rank(), ranks)
    config = model.config
    for layer in model.model.layers:
        for name in sorted(modules_of_layers(config)):
            parent_name, child_name = name.split(".")
            parent = getattr(layer, parent_name)
            if hasattr(parent, child_name):  # other types of layers have others
                linear = getattr(parent, child_name)
                setattr(parent, child_name, parallel_linear(linear, name, shard))
    model.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
    model.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
    return LogitsProcessor(config.vocab_size)


def parallel_linear(linear: nn.Linear, name: str, shard: HeadsOfRank) -> nn.Module:
    """vLLM's, of the style that the plan has for this name."""
    made = LINEARS[style_of(name)](
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        return_bias=False,
    )
    made.out_features = linear.out_features  # by which a mixer sees that it got a share
    made.head_shard = shard
    return made
