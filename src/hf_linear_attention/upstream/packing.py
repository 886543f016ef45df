# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Packed sequences for models of Transformers whose recurrent layers ask for other packages then,
or receive no bounds.

Callers say it by `cu_seq_lens_q`, by `seq_idx`, or by `position_ids` that begin again, as
DataCollatorWithFlattening and TRL do.

Shapes: B batch, T time, N sequences.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..cache.slots import SlotCache
from ..ops.tokens import positions_within, sequence_of_each_token
from ..recurrences.packing import bounds_where, check_packing, find_bounds
from ..recurrences.tree import TokenTree, check_labels_of_tree
from ..releases import CACHE, CACHE_NAMES
from .bounds import ALSO_CALLED, BOUNDS, GROUP, SHARDS, TELL_BY_MASK, MaskAndBounds
from .families import family_of, replacement_for
from .trees import tell_tree, tree_of_call

# Of models whose heads hand nothing on (see `tell_base`): bounds for the base model below.
_told: ContextVar[Tensor | TokenTree | None] = ContextVar("bounds, or a tree", default=None)
# True of a base model that is told so now; a compiled graph can ask for this, and not for `_told`.
IS_TOLD = "_is_told_of_packed_sequences"


def bounds_of_call(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Those that a model's arguments say. By positions sequences are packed only where there is no
    mask and no cache, as for Transformers' masks.
    """
    packing, positions = (kwargs.get(BOUNDS), kwargs.get("seq_idx")), kwargs.get("position_ids")
    if all(x is None for x in packing):
        others = ("attention_mask", *CACHE_NAMES)
        if positions is None or any(kwargs.get(name) is not None for name in others):
            return None
        positions = _of_text(positions)
        if positions is None or (positions.diff(dim=-1) == 1).all():
            return None
    B, T = batch_and_time(kwargs)
    check_packing(B, T, *packing)
    return find_bounds(B, T, *packing, positions)


def tell_layers(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict] | None:
    """Before the forward of a model that holds the layers: packed sequences get bounds that it
    hands on, positions if they have none, and neither a cache, which could not be continued, nor a
    mask, with which softmax layers would not keep them apart.

    Raises:
        ValueError: the model's softmax layers can't keep them apart, or not with such a mask or
            positions, or the model can't be told in a compiled graph.
    """
    if is_continuous_batch(kwargs):  # whose slots say which token is of which sequence
        return None
    if SHARDS in kwargs:  # which say it
        return None
    name = type(model).__name__
    if torch.compiler.is_compiling():
        _check_in_a_graph(model, args, kwargs)
        return None
    given = by_name(model, args, kwargs)
    tree, bounds = tree_of_call(given), _told.get()
    given.pop("tree", None)
    if bounds is None:
        bounds = bounds_of_call(given) if tree is None else tree
    if bounds is None:
        return None
    indexer = family_of(type(model)).indexer
    mixing = next((one for one in model.modules() if mixes_packed(one, indexer)), None)
    if mixing is not None:
        raise ValueError(
            f"{name} can't take packed sequences: its {type(mixing).__name__} is as Transformers "
            "has it, and knows no bounds. Give the sequences as rows with an attention_mask"
        )
    longest = None if isinstance(bounds, TokenTree) else _longest_row(model)  # those read no trees
    if longest is not None and batch_and_time(given)[1] > longest:
        raise ValueError(
            f"{name} can't take packed sequences in rows of over {longest} tokens: its softmax "
            "layers scale by a token's place in the row from there on. Give shorter rows, or the "
            "sequences as rows with an attention_mask"
        )
    if isinstance(bounds, TokenTree):
        return (), tell_tree(model, given, bounds, batch_and_time(given), _attends(model))
    given[BOUNDS] = bounds
    if _attends(model):
        _keep_softmax_apart(model, given, bounds)
    if all(given.get(cache) is None for cache in CACHE_NAMES):
        given["use_cache"] = False
    if given.get("position_ids") is None and "position_ids" in parameters_of(type(model).forward):
        given["position_ids"] = positions_within(bounds, *batch_and_time(given))
    family = family_of(type(model))
    if not family.masks_by_position and given.get("attention_mask") is None:
        given["attention_mask"] = _masks(model, given)
    if family.hands_on == "seq_idx":
        B, T = batch_and_time(given)
        given["seq_idx"] = sequence_of_each_token(bounds, B * T).int().view(B, T)
    if family.hands_on == "mask":
        given["attention_mask"] = _mask_with_bounds(model, given)
    return (), given


def _check_in_a_graph(model: PreTrainedModel, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Bounds that are given reach the layers as they are; for softmax layers positions have to."""
    name, is_told = type(model).__name__, getattr(model, IS_TOLD, False)
    is_given = any(kwargs.get(argument) is not None for argument in (BOUNDS, "seq_idx"))
    if not is_given and not is_told:
        return
    family = family_of(type(model))
    in_no_argument = family.hands_on not in ("bounds", "seq_idx")
    if is_told or in_no_argument or not family.masks_by_position:
        refuse_in_a_graph(name)
    given = by_name(model, args, kwargs)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    is_by_positions = mask is None and positions is not None
    if _attends(model) and not (is_by_positions or _is_for_each_query(mask)):
        refuse_in_a_graph(name, " unless position_ids begin again, and without an attention_mask")


def _attends(model: PreTrainedModel) -> bool:
    """Whether some layers are softmax attention, which a mask keeps from seeing the bounds."""
    has_positions = "position_ids" in parameters_of(type(model).forward)
    return has_positions and family_of(type(model)).indexer is None


def _keep_softmax_apart(model: PreTrainedModel, given: dict[str, Any], bounds: Tensor) -> None:
    """Takes away a mask (B, T), false or 0 for padding, that softmax layers would see instead of
    the bounds. What it hides behind the other tokens of a sequence reaches none of them. A mask for
    each query and key is the caller's own, and stays.

    Raises:
        ValueError: it hides other tokens, too, or positions count on over a bound, by which alone
            these layers know it, unless they are flash attention's.
    """
    name, (B, T) = type(model).__name__, batch_and_time(given)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if _is_for_each_query(mask):
        return
    if mask is not None:
        if mask.shape != (B, T) or _has_padding_before_tokens(mask, bounds):
            raise ValueError(
                f"{name} can't take packed sequences with an attention_mask that is not {(B, T)} "
                "or hides tokens before others of their sequence: its softmax layers know bounds "
                "or a mask. Leave these tokens out, or give the sequences as rows"
            )
        given["attention_mask"] = None
    if positions is None or "flash" in (model.config._attn_implementation or ""):
        return
    positions = _of_text(positions)
    if positions is None:  # softmax layers see none, and know of rows only
        positions = torch.arange(T)[None]
    begins = bounds_where(positions.diff(dim=-1) != 1, B, T)
    if not torch.isin(bounds, begins.to(bounds.device)).all():
        raise ValueError(
            "position_ids must begin again with each packed sequence, for the softmax layers of "
            f"{name}: leave them out, or let them count from 0 in each (beside three axes of "
            "images the first of four)"
        )


def _is_for_each_query(mask: Any) -> bool:
    """Whether a mask, or a dict of them, is of queries and keys, and not of tokens (B, T)."""
    return mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)


def _of_text(positions: Tensor) -> Tensor | None:
    """Positions (B or 1, T) of (4, B, T), for the text and three axes of images; None of these
    alone.
    """
    if positions.dim() == 2:
        return positions
    return positions[0] if len(positions) == 4 else None


def _has_padding_before_tokens(mask: Tensor, bounds: Tensor) -> bool:
    """Whether a mask (B, T) hides a token before another of the same sequence."""
    is_real = mask.flatten().bool().to(bounds.device)
    sequence = sequence_of_each_token(bounds, len(is_real))
    return bool((is_real[1:] & ~is_real[:-1] & (sequence[1:] == sequence[:-1])).any())


def mixes_packed(module: nn.Module, indexer: str | None) -> bool:
    """Whether it chooses keys without regard to bounds, or is a recurrent layer that stayed."""
    classes = type(module).__mro__
    if any(cls.__module__.startswith(f"{__package__}.") for cls in classes):
        return False
    replacements = filter(None, map(replacement_for, classes))
    return type(module).__name__ == indexer or any(one.is_recurrent for one in replacements)


def _longest_row(model: PreTrainedModel) -> int | None:
    """Beyond which it scales by place; None for models that never do."""
    return getattr(model.config, family_of(type(model)).longest_row or "", None)


def tell_base(
    head: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict] | None:
    """Before the forward of a head that hands none of these arguments on to its base model."""
    if is_continuous_batch(kwargs) or kwargs.get(GROUP) is not None:
        return None
    if torch.compiler.is_compiling():
        if kwargs.get(BOUNDS) is not None:
            refuse_in_a_graph(type(head).__name__)
        return None
    tree, others = tree_of_call(kwargs), {k: x for k, x in kwargs.items() if k != "tree"}
    check_labels_of_tree(tree, kwargs.get("labels"), kwargs.get("shift_labels"))
    _told.set(bounds_of_call(by_name(head, args, others)) if tree is None else tree)
    setattr(head.base_model, IS_TOLD, _told.get() is not None)
    return args, others


def forget(head: PreTrainedModel, args: tuple, output: Any) -> None:
    """After it, or its error."""
    vars(head.base_model).pop(IS_TOLD, None)
    if not torch.compiler.is_compiling():
        _told.set(None)


def is_continuous_batch(kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(kwargs.get(name), SlotCache) for name in CACHE_NAMES)


def refuse_in_a_graph(name: str, condition: str = "") -> None:
    """Bounds that would not reach the layers. Without fullgraph=True this ends the graph, and the
    hook that raised it runs again outside of it.
    """
    raise ValueError(f"{name} takes no packed sequences compiled{condition}: don't compile it")


def batch_and_time(kwargs: Mapping[str, Any]) -> tuple[int, int]:
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            B, T = kwargs[name].shape[:2]
            return B, T
    raise ValueError("packed sequences need input_ids or inputs_embeds, got neither")


def _masks(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The masks of a model's layers by their type, as it makes them, or would if it looked at
    positions. Of embeddings, making them asks for the shape, dtype and device.
    """
    weight, given = model.get_input_embeddings().weight, kwargs.get("attention_mask")
    options = {
        "config": model.config,
        "inputs_embeds": weight.new_empty(*batch_and_time(kwargs), 0),
        "attention_mask": given,
        CACHE: None,
        "position_ids": kwargs["position_ids"],
    }
    of_tokens = None if _is_for_each_query(given) else given
    masks = {"full_attention": create_causal_mask(**options), "linear_attention": of_tokens}
    if getattr(model.config, "sliding_window", None) is not None:
        masks["sliding_attention"] = create_sliding_window_causal_mask(**options)
    return masks


def _mask_with_bounds(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> Any:
    """The mask of a model that hands on nothing else, and in it the bounds for recurrent layers."""
    mask, bounds = kwargs.get("attention_mask"), kwargs[BOUNDS]
    if "position_ids" not in parameters_of(type(model).forward):  # all layers are recurrent
        return MaskAndBounds(mask, bounds)
    masks = mask if isinstance(mask, dict) else _masks(model, kwargs)
    masks = masks | {also: masks[name] for name, also in ALSO_CALLED.items() if name in masks}
    told = MaskAndBounds(masks["conv"], bounds)
    return {**masks, **dict.fromkeys(TELL_BY_MASK, told)}


def by_name(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(parameters_of(type(model).forward), args, strict=False)), **kwargs}


@functools.cache
def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # without self
