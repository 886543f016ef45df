# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Trees of texts: what several texts begin with is read once, and its state is forked.

Shapes: T tokens of a tree, N segments of it, n segments of a level.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import index, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import is_flash_attention_requested

from ..ops.tokens import Tokens
from ..releases import CACHE
from .interface import Inputs, Recurrence, State


class Level(NamedTuple):
    """The segments of one depth, which stand side by side in the row."""

    tokens: slice
    cu_seqlens: Tensor | None  # (n + 1,) int32 bounds in these tokens; None of a single segment
    bounds: tuple[int, ...]  # the same
    parents: Tensor | None  # (n,) numbers of segments in the level before; None of the first


@dataclass(frozen=True)
class TokenTree:
    """How the tokens of a row (1, T) are a tree: `forward(..., tree=TokenTree(...))`.

    Each segment goes on where its parent ends, as if nothing else were in the row: its tokens see
    those of the segments that lead to it, and count positions on. Segments without a parent begin a
    text. A prompt and its G answers are TokenTree((P, A_1, ..., A_G), (-1, 0, ..., 0)). It is made
    of numbers alone, so that it goes with a batch to any device.

    lengths: tokens of each segment, in the order of the row, at least 1.
    parents: the number of each one's parent, -1 where there is none. Segments stand level by level:
        first those without a parent, then all of their children, and so on.

    Raises:
        ValueError: that is no tree, or not in this order.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self):
        try:
            lengths, parents = (tuple(map(index, x)) for x in (self.lengths, self.parents))
        except TypeError as error:
            raise ValueError(
                "lengths and parents must be whole numbers, one for each segment, got "
                f"{self.lengths} and {self.parents}"
            ) from error
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "parents", parents)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be of segments of 1 token or more, got {lengths}")
        if len(parents) != len(lengths):
            raise ValueError(
                f"parents must be one for each of {len(lengths)} segments, got {len(parents)}"
            )
        for segment, parent in enumerate(parents):
            if not -1 <= parent < segment:
                raise ValueError(
                    "parents must be numbers of earlier segments, or -1, got "
                    f"{parent} for segment {segment}"
                )
        if self.depths != tuple(sorted(self.depths)):
            raise ValueError(
                "segments must stand level by level, those without a parent first, got depths "
                f"{self.depths}"
            )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each segment, 0 without a parent."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def bounds(self) -> tuple[int, ...]:
        """N + 1 of them, in the row."""
        return (0, *accumulate(self.lengths))

    def path(self, segment: int) -> list[int]:
        """The segments that lead to one, and it itself, in order."""
        path = [segment]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    def levels(self, device: torch.device) -> tuple[Level, ...]:
        """From the first to the deepest."""
        return _levels(self, device)

    def position_ids(self, device: torch.device) -> Tensor:
        """(1, T): how many tokens lead to each."""
        before: list[int] = []  # each segment
        for parent in self.parents:
            before.append(0 if parent < 0 else before[parent] + self.lengths[parent])
        parts = [torch.arange(n) + start for n, start in zip(self.lengths, before, strict=True)]
        return torch.cat(parts)[None].to(device)

    def tokens_before(self, device: torch.device) -> Tensor:
        """(T,): the place in the row of the token before each, whose logits predict it; -1 where a
        text begins.
        """
        before = torch.arange(self.num_tokens) - 1
        for start, parent in zip(self.bounds, self.parents, strict=False):
            before[start] = self.bounds[parent + 1] - 1 if parent >= 0 else -1
        return before.to(device)

    def mask_function(self, device: torch.device, window: int | None = None) -> Callable:
        """Of masks as Transformers makes them: whether the query q of the row may see the key k, as
        far as segments say, and a window of so many tokens. Later tokens of its own segment are not
        hidden.
        """
        lengths = torch.tensor(self.lengths)
        segment = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
        leads = torch.zeros(len(lengths), len(lengths), dtype=torch.bool)
        for number in range(len(lengths)):
            leads[number, self.path(number)] = True
        leads, position = leads.to(device), self.position_ids(device)[0]

        def sees(b: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
            seen = leads[segment[q], segment[k]]
            return seen if window is None else seen & (position[q] - position[k] < window)

        return sees


@functools.lru_cache(maxsize=16)  # all layers of a forward, and of its gradient, ask for the same
def _levels(tree: TokenTree, device: torch.device) -> tuple[Level, ...]:
    levels, first = [], 0
    before = 0  # the number of the first segment of the level before
    while first < len(tree.lengths):
        stop = first + tree.depths.count(tree.depths[first])
        start = tree.bounds[first]
        bounds = tuple(bound - start for bound in tree.bounds[first : stop + 1])
        is_one, is_first = stop == first + 1, first == 0
        parents = torch.tensor([parent - before for parent in tree.parents[first:stop]])
        levels.append(
            Level(
                slice(start, tree.bounds[stop]),
                None if is_one else torch.tensor(bounds, dtype=torch.int32).to(device),
                bounds,
                None if is_first else parents.to(device),
            )
        )
        before, first = first, stop
    return tuple(levels)


def check_tree(tree: Any, shape: tuple[int, int], config: PreTrainedConfig) -> None:
    """Raises a ValueError where a model can't read tokens (B, T) as a tree."""
    if tree is None:
        return
    check_kind(tree)
    if shape != (1, tree.num_tokens):
        raise ValueError(
            f"tree must be of all tokens of one row, (1, {tree.num_tokens}) by its lengths, got "
            f"tokens of {tuple(shape)}"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError("tree must be None where is_causal=False: nothing can be forked there")


def check_kind(tree: Any) -> None:
    """Raises a ValueError where it is no tree."""
    if not isinstance(tree, TokenTree):
        raise ValueError(f"tree must be a TokenTree, got {type(tree).__name__}")


def check_beside_tree(**others: Any) -> None:
    """Raises a ValueError where a model is given what a tree says, or what does not go with one."""
    for name, given in others.items():
        if given is not None:
            raise ValueError(f"{name} must be None with a tree")


def check_labels_of_tree(tree: Any, labels: Any, shift_labels: Any) -> None:
    """Raises a ValueError where labels of a tree are to be shifted as those of a row."""
    if tree is not None and labels is not None and shift_labels is None:
        raise ValueError(
            "labels need shift_labels beside them with a tree, in which a token may be followed by "
            "several: DataCollatorWithTrees makes both"
        )


def masks_of_tree(
    tree: TokenTree, config: PreTrainedConfig, inputs_embeds: Tensor
) -> dict[str, Tensor | None]:
    """For each type of softmax layer the mask (1, 1, T, T) that its attention function takes, and
    None for recurrent layers, for embeddings of the model's dtype (1, T, C).

    Raises:
        ValueError: it takes none, as that of flash attention.
    """
    if is_flash_attention_requested(config):
        raise ValueError(
            "tree needs attention with masks, so attn_implementation='sdpa', 'eager' or "
            f"'flex_attention', got {config._attn_implementation!r}"
        )
    windows = {"full_attention": None}
    if getattr(config, "sliding_window", None) is not None:
        windows["sliding_attention"] = config.sliding_window
    masks = {
        layer_type: create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            and_mask_function=tree.mask_function(inputs_embeds.device, window),
            **{CACHE: None},
        )
        for layer_type, window in windows.items()
    }
    return {**masks, "linear_attention": None}


def run_tree(recurrence: Recurrence, inputs: Inputs, tokens: Tokens) -> Tensor:
    """The outputs of a recurrence for the tokens of a tree, (1, T, ...), level by level: segments
    begin with the state that their parent leaves, to which the gradients of all forks are added.
    """
    outputs: list[Tensor] = []
    state: State = {}
    for level in tokens.tree:
        piece = recurrence.tokens_of(inputs, itemgetter((slice(None), level.tokens)))
        if level.parents is not None:
            state = {name: x.index_select(0, level.parents) for name, x in state.items()}
        y, state = _run_level(recurrence, piece, state, tokens, level)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def _run_level(
    recurrence: Recurrence, inputs: Inputs, state: State, tokens: Tokens, level: Level
) -> tuple[Tensor, State]:
    """`run` of its segments, side by side or, where a recurrence can't, one after the other."""
    tokens = tokens._replace(tree=None, cu_seqlens=level.cu_seqlens)
    if recurrence.packs_states or level.cu_seqlens is None:
        return recurrence.run(inputs, state, tokens)
    outputs, states = [], []
    for number, start in enumerate(level.bounds[:-1]):
        at = slice(None), slice(start, level.bounds[number + 1])
        piece = recurrence.tokens_of(inputs, itemgetter(at))
        before = {name: x[number, None] for name, x in state.items()}
        y, after = recurrence.run(piece, before, tokens._replace(cu_seqlens=None))
        outputs.append(y)
        states.append(after)
    return torch.cat(outputs, 1), {name: torch.cat([x[name] for x in states]) for name in states[0]}
