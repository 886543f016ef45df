# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Language models that experiments compare: alike but for their attention."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, ReformerConfig, ReformerModelWithLMHead

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class Size(NamedTuple):
    layers: int
    heads: int
    head_dim: int = 32

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_dim


BASELINE = "softmax"
Maker = Callable[[Size, int, int, int], PreTrainedModel]  # of size, vocabulary, length, MLP's width
LONGEST_CHUNK = 64  # of Reformer, whose queries look at their own chunk and the one before


def make_model(name: str, size: Size, vocab_size: int, length: int) -> PreTrainedModel:
    """One of CONTENDERS, for sequences of so many tokens, in training mode.

    All have as many weights as softmax attention with an MLP that is twice as wide as its input:
    MLPs are wider or narrower for what attention lacks or needs.
    """
    width = 2 * size.hidden_size
    target = _num_weights(BASELINE, size, vocab_size, length, width)
    here, next_one = (_num_weights(name, size, vocab_size, length, w) for w in (width, width + 1))
    width += round((target - here) / (next_one - here))
    return CONTENDERS[name](size, vocab_size, length, width).train()


@functools.cache
def _num_weights(name: str, size: Size, vocab_size: int, length: int, width: int) -> int:
    with torch.device("meta"):
        return CONTENDERS[name](size, vocab_size, length, width).num_parameters()


def _preset(name: str, attn_implementation: str = "sdpa") -> Maker:
    """A model of this package."""

    def make(size: Size, vocab_size: int, length: int, width: int) -> PreTrainedModel:
        config = LinearAttentionConfig.from_preset(
            name,
            vocab_size=vocab_size,
            hidden_size=size.hidden_size,
            intermediate_size=width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=length,
            **NO_SPECIAL_TOKENS,
        )
        config._attn_implementation = attn_implementation
        return LinearAttentionForCausalLM(config)

    return make


def _reformer(num_hashes: int) -> Maker:
    """A causal Reformer of Transformers, all of whose layers look for keys by hashes."""

    def make(size: Size, vocab_size: int, length: int, width: int) -> PreTrainedModel:
        config = ReformerConfig(
            vocab_size=vocab_size,
            hidden_size=size.hidden_size,
            feed_forward_size=width,
            attn_layers=["lsh"] * size.layers,
            num_attention_heads=size.heads,
            attention_head_size=size.head_dim,
            num_hashes=num_hashes,
            lsh_attn_chunk_length=_chunk(length),
            axial_pos_embds=False,
            max_position_embeddings=length,
            is_decoder=True,
        )
        return ReformerModelWithLMHead(config)

    return make


def _chunk(length: int) -> int:
    """Of Reformer: sequences in training are whole numbers of chunks, two at least."""
    return max(n for n in range(1, min(LONGEST_CHUNK, length // 2) + 1) if length % n == 0)


CONTENDERS: dict[str, Maker] = {
    "linear": _preset("katharopoulos"),
    "gated delta rule": _preset("gated_deltanet"),
    "hybrid": _preset("hybrid"),
    "Aaren": _preset("aaren"),
    "softmax": _preset("softmax"),
    "softmax, plain products": _preset("softmax", "eager"),
    "Reformer, 1 hash": _reformer(1),
    "Reformer, 4 hashes": _reformer(4),
}
