# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallelism: ranks hold consecutive pieces of the same sequences, and exchange states.

A layer needs of the pieces before its own no more than their states, whose size does not depend on
their length: each rank makes its piece's, all gather them, and each continues from the combination
of those before it. What is gathered has a gradient, which goes back to the rank that it came from.

Shapes: B batch, T tokens of a piece, Hkv key-value heads, K key dim, V value dim.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .cache_linear_attention import padding_first
from .linear_attention import LinearAttentionState, linear_attention


def split_sequence(inputs: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """This rank's piece of a batch, ready for `model(**piece)`.

    Args:
        inputs: tensors (B, T of all, ...), the same on all ranks: input_ids, labels,
            attention_mask, position_ids, inputs_embeds.
        group: torch.distributed's ProcessGroup of the ranks that share the sequences; by default
            all ranks.

    Returns:
        for each tensor the piece of dimension 1 that is this rank's, and `sequence_group`, the
        group. The model takes care of positions, states, and the labels beyond a piece. Its loss is
        that of the whole sequences, on every rank; its gradients are, when averaged over the ranks,
        as DistributedDataParallel and FSDP do.

    Raises:
        ValueError: a tensor has no dimension 1, or not the others' size there, or fewer tokens than
            there are ranks.
    """
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_world_size(group)
    lengths = {name: x.shape[1] if x.dim() > 1 else None for name, x in inputs.items()}
    length = next(iter(lengths.values()), None)
    for name, other in lengths.items():
        if other is None or other != length or other < ranks:
            raise ValueError(
                f"{name} must have a dimension 1 of as many tokens as the other inputs, at least "
                f"one for each of {ranks} ranks, got shape {tuple(inputs[name].shape)}"
            )
    pieces = {
        name: x.tensor_split(ranks, dim=1)[dist.get_rank(group)] for name, x in inputs.items()
    }
    return {**pieces, "sequence_group": group}


class AllGather(torch.autograd.Function):
    """x, of the same shape on all ranks -> (ranks, *x.shape); gradients add up over the ranks.

    All ranks must use the result, were it no row of it: the backward pass needs them all.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, dgathered: Tensor) -> tuple[Tensor, None]:
        dx = torch.empty_like(dgathered[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(dx, list(dgathered.contiguous().unbind()), group=ctx.group)
        return dx, None


def state_before(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    group: Any,
    *,
    is_causal: bool,
    **options: Any,
) -> LinearAttentionState:
    """The state that the pieces before this one leave, by one all-gather; arguments as of
    `linear_attention`. Not causal: what the other pieces add to the sums.
    """
    _, (kv, z) = linear_attention(  # nobody reads, so any q will do
        k.detach(), k, v, log_decay, key_mask=key_mask, return_state=True, **options
    )
    parts = [kv.flatten(2)]
    if z is not None:
        parts.append(z)
    if log_decay is not None:
        if key_mask is not None:
            log_decay = log_decay.masked_fill(~key_mask[..., None], 0)
        parts.append(log_decay.to(kv.dtype).sum(1)[..., None])

    pieces = AllGather.apply(torch.cat(parts, -1), group)  # (ranks, B, Hkv, ...)
    rank = dist.get_rank(group)
    pieces = pieces[:rank] if is_causal else torch.cat([pieces[:rank], pieces[rank + 1 :]])
    if log_decay is not None:
        pieces = pieces[..., :-1] * _sum_of_later(pieces[..., -1]).exp()[..., None]
    total = pieces.sum(0)
    state_size = kv.shape[2] * kv.shape[3]
    return LinearAttentionState(
        total[..., :state_size].view(kv.shape), None if z is None else total[..., state_size:]
    )


def _sum_of_later(x: Tensor) -> Tensor:
    """For each of x's rows the sum of those after it. No difference: they may be infinite."""
    return torch.cat([x[1:].flip(0).cumsum(0).flip(0), torch.zeros_like(x[:1])])


def inputs_before(x: Tensor, count: int, key_mask: Tensor | None, group: Any) -> Tensor:
    """The last `count` real tokens before this piece, (B, count, C) for x (B, T, C); zeros where
    there are fewer.
    """
    is_real = torch.ones_like(x[..., :1])
    tokens = F.pad(torch.cat([x, is_real], -1), (0, 0, count, 0))  # as if nothing came before
    tail = padding_first(tokens, key_mask)[0][:, tokens.shape[1] - count :]
    pieces = AllGather.apply(tail, group)[: dist.get_rank(group)]
    tokens = torch.cat([torch.zeros_like(tail), pieces.transpose(0, 1).flatten(1, 2)], dim=1)
    tokens, _ = padding_first(tokens, tokens[..., -1] != 0)
    return tokens[:, tokens.shape[1] - count :, :-1]


@torch.no_grad()
def largest_before(x: Tensor, group: Any) -> Tensor:
    """The largest x of the ranks before this one, elementwise; -inf on the first."""
    pieces = AllGather.apply(x, group)[: dist.get_rank(group)]
    return torch.cat([torch.full_like(x, -torch.inf)[None], pieces]).amax(0)


def tokens_before(key_mask: Tensor | None, hidden_states: Tensor, group: Any) -> Tensor:
    """The number of real tokens before this piece, (B, 1), for hidden states (B, T, C)."""
    if key_mask is None:
        key_mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
    counts = AllGather.apply(key_mask.sum(1, keepdim=True), group)
    return counts[: dist.get_rank(group)].sum(0)


def shift_labels_across(labels: Tensor, ignore_index: int, group: Any) -> Tensor:
    """labels (B, T), each in the place of the token before it, that of a later piece included."""
    first = AllGather.apply(labels[:, :1], group)
    rank = dist.get_rank(group)
    is_last = rank + 1 == len(first)
    following = torch.full_like(first[0], ignore_index) if is_last else first[rank + 1]
    return torch.cat([labels[:, 1:], following], dim=1)


def sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """The sum of all ranks' x."""
    return AllGather.apply(x, group).sum(0)
