# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' models whose ranks share sequences, once `use_kernels` has changed them.

What a rank has of them goes as one argument more through the model to its layers, so that gradient
checkpoints have it, too: recurrent layers exchange states, softmax layers gather keys and values.

Shapes: B batch, T tokens of this rank, S of all.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..mixers.parts.shared_attention import attend_across
from ..model.auto import observe_attention
from ..model.loss import causal_lm_loss
from ..recurrences.sequence_parallel import Shards, rope_by_length, share_tokens
from ..releases import CACHE_NAMES
from .bounds import BOUNDS, GROUP, SHARDS
from .families import family_of
from .functions import ByFunctions
from .heads import Served
from .losses import GIVEN
from .packing import batch_and_time, by_name, mixes_packed, parameters_of
from .trees import tree_of_call

# Of heads that hand nothing on to the base model below: what they were given of this.
SAID = (GROUP, BOUNDS, "seq_idx", "position_ids")
_said: ContextVar[dict[str, Any] | None] = ContextVar("who shares which sequences", default=None)
# True of a base model that is told so now; a compiled graph can ask for this, and not for `_said`.
IS_SHARED = "_is_told_of_shared_sequences"


def attends(model: Any) -> bool:
    """Whether it has softmax layers."""
    return any(hasattr(module, "num_key_value_groups") for module in model.modules())


def why_not(model: Any) -> str | None:
    """Why ranks can't share sequences of a model; None where they can."""
    inner = [x for x in model.modules() if isinstance(x, PreTrainedModel)]
    families = [family_of(type(x)) for x in inner]
    if not any(family.shares_sequences for family in families):
        return "its layers are of no family whose ranks can"
    implementation = model.config._attn_implementation
    if attends(model) and implementation != "sdpa":
        return f"its softmax layers need attn_implementation='sdpa', and have {implementation!r}"
    for layer in model.modules():
        if isinstance(layer, ByFunctions) or mixes_packed(layer, None):
            return f"its {type(layer).__name__} is not of this package"
    for x in inner:
        if hasattr(x, "lm_head") and vars(x).get(GIVEN) is not causal_lm_loss:
            return f"the loss of {type(x).__name__} is not of this package"
    config = model.config.get_text_config()
    if (kind := rope_by_length(config)) is not None:
        return f"its rotary positions are {kind!r}, and depend on a sequence's length"
    known = {"linear_attention", "full_attention", "mamba", "attention", "hybrid", "moe", "mlp"}
    if others := set(getattr(config, "layer_types", None) or ()) - known:
        return f"it has layers of types {sorted(others)}"
    if getattr(config, "output_router_logits", False):
        return "with output_router_logits the loss of routers is that of a rank's tokens alone"
    return None


def order_of_pieces(model: Any) -> str | None:
    """What shares the work of its layers evenly; None where ranks can't share its sequences."""
    if why_not(model) is not None:
        return None
    return "head_tail" if attends(model) else "contiguous"


Served.order_for = staticmethod(order_of_pieces)


def check_head(head: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the forward of a head.

    Raises:
        ValueError: ranks can't share its sequences.
    """
    if kwargs.get(GROUP) is None:
        return
    if (why := why_not(head)) is not None:
        raise ValueError(f"sequence_group must be None for {type(head).__name__}: {why}")
    tree_of_call(kwargs)


def tell_shared_base(head: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before the forward of one that does not hand the group on to its base model."""
    if kwargs.get(GROUP) is not None:
        _say(head, {name: kwargs.get(name) for name in SAID})


def forget_group(head: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """After it, or its error."""
    if kwargs.get(GROUP) is not None:
        _say(head, None)


@torch.compiler.disable  # a graph ends here, for it knows no such variables
def _say(head: PreTrainedModel, said: dict[str, Any] | None) -> None:
    _said.set(said)
    setattr(head.base_model, IS_SHARED, said is not None)


def share_layers(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before the forward of a model that holds the layers, whose sequences ranks share: it gets
    positions, what its layers need, no cache, and no mask, which they know.

    Raises:
        ValueError: ranks can't share its sequences, or not with such arguments.
    """
    is_shared = kwargs.get(GROUP) is not None or getattr(model, IS_SHARED, False)
    if not is_shared and (torch.compiler.is_compiling() or _said.get() is None):
        return None
    return _share(model, args, kwargs)


@torch.compiler.disable
def _share(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    name, given = type(model).__name__, by_name(model, args, kwargs)
    said = _said.get() or {name: given.get(name) for name in SAID}
    check_head(model, args, {**said, "tree": given.get("tree")})
    if any(given.get(cache) is not None for cache in CACHE_NAMES):
        raise ValueError(f"sequence_group must be None for {name} with a cache")
    (B, T), mask = batch_and_time(given), given.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (B, T)):
        raise ValueError(f"attention_mask must be {(B, T)} with sequence_group")
    positions = said["position_ids"]
    if positions is not None and positions.dim() != 2:
        raise ValueError(
            f"position_ids must be (B, T) with sequence_group, got {tuple(positions.shape)}"
        )
    weight = model.get_input_embeddings().weight
    shards = share_tokens(
        said[GROUP],
        weight.new_empty(B, T, 0),
        None if mask is None or mask.all() else mask.bool(),
        *(said[BOUNDS], said["seq_idx"]),
        positions if mask is None else None,
    )
    if "position_ids" in parameters_of(type(model).forward):
        if positions is None:  # in which Transformers counts padding
            counting = shards._replace(key_mask=None)
            given["position_ids"] = counting.positions(weight.device).expand(B, T)
        # Softmax layers have masks of their own. This one, of four dimensions, is handed on as it
        # is, and fits no layer that would look at it.
        given["attention_mask"] = weight.new_empty(1, 1, T + 1, 1, dtype=torch.bool)
        observe_attention(_observe)
    else:
        given["attention_mask"] = None
    given = {name: x for name, x in given.items() if name not in (GROUP, BOUNDS, "seq_idx")}
    return (), {**given, SHARDS: shards, "use_cache": False}


def _observe(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return _of_shards(function) if name == "sdpa" else function


@functools.cache
def _of_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that has keys of all ranks where they share sequences."""

    @functools.wraps(function)
    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        shards: Shards | None = kwargs.pop(SHARDS, None)
        if shards is None:
            return function(module, q, k, v, mask, **kwargs)
        y = attend_across(
            lambda *args: function(module, *args, **kwargs)[0],
            *(q, shards.gather(k, 2), shards.gather(v, 2), shards),
            is_causal=getattr(module, "is_causal", True),
            window=kwargs.get("sliding_window"),
        )
        return y, None

    return attend
