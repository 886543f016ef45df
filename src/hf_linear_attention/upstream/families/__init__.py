# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' recurrent models, a file for each, or for several that have much in common: all
files in this folder are read, so that one more is all that one more model needs.
"""

import importlib
import inspect
import operator
import pkgutil
from typing import Any

from torch import nn

from ..family import UNKNOWN, Family
from ..module_classes import answers_of
from ..proof.fingerprints import fingerprint
from ..proof.proof import why_other_arguments
from ..recorded_layers import RecordedLayer
from ..replacements import NORMS, Replacement

# By the names of their folders in Transformers.
FAMILIES: dict[str, Family] = {
    family.name: family
    for file in pkgutil.iter_modules(__path__, f"{__name__}.")
    for family in importlib.import_module(file.name).FAMILIES
}

Place = tuple[str, str]  # module and name of a class of Transformers


def _file_of(family: Family) -> str:
    return f"transformers.models.{family.name}.modeling_{family.name}"


REPLACEMENTS: dict[Place, Replacement] = {
    (_file_of(family), name): replacement
    for family in FAMILIES.values()
    for name, replacement in family.replaced.items()
}
# Layers around recurrent ones, and heads that take drafts: what is put before them.
LAYERS: dict[Place, type] = {
    (_file_of(family), family.layer): RecordedLayer for family in FAMILIES.values() if family.layer
}
HEADS: dict[Place, type] = {
    (_file_of(family), family.head): family.drafts
    for family in FAMILIES.values()
    if family.head and family.drafts
}
# Where pickle finds what is made of them.
REPLACED_IN = f"{__name__.rpartition('.')[0]}.replaced"
AROUND = LAYERS | HEADS
_BY_FILE = {_file_of(family): family for family in FAMILIES.values()}
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
    return _BY_FILE.get(cls.__module__, UNKNOWN).sizes


def replacement_for(cls: type) -> Replacement | None:
    """What replaces modules of exactly this class; an earlier one if that takes its arguments."""
    replacement = REPLACEMENTS.get((cls.__module__, cls.__name__))
    earlier = None if replacement is None else replacement.earlier
    takes_those = earlier is not None and why_other_arguments(cls, earlier.ours) is None
    return earlier if takes_those else replacement


def norm_for(cls: type[nn.Module]) -> Replacement | None:
    """What replaces norms of this class, whichever model it is of: the one that was written for its
    source.
    """
    if not inspect.isfunction(inspect.unwrap(cls.forward)):
        return None
    source = fingerprint(cls, ())
    return next((norm for norm in NORMS if source in norm.sources), None)


_made: dict[type[nn.Module], type[nn.Module]] = {}


def made_class(upstream: type[nn.Module]) -> type[nn.Module]:
    """The class that replaces one of Transformers: a subclass of it and of ours, of the same name,
    so that whoever asks for the name is not surprised; `replaced` is where pickle finds it.

    Raises:
        ValueError: nothing replaces it.
    """
    if upstream in _made:
        return _made[upstream]
    replacement = replacement_for(upstream) or norm_for(upstream)
    around = AROUND.get((upstream.__module__, upstream.__name__))
    ours = around if replacement is None else replacement.ours
    if ours is None:
        raise ValueError(f"nothing replaces {upstream.__name__}")
    body = {"__module__": REPLACED_IN, "__doc__": ours.__doc__}
    made = type(upstream.__name__, (ours, upstream), body | answers_of(upstream))
    made.__qualname__ = f"{upstream.__module__}:{upstream.__qualname__}".replace(".", "/")
    return _made.setdefault(upstream, made)


def found_again(qualname: str) -> type[nn.Module]:
    """By the name that `made_class` gave it.

    Raises:
        ValueError: it gave no such name.
        ImportError, AttributeError: there is no such class here.
    """
    module, colon, name = qualname.replace("/", ".").partition(":")
    if not colon:
        raise ValueError(f"{qualname} is of no class that was made")
    return made_class(operator.attrgetter(name)(importlib.import_module(module)))
