# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' growing layer of a cache, with room for tokens to come: one more is written behind
the others on the CPU, where Transformers copies all of them for each.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..ops.numerics import needs_grad
from ..releases import CACHE_NAMES

LEAST_ROOM, PART = 64, 4  # tokens; and at least a quarter of those that are there


class Room(NamedTuple):
    """Memory for keys and values (B, heads, tokens, D each), and the tokens that were written to
    it. What is in `used` is never written again: others may hold views of it.
    """

    keys: Tensor
    values: Tensor
    used: list[int]

    def has(self, keys: Tensor, values: Tensor, more: int) -> bool:
        """Whether these are all that is in it, and so many tokens more may be written."""
        n = keys.shape[-2]
        return (
            self.used[0] == n
            and n + more <= self.keys.shape[-2]
            and keys.data_ptr() == self.keys.data_ptr()
            and values.data_ptr() == self.values.data_ptr()
            and keys.shape[:2] == self.keys.shape[:2]
            and keys.stride() == self.keys.stride()
            and values.stride() == self.values.stride()
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
        )


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
        if (
            torch.compiler.is_compiling()
            or type(key_states) is not Tensor
            or not key_states.is_cpu
            or (torch.is_grad_enabled() and needs_grad(key_states, value_states, self.keys))
        ):
            self.room = None
            return super().update(key_states, value_states, *args, **kwargs)
        room = self.room
        if room is None or n == 0 or not room.has(self.keys, self.values, T):
            room = self._make_room(n, key_states, value_states)
        room.keys[:, :, n : n + T], room.values[:, :, n : n + T] = key_states, value_states
        room.used[0] = n + T
        self.keys, self.values = room.keys[:, :, : n + T], room.values[:, :, : n + T]
        return self.keys, self.values

    def reset(self) -> None:
        """Forgets all tokens, as Transformers does since 5.18; before, it made them zeros, also for
        who has views of them.
        """
        self.room = self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        super().reset()

    def _make_room(self, n: int, key_states: Tensor, value_states: Tensor) -> Room:
        """For n tokens, which are copied, these, and some to come."""
        tokens = n + key_states.shape[-2]
        tokens += max(LEAST_ROOM, tokens // PART)
        keys, values = (
            x.new_empty(*x.shape[:-2], tokens, x.shape[-1]) for x in (key_states, value_states)
        )
        if n > 0:
            keys[:, :, :n], values[:, :, :n] = self.keys, self.values
        self.room = Room(keys, values, [n])
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
