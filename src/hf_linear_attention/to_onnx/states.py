# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The states of a graph: their names, those that transformers.js gives them, shapes and dtypes, and
the cache by which the layers of a model read and write them.

Shapes: B batch, T time, P tokens that were read before.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.slots import SlotCache, SlotLayer
from ..ops.tokens import Tokens
from ..recurrences.convolution import ConvolutionWindow
from ..recurrences.interface import Inputs, Recurrence
from .operators import FORMS, Order, take

PAST = "past_sequence_length"  # a dimension that grows
# Convolutions' names in transformers.js. Mamba-2's B and C are its keys and queries.
CONVOLUTIONS = {"q_conv": ".query", "k_conv": ".key", "v_conv": ".value"}
CONVOLUTIONS |= {"B_conv": ".key", "C_conv": ".query"}


class State(NamedTuple):
    """One tensor, without the batch; PAST for a size that grows."""

    past: str  # its name as an input
    present: str  # and as an output
    shape: tuple[int | str, ...]
    dtype: torch.dtype


class GraphCache(SlotCache):
    """States by the names that the graph has for them. As slots it says itself whose the tokens
    are: nothing asks for numbers that a graph has not yet.

    windows: of layers with sliding windows, how many tokens before the present one they see.
    past: None to find out which there are: then they are zeros.
    states: those that were read so far.
    """

    def __init__(
        self, order: Order, windows: Mapping[int, int], past: Mapping[str, Tensor] | None = None
    ):
        self.order = order
        self.windows = windows
        self.past = past
        self.present: dict[str, Tensor] = {}
        self.states: dict[str, State] = {}
        self.layers = _LayersOf(self)

    def read(self, state: State) -> Tensor:
        """(B, ...)"""
        self.states[state.past] = state
        if self.past is not None:
            return self.past[state.past]
        sizes = [0 if isinstance(size, str) else size for size in state.shape]
        return torch.zeros(len(self.order.column), *sizes, dtype=state.dtype)

    def write(self, state: State, x: Tensor) -> None:
        self.present[state.present] = x

    def run(self, recurrence: Recurrence, inputs: Inputs, names: tuple[str, str]) -> Tensor:
        """A recurrence's outputs for the inputs (B, T, ...), from a state of these names and to it.
        Sums are float32, as our caches keep them.
        """
        run, shape = FORMS[type(recurrence)]
        is_window = isinstance(recurrence, ConvolutionWindow)
        dtype = inputs[0].dtype if is_window else torch.float32
        state = State(*names, shape(recurrence), dtype)
        y, after = run(recurrence, inputs, self.read(state), self.order)
        self.write(state, after)
        return y

    def get_seq_length(self, *args: Any) -> int:
        """None that the mask of a forward would have to cover."""
        return 0

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of T tokens (B, heads, T, features) -> those of all that are seen.

        Full attention keeps them in the order of the input, as the mask of later pieces is; a
        window its last real ones.
        """
        return self._joined("key", keys, layer_idx), self._joined("value", values, layer_idx)

    def _joined(self, name: str, x: Tensor, layer: int) -> Tensor:
        heads, size, window = x.shape[1], x.shape[3], self.windows.get(layer)
        names = f"past_key_values.{layer}.{name}", f"present.{layer}.{name}"
        state = State(*names, (heads, PAST if window is None else window, size), x.dtype)
        if window is None:
            x = take(x.transpose(1, 2), self.order.place).transpose(1, 2)
        kept = seen = torch.cat([self.read(state), x], 2)
        if window is not None:
            kept = self.order.last(seen.transpose(1, 2), window).transpose(1, 2)
        self.write(state, kept)
        return seen


class _LayersOf(dict):
    """By number, made when they are asked for."""

    def __init__(self, cache: GraphCache):
        self.cache = cache

    def __missing__(self, layer: int) -> "GraphLayer":
        return GraphLayer(self.cache, layer)


class GraphLayer(SlotLayer):
    """A layer's part of a GraphCache."""

    def __init__(self, cache: GraphCache, layer: int):
        self.cache = cache
        self.layer = layer

    def run(self, recurrence: Recurrence, inputs: Inputs, tokens: Tokens) -> Tensor:
        """The recurrence's outputs for the inputs (B, T, ...)."""
        names = names_of("recurrent", self.layer)
        if isinstance(recurrence, ConvolutionWindow):
            part = CONVOLUTIONS.get(recurrence.name, f".{recurrence.name}")
            names = names_of("conv", self.layer, part)
        return self.cache.run(recurrence, inputs, names)


def names_of(kind: str, layer: int, part: str = "") -> tuple[str, str]:
    """Of a state as an input and as an output."""
    return f"past_{kind}.{layer}{part}", f"present_{kind}.{layer}{part}"


def full_mask(order: Order, mask: Tensor) -> Tensor:
    """What each token sees of all, (B, 1, T, P + T) bool, by a mask (B, P + T) of int64. A hidden
    one sees itself, for a row of softmax needs something.
    """
    T, S = order.column.shape[1], mask.shape[1]
    query, key = (S - T + order.column)[:, :, None], torch.arange(S)
    seen = (mask == 1)[:, None] & (key < query) | (key == query)
    return seen[:, None]


def window_mask(order: Order, mask: Tensor, window: int) -> Tensor:
    """What each token sees of the last `window` real ones before these T, of which there may have
    been fewer, and of these: (B, 1, T, window + T) bool.
    """
    T = order.column.shape[1]
    num_past = mask[:, : mask.shape[1] - T].sum(1, keepdim=True)
    query, key = torch.arange(T)[:, None] + window, torch.arange(window + T)
    is_within = (key <= query) & (key >= query - window)
    seen = is_within & (key >= window - num_past)[:, None]
    return seen[:, None]
