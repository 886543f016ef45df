# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Language models and encoders that experiments compare: alike but for their attention."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BigBirdConfig,
    FNetConfig,
    LongformerConfig,
    NystromformerConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ReformerConfig,
    ReformerModelWithLMHead,
    YosoConfig,
)

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


def _fitted_width(count: Callable[[str, int], int], name: str, width: int) -> int:
    """Of the MLPs, with which a contender has as many weights as the baseline has with `width`."""
    here, next_one = (count(name, w) for w in (width, width + 1))
    return width + round((count(BASELINE, width) - here) / (next_one - here))


# ---- language models ----


def make_model(name: str, size: Size, vocab_size: int, length: int) -> PreTrainedModel:
    """One of CONTENDERS, for sequences of so many tokens, in training mode.

    All have as many weights as softmax attention with an MLP that is twice as wide as its input,
    but for the tables of tokens and positions: MLPs are wider or narrower for what attention lacks
    or needs.
    """

    def count(name: str, width: int) -> int:
        return _num_weights(name, size, vocab_size, length, width)

    width = _fitted_width(count, name, 2 * size.hidden_size)
    return CONTENDERS[name](size, vocab_size, length, width).train()


@functools.cache
def _num_weights(name: str, size: Size, vocab_size: int, length: int, width: int) -> int:
    with torch.device("meta"):
        return num_weights_of_layers(CONTENDERS[name](size, vocab_size, length, width))


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


# ---- encoders ----

PAD, FIRST, LAST, SYMBOLS = 0, 1, 2, 3  # tokens; others begin at SYMBOLS
LONGEST_WINDOW = 512
UNMASKED = ("Nyströmformer",)  # a mask of padding is an error in Transformers 5.23's


def make_encoder(
    name: str, size: Size, vocab_size: int, length: int, num_labels: int | None = None
) -> PreTrainedModel:
    """One of ENCODERS, in training mode; with a head that gives a sequence one of so many labels,
    or without a head.

    Sequences have `length` tokens, a multiple of 64: FIRST, at which the heads of Transformers'
    encoders look, what is to be read, LAST, at which the head of this package looks, and PAD. All
    have as many weights as softmax attention, but for the tables of tokens and positions.
    """

    def make(name: str, width: int) -> PreTrainedModel:
        config = ENCODERS[name](size, length, width)
        tokens = {"pad_token_id": PAD, "bos_token_id": FIRST, "eos_token_id": LAST}
        config.update({"vocab_size": vocab_size, **tokens})
        if num_labels is None:
            return AutoModel.from_config(config)
        config.num_labels = num_labels
        return AutoModelForSequenceClassification.from_config(config)

    def count(name: str, width: int) -> int:
        with torch.device("meta"):
            return num_weights_of_layers(make(name, width))

    return make(name, _fitted_width(count, name, 2 * size.hidden_size)).train()


def num_weights_of_layers(model: PreTrainedModel) -> int:
    """All but the tables of tokens and positions."""
    return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)


EncoderConfig = Callable[[Size, int, int], PreTrainedConfig]  # of size, length, MLP's width


def _encoder_preset(name: str, is_causal: bool = False) -> EncoderConfig:
    """A config of this package."""

    def make(size: Size, length: int, width: int) -> PreTrainedConfig:
        return LinearAttentionConfig.from_preset(
            name,
            hidden_size=size.hidden_size,
            intermediate_size=width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            is_causal=is_causal,
        )

    return make


def _of_transformers(
    config_class: type[PreTrainedConfig], own: Callable[[int], dict[str, Any]]
) -> EncoderConfig:
    """A config of Transformers; `own` is what only that class has, by length. Nothing is dropped
    out, since this package's models drop nothing.
    """

    def make(size: Size, length: int, width: int) -> PreTrainedConfig:
        return config_class(
            hidden_size=size.hidden_size,
            intermediate_size=width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=length + 2,  # some count from their padding token's number on
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **own(length),
        )

    return make


def _encoding_reformer(size: Size, length: int, width: int) -> PreTrainedConfig:
    return ReformerConfig(
        hidden_size=size.hidden_size,
        feed_forward_size=width,
        attn_layers=["lsh"] * size.layers,
        num_attention_heads=size.heads,
        attention_head_size=size.head_dim,
        lsh_attn_chunk_length=_chunk(length),
        lsh_num_chunks_after=1,
        axial_pos_embds=False,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        is_decoder=False,
    )


def _sparse_blocks(length: int) -> dict[str, Any]:
    """Of BigBird, which is softmax attention where a sequence has no more than 11 blocks."""
    return {"block_size": 2 ** min((length // 12).bit_length() - 1, 6)}


def _windows(length: int) -> dict[str, Any]:
    return {"attention_window": min(length // 8, LONGEST_WINDOW)}


def _landmarks(length: int) -> dict[str, Any]:
    return {"num_landmarks": min(length // 4, 64), "segment_means_seq_len": length}


ENCODERS: dict[str, EncoderConfig] = {
    "softmax": _encoder_preset("softmax"),
    "linear": _encoder_preset("katharopoulos"),
    "Performer": _encoder_preset("performer"),
    "gated delta rule": _encoder_preset("gated_deltanet", is_causal=True),
    "Reformer": _encoding_reformer,
    "BigBird": _of_transformers(BigBirdConfig, _sparse_blocks),
    "Longformer": _of_transformers(LongformerConfig, _windows),
    "Nyströmformer": _of_transformers(NystromformerConfig, _landmarks),
    "FNet": _of_transformers(FNetConfig, lambda length: {}),
    "YOSO": _of_transformers(YosoConfig, lambda length: {}),
}
