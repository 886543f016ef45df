# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Traces of Transformers' layers around a recurrent one of ours: a generated token's operations are
traced once, and replayed without their Python (see decode/layers.py).

Shapes: B batch, T time, C hidden size.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..cache.slots import SlotCache, SlotLayer
from ..decode.conditions import may_be_recorded
from ..decode.layers import RecordedTokens
from ..recurrences.interface import layout_of
from .layers.parts import CACHES


class RecordedLayer(nn.Module):
    """Put before a layer of Transformers where one recurrent layer remembers, and nothing else."""

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Any:
        """hidden_states (B, T, C), and what else Transformers gives its layer."""
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, CACHES)), None)
        if cache is None or not may_be_recorded(hidden_states, None, True, cache):
            return super().forward(hidden_states, *args, **kwargs)
        own = _recordings.get(self)
        if own is None:
            own = _recordings[self] = Recordings(
                RecordedTokens(are_called=True), index_in_cache(self)
            )
        by_modules = partial(super().forward, hidden_states, *args, **kwargs)
        states = None if own.layer_idx is None else states_in(cache, own.layer_idx)
        given = None if states is None else given_beside(cache, args, kwargs)
        if states is None or given is None:
            return by_modules()
        inputs = [hidden_states, *given.tensors]
        return own.tokens.run([self], [states], inputs, by_modules, given.constants)

    def _apply(self, *args, **kwargs) -> nn.Module:
        _recordings.pop(self, None)  # parameters stay, and what they are made of does not
        return super()._apply(*args, **kwargs)


class Recordings(NamedTuple):
    """A layer's, and where it is in a cache."""

    tokens: RecordedTokens
    layer_idx: int | None  # None: its recurrent layer became what it was


# Not in the layers, so that these are what they were as soon as `use_kernels` is undone.
_recordings: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()


def index_in_cache(layer: nn.Module) -> int | None:
    """Of the one layer in it that says what it remembers."""
    modules: Iterator[Any] = layer.modules()
    return next((x.layer_idx for x in modules if hasattr(type(x), "recurrences")), None)


class StockStates(NamedTuple):
    """Those of one layer of a cache of Transformers, which every token changes in place."""

    cached: LinearAttentionLayer

    @property
    def may_be_recorded(self) -> bool:
        """Whether all that a token does to this is to change the states."""
        return (
            type(self.cached) is LinearAttentionLayer
            and not self.cached.record_past
            and all(self.cached.has_previous_state.values())
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        kinds = {"conv": self.cached.conv_states, "kv": self.cached.recurrent_states}
        return {
            f"{name}{i}": state
            for name, states in kinds.items()
            for i, state in states.items()
            if state is not None
        }

    def read(self) -> dict[str, Tensor]:
        return self.tensors

    def layout(self) -> tuple:
        """What a trace depends on."""
        return layout_of(self.tensors)

    def step_was_taken(self) -> None:
        """A stock cache counts no tokens of such layers."""


def states_in(cache: Cache | SlotCache, layer_idx: int) -> StockStates | SlotLayer | None:
    """None where a token may do more than change them."""
    if isinstance(cache, Cache) and layer_idx >= len(cache.layers):
        return None  # not made for this model, as the layer will say
    cached: Any = cache.layers[layer_idx]
    states = cached if isinstance(cached, SlotLayer) else StockStates(cached)
    return states if states.may_be_recorded else None


class Given(NamedTuple):
    """What a layer is given with hidden states, the cache apart."""

    tensors: list[Tensor]
    constants: tuple  # all else


def given_beside(cache: Cache | SlotCache, args: tuple, kwargs: Mapping[str, Any]) -> Given | None:
    """None where what a layer does with it may depend on more than can be told."""
    tensors: list[Tensor] = []
    constants: list[Any] = []
    for name, given in (*enumerate(args), *kwargs.items()):
        if given is cache:
            continue
        constants.append(name)
        for x in given if isinstance(given, tuple) else (given,):
            if type(x) is Tensor:
                tensors.append(x)
            elif x is None or isinstance(x, (bool, int, float, str)):
                constants.append(x)
            else:
                return None
    return Given(tensors, tuple(constants))
