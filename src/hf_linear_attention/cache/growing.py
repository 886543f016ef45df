# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' growing layer of a cache, with room for tokens to come: one more is written behind
the others on the CPU, where Transformers copies all of them for each. In the trace of a token
attention writes it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..fast.attention import NEW_TOKEN
from ..ops.numerics import needs_grad
from ..recurrences.interface import State
from ..releases import CACHE_NAMES

LEAST_ROOM, PART = 64, 4  # tokens; and at least a quarter of those that are there


class Room(NamedTuple):
    """Memory for keys and values (B, heads, tokens, D each), and how many tokens were written to
    it, (1,) int64. These are never written again: others may hold views of them.
    """

    keys: Tensor
    values: Tensor
    used: Tensor

    def has(self, keys: Tensor, values: Tensor, more: int) -> bool:
        """Whether these are all that is in it, and so many tokens more may be written."""
        n = keys.shape[-2]
        return (
            self.used.item() == n
            and n + more <= self.keys.shape[-2]
            and keys.data_ptr() == self.keys.data_ptr()
            and values.data_ptr() == self.values.data_ptr()
            and keys.shape[:2] == self.keys.shape[:2]
            and keys.stride() == self.keys.stride()
            and values.stride() == self.values.stride()
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
        )


class NewToken(NamedTuple):
    """What a trace's attention is given as keys and values, and is to write itself the next time:
    the new key and value, (B, heads, 1, D each), and where.
    """

    key: Tensor
    value: Tensor
    room: Room
    values: Tensor  # all, as the layer returned them


class GrowingLayer(DynamicLayer):
    """The keys and values of a softmax layer: `keys` and `values` are views of all tokens, as
    Transformers' are tensors of them.
    """

    keys: Tensor
    values: Tensor
    room: Room | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Takes new keys and values (B, heads, T, D each); returns them after those before."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n, T = self.get_seq_length(), key_states.shape[-2]
        tracer = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
        if T == 1 and self.room is not None and hasattr(tracer, "may_not_read"):
            return self._update_in_trace(tracer, n, key_states, value_states)
        if (
            torch.compiler.is_compiling()
            or type(key_states) is not Tensor
            or not key_states.is_cpu
            or (torch.is_grad_enabled() and needs_grad(key_states, value_states, self.keys))
        ):
            self.room = None
            return super().update(key_states, value_states, *args, **kwargs)
        self._write(n, key_states, value_states).used.fill_(n + T)
        return self.keys, self.values

    def _write(self, n: int, key_states: Tensor, value_states: Tensor) -> Room:
        """Writes tokens behind the n that are there, without counting them in the room."""
        room, end = self._room_for(n, key_states, value_states), n + key_states.shape[-2]
        room.keys[:, :, n:end], room.values[:, :, n:end] = key_states, value_states
        self.keys, self.values = room.keys[:, :, :end], room.values[:, :, :end]
        return room

    def _update_in_trace(
        self, tracer: Any, n: int, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for a token whose operations are traced: attention writes it again, and counts
        it. Where anything else reads these keys, the trace is none.
        """
        with _disable_current_modes():
            room = self._write(n, key_states, value_states)
        tracer.may_not_read(self.keys, self.values)
        setattr(self.keys, NEW_TOKEN, NewToken(key_states, value_states, room, self.values))
        return self.keys, self.values

    # ---- as a StepCache ----

    @property
    def may_be_recorded(self) -> bool:
        """Whether all that a token does to this is to be written behind the others."""
        return (
            type(self) is GrowingLayer
            and self.is_initialized
            and self.keys.is_cpu
            and self.get_seq_length() > 0
            and not self.keys.requires_grad
        )

    @property
    def tensors(self) -> State:
        """What a token writes: room for it, and how many tokens are there."""
        n = self.get_seq_length()
        return self._room_for(n, self.keys[:, :, :1], self.values[:, :, :1])._asdict()

    def read(self) -> State:
        return self.tensors

    def layout(self) -> tuple:
        """What a trace depends on: not how many tokens there is room for."""
        keys, values = self.keys, self.values
        return keys.dtype, keys.shape[:2], keys.shape[3], values.shape[3]

    def step_was_taken(self) -> None:
        room = self.room
        assert room is not None
        n = room.used.item()  # attention counts, where the model runs this layer
        self.keys, self.values = room.keys[:, :, :n], room.values[:, :, :n]

    # ---- room ----

    def reset(self) -> None:
        """Forgets all tokens, as Transformers does since 5.18; before, it made them zeros, also for
        who has views of them.
        """
        self.room = self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        super().reset()

    def _room_for(self, n: int, key_states: Tensor, value_states: Tensor) -> Room:
        """That of the n tokens that are there, with space for such ones."""
        room = self.room
        if room is None or n == 0 or not room.has(self.keys, self.values, key_states.shape[-2]):
            room = self._make_room(n, key_states, value_states)
        return room

    def _make_room(self, n: int, key_states: Tensor, value_states: Tensor) -> Room:
        """For n tokens, which are copied, these, and some to come."""
        tokens = n + key_states.shape[-2]
        tokens += max(LEAST_ROOM, tokens // PART)
        keys, values = (
            x.new_empty(*x.shape[:-2], tokens, x.shape[-1]) for x in (key_states, value_states)
        )
        if n > 0:
            keys[:, :, :n], values[:, :, :n] = self.keys, self.values
            self.keys, self.values = keys[:, :, :n], values[:, :, :n]
        self.room = Room(keys, values, torch.tensor([n]))
        return self.room


def let_grow(cache: Cache | None) -> None:
    """Makes the growing layers of a DynamicCache of Transformers such ones."""
    if cache is None or type(cache) is not DynamicCache:
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            growing = GrowingLayer()
            growing.__dict__.update(layer.__dict__)
            cache.layers[i] = growing


def let_cache_grow(model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    """Before a model's forward."""
    if not torch.compiler.is_compiling():
        for name in CACHE_NAMES:
            let_grow(kwargs.get(name))
