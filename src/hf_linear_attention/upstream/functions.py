# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Layers of Transformers that none of our classes replaces: their own code runs, and the functions
that Transformers routes to fla, causal-conv1d and mamba_ssm are ours.

Of such a layer nothing has to be known: neither the names of its arguments, nor what it does beside
these functions. A module becomes one of a subclass, whose methods have the code of Transformers'
and other globals (see upstream/rebinding.py).
"""

import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..recurrences.tree import TokenTree
from .bounds import BOUNDS, MaskAndBounds, bounds_for_layers
from .layers.parts import PACKED_AND_CACHED
from .module_classes import answers_of, device_type_of
from .packing import refuse_in_a_graph
from .proof.proved_functions import CONVOLUTION, ON_CPU, Ours, ours_for, routed, stand_in
from .rebinding import Loaded, Rebinding, all_globals_of, globals_of, values_of, why_not_copied
from .routed_functions import bounds_of_layer

# Whether a model that is at work was told of packed sequences, so that its layers have to be, too.
_is_packed: ContextVar[bool] = ContextVar("packed sequences", default=False)


class ByFunctions(nn.Module):
    """Put before a layer of Transformers with the code of its own and functions of ours."""

    # Names that no layer of anybody's has.
    _upstream_of_functions: ClassVar[type[nn.Module]]
    _gist_of_functions: ClassVar[str]
    _staying_functions: ClassVar[tuple[str, ...]]  # why some are not ours
    _packages_of_functions: ClassVar[tuple[str, ...]]  # that are there for some

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's. Bounds of packed sequences reach all of its functions, whether it hands
        them on to these or not.

        Raises:
            ValueError: sequences are packed, and the layer would mix them.
        """
        bounds = _bounds_among(args, kwargs)
        if bounds is None:
            if not torch.compiler.is_compiling() and _is_packed.get():
                raise ValueError(
                    f"packed sequences reach {type(self).__name__} without their bounds, which its "
                    "model does not hand on: give the sequences as rows with an attention_mask"
                )
            return super().forward(*args, **kwargs)
        self._check_packed((*args, *kwargs.values()))
        args = tuple(map(_without_bounds, args))
        kwargs = {name: _without_bounds(x) for name, x in kwargs.items()}
        before = bounds_of_layer.set(bounds)
        try:
            if self not in _kept_apart:
                self._try_packed(bounds, args, kwargs)
            return super().forward(*args, **kwargs)
        finally:
            bounds_of_layer.reset(before)

    def _check_packed(self, given: Iterable[Any]) -> None:
        name = type(self).__name__
        if torch.compiler.is_compiling():
            refuse_in_a_graph(name)
        if self._staying_functions:
            raise ValueError(
                f"{name} can't take packed sequences: {'; '.join(self._staying_functions)}"
            )
        if any(isinstance(x, Cache) for x in given):
            raise ValueError(PACKED_AND_CACHED)

    def _try_packed(self, bounds: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """The first time, that what is before a bound changes nothing behind it, since a layer may
        look back by itself, too.
        """
        x = next(filter(_is_sequence, (*args, *kwargs.values())), None)
        if x is None:
            raise ValueError(f"{type(self).__name__} takes no hidden states (B, T, C) to be packed")
        bound = int(bounds[len(bounds) // 2])
        if not 0 < bound < x.shape[0] * x.shape[1]:
            return  # this one tells nothing
        other = x.detach().clone(memory_format=torch.contiguous_format)
        other.view(-1, x.shape[-1])[:bound] = 0
        modes = {module: module.training for module in self.modules()}
        try:
            self.eval()  # without dropout
            with torch.no_grad():
                want = super().forward(*args, **kwargs)
                args = tuple(other if y is x else y for y in args)
                kwargs = {name: other if y is x else y for name, y in kwargs.items()}
                got = super().forward(*args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
        want, got = (y[0] if isinstance(y, tuple) else y for y in (want, got))
        close: dict[str, Any] = dict(
            rtol=1e-4, atol=1e-5 * float(want.abs().nan_to_num(0).max()), equal_nan=True
        )
        if not torch.allclose(got.flatten(0, 1)[bound:], want.flatten(0, 1)[bound:], **close):
            raise ValueError(
                f"{type(self).__name__} can't take packed sequences: it looks back over their "
                "bounds, beside the functions that are ours"
            )
        _kept_apart.add(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple, super().__reduce_ex__(max(protocol, 2)))
        return _new_of, (self._upstream_of_functions,), *state


# Layers of which this is known.
_kept_apart: WeakSet[ByFunctions] = WeakSet()


def _is_sequence(x: Any) -> bool:
    """Whether x is as hidden states (B, T, C) are."""
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()


def _new_of(upstream: type[nn.Module]) -> nn.Module:
    """What pickle and copies fill."""
    now = functions_class_for(upstream)
    cls = now if isinstance(now, type) else upstream
    return cls.__new__(cls)


def expect_bounds(model: PreTrainedModel, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Before the forward of a model with such layers, behind `tell_layers`."""
    if not torch.compiler.is_compiling():
        _is_packed.set(kwargs.get(BOUNDS) is not None)


def expect_none(model: PreTrainedModel, args: tuple, output: Any) -> None:
    """After it, or its error."""
    if not torch.compiler.is_compiling():
        _is_packed.set(False)


def _bounds_among(args: tuple, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The bounds of packed sequences that a layer is given in any of the ways of packing.py."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, MaskAndBounds):
            if isinstance(x.bounds, TokenTree):
                raise ValueError(
                    "tree must be None where layers run Transformers' own code over our functions, "
                    "which know bounds alone"
                )
            return x.bounds
    seq_idx = kwargs.get("seq_idx")
    B, T = (0, 0) if seq_idx is None else seq_idx.shape
    return bounds_for_layers(kwargs, B, T)


def _without_bounds(x: Any) -> Any:
    return x.mask if isinstance(x, MaskAndBounds) else x


class Made(NamedTuple):
    """What a class of Transformers becomes, and the globals and methods that this was made of."""

    now: type[ByFunctions]
    read: list[Loaded]


_made: dict[type[nn.Module], Made] = {}


def functions_class_for(cls: type[nn.Module]) -> type[ByFunctions] | str | None:
    """The class that modules of exactly this class become, to do the same by our ops; why there is
    none, though it uses functions that Transformers routes; None where it uses none of these.
    """
    made = _made.get(cls)
    if made is not None and all(one.is_there for one in made.read):
        return made.now
    if any(base.__module__.startswith(f"{__package__}.") for base in cls.__mro__):
        return None  # it is ours
    if cls.__module__.startswith("torch."):
        return None  # or one that FSDP2 made
    members = {base: _members_of(base) for base in cls.__mro__}
    functions = [_function_of(x) for named in members.values() for x in named.values()]
    users = Rebinding(routed, _knows_routed).users(functions)
    if not users:
        return _why_none(cls)
    found = [one for function in users for one in map(routed, values_of(function)) if one]
    ours = list({one.in_torch: ours_for(one.name, one.in_torch) for one in found}.values())
    gists = [one.gist for one in ours if isinstance(one, Ours) and one.gist]
    staying = tuple(one for one in ours if isinstance(one, str))
    why = [reason for function in users if (reason := why_not_copied(function)) is not None]
    if why or not gists:
        return "; ".join(why or staying)
    rebinding = Rebinding(stand_in, _knows_routed)
    copies = rebinding.copies(rebinding.users(functions))
    gist = max(gists, key=lambda gist: gist != CONVOLUTION)
    facts = {
        "_upstream_of_functions": cls,
        "_gist_of_functions": f"{gist}, by function",
        "_staying_functions": staying,
        "_packages_of_functions": tuple(dict.fromkeys(x.package for x in found if x.is_there)),
    }
    now = _made_class(cls, members, copies, facts)
    names = {name for named in members.values() for name in named}
    methods = [Loaded(vars(base), x, vars(base).get(x)) for base in members for x in names]
    read = [one for function in copies for one in globals_of(function)]
    read += [one for each in found for one in all_globals_of(each.in_torch)]
    _made[cls] = Made(now, read + methods)
    return now


def why_left_to_packages(module: nn.Module, now: type[ByFunctions]) -> str | None:
    """Where other packages' functions are there, and run."""
    if now._packages_of_functions and device_type_of(module) not in (None, *ON_CPU):
        return f"Transformers runs it on {' and '.join(now._packages_of_functions)} there"
    return None


def _made_class(
    cls: type[nn.Module],
    members: Mapping[type, Mapping[str, Any]],
    copies: Mapping[FunctionType, FunctionType],
    facts: dict[str, Any],
) -> type[ByFunctions]:
    """For each class that the layer's derives from and that has a method with a copy, one between
    it and those before, so that `super()` finds the copies, too.
    """
    parts = []
    for base, named in members.items():
        body = {
            name: _with_function(x, copies[_function_of(x)])
            for name, x in named.items()
            if _function_of(x) in copies
        }
        if body or base is cls:
            parts.append(type(base.__name__, (base,), {"__module__": __name__, **body}))
    facts = {**facts, "__module__": __name__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ByFunctions, *parts), facts | answers_of(cls))


def _members_of(cls: type) -> dict[str, Any]:
    """Its own methods, where its module has functions that Transformers routes."""
    module = sys.modules.get(cls.__module__)
    if module is None or not _has_routed(vars(module)):
        return {}
    is_method = {name: isinstance(_function_of(x), FunctionType) for name, x in vars(cls).items()}
    return {name: x for name, x in vars(cls).items() if is_method[name] and name != "__init__"}


def _function_of(member: Any) -> Any:
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def _with_function(member: Any, function: FunctionType) -> Any:
    return type(member)(function) if isinstance(member, (classmethod, staticmethod)) else function


def _why_none(cls: type[nn.Module]) -> str | None:
    """Where only `__init__` reads the functions, modules hold them, and would go on to do so."""
    functions = [
        x for base in cls.__mro__ if isinstance(x := vars(base).get("__init__"), FunctionType)
    ]
    is_held = Rebinding(routed, lambda function: False).users(functions)
    return "it keeps Transformers' functions as attributes" if is_held else None


def _knows_routed(function: FunctionType) -> bool:
    return _has_routed(function.__globals__)


def _has_routed(module: Mapping[str, Any]) -> bool:
    return any(routed(value) is not None for value in list(module.values()))
