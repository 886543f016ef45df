# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Layers of Transformers around a recurrent one of ours: what they do with a generated token is
recorded once, and run again without their Python (see ../recorded_tokens.py).

Shapes: B batch, T time, C hidden size.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..inputs import may_be_recorded
from ..recorded_tokens import RecordedTokens


class RecordedLayer(nn.Module):
    """Put before a layer of Transformers where one recurrent layer remembers, and nothing else."""

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Any:
        """hidden_states (B, T, C), and what else Transformers gives its layer."""
        if not may_be_recorded(hidden_states, None, is_causal=True):
            return super().forward(hidden_states, *args, **kwargs)
        own = _recordings.get(self)
        if own is None:
            own = _recordings[self] = Recordings(RecordedTokens(), index_in_cache(self))
        by_modules = partial(super().forward, hidden_states, *args, **kwargs)
        token = None if own.layer_idx is None else token_of(args, kwargs, own.layer_idx)
        if token is None:
            return by_modules()
        inputs = [hidden_states, *token.tensors]
        return own.tokens.run(self, token, inputs, by_modules, token.constants)

    def _apply(self, *args, **kwargs) -> nn.Module:
        _recordings.pop(self, None)  # parameters stay, and what they are made of does not
        return super()._apply(*args, **kwargs)


class Recordings(NamedTuple):
    """A layer's, and where it is in a cache."""

    tokens: RecordedTokens
    layer_idx: int | None  # None: its recurrent layer became what it was


# Not in the layers, so that these are what they were as soon as `use_kernels` is undone.
_recordings: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()


def recordings_of(layer: nn.Module) -> RecordedTokens | None:
    """None where it has been given no token that can be recorded."""
    return _recordings[layer].tokens if layer in _recordings else None


def index_in_cache(layer: nn.Module) -> int | None:
    """Of the one layer in it that says what it remembers."""
    modules: Iterator[Any] = layer.modules()
    return next((x.layer_idx for x in modules if hasattr(type(x), "recurrences")), None)


class Token(NamedTuple):
    """What a layer is given with hidden states, the cache apart, whose `cached` is the layer's."""

    tensors: list[Tensor]
    constants: tuple  # all else
    cached: LinearAttentionLayer

    def read(self) -> dict[str, Tensor]:
        """The states, which every token changes in place."""
        kinds = {"conv": self.cached.conv_states, "kv": self.cached.recurrent_states}
        return {
            f"{name}{i}": state
            for name, states in kinds.items()
            for i, state in states.items()
            if state is not None
        }

    def step_was_taken(self) -> None:
        """A stock cache counts no tokens of such layers."""


def token_of(args: tuple, kwargs: Mapping[str, Any], layer_idx: int) -> Token | None:
    """None where what a layer does with it may depend on more than can be told."""
    tensors: list[Tensor] = []
    constants: list[Any] = []
    cached = None
    for name, given in (*enumerate(args), *kwargs.items()):
        if isinstance(given, Cache):
            cached = given.layers[layer_idx]
            continue
        constants.append(name)
        for x in given if isinstance(given, tuple) else (given,):
            if type(x) is Tensor:
                tensors.append(x)
            elif x is None or isinstance(x, (bool, int, float, str)):
                constants.append(x)
            else:
                return None
    if cached is None or type(cached) is not LinearAttentionLayer or cached.record_past:
        return None
    has_states = all(cached.has_previous_state.values())
    return Token(tensors, tuple(constants), cached) if has_states else None
