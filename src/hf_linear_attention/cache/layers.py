# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The layers of caches, as subclasses of Transformers' cache layers.

Shapes: B batch, T time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
)

from ..recurrences.interface import Recurrence, State, layout_of
from .growing import GrowingLayer
from .rollback import (
    TAKES_NOTHING_BACK,
    Recorded,
    Recording,
    Rollback,
    WindowRollback,
)

IS_NOT_STOCK = "the cache of a linear-attention layer is written by the layer itself (`write`)"


# Transformers asks each base for something: CacheLayerMixin counts tokens, which generate() needs;
# LinearAttentionCacheLayerMixin says that this layer is not one to offload or to make masks for.
class RecurrentLayer(Rollback, LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one layer with recurrences remembers: in `tensors`, those of their states, by name.

    A forward takes them by `read` and gives them back by `write`, once each. Only these change
    them, and the recurrences' `step_`, in place: their addresses stay until the batch size changes,
    or until autograd or crop() needs their old values.
    """

    is_compileable = False  # generate() would compile every model on CUDA by itself
    supports_early_init = False

    def __init__(self, **kwargs):
        self.keys = self.values = None  # of softmax layers; whoever iterates over a cache asks
        self.tensors: State = {}
        self.recurrences: tuple[Recurrence, ...] = ()  # that wrote last
        self.num_tokens: Any = 0
        self.dtype: torch.dtype | None = None  # of the model

    @property
    def is_initialized(self) -> bool:
        return bool(self.tensors)

    @property
    def has_state(self) -> bool:
        return self.num_tokens > 0

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.has_state}

    def read(self) -> State:
        """The state to continue from; {} before the first token."""
        if not self.has_state:
            return {}
        self._thaw()
        return dict(self.tensors)

    def _thaw(self) -> None:
        """Makes the tensors such as may be changed in place in the current grad mode."""
        if torch.compiler.is_compiling():
            return
        for name, tensor in self.tensors.items():
            has_graph = tensor.requires_grad and not torch.is_grad_enabled()
            is_frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
            if has_graph or is_frozen:
                self.tensors[name] = tensor.clone()

    def write(self, state: State, read: Recorded, dtype: torch.dtype) -> None:
        """Keeps the state after a forward."""
        self.keep(state, dtype)
        self.num_tokens += read.num_tokens
        self.recurrences = tuple(recurrence for recurrence, _ in read.parts)

    @property
    def may_be_recorded(self) -> bool:
        """Whether all that a token does to this is to change the tensors in place."""
        return type(self) is RecurrentLayer and self.has_state and not self.record_past

    def layout(self) -> tuple:
        """What a trace depends on."""
        return layout_of(self.tensors)

    def step_was_taken(self) -> None:
        """Takes note of a token that has changed the tensors in place."""
        self.num_tokens += 1

    def keep(self, state: State, dtype: torch.dtype | None) -> None:
        """Keeps tensors, each in the memory of the one that it replaces where that may be."""
        may_change = self.may_change
        for name, new in state.items():
            old = self.tensors.get(name)
            if new is old:
                continue
            has_graph = new.requires_grad or (old is not None and old.requires_grad)
            if old is None or old.shape != new.shape or has_graph or not may_change:
                self.tensors[name] = new
            else:
                old.copy_(new)
        self.dtype = dtype

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1  # none

    def reset(self) -> None:
        self.num_tokens = 0
        if self.recording is not None:
            self.recording = Recording({})

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(lambda x: x[beam_idx.to(x.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.has_state:  # to keep nothing would count as having read
            self._thaw()
            self.keep({name: function(tensor) for name, tensor in self.tensors.items()}, self.dtype)
        if self.recording is not None:
            self.recording.map_rows(function)

    def offload(self) -> None:
        """Stays on its device: it never grows."""

    def prefetch(self) -> None:
        """Never left its device."""

    # The interface of stock layers, which the model does not use.
    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(IS_NOT_STOCK)

    def update_conv_state(self, conv_states, state_idx=0, **kwargs):
        raise TypeError(IS_NOT_STOCK)

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        raise TypeError(IS_NOT_STOCK)

    def lazy_initialization(self, *args, **kwargs):
        raise TypeError(IS_NOT_STOCK)


def _promise_address(tensor: Tensor) -> None:
    """Lets CUDA graphs keep the address of a tensor that a static cache writes in place."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


class StaticRecurrentLayer(RecurrentLayer):
    """A RecurrentLayer for compiled graphs: no Python number changes from one token to the next, so
    nothing is compiled twice, and no address ever changes, so CUDA graphs may keep them.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len  # of softmax layers: masks are made for all alike
        self.num_tokens = torch.zeros((), dtype=torch.long)

    @property
    def has_state(self) -> bool:
        return self.is_initialized  # after reset(), that of no tokens

    def keep(self, state: State, dtype: torch.dtype | None) -> None:
        known = set(self.tensors)
        if not known:
            self.num_tokens = self.num_tokens.to(next(iter(state.values())).device)
            _promise_address(self.num_tokens)
        super().keep(state, dtype)
        for name in state.keys() - known:
            _promise_address(self.tensors[name])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def reset(self) -> None:
        self.num_tokens.zero_()
        for recurrence in self.recurrences:
            recurrence.reset_(self.tensors)

    def activate_past_recording(self) -> None:
        raise RuntimeError(TAKES_NOTHING_BACK)


class MemoryLayer(RecurrentLayer):
    """The state that a layer's cross attention reads, static caches included: written by the first
    forward, not changed by the tokens that are read or removed.
    """

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.is_compileable = max_cache_len is not None

    def keep(self, state: State, dtype: torch.dtype | None) -> None:
        """Keeps the state of a whole memory."""
        super().keep(state, dtype)
        self.num_tokens = 1  # or any other number: compiled graphs must not depend on its length
        if self.is_compileable:
            for tensor in self.tensors.values():
                _promise_address(tensor)

    def activate_past_recording(self) -> None:
        """There is nothing to record."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """No crop changes anything here."""

    def crop(self, tokens_to_remove: int) -> None:
        """Leaves the memory as it is."""


class StaticWindowLayer(StaticLayer):
    """A StaticLayer for sliding-window attention that has room for all tokens; the mask hides those
    outside the window. Transformers' layer for this counts in Python, and moves what it holds.
    """

    is_sliding = True


class SlidingWindowLayer(WindowRollback, DynamicSlidingWindowLayer):
    """Transformers' layer for sliding-window attention, which can be cropped as often as the others
    while it records.
    """

    keys: Tensor
    values: Tensor
    cumulative_length: int

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        # what the mask covers: transformers 5.17 returns all that was recorded
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


LAYER_CLASSES: dict[str, type[CacheLayerMixin]] = {
    "linear_attention": RecurrentLayer,
    "full_attention": GrowingLayer,
    "sliding_attention": SlidingWindowLayer,
}
STATIC_LAYER_CLASSES: dict[str, type[CacheLayerMixin]] = {
    "linear_attention": StaticRecurrentLayer,
    "full_attention": StaticLayer,
    "sliding_attention": StaticWindowLayer,
}


def layer_classes(config: PreTrainedConfig, is_static: bool = False) -> list[type[CacheLayerMixin]]:
    """The class of cache layer that each layer of the model writes to, and then, with cross
    attention, of those that its layers read.
    """
    by_type = STATIC_LAYER_CLASSES if is_static else LAYER_CLASSES
    classes = [by_type[layer_type] for layer_type in config.active_layer_types]
    if config.add_cross_attention:
        classes += [MemoryLayer] * len(classes)
    return classes


def memory_layer(cache: Cache, layer_idx: int) -> MemoryLayer:
    """The cache layer for the cross attention in a layer of the model."""
    return cache.layers[len(cache.layers) // 2 + layer_idx]


def count_rows(cache: Cache) -> int | None:
    """The rows of a cache for one of this package's models; None before the first token."""
    if cache.get_seq_length() == 0:
        return None
    layer = cache.layers[0]
    is_state = isinstance(layer, RecurrentLayer)
    tensors = layer.tensors.values() if is_state else [getattr(layer, "keys", None)]
    return next((x.shape[0] for x in tensors if x is not None), None)


def left_padding_of(past_key_values: Cache | None) -> Tensor | None:
    """How many of the cached tokens are padding, in front of each row (B,); None: not one is known
    to be. Only caches that were joined know.
    """
    return getattr(past_key_values, "left_padding", None)
