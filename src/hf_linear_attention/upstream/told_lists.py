# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Padding and packed sequences for layers whose model passes them nothing but a list of all layers'
states: RWKV's.

Shapes: B batch, T time.
"""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .bounds import BOUNDS, MaskAndBounds
from .layers.parts import PACKED_AND_CACHED
from .layers.wkv import ListedStates
from .packing import batch_and_time, by_name
from .told_states import mask_of_last

# Of heads: masks for the base model below.
_mask: ContextVar[Tensor | None] = ContextVar("mask of padding", default=None)


def keep_mask(head: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the forward of a head that does not hand it on to its base model."""
    if not torch.compiler.is_compiling():
        _mask.set(by_name(head, args, kwargs).get("attention_mask"))


def forget_mask(head: PreTrainedModel, args: tuple, output: Any) -> None:
    """After it, or its error."""
    if not torch.compiler.is_compiling():
        _mask.set(None)


def tell_lists(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before the forward of the model, and behind `tell_layers`.

    Raises:
        ValueError: packed sequences are to go on from states.
    """
    if torch.compiler.is_compiling():
        return None
    given = by_name(model, args, kwargs)
    if all(given.get(name) is None for name in ("input_ids", "inputs_embeds")):
        return None  # the model will say so
    B, T = batch_and_time(given)
    mask = given.pop("attention_mask", None)  # which the model only warns of
    mask = mask_of_last(_mask.get() if mask is None else mask, T)
    bounds, states = given.get(BOUNDS), given.get("state")
    if bounds is not None and states is not None:
        raise ValueError(PACKED_AND_CACHED)
    if mask is None and bounds is None:
        return (), given
    if states is None and given_or_set(model, given.get("use_cache")):
        states = new_states(model, B)
    given["state"] = told = ListedStates(states or ())
    told.told = mask if bounds is None else MaskAndBounds(mask, bounds)
    return (), given


def given_or_set(model: PreTrainedModel, use_cache: bool | None) -> bool:
    """Whether the model keeps states, as it decides itself."""
    is_set = model.config.use_cache and not model.training
    return bool(is_set if use_cache is None else use_cache)


def new_states(model: PreTrainedModel, B: int) -> list[Tensor]:
    """As the model makes them."""
    weight = model.get_input_embeddings().weight
    shape = (B, model.config.hidden_size, model.config.num_hidden_layers)
    zeros = [weight.new_zeros(shape, dtype=torch.float32 if i > 1 else None) for i in range(5)]
    zeros[4] -= 1e30
    return zeros


def take_lists(model: PreTrainedModel, args: tuple, output: Any) -> Any:
    """After it: a list tells no more, and one that told only is no state to anybody."""
    is_tuple = isinstance(output, tuple)
    named: dict[Any, Any] = dict(enumerate(output)) if is_tuple else dict(output)
    for name, x in list(named.items()):
        if isinstance(x, ListedStates):
            x.told = None
            if not x:
                del named[name]
    return tuple(named.values()) if is_tuple else type(output)(**named)
