# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' recurrent models, a file for each, or for several that have much in common: all
files in this folder are read, so that one more is all that one more model needs.
"""

import functools
import importlib
import pkgutil
from typing import Any

from torch import nn

from ..family import UNKNOWN, Family
from ..module_classes import answers_of
from ..proof import why_other_arguments
from ..recorded_layers import RecordedLayer
from ..replacements import Replacement

# By the names of their folders in Transformers.
FAMILIES: dict[str, Family] = {
    family.name: family
    for file in pkgutil.iter_modules(__path__, f"{__name__}.")
    for family in importlib.import_module(file.name).FAMILIES
}

Place = tuple[str, str]  # module and name of a class of Transformers


def place(family: Family, name: str) -> Place:
    return f"transformers.models.{family.name}.modeling_{family.name}", name


REPLACEMENTS: dict[Place, Replacement] = {
    place(family, name): replacement
    for family in FAMILIES.values()
    for name, replacement in family.replaced.items()
}
# Layers around recurrent ones, and heads that take drafts: what is put before them.
LAYERS: dict[Place, type] = {
    place(family, family.layer): RecordedLayer for family in FAMILIES.values() if family.layer
}
HEADS: dict[Place, type] = {
    place(family, family.head): family.drafts
    for family in FAMILIES.values()
    if family.head and family.drafts
}
# Where pickle finds what is made of them.
REPLACED_IN = f"{__name__.rpartition('.')[0]}.replaced"
AROUND = LAYERS | HEADS
REPLACED = {*REPLACEMENTS, *AROUND}
# Models that hold the layers, and heads. No two have one name.
_BY_NAME = {name: one for one in FAMILIES.values() for name in (one.model, one.head) if name}


def family_of(cls: type) -> Family:
    """That of a model or head of this class, or of one derived from it, as FSDP2 makes them;
    UNKNOWN of all others.
    """
    names = (one.__name__ for one in cls.__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), UNKNOWN)


def sizes_for(cls: type) -> dict[str, Any]:
    """Of a tiny model of the family that a class of Transformers is of."""
    return FAMILIES.get(cls.__module__.split(".")[-2], UNKNOWN).sizes


def replacement_for(cls: type) -> Replacement | None:
    """What replaces modules of exactly this class; an earlier one if that takes its arguments."""
    replacement = REPLACEMENTS.get((cls.__module__, cls.__name__))
    earlier = None if replacement is None else replacement.earlier
    takes_those = earlier is not None and why_other_arguments(cls, earlier.ours) is None
    return earlier if takes_those else replacement


@functools.cache
def made_class(module: str, name: str) -> type[nn.Module]:
    """The class that replaces one of Transformers: a subclass of it and of ours, of the same name,
    so that whoever asks for the name is not surprised; `replaced` is where pickle finds it.
    """
    upstream = getattr(importlib.import_module(module), name)
    replacement = replacement_for(upstream)
    ours = AROUND[module, name] if replacement is None else replacement.ours
    body = {"__module__": REPLACED_IN, "__doc__": ours.__doc__}
    return type(name, (ours, upstream), body | answers_of(upstream))
