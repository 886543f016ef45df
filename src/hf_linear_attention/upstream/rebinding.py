# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Copies of functions that find other functions under some of their global names. The code is the
same, and the original stays as it is.

What a copy reads of its module besides is what stood there when the copy was made.
"""

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

NAME = "__name__"
# What a function could do with its globals that a copy would do to others.
WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")
READS_ALL = ("globals", "eval", "exec", NAME)


class Loaded(NamedTuple):
    """A name of a module or class that was read, and what stood there."""

    module: Mapping[str, Any]
    name: str
    value: Any

    @property
    def is_there(self) -> bool:
        """Whether it still does."""
        return self.module.get(self.name) is self.value


class Rebinding:
    """Finds what uses values that have a stand-in, and copies it so that it uses these.

    Args:
        stand_in: what takes the place of a value; None for most.
        follows: whether a function that is read as a global is looked into, too. Those that a
            decorator wraps are in any case.
    """

    def __init__(
        self, stand_in: Callable[[Any], Any], follows: Callable[[FunctionType], bool]
    ) -> None:
        self.stand_in = stand_in
        self.follows = follows

    def users(self, functions: Iterable[FunctionType]) -> set[FunctionType]:
        """Those of the functions, and of what they call, that use a value with a stand-in, by
        themselves or through others.
        """
        callers: dict[FunctionType, set[FunctionType]] = {}
        using, pending = [], list(functions)
        seen = set(pending)
        while pending:
            function = pending.pop()
            values = values_of(function)
            if any(self.stand_in(value) is not None for value in values):
                using.append(function)
            called = {x for x in _held_by(function) if isinstance(x, FunctionType)}
            called |= {x for x in values if isinstance(x, FunctionType) and self.follows(x)}
            for other in called:
                callers.setdefault(other, set()).add(function)
            pending += called - seen
            seen |= called
        found: set[FunctionType] = set()
        while using:
            function = using.pop()
            if function not in found:
                found.add(function)
                using += callers.get(function, ())
        return found

    def copies(self, users: set[FunctionType]) -> dict[FunctionType, FunctionType]:
        """A copy of each of these, which calls copies of the others."""
        modules = {id(function.__globals__): function.__globals__ for function in users}
        # By its name torch.compile would look for a module, and find what is replaced there.
        copied = {
            key: {name: value for name, value in module.items() if name != NAME}
            for key, module in modules.items()
        }
        cells = {
            function: tuple(
                CellType() if self._changes(cell, users) else cell
                for cell in function.__closure__ or ()
            )
            for function in users
        }
        made = {
            function: _copy(function, copied[id(function.__globals__)], cells[function])
            for function in users
        }

        def other(value: Any) -> Any:
            if isinstance(value, FunctionType) and value in made:
                return made[value]
            stand_in = self.stand_in(value)
            return value if stand_in is None else stand_in

        for function, copy in made.items():
            for one in globals_of(function):
                copied[id(one.module)][one.name] = other(one.value)
            for cell, before in zip(cells[function], function.__closure__ or (), strict=True):
                if cell is not before:
                    cell.cell_contents = other(before.cell_contents)
            copy.__defaults__ = function.__defaults__ and tuple(map(other, function.__defaults__))
            by_name = function.__kwdefaults__
            copy.__kwdefaults__ = by_name and {name: other(x) for name, x in by_name.items()}
            copy.__dict__.update({name: other(x) for name, x in vars(function).items()})
        return made

    def _changes(self, cell: CellType, users: set[FunctionType]) -> bool:
        value = _contents(cell)
        is_copied = isinstance(value, FunctionType) and value in users
        return is_copied or self.stand_in(value) is not None


def why_not_copied(function: FunctionType) -> str | None:
    """Why a copy could do something else; None where it does the same."""
    used = {
        (one.opname, one.argval) for code in _codes(function) for one in dis.get_instructions(code)
    }
    if any(opname in WRITES for opname, _ in used):
        return f"{function.__qualname__} writes to its module"
    if any(("LOAD_GLOBAL", name) in used for name in READS_ALL):
        return f"{function.__qualname__} reads its module by {' or '.join(READS_ALL)}"
    return None


def globals_of(function: FunctionType) -> list[Loaded]:
    """What a function, and those within it, read as globals of its module."""
    module = function.__globals__
    names = {
        one.argval: None
        for code in _codes(function)
        for one in dis.get_instructions(code)
        if one.opname == "LOAD_GLOBAL" and one.argval in module
    }
    return [Loaded(module, name, module[name]) for name in names]


def all_globals_of(function: FunctionType) -> list[Loaded]:
    """And those of the functions of its module that it calls."""
    found: list[Loaded] = []
    pending, seen = [function], {function}
    while pending:
        loaded = globals_of(pending.pop())
        found += loaded
        called = {x.value for x in loaded if isinstance(x.value, FunctionType)} - seen
        called = {x for x in called if x.__globals__ is function.__globals__}
        seen |= called
        pending += called
    return found


def values_of(function: FunctionType) -> list[Any]:
    """All that a function reads, as a global or of what it holds itself."""
    return [*_held_by(function), *(one.value for one in globals_of(function))]


def _held_by(function: FunctionType) -> Iterator[Any]:
    """What it holds itself: what a decorator wrapped, and defaults."""
    yield from map(_contents, function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty as yet
        return None


def _codes(function: FunctionType) -> Iterator[CodeType]:
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        yield code
        pending += [x for x in code.co_consts if isinstance(x, CodeType)]


def _copy(function: FunctionType, module: dict[str, Any], closure: tuple) -> FunctionType:
    """With a code object of its own, by which torch.compile knows a function."""
    copy = FunctionType(function.__code__.replace(), module, function.__name__, None, closure)
    names = ["__module__", "__qualname__", "__doc__"]
    # From Python 3.14 on, annotations are evaluated when they are asked for.
    names.append("__annotate__" if hasattr(function, "__annotate__") else "__annotations__")
    for name in names:
        setattr(copy, name, getattr(function, name))
    return copy
