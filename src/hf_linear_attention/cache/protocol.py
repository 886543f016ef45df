# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a layer of a cache is to the layer of the model that it belongs to."""

from typing import Protocol

import torch

from ..recurrences.interface import State
from .rollback import Recorded, Recording
from .slots import SlotLayer


class LayerCache(Protocol):
    """Of a cache that is read before a forward of the layer and written after it, by `LayerMemory`:
    a RecurrentLayer, or one of those that stand before a layer of Transformers' own caches. (States
    in slots change where they are: SlotLayer runs a recurrence itself.)
    """

    @property
    def recording(self) -> Recording | None:
        """What takes note of the tokens that are read, where some may be taken back."""

    @property
    def may_change(self) -> bool:
        """Whether the state may change in place."""

    def read(self) -> State:
        """The state to continue from; {} before the first token."""

    def write(self, state: State, read: Recorded, dtype: torch.dtype) -> None:
        """Keeps the state after a forward that has read so much, in a model that computes in
        `dtype`: tensors that changed in place, or that nobody else has.
        """


CacheLayer = LayerCache | SlotLayer | None  # what a layer of the model finds in its place


class StepCache(Protocol):
    """Of a cache whose layer has a trace of a token: a RecurrentLayer, a SlotLayer, StockStates."""

    @property
    def may_be_recorded(self) -> bool:
        """Whether all that a token does to it is to change the tensors in place."""

    @property
    def tensors(self) -> State:
        """What a token reads and changes."""

    def read(self) -> State:
        """The same, such as may change in place in the current grad mode."""

    def layout(self) -> tuple:
        """All of them that a trace depends on, their numbers apart."""

    def step_was_taken(self) -> None:
        """Takes note of a token that has changed the tensors in place."""
