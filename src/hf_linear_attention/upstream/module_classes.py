# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A change of a module's class, also where accelerate put a hook around its forward, as it does to
place the parts of a model on devices, in memory and on disks.

Such a hook replaces `forward` on the module itself, and keeps the class's as `_old_forward`, bound
to the module, which is `forward` again when the hook is removed.
"""

import functools
from types import MethodType
from typing import Any

import torch
from torch import nn

BOUND = ("forward", "_old_forward")
ASKED_OF_A_FILE = ("_can_set_attn_implementation", "_can_set_experts_implementation")


def why_it_stays(module: nn.Module) -> str | None:
    """Why another class would not change what a module does; None where it would."""
    forward = vars(module).get("forward")
    if forward is None or _is_of_class(module, "forward"):
        return None
    if _is_hooked(forward) and _is_of_class(module, "_old_forward"):
        return None
    return "its forward was replaced on the module itself"


def change_class(module: nn.Module, now: type[nn.Module]) -> None:
    """Makes the module one of a class with the same fields; where `why_it_stays` is None."""
    bound = [name for name in BOUND if _is_of_class(module, name)]
    module.__class__ = now
    for name in bound:
        setattr(module, name, MethodType(now.forward, module))


def device_type_of(module: nn.Module) -> str | None:
    """Where it computes, as "cpu", if it has weights: where a hook of accelerate puts them then, or
    else where they are.
    """
    where = getattr(vars(module).get("_hf_hook"), "execution_device", None)
    if where is not None:
        return torch.device(where).type
    weight = next(module.parameters(), None)
    return None if weight is None else weight.device.type


def _is_of_class(module: nn.Module, name: str) -> bool:
    method = vars(module).get(name)
    return (
        isinstance(method, MethodType)
        and method.__self__ is module
        and method.__func__ is type(module).forward
    )


def _is_hooked(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func.__module__ == "accelerate.hooks"


def is_one_of(module: nn.Module, name: str | None) -> bool:
    """Of a class of this name, or of one derived from it, as FSDP2 makes them."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


def answers_of(upstream: type) -> dict[str, Any]:
    """What Transformers looks up in the source of the file that a model's class is said to be in,
    as it finds it for the class that was replaced.
    """
    names = [name for name in ASKED_OF_A_FILE if hasattr(upstream, name)]
    return {name: classmethod(lambda cls, name=name: getattr(upstream, name)()) for name in names}
