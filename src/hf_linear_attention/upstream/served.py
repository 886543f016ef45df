# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Heads of models that use_kernels has changed, with continuous batching for states.

Each is of a class of the name of Transformers' own, made when it is asked for, which pickle finds
here.
"""

import functools

import transformers
from transformers import PreTrainedModel

from .families import family_of
from .heads import Served
from .module_classes import answers_of


def generates(cls: type) -> bool:
    """Whether a class is a head of Transformers that has continuous batching, but not yet ours."""
    return (
        hasattr(cls, "init_continuous_batching")
        and getattr(transformers, cls.__name__, None) is cls
    )


@functools.cache
def served_class(name: str) -> type[PreTrainedModel]:
    """What a head of Transformers of this name becomes."""
    upstream = getattr(transformers, name)
    body = {"__module__": __name__, "__doc__": upstream.__doc__}
    family = family_of(upstream)
    also = () if family is None or family.beams is None else (family.beams,)
    return type(name, (Served, *also, upstream), body | answers_of(upstream))


def forget_manager(model: PreTrainedModel) -> None:
    """Ends a manager that was kept for later sessions."""
    if hasattr(model, "destroy_cached_continuous_batching_manager"):
        model.destroy_cached_continuous_batching_manager()


def __getattr__(name: str) -> type[PreTrainedModel]:
    upstream = getattr(transformers, name, None)
    if not isinstance(upstream, type) or not generates(upstream):
        raise AttributeError(f"Transformers has no model {name} that generates")
    return served_class(name)
