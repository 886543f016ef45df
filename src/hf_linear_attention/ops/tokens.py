# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a forward knows of its tokens beside their embeddings: worked out once, read by all layers.

Shapes: B batch, T time, N sequences packed into a batch, D head dim.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """The same for all layers. A tuple, so that what moves a layer's arguments to its device, or
    casts them, finds the tensors.
    """

    is_causal: bool
    key_mask: Tensor | None = None  # (B, T) bool, False for padding; None where all tokens are real
    cu_seqlens: Tensor | None = None  # (N + 1,) int32 bounds in all B T tokens; None: not packed
    position_ids: Tensor | None = None  # (B or 1, T), for softmax layers: from 0 where packed
    position_embeddings: tuple[Tensor, ...] | None = None  # cos, sin (B, T, D), for `rotate`
    attention_masks: Mapping[str, Any] = {}  # for each type of softmax layer what it takes
    shards: Any = None  # what ranks have of the sequences, where they share them: a `Shards`
    tree: Any = None  # of a tree in one row: its levels (recurrences/tree.py)

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several sequences."""
        if self.shards is not None and self.shards.begins is not None:
            return True  # in pieces that ranks hold
        return self.cu_seqlens is not None

    def one_row(self, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Hidden states and position embeddings as recurrences take them: where sequences are
        packed, all B T tokens in one long row.
        """
        if self.cu_seqlens is None:
            return hidden_states, self.position_embeddings
        B = hidden_states.shape[0]
        positions = self.position_embeddings
        if positions is not None:
            positions = tuple(x.expand(B, -1, -1).flatten(0, 1)[None] for x in positions)
        return hidden_states.flatten(0, 1)[None], positions


def behind(x: Tensor, like: Tensor) -> Tensor:
    """x with as many dimensions as `like`, those behind its own of size 1: (B, T) for (B, T, H, D),
    say.
    """
    return x.view(*x.shape, *[1] * (like.dim() - x.dim()))


def sequence_of_each_token(cu_seqlens: Tensor, T: int) -> Tensor:
    """The number (T,) of the packed sequence that each token belongs to."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True)


def positions_within(cu_seqlens: Tensor, B: int, T: int) -> Tensor:
    """Positions (B, T) that count from 0 in each packed sequence."""
    starts = cu_seqlens[sequence_of_each_token(cu_seqlens, B * T)]
    return (torch.arange(B * T, device=cu_seqlens.device) - starts).view(B, T)
