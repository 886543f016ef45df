# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that begin alike, folded into a tree.

Shapes: B texts, n tokens of their tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .tree import TokenTree

# How many tokens texts must have in common, from where they last forked on, to be read together: a
# level more of a tree is one more call of each layer's ops.
SHORTEST = 16


class Folded(NamedTuple):
    tree: TokenTree
    input_ids: Tensor  # (1, n)
    places: list[Tensor]  # of each text's tokens in the tree


class _Segment(NamedTuple):
    parent: int
    depth: int
    texts: list[int]  # whose it is
    start: int  # in each of them
    stop: int


def fold_texts(texts: Sequence[Tensor], shortest: int = SHORTEST) -> Folded:
    """The tree of B texts, (length,) of token ids each.

    Args:
        shortest: how many tokens texts must have in common, from where they last forked on, to be
            read together.

    Raises:
        ValueError: there are no texts, or one of no tokens.
    """
    lengths = [len(text) for text in texts]
    if min(lengths, default=0) == 0:
        raise ValueError(f"texts must be one or more of 1 token or more, got lengths {lengths}")
    device = texts[0].device
    ids = pad_sequence([text.cpu() for text in texts], batch_first=True)
    segments = sorted(_segments(ids, lengths, shortest), key=lambda numbered: numbered[1].depth)
    number_of = {-1: -1} | {old: new for new, (old, _) in enumerate(segments)}
    parts = [ids[one.texts[0], one.start : one.stop] for _, one in segments]
    tree = TokenTree(
        lengths=tuple(map(len, parts)),
        parents=tuple(number_of[one.parent] for _, one in segments),
    )
    places: list[list[Tensor]] = [[] for _ in texts]
    for (_, one), start in zip(segments, tree.bounds, strict=False):
        for text in one.texts:
            places[text].append(torch.arange(start, start + one.stop - one.start))
    return Folded(
        tree,
        torch.cat(parts)[None].to(device),
        [torch.cat(of_text).to(device) for of_text in places],
    )


def _segments(ids: Tensor, lengths: list[int], shortest: int) -> list[tuple[int, _Segment]]:
    """Those of the tree of texts (B, longest), numbered, parents first."""
    found: list[tuple[int, _Segment]] = []
    to_do = [(list(range(len(lengths))), 0, -1, 0)]
    while to_do:  # texts that are alike before `start`, where they go on from one segment
        texts, start, parent, depth = to_do.pop()
        stop = _end_of_common(ids[texts], start, min(lengths[text] for text in texts))
        is_whole = all(lengths[text] == stop for text in texts)  # of one text, or of equal ones
        if stop > start and (is_whole or stop - start >= shortest):
            found.append((len(found), _Segment(parent, depth, texts, start, stop)))
            start, parent, depth = stop, len(found) - 1, depth + 1
        if is_whole:
            continue
        forks: dict[int | None, list[int]] = {}  # by the next token; None of texts that end
        for text in texts:
            token = None if lengths[text] == stop else int(ids[text, stop])
            forks.setdefault(token, []).append(text)
        if start == stop:
            forks.pop(None, None)
        to_do += [(some, start, parent, depth) for some in reversed(forks.values())]
    return found


def _end_of_common(ids: Tensor, start: int, stop: int) -> int:
    """Up to where all of these texts (B, longest), alike before `start`, are, at most `stop`."""
    differs = (ids[1:, start:stop] != ids[:1, start:stop]).any(0)
    return start + int(differs.int().argmax()) if differs.any() else stop
