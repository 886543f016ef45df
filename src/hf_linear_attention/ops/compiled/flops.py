# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How many floating-point operations the compiled ops are, for `torch.utils.flop_counter`.

As torch counts: a multiplication and an addition for each number that goes into a sum of products,
nothing for what is done to numbers one by one (decays, feature maps, norms, losses). These are the
recurrences' own counts, by which no token is computed twice: a state of K x V numbers is written by
K V products, and read by as many. PyTorch's chunks, in which tokens meet each other as well, are
more. A backward pass is two products for each one, as a matrix product's, whatever it computes anew
to save memory.

Shapes: B batch, T time, K key dim, V value dim; a step has no T.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

from .library import ops

Given = Mapping[str, Any]  # an op's arguments by name, shapes in the place of tensors; "out", too


def linear_attention(given: Given) -> int:
    """2 K (V + 1) for each token and key head, which writes, and query head, which reads; the 1 is
    the normaliser's, which is there where it is used.
    """
    *tokens, query_heads, K = given["q"]
    *_, key_heads, V = given["v"]
    return 2 * prod(tokens) * (key_heads + query_heads) * K * (V + given["normalize"])


def delta_rule(given: Given) -> int:
    """2 K V for each token and value head for what the state holds of a key (with `delta`), for
    what is written, once or twice (with `add_along`), and for what is read.
    """
    writes = 1 + (given.get("add_along") is not None)
    return 2 * prod(given["v"]) * given["q"][-1] * (1 + writes + given["delta"])


def selective_scan(given: Given) -> int:
    """2 for each token, channel and number of its state to write, 2 to read."""
    return 4 * prod(given["x"]) * given["A"][-1]


def short_convolution(given: Given) -> int:
    """2 for each token, channel and number of a kernel."""
    return 2 * prod(given["x"]) * given["weight"][-1]


def linear(given: Given) -> int:
    """2 for each row, input and output."""
    return 2 * prod(given["x"]) * given["out"][-1]


OF_SEQUENCES = {
    "linear_attention": linear_attention,
    "delta_rule": delta_rule,
    "selective_scan": selective_scan,
    "short_convolution": short_convolution,
}
FORMULAS: dict[str, Callable[[Given], int]] = {
    **OF_SEQUENCES,
    **{f"{name}_step_": formula for name, formula in OF_SEQUENCES.items()},
    "linear_attention_": linear_attention,  # in slots
    "delta_rule_": delta_rule,
    "linear": linear,
    "many_rows_linear": linear,  # also of its gradients
    "expert_linear": linear,
    "int8_linear": linear,
    "int4_linear": linear,
}


def register_formulas() -> None:
    """Has torch count the ops by their formulas."""
    for name, formula in FORMULAS.items():
        _register(name, formula)
    for name, formula in OF_SEQUENCES.items():
        _register(f"{name}_backward", formula, times=2)


def _register(name: str, formula: Callable[[Given], int], times: int = 1) -> None:
    op = getattr(ops, name)
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        return times * formula({**given, "out": out_shape})

    flop_registry.pop(op, None)  # of this module where it was imported before
    register_flop_formula(op)(count)
