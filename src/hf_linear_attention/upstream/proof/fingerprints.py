# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Fingerprints of Transformers' source, by which it is known again."""

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn


def fingerprint(upstream: type[nn.Module], functions: tuple[str, ...]) -> str:
    """Of the source of a class's forward, of its methods that this names, and of functions of its
    module.
    """
    things: list[Callable[..., Any] | None] = [upstream.forward]
    for name in inspect.unwrap(upstream.forward).__code__.co_names:
        if name != "forward" and inspect.isfunction(vars(upstream).get(name)):
            things.append(vars(upstream)[name])
    for name in functions:
        module, _, name = name.rpartition(".")
        things.append(getattr(importlib.import_module(module or upstream.__module__), name, None))
    return fingerprint_of(*things)


def fingerprint_of(*things: Callable[..., Any] | None) -> str:
    """Of the source of functions and classes, where they are."""
    sources = ["none" if thing is None else source_of(thing) for thing in things]
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:12]


@functools.cache
def source_of(thing: Callable[..., Any]) -> str:
    """The syntax tree of a function or class as text; "" where there is no source. Layout,
    comments, annotations and decorators change nothing, nor does Python's version. What somebody
    has wrapped around it is named.
    """
    *around, inner = parts_of(thing)
    trees = [f"{one.__globals__.get('__name__')}({text_of(one)})" for one in around]
    return "".join([*trees, text_of(inner)])


def parts_of(thing: Callable[..., Any]) -> list[Any]:
    """What wraps a function or class, but for Transformers' and PyTorch's decorators, the outermost
    first, and last what is in all of them.
    """
    around = []
    while hasattr(thing, "__wrapped__"):
        module = getattr(thing, "__globals__", {}).get("__name__", "")
        if isinstance(thing, FunctionType) and module.partition(".")[0] not in DECORATE:
            around.append(thing)
        thing = thing.__wrapped__
    return [*around, thing]


def tree_of(part: Any) -> ast.AST | None:
    """Of one of these; None without its source."""
    code = part.__code__ if isinstance(part, FunctionType) else part
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError):  # there is none, or it is a part of a statement
        return None


def text_of(part: Any) -> str:
    tree = tree_of(part)
    return "" if tree is None else _as_text(tree)


DECORATE = ("transformers", "torch", "kernels")  # packages whose decorators change no answer


LEAVES_OUT = {"annotation", "returns", "decorator_list", "type_params", "type_comment", "kind"}


def _as_text(node: Any) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_as_text(x) for x in node if not _is_docstring(x)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields if name not in LEAVES_OUT)
    given = (f"{name}={_as_text(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({','.join(given)})"


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
