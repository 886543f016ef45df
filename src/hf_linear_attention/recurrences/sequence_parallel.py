# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallelism: ranks hold pieces of the same sequences, and exchange states.

A recurrent layer needs of the pieces before its own no more than what they do to its state, whose
size does not depend on their length: each rank makes its pieces', all gather them, and each
continues from the combination of those before it. Softmax layers gather keys and values. What is
gathered has a gradient, which goes back to the rank that it came from.

Shapes: B batch, T tokens of a rank, S of all n ranks, P pieces of a rank, L tokens of a piece.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ..ops.tokens import Tokens
from .interface import Inputs, Recurrence, State


class HeadTail(NamedTuple):
    """A group of n ranks of which the r-th holds two of 2 n pieces of equal length: the r-th from
    the front, and behind it the r-th from the back. So each has as much to do in softmax layers.
    """

    group: Any


# torch.distributed's ProcessGroup of ranks with consecutive pieces, or a HeadTail of one.
SequenceGroup = Any

ORDERS = {"contiguous": lambda group: group, "head_tail": HeadTail}


def ranks_of(sequence_group: SequenceGroup) -> Any:
    """torch.distributed's group."""
    return sequence_group.group if isinstance(sequence_group, HeadTail) else sequence_group


def pieces_in_order(sequence_group: SequenceGroup) -> list[tuple[int, int]]:
    """Of every piece, first to last, the rank that holds it, and which of that rank's it is."""
    n = dist.get_world_size(ranks_of(sequence_group))
    front = [(rank, 0) for rank in range(n)]
    is_head_tail = isinstance(sequence_group, HeadTail)
    return front + [(rank, 1) for rank in reversed(range(n))] if is_head_tail else front


def own_pieces(sequence_group: SequenceGroup) -> list[int]:
    """Where this rank's pieces stand among all."""
    rank = dist.get_rank(ranks_of(sequence_group))
    return [i for i, piece in enumerate(pieces_in_order(sequence_group)) if piece[0] == rank]


def split_sequence(
    inputs: Mapping[str, Any], group: Any = None, order: str = "contiguous"
) -> dict[str, Any]:
    """This rank's part of a batch, ready for `model(**part)`.

    Args:
        inputs: tensors (B, S, ...), the same on all ranks: input_ids, labels, attention_mask,
            position_ids, inputs_embeds, seq_idx; and cu_seq_lens_q, which all ranks need whole, as
            numbers and whatever is no tensor.
        group: torch.distributed's ProcessGroup of the ranks that share the sequences; by default
            all ranks.
        order: "contiguous", one piece for each rank; or "head_tail", one of the front and one of
            the back, as torch's context parallelism has it, which shares the work of softmax layers
            evenly.

    Returns:
        for each tensor the tokens of dimension 1 that are this rank's, and `sequence_group`, which
        says so. The model takes care of positions, states, and the labels beyond a piece. Its loss
        is that of the whole sequences, on every rank; its gradients are, when averaged over the
        ranks, as DistributedDataParallel and FSDP do.

    Raises:
        ValueError: a tensor has no dimension 1, or not the others' size there, or one that does not
            suit the ranks; the order is none of the two, or this rank none of the group's.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {sorted(ORDERS)}, got {order!r}")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"group must be one that rank {dist.get_rank()} is in, got one of ranks "
            f"{dist.get_process_group_ranks(group)}"
        )
    sequence_group = ORDERS[order](group)
    shared = {
        name: x
        for name, x in inputs.items()
        if name not in GIVEN_WHOLE and isinstance(x, Tensor) and x.dim() > 0
    }
    whole = {name: x for name, x in inputs.items() if name not in shared}
    check_lengths(shared, sequence_group)
    parts = {name: part_of(x, sequence_group) for name, x in shared.items()}
    return {**parts, **whole, "sequence_group": sequence_group}


# Arguments that are of no tokens, but of all.
GIVEN_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def check_lengths(
    tensors: Mapping[str, Tensor], sequence_group: SequenceGroup, dim: int = 1
) -> None:
    """Raises a ValueError where tensors (B, S, ...) can't be shared, or not alike."""
    ranks = dist.get_world_size(ranks_of(sequence_group))
    pieces = len(pieces_in_order(sequence_group))
    lengths = {name: x.shape[dim] if x.dim() > dim else None for name, x in tensors.items()}
    length = next(iter(lengths.values()), None)
    for name, other in lengths.items():
        if other is None or other != length or other < ranks:
            raise ValueError(
                f"{name} must have a dimension {dim} of as many tokens as the other inputs, at "
                f"least one for each of {ranks} ranks, got shape {tuple(tensors[name].shape)}"
            )
        if pieces > ranks and other % pieces != 0:
            raise ValueError(
                f"{name} must have a multiple of {pieces} tokens to be shared by {ranks} ranks "
                f"from head and tail, got {other}: pad them"
            )


def part_of(x: Tensor, sequence_group: SequenceGroup, dim: int = 1) -> Tensor:
    """This rank's tokens of all in dimension `dim`."""
    pieces = x.tensor_split(len(pieces_in_order(sequence_group)), dim=dim)
    return torch.cat([pieces[i] for i in own_pieces(sequence_group)], dim=dim)


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


all_gather = torch.compiler.disable(AllGather.apply)  # whose ranks compile each for itself


def gathered_pieces(x: Tensor, sequence_group: SequenceGroup) -> Tensor:
    """x (B P, ...), the pieces of a row side by side, of all ranks in order: (n P, B, ...)."""
    of_ranks = all_gather(x, ranks_of(sequence_group))
    order = pieces_in_order(sequence_group)
    pieces = of_ranks.unflatten(1, (-1, len(order) // len(of_ranks)))
    return torch.stack([pieces[rank, :, i] for rank, i in order])


class Shards(NamedTuple):
    """What a rank knows of the sequences that it has a part of.

    A tuple, so that what moves a layer's arguments to its device finds the tensors.
    """

    sequence_group: SequenceGroup
    lengths: tuple[int, ...]  # of each piece, in order
    key_mask: Tensor | None = None  # (B, S) bool, False for padding; None where all are real
    sequence: Tensor | None = None  # (B, S), which packed one a token is of; None: not packed
    # Of each piece, in order, and each row the tokens of it that packed sequences begin with.
    begins: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    @property
    def group(self) -> Any:
        return ranks_of(self.sequence_group)

    @property
    def own(self) -> list[int]:
        """Where this rank's pieces stand among all."""
        return own_pieces(self.sequence_group)

    def start(self, piece: int) -> int:
        """Its first token among all S."""
        return sum(self.lengths[:piece])

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """x with T tokens in dimension `dim` -> those of all ranks, S, in order."""
        order, x = pieces_in_order(self.sequence_group), x.transpose(0, dim)
        of_ranks = [0] * dist.get_world_size(self.group)
        for (rank, _), length in zip(order, self.lengths, strict=True):
            of_ranks[rank] += length
        padded = F.pad(x, (*[0, 0] * (x.dim() - 1), 0, max(of_ranks) - len(x)))
        rows = all_gather(padded, self.group)
        P = len(order) // len(of_ranks)
        pieces = [row[:length].chunk(P) for row, length in zip(rows, of_ranks, strict=True)]
        return torch.cat([pieces[rank][i] for rank, i in order]).transpose(0, dim)

    def part(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, T, ...) of all, (B, S, ...)."""
        pieces = x.split(self.lengths, dim=1)
        return torch.cat([pieces[i] for i in self.own], dim=1)

    def positions(self, device: torch.device) -> Tensor:
        """Of this rank's tokens (B or 1, T): they count real ones, from 0 in each sequence."""
        places = torch.arange(sum(self.lengths), device=device)[None]
        if self.key_mask is not None:
            places = (self.key_mask.cumsum(1) - 1).clamp(min=0)
        elif self.sequence is not None:
            first = F.pad(self.sequence.diff(dim=1) != 0, (1, 0), value=True)
            places = places - (places * first).cummax(1).values
        return self.part(places)

    def earlier(self, piece: int, row: int) -> slice:
        """The pieces before one that have a part of the sequence that it begins with."""
        if self.begins is None:
            return slice(0, piece)
        if 0 in self.begins[piece][row]:
            return slice(piece, piece)
        first = piece - 1
        while first > 0 and not self.begins[first][row]:
            first -= 1
        return slice(max(first, 0), piece)


def share_tokens(
    sequence_group: SequenceGroup,
    like: Tensor,
    key_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Shards:
    """What a rank has to know of all tokens, of which `like` (B, T, ...) are its own.

    Args:
        key_mask: (B, T), False for padding; None where all of this rank's are real.
        cu_seq_lens_q: bounds of packed sequences among the B S tokens of all ranks.
        seq_idx: the number of each token's sequence, (B or 1, T), or of all ranks' (B or 1, S).
        position_ids: (B or 1, T), which begin again with each sequence.

    Raises:
        ValueError: on all ranks, if what they hold does not go together.
    """
    (B, T), device, group = like.shape[:2], like.device, ranks_of(sequence_group)
    given = [cu_seq_lens_q, seq_idx, position_ids]
    kind = next((i for i, x in enumerate(given) if x is not None), len(given))
    of_rank = torch.tensor([B, T, key_mask is not None, kind], device=device)
    rows, tokens, masked, kinds = all_gather(of_rank, group).T.tolist()
    if len(set(rows)) > 1 or len(set(kinds)) > 1:
        raise ValueError(
            "ranks of a sequence_group must have as many rows, and say in one way where packed "
            f"sequences begin, got {rows} rows, and by {kinds} of cu_seq_lens_q, seq_idx, "
            "position_ids, nothing"
        )
    order = pieces_in_order(sequence_group)
    P = len(order) // len(tokens)
    if P > 1 and (len(set(tokens)) > 1 or T % P != 0):
        raise ValueError(
            f"ranks that share sequences from head and tail must have as many tokens, a multiple "
            f"of {P}, got {tokens}"
        )
    shards = Shards(sequence_group, tuple(tokens[rank] // P for rank, _ in order))
    begins = _beginnings(shards, B, *given)
    if any(masked):
        if begins is not None:
            raise ValueError("attention_mask must hide nothing where sequences are packed")
        own = torch.ones(B, T, device=device) if key_mask is None else key_mask
        return shards._replace(key_mask=shards.gather(own.to(torch.uint8)) != 0)
    if begins is None:
        return shards
    of_pieces = begins.cpu().split(shards.lengths, dim=1)
    found = tuple(tuple(tuple(row.nonzero()[:, 0].tolist()) for row in x) for x in of_pieces)
    return shards._replace(sequence=begins.cumsum(1), begins=found)


def _beginnings(
    shards: Shards,
    B: int,
    cu_seq_lens_q: Tensor | None,
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """Whether a packed sequence begins with a token, (B, S); None where rows hold one each."""
    S = sum(shards.lengths)
    if cu_seq_lens_q is not None:
        if cu_seq_lens_q[-1] != B * S:
            raise ValueError(
                f"cu_seq_lens_q must be of the tokens of all ranks, B S = {B * S}, got "
                f"{cu_seq_lens_q.tolist()}"
            )
        begins = torch.zeros(B * S + 1, dtype=torch.bool, device=cu_seq_lens_q.device)
        begins[cu_seq_lens_q.long()] = True
        begins = begins[:-1].view(B, S)
    elif seq_idx is not None:
        numbers = seq_idx if seq_idx.shape[1] == S else shards.gather(seq_idx)
        begins = F.pad(numbers.diff(dim=1) != 0, (1, 0))
    elif position_ids is not None:
        begins = F.pad(shards.gather(position_ids).diff(dim=1) != 1, (1, 0))
    else:
        return None
    begins = begins.expand(B, S).clone()
    begins[:, 0] = True
    return begins if begins[:, 1:].any() else None


def run_shared(recurrence: Recurrence, inputs: Inputs, tokens: Tokens) -> Tensor:
    """`recurrence.run` of this rank's tokens (B, T, ...) behind those of the pieces before.

    Raises:
        ValueError: packed sequences of a model that is not causal, for tokens of which a later
            rank's count.
    """
    shards: Shards = tokens.shards
    P, tokens = len(shards.own), tokens._replace(shards=None)
    if P > 1:  # each piece a row
        inputs = recurrence.tokens_of(inputs, lambda x: x.unflatten(1, (P, -1)).flatten(0, 1))
        mask = tokens.key_mask
        if mask is not None:
            tokens = tokens._replace(key_mask=mask.unflatten(1, (P, -1)).flatten(0, 1))
    if shards.begins is not None:
        y = _run_packed(recurrence, inputs, shards, tokens)
    elif P == 1 and not (recurrence.reads_ahead and not tokens.is_causal):
        y = _run_piece(recurrence, inputs, shards, tokens)
    else:
        piece = recurrence.piece(inputs, tokens)
        y, _ = recurrence.run(inputs, _states_before(recurrence, piece, shards, tokens), tokens)
    return y.unflatten(0, (-1, P)).flatten(1, 2) if P > 1 else y


def _run_piece(recurrence: Recurrence, inputs: Inputs, shards: Shards, tokens: Tokens) -> Tensor:
    """Of one piece, behind all before it. Only pieces between others are read twice, to tell what
    they do to a state: nobody asks that of the last one, and the first one's state is it.
    """
    one = recurrence.tokens_of(inputs, lambda x: x[:, :1])
    mask = tokens.key_mask
    of_one = tokens._replace(key_mask=None if mask is None else mask[:, :1])
    (own,), y = shards.own, None
    if own == 0 and recurrence.state_is_first_piece:
        y, after = recurrence.run(inputs, {}, tokens)
        sizes = recurrence.piece(one, of_one)
        piece = {name: after.get(name, torch.zeros_like(x)) for name, x in sizes.items()}
    elif own == len(shards.lengths) - 1:
        piece = recurrence.piece(one, of_one)
    else:
        piece = recurrence.piece(inputs, tokens)
    before = _states_before(recurrence, piece, shards, tokens)
    return recurrence.run(inputs, before, tokens)[0] if y is None else _needing(y, before)


def _needing(y: Tensor, state: State) -> Tensor:
    """y, as if it were made of a state: the backward pass of a gathering needs all ranks."""
    nothing = torch.cat([x.flatten()[:0] for x in state.values()]).sum()
    return y + nothing.to(y.dtype)


def _states_before(
    recurrence: Recurrence, piece: dict[str, Tensor], shards: Shards, tokens: Tokens
) -> State:
    """The states (B P, ...) that the pieces before those of this rank leave, by one all-gather; for
    a recurrence that reads ahead, in a model that is not causal, what all other pieces leave.
    """
    found = _gathered(piece, shards)
    reads_ahead = recurrence.reads_ahead and not tokens.is_causal
    states = []
    for i in shards.own:
        others = slice(0, i)
        before = {name: x[others] for name, x in found.items()}
        if reads_ahead:
            before = {name: torch.cat([x[:i], x[i + 1 :]]) for name, x in found.items()}
        states.append(recurrence.combine(before))
    return {name: torch.stack([x[name] for x in states], 1).flatten(0, 1) for name in states[0]}


def _gathered(piece: dict[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    """What pieces (B P, ...) do to a state, of all ranks' in order: (n P, B, ...) each."""
    rows = len(next(iter(piece.values())))
    together = torch.cat([x.reshape(rows, -1) for x in piece.values()], 1)
    parts = gathered_pieces(together, shards.sequence_group).split(
        [x[0].numel() for x in piece.values()], dim=2
    )
    named = zip(piece.items(), parts, strict=True)
    return {name: part.unflatten(2, x.shape[1:]) for (name, x), part in named}


def _run_packed(recurrence: Recurrence, inputs: Inputs, shards: Shards, tokens: Tokens) -> Tensor:
    """Row by row of pieces (B P, L, ...): the rest of a sequence that began in an earlier piece
    goes on from there, and those that begin in this one from nothing.
    """
    if recurrence.reads_ahead and not tokens.is_causal:
        raise ValueError("sequence_group must be None with packed sequences and is_causal=False")
    assert shards.begins is not None
    B, P = len(shards.begins[0]), len(shards.own)
    of_rows = [(piece, b) for b in range(B) for piece in shards.own]
    begins = [shards.begins[piece][b] for piece, b in of_rows]

    def cut(row: int, start: int, stop: int | None = None) -> Inputs:
        return recurrence.tokens_of(inputs, lambda x: x[row : row + 1, start:stop])

    last = [recurrence.piece(cut(row, max(begins[row], default=0)), tokens) for row in range(B * P)]
    found = _gathered({name: torch.cat([x[name] for x in last]) for name in last[0]}, shards)
    device = next(iter(found.values())).device
    outputs: list[Tensor] = []
    for row, (piece, b) in enumerate(of_rows):
        earlier = shards.earlier(piece, b)
        state = recurrence.combine({name: x[earlier, b : b + 1] for name, x in found.items()})
        first, *_ = bounds = (*begins[row], shards.lengths[piece])
        if first > 0:
            outputs.append(recurrence.run(cut(row, 0, first), state, tokens)[0])
        if len(bounds) > 1:
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device) - first
            of_rest = tokens._replace(cu_seqlens=cu_seqlens)
            outputs.append(recurrence.run(cut(row, first), {}, of_rest)[0])
        if first == 0:
            outputs[-1] = _needing(outputs[-1], state)
    return torch.cat(outputs, 1).view(B * P, -1, *outputs[0].shape[2:])


def shift_labels_across(labels: Tensor, ignore_index: int, sequence_group: SequenceGroup) -> Tensor:
    """labels (B, T), each in the place of the token before it, that of a later piece included."""
    order = pieces_in_order(sequence_group)
    P = len(order) // dist.get_world_size(ranks_of(sequence_group))
    pieces = labels.unflatten(1, (P, -1))  # (B, P, L)
    first = gathered_pieces(pieces[..., :1].flatten(0, 1), sequence_group)  # (n P, B, 1)
    following = torch.cat([first[1:], torch.full_like(first[:1], ignore_index)])
    following = following[own_pieces(sequence_group)].transpose(0, 1)
    return torch.cat([pieces[..., 1:], following], dim=2).flatten(1)


def sum_over_ranks(x: Tensor, sequence_group: SequenceGroup) -> Tensor:
    """The sum of all ranks' x."""
    return all_gather(x, ranks_of(sequence_group)).sum(0)


# Rotary positions whose frequencies depend on how long the longest sequence of a batch is: of that
# ranks see a part, graphs none, and a request in a batch others'.
ROPE_BY_LENGTH = ("dynamic", "longrope")


def rope_by_length(config: PreTrainedConfig) -> str | None:
    """Which of these a config asks for, for all layers or some; None for none."""
    if getattr(config, "position_embedding_type", "rotary") != "rotary":
        return None
    fields = getattr(config, "rope_parameters", None) or {}
    local = getattr(config, "local_rope_parameters", None) or {}
    of_layers = [fields, local, *(x for x in fields.values() if isinstance(x, dict))]
    kinds = [x.get("rope_type", x.get("type")) for x in of_layers]
    return next((kind for kind in kinds if kind in ROPE_BY_LENGTH), None)


def check_sequence_group(group: SequenceGroup, config: PreTrainedConfig) -> None:
    """Raises a ValueError where the ranks of a group can't share sequences."""
    if group is None:
        return
    if (kind := rope_by_length(config)) is not None:
        raise ValueError(f"sequence_group must be None with rope_type={kind!r}")
    softmax = set(config.active_layer_types) - {"linear_attention"}
    implementation = config._attn_implementation
    if softmax and implementation != "sdpa":
        raise ValueError(
            f"sequence_group must be None where layer_types has {sorted(softmax)}, unless "
            f"attn_implementation is 'sdpa', got {implementation!r}"
        )
