# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Trees of texts (`tree=TokenTree(...)`) for models of Transformers on our kernels.

Shapes: B batch, T time.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..recurrences.tree import TokenTree, check_beside_tree, check_kind, check_tree, masks_of_tree
from ..releases import CACHE_NAMES
from .bounds import ALSO_CALLED, BOUNDS, GROUP, TELL_BY_MASK, MaskAndBounds
from .families import family_of


def tree_of_call(kwargs: Mapping[str, Any]) -> TokenTree | None:
    """The tree among a model's arguments.

    Raises:
        ValueError: it is another thing, or ranks share its tokens.
    """
    tree = kwargs.get("tree")
    if tree is not None:
        check_kind(tree)
        check_beside_tree(**{GROUP: kwargs.get(GROUP)})
    return tree


def tell_tree(
    model: PreTrainedModel,
    given: dict[str, Any],
    tree: TokenTree,
    tokens: tuple[int, int],
    attends: bool,
) -> dict[str, Any]:
    """The arguments of a model that holds the layers, for tokens (B, T) that are a tree: positions,
    masks of softmax layers, if it has any, and the tree in place of recurrent layers' masks.

    Raises:
        ValueError: the model can't read trees, or not with these arguments.
    """
    why = family_of(type(model)).why_no_trees
    if why is not None:
        raise ValueError(f"{type(model).__name__} can't read a tree: {why}")
    told = (BOUNDS, "seq_idx", "attention_mask", "position_ids", *CACHE_NAMES)
    check_tree(tree, tokens, model.config)
    check_beside_tree(**{name: given.get(name) for name in told})
    mask, weight = MaskAndBounds(None, tree), model.get_input_embeddings().weight
    given = {**given, "use_cache": False}
    if not attends:
        by_mask = family_of(type(model)).hands_on == "mask"
        return {**given, **({"attention_mask": mask} if by_mask else {BOUNDS: tree})}
    masks: dict[str, Any] = dict(masks_of_tree(tree, model.config, weight.new_empty(*tokens, 0)))
    masks |= {also: masks[name] for name, also in ALSO_CALLED.items() if name in masks}
    masks |= dict.fromkeys(TELL_BY_MASK, mask)
    return {**given, "attention_mask": masks, "position_ids": tree.position_ids(weight.device)}
