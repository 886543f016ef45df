# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How one module comes to our kernels: by a class of ours, by functions of ours under its own
`forward`, or by a way of its own, which changes no class.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from .families import made_class, replacement_for, sizes_for
from .functions import ByFunctions, why_left_to_packages
from .module_classes import change_class, why_it_stays
from .replacements import Replacement
from .report import Change, Left, Report
from .tiny_models import innermost_model

IS_OURS = "it runs on our kernels already"


class Becomes(NamedTuple):
    """What a module is changed into."""

    now: type[nn.Module]
    gist: str


# How a module may come to our kernels: what it becomes, or a string that says why not; None where
# nothing is to be said. It is given what replaces its class, if anything does, and what is around
# the module, where a model of Transformers may be, to try a tiny one of.
Tier = Callable[[nn.Module, Replacement | None, nn.Module | None], Becomes | str | None]


def replace(
    report: Report,
    name: str,
    module: nn.Module,
    replacement: Replacement | None,
    tiers: tuple[Tier, ...],
    root: nn.Module | None = None,
) -> None:
    """By the first tier that can."""
    before = type(module)
    whys: list[str] = []
    for tier in tiers:
        found = tier(module, replacement, root)
        if isinstance(found, Becomes):
            gist = ", as ".join([found.gist, *whys[:1]])
            change_class(module, found.now)
            report.changed.append(Change(name, ref(module), before, found.now, gist))
            staying = getattr(found.now, "_staying_functions", ())
            report.left += [Left(name, before.__name__, why) for why in staying]
            return
        if found is not None:
            whys.append(found)
    report.left += [Left(name, before.__name__, why) for why in whys[:1]]


def by_class(
    module: nn.Module, replacement: Replacement | None, root: nn.Module | None
) -> Becomes | str | None:
    """A class of ours, whose forward is another, if the source that it stands in for is known, or
    proved to compute the same.
    """
    if replacement is None:
        return _why_unknown(module)
    before, gist = type(module), replacement.gist
    model = None
    if root is not None and not replacement.knows(before):
        model = innermost_model(root, module)
        gist = f"{gist}, proved on a tiny model of these settings"
    why = replacement.why_not(module, before, model, sizes_for(before))
    return Becomes(made_class(before), gist) if why is None else why


def by_functions(
    class_for: Callable[..., type[ByFunctions] | str | None],
    module: nn.Module,
    replacement: Replacement | None,
    root: nn.Module | None,
) -> Becomes | str | None:
    """Its own forward, over functions of ours."""
    now = class_for(type(module))
    if not isinstance(now, type):
        return now
    why = why_it_stays(module) or why_left_to_packages(module, now)
    return Becomes(now, now._gist_of_functions) if why is None else why


def _why_unknown(module: nn.Module) -> str | None:
    """Why a module is left alone that has no replacement, but nearly; None for all others."""
    if isinstance(module, ByFunctions):
        return IS_OURS
    for base in type(module).__mro__[1:]:
        replacement = replacement_for(base)
        if replacement is not None and replacement.is_recurrent:
            if type(module) is made_class(base):
                return IS_OURS
            return f"a subclass of {base.__name__}, which may compute something else"
    return None


def hasten(report: Report, name: str, module: nn.Module, way: Any, gist: str) -> None:
    """By `way`, which changes no class: quantisers look for products by theirs. One of `linear` and
    `attention`.
    """
    cls = type(module)
    if way.is_hastened(module):
        report.left.append(Left(name, cls.__name__, IS_OURS))
    elif (why := why_it_stays(module)) is not None:
        report.left.append(Left(name, cls.__name__, why))
    else:
        way.hasten(module)
        report.changed.append(Change(name, ref(module), cls, cls, gist))
