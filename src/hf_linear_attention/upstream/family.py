# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The record of one family of models, which the files of families/ fill in."""

from dataclasses import dataclass
from typing import Any, Literal

from .replacements import Replacement


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model of Transformers with recurrent layers. Its classes are given by their names."""

    name: str  # of its folder in transformers.models
    replaced: dict[str, Replacement]  # class -> what stands in for it
    sizes: dict[str, Any]  # of a tiny one for trials, in the config of its text model
    model: str  # what holds the layers
    # Around a recurrent layer, if it remembers nothing else: its generated tokens are recorded.
    layer: str | None = None

    # Whether the model counts positions on from its cache, where it is given none.
    counts_positions: bool = True

    # What generates, where it needs something of the following.
    head: str | None = None
    drafts: type | None = None  # put before the head, for drafts
    beams: type | None = None  # put before the head, for beams
    head_hands_on: bool = True  # what it is told of packed sequences

    # Packed sequences. What the model hands on to its recurrent layers, numbers of sequences only
    # before 5.22:
    hands_on: Literal["bounds", "seq_idx", "mask", "state", "states"] = "bounds"
    # Whether it makes masks by positions. Else it takes masks that are made already.
    masks_by_position: bool = True
    # What chooses keys for its softmax layers, and knows bounds beside a mask once it is ours.
    indexer: str | None = None
    # The field of the config with the number of tokens from where on queries are scaled by place.
    longest_row: str | None = None

    # Whether ranks may share sequences: layers are handed whatever the model is, and read the past
    # through their memory and softmax attention alone.
    shares_sequences: bool = False
    why_no_trees: str | None = None  # in words

    # Continuous batching.
    attention: str | None = None  # its softmax layers, if it has any
    is_latent: bool = False  # whether these keep latent vectors, of which they make keys
    never_with: str | None = None  # what its config may not have, for it changes softmax layers
    why_not_served: str | None = None  # in words; a model that is no Family's has not been tried


# Why continuous batching can't serve several.
CONVOLVED = "convolutions beside its softmax layers have no slots"
# Why others are not told of trees.
BY_PLACE = "its softmax layers count places in the row"
CHOSEN = "its softmax layers choose keys by an indexer, which knows no trees"
IN_OTHER_WAYS = "its recurrent layers keep states in ways of their own, which know no trees"
INDEXED = "its softmax layers choose keys by an indexer, whose own keys have no pages"

UNKNOWN = Family(name="", replaced={}, sizes={}, model="")
