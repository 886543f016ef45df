# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a recurrence is to the rest of the package: the owner of all facts about its state.

A layer of a model reads tokens by one recurrence or several: its attention, and the windows of its
short convolutions. Cache, rollback, sequence parallelism and model cards know no tensor of a state
by its name; they ask the recurrence, by the methods below. docs/adding_a_recurrence.md adds one.

Shapes: B batch, T time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens

# A state: its tensors (B, ...) by name, no two recurrences of a layer using the same; before the
# first token none of them is there. The dict may hold those of the layer's other recurrences, too.
State = dict[str, Tensor]
# What a recurrence reads of T tokens: a NamedTuple of its own, of tensors (B, T, ...) or None.
Inputs = Any


class StateSize(NamedTuple):
    """Of one tensor of a state, for each row of the batch."""

    shape: tuple[int, ...]
    is_sum: bool  # kept in the dtype of sums, float32 or better; otherwise in the model's


class SlotPieces(NamedTuple):
    """Pieces of M sequences, packed into one row, whose states are rows ("slots") of larger
    tensors. None is empty.
    """

    slots: Tensor  # (M,) int32, no two the same
    is_new: Tensor  # (M,) bool: whether a sequence begins here, whatever its slot holds
    cu_seqlens: Tensor  # (M + 1,) int32, 0 first
    known: tuple[tuple[int, int, int, bool], ...]  # the same: slot, start, stop, is new


@dataclass(frozen=True, kw_only=True)
class Recurrence(ABC):
    """A value without weights, so that a cache may keep it, copy it, and outlive the model.

    in_fp64: whether sums are kept in float64, and so computed in it, whatever the inputs' dtype:
    then those of millions of tokens do not drift, in pieces of any sizes and token by token.
    """

    in_fp64: bool = False

    # Inputs that leave no trace in the state, and so are not recorded: some of tokens, as queries,
    # and parameters, which are the same for all tokens, as weights.
    only_read: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    # Whether `run` takes and gives a state for each of several packed sequences.
    packs_states: ClassVar[bool] = False
    # Whether tokens of a model that is not causal read what comes after them, too.
    reads_ahead: ClassVar[bool] = False
    # Whether the state behind the first piece of a sequence is all that `combine` needs of it.
    state_is_first_piece: ClassVar[bool] = False

    @abstractmethod
    def state_sizes(self) -> dict[str, StateSize]:
        """The tensors of the state by name, those of all heads."""

    @abstractmethod
    def start(self, inputs: Inputs) -> State:
        """The state before the first token, for rows and heads as those of `inputs`."""

    @abstractmethod
    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        """Outputs for a whole sequence, and the state after it, in tensors of its own that are no
        part of larger ones; differentiable. `state` is left as it is.
        """

    @abstractmethod
    def combine(self, pieces: dict[str, Tensor]) -> State:
        """The state that consecutive pieces leave, each of whose tensors are (n, B, ...), n >= 0 of
        them. With a gradient for `pieces`, for n = 0 as well.
        """

    def piece(self, inputs: Inputs, tokens: Tokens) -> dict[str, Tensor]:
        """What a piece of a sequence, read from nothing, does to a state: tensors (B, ...) of one
        dtype, all that `combine` needs of it.
        """
        return self.run(inputs, {}, tokens)[1]

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        """`run` for one token, T = 1, without gradient; `state` changes in place."""
        y, after = self.run(inputs, state, tokens)
        for name, x in after.items():
            state[name].copy_(x)
        return y

    # For continuous batching: states are rows ("slots") of larger tensors, the layer's by name, and
    # change in place. These copy them out and back; an op that finds its rows itself is faster.

    def step_in_slots_(
        self, inputs: Inputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        """`step_` of rows (n, 1, ...), whose states are in slots (n,) int32, no two the same."""
        slots = slots.long()
        state = {name: states[name].index_select(0, slots) for name in self.state_sizes()}
        y = self.step_(inputs, state, tokens)
        for name, x in state.items():
            states[name].index_copy_(0, slots, x)
        return y

    def run_in_slots_(
        self, inputs: Inputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        """`run` of packed pieces of sequences, (1, T, ...)."""
        names, outputs = self.state_sizes(), []
        for slot, _, _, is_new in pieces.known:
            if is_new:
                self.reset_({name: states[name][slot] for name in names})
        if self.packs_states:
            slots = pieces.slots.long()
            state = {name: states[name].index_select(0, slots) for name in names}
            y, after = self.run(inputs, state, tokens._replace(cu_seqlens=pieces.cu_seqlens))
            for name, x in after.items():
                states[name].index_copy_(0, slots, x.to(states[name].dtype))
            return y
        for slot, start, stop, _ in pieces.known:
            piece = self.tokens_of(inputs, itemgetter((slice(None), slice(start, stop))))
            state = {name: states[name][slot, None] for name in names}
            y, after = self.run(piece, state, tokens._replace(cu_seqlens=None))
            outputs.append(y)
            for name, x in after.items():
                state[name].copy_(x)
        return torch.cat(outputs, dim=1)

    def dtype_of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """In a model that computes in `dtype`."""
        return torch.float64 if self.in_fp64 else accumulation_dtype(dtype)

    def exact(self, inputs: Inputs) -> Inputs:
        """The inputs in the dtype that sums are computed in, if that is float64."""
        if not self.in_fp64:
            return inputs
        return type(inputs)(*(x.double() if is_floating(x) else x for x in inputs))

    def tokens_of(self, inputs: Inputs, take: Callable[[Tensor], Tensor]) -> Inputs:
        """The inputs with `take` of all that is (B, T, ...)."""
        return type(inputs)(
            *(
                x if x is None or name in self.parameters else take(x)
                for name, x in zip(inputs._fields, inputs, strict=True)
            )
        )

    def replay(self, inputs: Inputs, state: State, key_mask: Tensor | None) -> State:
        """The state that `run` gave, from what was recorded: inputs whose `only_read` and
        `parameters` are None.
        """
        return self.run(inputs, state, Tokens(is_causal=True, key_mask=key_mask))[1]

    def reset_(self, state: State) -> None:
        """Makes a state in place what `start` gives."""
        for name in self.state_sizes():
            state[name].zero_()

    def recorded(self, inputs: Inputs) -> Inputs:
        """What `replay` needs of the inputs of a forward."""
        return inputs._replace(**dict.fromkeys((*self.only_read, *self.parameters)))


def layout_of(state: State) -> tuple:
    """All of its tensors but their numbers."""
    return (*state, *[(x.dtype, x.shape, x.stride()) for x in state.values()])


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def sum_of_later(x: Tensor) -> Tensor:
    """For each of x's rows the sum of those after it. No difference: they may be infinite."""
    return torch.cat([x[1:].flip(0).cumsum(0).flip(0), torch.zeros_like(x[:1])])


def padding_first(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (B, past + T, ...) with the tokens that key_mask (B, T) hides moved to the front, so that
    the last ones are real as long as there are any.
    """
    if key_mask is None:
        return x
    is_real = F.pad(key_mask, (x.shape[1] - key_mask.shape[1], 0), value=True)
    return take_tokens(x, padding_first_order(is_real))


def padding_first_order(key_mask: Tensor) -> Tensor:
    """The order (B, T) that puts tokens which key_mask (B, T) hides in front of the others."""
    return key_mask.int().argsort(dim=1, stable=True)


def take_tokens(x: Tensor, order: Tensor) -> Tensor:
    """x (B, T, ...) at the tokens that `order` (B, n) names."""
    index = order.view(*order.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(*order.shape, *x.shape[2:]))
