# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The states of a graph: their names, those that transformers.js gives them, shapes and dtypes, and
the cache by which the layers of a model read and write them.

Shapes: B batch, T time, P tokens that were read before.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache.slots import SlotCache, SlotLayer
from ..mixers.softmax import LatentAttention, SoftmaxAttention
from ..ops.tokens import Tokens
from ..recurrences.convolution import ConvolutionWindow
from ..recurrences.interface import Inputs, Recurrence
from .operators import FORMS, Order, take

PAST = "past_sequence_length"  # a dimension that grows
# Convolutions' names in transformers.js. Mamba-2's B and C are its keys and queries.
CONVOLUTIONS = {"q_conv": "query", "k_conv": "key", "v_conv": "value"}
CONVOLUTIONS |= {"B_conv": "key", "C_conv": "query"}


class State(NamedTuple):
    """One tensor, without the batch; PAST for a size that grows."""

    past: str  # its name as an input
    present: str  # and as an output
    shape: tuple[int | str, ...]
    dtype: torch.dtype


def name_of(recurrence: Recurrence, layer: int) -> tuple[str, str]:
    """Of its state, as an input and as an output."""
    kind, part = "recurrent", ""
    if isinstance(recurrence, ConvolutionWindow):
        kind, part = "conv", f".{CONVOLUTIONS.get(recurrence.name, recurrence.name)}"
    return f"past_{kind}.{layer}{part}", f"present_{kind}.{layer}{part}"


def states_of(mixer: nn.Module, layer: int, dtype: torch.dtype) -> list[State]:
    """Of a layer of a model that computes in `dtype`. Sums are float32, as our caches keep them."""
    if isinstance(mixer, SoftmaxAttention):
        if isinstance(mixer, LatentAttention):
            heads, sizes = 1, (mixer.latent_size, mixer.shared_size)
        else:
            heads, sizes = mixer.num_key_value_heads, (mixer.head_dim, mixer.head_dim)
        length = PAST if mixer.sliding_window is None else mixer.sliding_window - 1
        return [
            State(
                f"past_key_values.{layer}.{name}",
                f"present.{layer}.{name}",
                (heads, length, size),
                dtype,
            )
            for name, size in zip(("key", "value"), sizes, strict=True)
        ]
    return [
        State(
            *name_of(recurrence, layer),
            FORMS[type(recurrence)].shape(recurrence),
            dtype if isinstance(recurrence, ConvolutionWindow) else torch.float32,
        )
        for recurrence in recurrences_of(mixer)
    ]


def recurrences_of(mixer: nn.Module) -> list[Recurrence]:
    recurrences: Any = getattr(mixer, "recurrences", [])
    return recurrences


class GraphLayer(SlotLayer):
    """A layer's part of a GraphCache: what it reads and writes are tensors of the graph."""

    def __init__(self, cache: "GraphCache", layer: int):
        self.cache = cache
        self.layer = layer

    def run(self, recurrence: Recurrence, inputs: Inputs, tokens: Tokens) -> Tensor:
        """The recurrence's outputs for the inputs (B, T, ...)."""
        past, present = name_of(recurrence, self.layer)
        y, after = FORMS[type(recurrence)].run(
            recurrence, inputs, self.cache.past[past], self.cache.order
        )
        self.cache.present[present] = after
        return y


class GraphCache(SlotCache):
    """States by the names that the graph has for them. As slots it says itself whose the tokens
    are: nothing asks for numbers that a graph has not yet.

    windows: of layers with sliding windows, how many tokens before the present one they see.
    """

    def __init__(self, past: Mapping[str, Tensor], order: Order, windows: Mapping[int, int]):
        self.past = past
        self.present: dict[str, Tensor] = {}
        self.order = order
        self.windows = windows
        self.layers = _LayersOf(self)

    def get_seq_length(self) -> int:
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
        past = self.past[f"past_key_values.{layer}.{name}"].transpose(1, 2)
        x, window = x.transpose(1, 2), self.windows.get(layer)
        seen = torch.cat([past, x if window is not None else take(x, self.order.place)], 1)
        kept = seen if window is None else self.order.last(seen, window)
        self.present[f"present.{layer}.{name}"] = kept.transpose(1, 2)
        return seen.transpose(1, 2)


class _LayersOf(dict):
    """By number, made when they are asked for."""

    def __init__(self, cache: GraphCache):
        self.cache = cache

    def __missing__(self, layer: int) -> GraphLayer:
        return GraphLayer(self.cache, layer)


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
