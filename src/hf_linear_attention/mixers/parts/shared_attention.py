# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention of this rank's queries to keys of all ranks.

Shapes: B batch, T tokens of this rank, S of all, H heads, D head dim, R queries at a time.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...recurrences.sequence_parallel import Shards

# Elements of a mask (R, S) to make at a time: that of all tokens would outgrow what is shared.
MASK_ELEMENTS = 2**25


def attend_across(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Outputs (B, T, ...) of `attention` for q (B, H, T, D), k and v (B, H, S, D), some queries at
    a time, each with the keys that they see: not those of later tokens, of padding, of other packed
    sequences, nor out of the window. Where there are several times, the backward pass
    does it again, so that no mask is kept.

    attention: of queries, keys, values and a mask (B or 1, 1, R, keys), bool, to (B, R, ...).
    """
    outputs = []
    blocks = list(_blocks(shards, is_causal, window))
    for own, first, keys in blocks:

        def attend(q: Tensor, k: Tensor, v: Tensor, first=first, keys=keys) -> Tensor:
            mask = _mask(shards, first, q.shape[2], keys, is_causal, window, q.device)
            return attention(q, k, v, mask)

        inputs = q[:, :, own], k[:, :, keys], v[:, :, keys]
        if len(blocks) > 1 and torch.is_grad_enabled():
            outputs.append(checkpoint(attend, *inputs, use_reentrant=False))
        else:
            outputs.append(attend(*inputs))
    return torch.cat(outputs, 1)


def _blocks(
    shards: Shards, is_causal: bool, window: int | None
) -> Iterator[tuple[slice, int, slice]]:
    """Queries among this rank's, the place of the first among all, and the keys for them."""
    S, behind = sum(shards.lengths), 0
    step = max(1, MASK_ELEMENTS // max(1, S))
    for piece in shards.own:
        start, length = shards.start(piece), shards.lengths[piece]
        for first in range(0, length, step):
            last = min(first + step, length)
            oldest = 0 if window is None else max(0, start + first - window)
            newest = start + last if is_causal else S
            yield slice(behind + first, behind + last), start + first, slice(oldest, newest)
        behind += length


def _mask(
    shards: Shards,
    first: int,
    R: int,
    keys: slice,
    is_causal: bool,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """(B or 1, 1, R, keys): which of the keys the R queries see from the `first` on."""
    place = torch.arange(first, first + R, device=device)[:, None]
    other = torch.arange(keys.start, keys.stop, device=device)
    seen = torch.ones(1, 1, R, len(other), dtype=torch.bool, device=device)
    if is_causal:
        seen = seen & (other <= place)
    if window is not None and is_causal:
        seen = seen & (other > place - window)
    elif window is not None:
        seen = seen & ((other - place).abs() <= window)  # as Transformers has it
    if shards.sequence is not None:
        own, others = shards.sequence[:, first : first + R], shards.sequence[:, keys]
        seen = seen & (own[:, None, :, None] == others[:, None, None])
    if shards.key_mask is not None:
        seen = seen & shards.key_mask[:, None, None, keys]
    return seen
