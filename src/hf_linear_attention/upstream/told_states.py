# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Padding, packed sequences and slots for layers whose model passes them nothing but a state:
xLSTM's.

Shapes: B batch, T time.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.slots import SlotCache
from ..releases import CACHE_NAMES, cache_among
from .bounds import BOUNDS
from .layers.parts import PACKED_AND_CACHED
from .layers.xlstm import LayerState
from .packing import batch_and_time, by_name, parameters_of

PACKED_IN_PIECES = (
    "{name} can't take packed sequences in rows of over {longest} tokens, which it reads in pieces "
    "outside of training: give shorter rows, or set max_inference_chunksize in its config"
)


class ToldStates:
    """Stands in for a cache of xLSTMModel, and is none: the model keeps nothing in it."""

    def __init__(self, states: list[LayerState]):
        self.rnn_state = states

    def __bool__(self) -> bool:
        return False


def tell_states(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before the forward of xLSTMModel, and behind `tell_layers`: its layers get with their states
    what else they are to know.

    Raises:
        ValueError: packed sequences can't be told.
    """
    if torch.compiler.is_compiling():
        return None
    from .xlstm_cache import XLSTMStates  # imports a model of Transformers

    given = by_name(model, args, kwargs)
    if all(given.get(name) is None for name in ("input_ids", "inputs_embeds")):
        return None  # the model will say so
    B, T = batch_and_time(given)
    cache = cache_among(**{name: given.pop(name, None) for name in CACHE_NAMES})
    name = next(name for name in parameters_of(type(model).forward) if name in CACHE_NAMES)
    if isinstance(cache, SlotCache):
        layers = (cache.layers[number] for number in range(len(model.blocks)))
        states = ToldStates([LayerState.told(slots=layer) for layer in layers])
        return (), {**given, name: states, "use_cache": False}
    bounds, mask = given.get(BOUNDS), mask_of_last(given.get("attention_mask"), T)
    uses_cache = given.get("use_cache")
    uses_cache = model.config.use_cache if uses_cache is None else uses_cache
    longest = model.config.max_inference_chunksize
    in_pieces = not model.training and longest < T
    if bounds is not None:
        if cache is not None:
            raise ValueError(PACKED_AND_CACHED)
        if in_pieces:
            raise ValueError(PACKED_IN_PIECES.format(name=type(model).__name__, longest=longest))
    if cache is not None or uses_cache or in_pieces:
        is_new = cache is None
        if is_new:
            weight = model.get_input_embeddings().weight
            cache = XLSTMStates.new(model.config, B, weight.dtype, weight.device)
        cache = XLSTMStates.made_of(cache)
        cache.tell(mask=mask, is_new=is_new)
    elif mask is not None or bounds is not None:
        told = LayerState.told(mask=mask, bounds=bounds)
        cache = ToldStates([told for _ in model.blocks])
    return (), {**given, name: cache}


def mask_of_last(mask: Any, T: int) -> Tensor | None:
    """Of the last T tokens, (B, T), bool; None where all of them are real, or nothing says so."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    mask = mask[:, -T:].bool()
    return None if mask.all() else mask


def take_told(model: PreTrainedModel, args: tuple, output: Any) -> Any:
    """After it: what only told something is no cache to anybody, and a cache tells no more."""
    is_tuple = isinstance(output, tuple)
    named: dict[Any, Any] = dict(enumerate(output)) if is_tuple else dict(output)
    kept = {name: x for name, x in named.items() if not isinstance(x, ToldStates)}
    for x in kept.values():
        if hasattr(x, "tell"):
            x.tell(mask=None, is_new=False)
    if len(kept) == len(named):
        return output
    return tuple(kept.values()) if is_tuple else type(output)(**kept)
