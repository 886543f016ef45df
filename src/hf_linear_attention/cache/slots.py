# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching: sequences come and go, and each has a slot, one row of larger tensors that
hold the states of all.

A batch is packed into one row: first sequences that go on by one token, which take a step in place,
then pieces of any lengths, which begin or go on.

Shapes: S slots, n steps, M pieces, T tokens of all.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.tokens import Tokens
from ..recurrences.interface import Inputs, Recurrence, SlotPieces, State, layout_of

# What a layer of softmax attention keeps of new tokens, for all that it then attends to:
# (keys, values, layer_idx, arguments of its attention function) -> (keys, values)
# The arguments may change in place. None: the layer says nothing of them.
KeepKeys = Callable[[Tensor, Tensor, int, dict[str, Any] | None], tuple[Tensor, Tensor]]


class SlotBatch(NamedTuple):
    """The slots of a batch, the same for all layers."""

    steps: Tensor  # (n,) int32: slots of sequences that go on by one token, the first n tokens
    pieces: SlotPieces | None  # of all tokens behind; None where there are none

    @property
    def num_tokens(self) -> int:
        return len(self.steps) + (0 if self.pieces is None else self.pieces.known[-1][2])

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        is_new: Sequence[bool],
        device: torch.device | str,
        num_steps: int | None = None,
    ) -> "SlotBatch":
        """Of sequences with so many tokens each, in order: those that `is_step` come first.

        num_steps: how many of the first take a step, where that is not all that could.
        """
        steps = [is_step(length, new) for length, new in zip(lengths, is_new, strict=True)]
        n = sum(steps) if num_steps is None else num_steps
        if not all(steps[:n]):
            raise ValueError(
                "sequences that go on by one token must come first in a batch, got "
                f"lengths={list(lengths)}, is_new={list(is_new)}"
            )
        pieces = None
        if n < len(slots):
            stops = list(accumulate(lengths[n:]))
            starts = [0, *stops[:-1]]
            pieces = SlotPieces(
                slots=torch.tensor(slots[n:], dtype=torch.int32, device=device),
                is_new=torch.tensor(is_new[n:], device=device),
                cu_seqlens=torch.tensor([0, *stops], dtype=torch.int32, device=device),
                known=tuple(zip(slots[n:], starts, stops, is_new[n:], strict=True)),
            )
        return cls(torch.tensor(slots[:n], dtype=torch.int32, device=device), pieces)


def is_step(length: int, is_new: bool) -> bool:
    """Whether a sequence of a batch is a single token that goes on from others."""
    return length == 1 and not is_new


class SlotLayer:
    """What one layer remembers of all sequences: tensors (S, ...) by name, of any strides between
    slots.
    """

    def __init__(self, states: State, batch: SlotBatch):
        self.states = states
        self.batch = batch

    @property
    def may_be_recorded(self) -> bool:
        """Whether each sequence goes on by one token: what happens then depends on no number."""
        return self.batch.pieces is None

    @property
    def tensors(self) -> State:
        """What a step reads and changes: all slots, and the numbers of its own."""
        return {"slots": self.batch.steps, **self.states}

    def read(self) -> State:
        return self.tensors

    def layout(self) -> tuple:
        """What a trace depends on."""
        return layout_of(self.tensors)

    def step_was_taken(self) -> None:
        """A batch counts no tokens."""

    def run(self, recurrence: Recurrence, inputs: Inputs, tokens: Tokens) -> Tensor:
        """The recurrence's outputs for the batch's inputs (1, T, ...). States change in place."""
        steps, pieces = self.batch
        n, outputs = len(steps), []
        if n > 0:
            first = inputs
            if pieces is not None:
                first = recurrence.tokens_of(inputs, lambda x: x[:, :n])
            if n > 1:  # (n, 1, ...)
                first = recurrence.tokens_of(first, lambda x: x.transpose(0, 1))
            y = recurrence.step_in_slots_(first, self.states, steps, tokens)
            outputs.append(y.transpose(0, 1))
        if pieces is not None:
            behind = inputs if n == 0 else recurrence.tokens_of(inputs, lambda x: x[:, n:])
            outputs.append(recurrence.run_in_slots_(behind, self.states, pieces, tokens))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class SlotCache:
    """The cache of a continuous batch.

    Args:
        states: of every layer with recurrences, by its number.
        batch: which sequences are in the batch, and where.
        keep_keys: for softmax layers. Without it their attention functions keep what is to be kept.
    """

    is_compileable = False

    def __init__(
        self, states: Mapping[int, State], batch: SlotBatch, keep_keys: KeepKeys | None = None
    ):
        self.layers = {number: SlotLayer(state, batch) for number, state in states.items()}
        self.keep_keys = keep_keys

    def update(
        self,
        keys: Tensor,
        values: Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """kwargs: of the layer's attention function, under the name that Transformers gives it."""
        if self.keep_keys is None:
            return keys, values
        return self.keep_keys(keys, values, layer_idx, kwargs)
