# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax layers of Transformers' models, whose attention of few queries is ours: they ask
AttentionInterface for a function, and those that have a mark get another.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..fast.attention import MARK, attention, attention_of_marked, hastened
from ..model.auto import observe_attention


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
    return attention_of_marked if hastened(function) is attention else function
