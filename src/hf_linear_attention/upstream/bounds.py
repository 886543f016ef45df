# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bounds of sequences packed in a row, as layers receive them.

Shapes: B batch, T time, N sequences.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..recurrences.packing import find_bounds

BOUNDS = "cu_seq_lens_q"  # the argument that models hand on to their layers
GROUP = "sequence_group"  # an argument of models whose ranks share sequences
SHARDS = "shards_of_sequences"  # what they hand on to their layers
# Types of layers that are told so by their mask, the last as it was called in 5.17.
TELL_BY_MASK = ("linear_attention", "indexed_attention", "deepseek_sparse_attention", "conv")
# What the masks of types of layers are called where all layers are hybrid.
ALSO_CALLED = {
    "full_attention": "hybrid",
    "sliding_attention": "hybrid_sliding",
    "linear_attention": "conv",
}
TOLD = (BOUNDS, "seq_idx")  # what layers read among their other arguments


class MaskAndBounds(NamedTuple):
    """What those models hand on in place of a mask."""

    mask: Tensor | None  # (B, T)
    bounds: Any  # (N + 1,), or a TokenTree


def bounds_for_layers(kwargs: Mapping[str, Any], B: int, T: int) -> Tensor | None:
    """The bounds of packed sequences that a layer finds among its arguments."""
    return find_bounds(B, T, kwargs.get(BOUNDS), kwargs.get("seq_idx"))
