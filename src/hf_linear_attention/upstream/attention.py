# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax layers of Transformers' models, whose attention of few queries is ours: they ask
AttentionInterface for a function, and those that have a mark get another.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..fast.attention import attention, hastened
from ..model.auto import observe_attention

MARK = "_attention_of_hf_linear_attention"  # an attribute of modules, which copies have, too


class Mark:
    """What modules have; whoever loads a pickle of one gets the function, too."""

    def __reduce__(self) -> tuple[Callable[[], "Mark"], tuple[()]]:
        return make_mark, ()


def make_mark() -> Mark:
    observe_attention(_observe, is_first=True)
    return Mark()


def hasten(module: nn.Module) -> None:
    """Gives a module ours, where it asks for that by PyTorch's `sdpa`."""
    vars(module)[MARK] = make_mark()


def restore(module: nn.Module) -> None:
    """Undoes `hasten`."""
    vars(module).pop(MARK, None)


def is_hastened(module: nn.Module) -> bool:
    return MARK in vars(module)


def _observe(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What modules get."""
    return _of_modules if hastened(function) is attention else function


@functools.wraps(sdpa_attention_forward)
def _of_modules(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    function = attention if is_hastened(module) else sdpa_attention_forward
    return function(module, *args, **kwargs)
