# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallelism: ranks hold consecutive pieces of the same sequences, and exchange states.

A layer needs of the pieces before its own no more than what they do to its state, whose size does
not depend on their length: each rank makes its piece's, all gather them, and each continues from
the combination of those before it. What is gathered has a gradient, which goes back to the rank
that it came from.

Shapes: B batch, T tokens of a piece.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from ..ops.tokens import Tokens
from .interface import Inputs, Recurrence, State


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


def state_before(recurrence: Recurrence, inputs: Inputs, tokens: Tokens) -> State:
    """The state that the pieces before this one leave, by one all-gather; for a recurrence that
    reads ahead, in a model that is not causal, what all other pieces leave.
    """
    piece = recurrence.piece(inputs, tokens)
    packed = torch.cat([x.flatten() for x in piece.values()])
    gathered = AllGather.apply(packed, tokens.sequence_group)
    rank = dist.get_rank(tokens.sequence_group)
    others = gathered[:rank]
    if recurrence.reads_ahead and not tokens.is_causal:
        others = torch.cat([others, gathered[rank + 1 :]])
    parts = others.split([x.numel() for x in piece.values()], dim=1)
    named = zip(piece.items(), parts, strict=True)
    return recurrence.combine({name: part.unflatten(1, x.shape) for (name, x), part in named})


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


def check_sequence_group(group: Any, config: PreTrainedConfig, cu_seqlens: Tensor | None) -> None:
    """Raises a ValueError where the ranks of a group can't share sequences."""
    if group is None:
        return
    others = sorted(set(config.active_layer_types) - {"linear_attention"})
    if others:
        raise ValueError(
            f"sequence_group must be None where layer_types has {others}: softmax attention "
            "needs the keys of the whole sequence"
        )
    if cu_seqlens is not None:
        raise ValueError("sequence_group must be None with packed sequences")
