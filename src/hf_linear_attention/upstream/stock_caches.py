# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Layers of Transformers' own caches that our recurrences read and write, with rollback.

Shapes: B batch, T time, C channels, H heads, K key dim, V value dim, W tokens of a convolution
before the present one.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ..cache.rollback import Recorded, Recording, remove_last
from ..ops.numerics import accumulation_dtype
from ..recurrences.interface import State
from ..releases import CACHE

# What a cache layer holds, in the shapes of its recurrences.
ViewsIn = Callable[[LinearAttentionLayer], State]


class StockLayer:
    """One layer of a stock cache, as LayerMemory reads and writes it: "conv" (B, W, C) are the last
    inputs of a convolution, "kv" (B, H, K, V) the state of a recurrence, if it has one.

    Transformers keeps (B, C, W + 1), whose first is never read again, and (B, H, K, V), or with
    `is_transposed` (B, H, V, K). Both are handed out as views, which a step changes in place. A
    transposed state lies in memory as ours: a cache keeps the layout of what it is given first.
    Where a layer has several convolutions, this is the one of state_idx.
    """

    def __init__(
        self,
        cache: Cache,
        layer_idx: int,
        is_transposed: bool,
        dtype: torch.dtype,
        state_idx: int = 0,
    ):
        self.layer = stock_layer(cache, layer_idx)
        self.is_transposed = is_transposed
        self.dtype = accumulation_dtype(dtype)
        self.state_idx = state_idx
        views_in = partial(views_of, is_transposed=is_transposed, state_idx=state_idx)
        self.views = views_in(self.layer)
        self.recording = recording_of(self.layer, views_in)

    def check_rows(self, B: int) -> None:
        """Raises a ValueError where another number of rows was read before."""
        for view in self.views.values():
            if view.shape[0] != B:
                raise ValueError(
                    f"{CACHE} must have read as many rows as there are now, a batch of {B}, got "
                    f"one of {view.shape[0]}"
                )

    @property
    def may_change(self) -> bool:
        return self.recording is None

    def read(self) -> State:
        if not self.views:
            return {}
        if "kv" not in self.views:
            return dict(self.views)
        kv = self.views["kv"]
        if torch.is_grad_enabled():  # a gradient may need what will be written over
            kv = kv.clone()
        # Beam search leaves another layout, and who cached it may have computed otherwise.
        return {**self.views, "kv": kv.to(self.dtype).contiguous()}

    def write(self, state: State, read: Recorded, dtype: torch.dtype) -> None:
        if self.recording is not None:
            self.layer.num_tokens += read.num_tokens
        if self.views:
            overwrite(self.views, state)
        else:
            self.begin(state)

    def begin(self, state: State) -> None:
        """Gives the cache's layer its first state."""
        conv = F.pad(state["conv"].transpose(1, 2), (1, 0))
        self.layer.update_conv_state(conv, state_idx=self.state_idx)
        if "kv" in state:
            kv = state["kv"].transpose(-1, -2) if self.is_transposed else state["kv"]
            self.layer.update_recurrent_state(kv)


def stock_layer(cache: Cache, layer_idx: int) -> LinearAttentionLayer:
    """The layer of a cache that Transformers makes for a recurrent layer of a model.

    Raises:
        ValueError: the cache has none there.
    """
    try:
        layer = getattr(cache, "layers", [])[layer_idx]
    except IndexError:
        layer = None
    if not isinstance(layer, LinearAttentionLayer):
        got = "one without" if layer is None else f"one with a {type(layer).__name__}"
        raise ValueError(
            f"{CACHE} must be made for this model, as DynamicCache(config=model.config) is, and "
            f"have states of linear attention in layer {layer_idx}, got {got} there, a "
            f"{type(cache).__name__}. Keys and values that others make, as PEFT's prefix tuning "
            "does, are no such state"
        )
    return layer


def views_of(layer: LinearAttentionLayer, is_transposed: bool, state_idx: int = 0) -> State:
    """What a cache layer holds, in our shapes; {} before the first token."""
    if not layer.has_previous_state[state_idx]:
        return {}
    views = {"conv": layer.conv_states[state_idx][..., 1:].transpose(1, 2)}
    if layer.is_recurrent_states_initialized[0]:
        kv = layer.recurrent_states[0]
        views["kv"] = kv.transpose(-1, -2) if is_transposed else kv
    return views


def overwrite(views: State, state: State) -> None:
    for name, view in views.items():
        if state[name] is not view:
            view.copy_(state[name])


class CroppableLayer(LinearAttentionLayer):
    """A stock layer that can take tokens back, while it records."""

    is_croppable = True
    recording: Recording | None
    views_in: ViewsIn
    num_tokens: int  # that were read since it records

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens."""
        recordings = {} if self.recording is None else {0: self.recording}
        for state in remove_last(recordings, tokens_to_remove).values():
            self.num_tokens -= abs(tokens_to_remove)
            if state:
                overwrite(self.views_in(self), state)
            else:
                LinearAttentionLayer.reset(self)

    def reset(self) -> None:
        super().reset()
        self.recording, self.num_tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.recording is not None:
            self.recording.map_rows(lambda x: x[beam_idx.to(x.device)])


class CroppableLayerWithAttention(CroppableLayer, LinearAttentionAndFullAttentionLayer):
    """The same, of a layer that has softmax attention, too."""

    def crop(self, tokens_to_remove: int) -> None:
        CroppableLayer.crop(self, tokens_to_remove)
        DynamicLayer.crop(self, tokens_to_remove)


CROPPABLE = {
    LinearAttentionLayer: CroppableLayer,
    LinearAttentionAndFullAttentionLayer: CroppableLayerWithAttention,
}


def recording_of(layer: LinearAttentionLayer, views_in: ViewsIn) -> Recording | None:
    """What records a layer's tokens, if it is to; the layer becomes one that can take them back.

    Raises:
        RuntimeError: it is of a class that can't become one.
    """
    if not layer.record_past:
        if isinstance(layer, CroppableLayer):
            layer.recording = None
        return None
    if type(layer) in CROPPABLE:
        layer.__class__ = CROPPABLE[type(layer)]
        layer.recording, layer.views_in, layer.num_tokens = None, views_in, 0
    if not isinstance(layer, CroppableLayer):
        raise RuntimeError(
            f"a cache's {type(layer).__name__} can't take tokens back: generate without drafts"
        )
    if layer.recording is None:
        layout = torch.contiguous_format
        views = views_in(layer)
        before = {name: view.clone(memory_format=layout) for name, view in views.items()}
        layer.recording = Recording(before)
    return layer.recording
