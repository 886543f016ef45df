# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The values that the source of one of Transformers' layers reads, and whether all of them are
known.

A short run on a tiny model can't see a limit that is at its default, a factor that is 1 so far, a
clamp that its numbers do not reach, or what begins at 4,096 tokens. All of these have to be read:
from the layer, its config, an argument, or as a number in the source. So what a source reads tells
whether there may be something that no run shows.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from .fingerprints import parts_of, tree_of
from .known_reads import KNOWN, Known

NAMES_IN_ARGUMENTS = ("get", "pop", "getattr", "hasattr", "setdefault")
SMALL = 4  # no integer up to it is a limit: they are axes, indices, factors


class Reads(NamedTuple):
    """Names that are read, as "self.A_log" or "kwargs.seq_idx", and numbers in the source."""

    names: frozenset[str]
    numbers: frozenset[float]


def why_unknown(ours: type[nn.Module], upstream: type[nn.Module], functions: tuple) -> str | None:
    """What the source of a class reads that is unknown, or does not read that all known sources of
    the kind do; None where there is nothing.
    """
    known = KNOWN.get(ours.__name__)
    if known is None:
        return "nothing is known of what it reads"
    reads = reads_of(upstream, functions)
    more = sorted(reads.names - known.names)
    less = sorted(known.always_read - reads.names)
    numbers = sorted(reads.numbers - set(known.numbers))
    for what, found in (("reads", more), ("does not read", less), ("has numbers like", numbers)):
        if found:
            return f"it {what} {', '.join(map(str, found))}, as no source that is known"
    return None


def reads_of(upstream: type[nn.Module], functions: tuple[str, ...]) -> Reads:
    """Of a class's forward, its methods that this calls, functions of its module by their names,
    and those of Transformers' models that these call.
    """
    return _reads_of_all(_things(upstream, functions))


def reads_of_function(function: FunctionType) -> Reads | None:
    """Of one, and of functions of Transformers' models that it calls; None without its source."""
    has_source = all(tree_of(part) is not None for part in parts_of(function))
    return _reads_of_all(_with_called([function])) if has_source else None


def _reads_of_all(parts: Iterator[Any]) -> Reads:
    names: set[str] = set()
    numbers: set[float] = set()
    for part in parts:
        tree = tree_of(part)
        if tree is not None:
            _Reader(names, numbers).visit(tree)
        for value in _globals_of(part, tree):
            if isinstance(value, (int, float)):
                _note_number(numbers, value)
    return Reads(frozenset(names), frozenset(numbers))


def merged(known: Known | None, reads: Reads) -> Known:
    """What is known with another source beside those of before."""
    always = reads.names if known is None else reads.names & known.always_read
    names = reads.names if known is None else reads.names | known.names
    numbers = reads.numbers if known is None else reads.numbers | set(known.numbers)
    return Known(" ".join(sorted(always)), " ".join(sorted(names - always)), tuple(sorted(numbers)))


def _things(upstream: type[nn.Module], functions: tuple[str, ...]) -> Iterator[Any]:
    """All whose source counts."""
    module = importlib.import_module(upstream.__module__)
    waiting: list[Any] = [upstream.forward]
    for name in inspect.unwrap(upstream.forward).__code__.co_names:
        if name != "forward" and inspect.isfunction(vars(upstream).get(name)):
            waiting.append(vars(upstream)[name])
    waiting += [getattr(module, name, None) for name in functions if "." not in name]
    return _with_called(waiting)


def _with_called(waiting: list[Any]) -> Iterator[Any]:
    """The parts of these, and of what they call."""
    seen: set[Any] = set()
    while waiting:
        thing = waiting.pop()
        if thing is None or thing in seen:
            continue
        seen.add(thing)
        for part in parts_of(thing):
            yield part
            for value in _globals_of(part, tree_of(part)):
                if isinstance(value, FunctionType) and value.__module__.startswith(
                    "transformers.models."
                ):
                    waiting.append(value)


def _globals_of(part: Any, tree: ast.AST | None) -> Iterator[Any]:
    """Values of the global names that a function reads."""
    known = getattr(part, "__globals__", {})
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in known:
            yield known[node.id]


def _note_number(numbers: set[float], value: float) -> None:
    is_small = isinstance(value, int) and abs(value) <= SMALL
    if not is_small and abs(value) not in (0.0, 1.0):
        numbers.add(float(abs(value)))


class _Reader(ast.NodeVisitor):
    """Notes what a syntax tree reads; decorators and annotations read nothing."""

    def __init__(self, names: set[str], numbers: set[float]):
        self.names, self.numbers = names, numbers

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of = node.value
        if isinstance(of, ast.Name) and of.id in ("self", "config"):
            self.names.add(f"{of.id}.{node.attr}")
        elif isinstance(of, ast.Attribute) and of.attr == "config":
            self.names.add(f"config.{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        if called in NAMES_IN_ARGUMENTS:
            self._note_strings(node.args)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._note_strings([node.slice])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, (int, float)):
            _note_number(self.numbers, node.value)

    def _note_strings(self, nodes: list[ast.expr]) -> None:
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.names.add(f"kwargs.{node.value}")
