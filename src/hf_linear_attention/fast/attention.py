# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' softmax attention, faster on the CPU where a few tokens look at many, or where a
mask hides much: PyTorch reads keys for each head that shares them, or one query at a time, and all
that a mask hides.

Shapes: B batch, Hq query heads, Hkv heads of keys, R queries, S keys, D head dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..ops.backends import has_compiled, native_op
from ..ops.numerics import is_transformed, needs_grad

compiled_attention = native_op("attention")
compiled_step = native_op("attention_step_")
IS_COMPILED = has_compiled()

MOST_QUERIES = 8  # where each sees nearly all keys: more are faster by PyTorch's products
# An attribute of keys that a trace sees: the last token's key and value, which attention itself is
# to write behind the others (cache/growing.py).
NEW_TOKEN = "_new_token_of_hf_linear_attention"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What Transformers' function looks at, and ours does not know.
UNKNOWN = ("softcap", "position_bias", "output_attentions")


def hastened(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of Transformers, of which that by PyTorch's `sdpa` becomes ours for a
    few queries; others stay what they are.
    """
    is_known = function in (sdpa_attention_forward, attention_of_marked) and IS_COMPILED
    return attention if is_known and not torch.compiler.is_compiling() else function


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`: query (B, Hq, R, D), key and value (B, Hkv, S, D) -> (B, R, Hq,
    D), and no weights.
    """
    R, mask = query.shape[2], attention_mask
    if (
        R > 0
        and dropout == 0
        and are_plain(query, key, value)
        and (R == 1 if mask is None else fits(mask, query, key))
        and (R <= MOST_QUERIES or hides_much(mask, query, kwargs.get("cu_seq_lens_q")))
        and all(kwargs.get(name) is None or kwargs[name] is False for name in UNKNOWN)
    ):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        new = vars(key).pop(NEW_TOKEN, None)  # of a token that is traced
        if new is not None and R == 1 and mask is None and value is new.values:
            return compiled_step(query, new.key, new.value, *new.room, scale), None
        if mask is not None:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return compiled_attention(query, key, value, mask, scale), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


MARK = "_attention_of_hf_linear_attention"  # an attribute of modules, which copies have, too


@functools.wraps(sdpa_attention_forward)
def attention_of_marked(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Ours for modules with a mark, Transformers' for all others."""
    function = attention if MARK in vars(module) else sdpa_attention_forward
    return function(module, *args, **kwargs)


def are_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the compiled op takes these, as they are."""
    return (
        all(type(x) is Tensor and x.is_cpu for x in (query, key, value))
        and query.dtype is key.dtype is value.dtype
        and query.dtype in DTYPES
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and key.stride(-1) == value.stride(-1) == 1
        and not (torch.is_grad_enabled() and needs_grad(query, key, value))
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and not is_transformed()
    )


def fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask can be expanded to (B, Hq, R, S), and is one that the compiled op takes."""
    B, Hq, R, _ = query.shape
    return (
        type(mask) is Tensor
        and mask.dim() == 4
        and mask.dtype in (torch.bool, query.dtype)
        and mask.shape[-1] == key.shape[2]
        and all(n in (1, m) for n, m in zip(mask.shape[:3], (B, Hq, R), strict=True))
        and not (torch.is_grad_enabled() and mask.requires_grad)
    )


def hides_much(mask: Tensor | None, query: Tensor, bounds: Tensor | None) -> bool:
    """Whether to leave out blocks of keys that a mask hides, as PyTorch does not, gains more than
    its products do: in half precision only for several sequences that are packed, by their bounds.
    """
    is_packed = bounds is not None and len(bounds) > 2
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return mask is not None and mask.dtype is torch.bool and (is_packed or not is_half)
