# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What bench_cuda.py's figures shall be, and which of them are."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]  # a line of bench_cuda.py's table


class Goal(NamedTuple):
    """Of each row of `contender` in `passes`: `value` of it `is_met` by `limit`."""

    text: str
    passes: tuple[str, ...]
    contender: str
    value: Callable[[Row], float]
    is_met: Callable[[float, float], bool]
    limit: float


SEQUENCES = "forward", "plain forward", "gated delta"
BOTH = "forward + backward", "plain forward + bwd", "gated delta + bwd"
GOALS = [
    Goal("fla's time / ours, forward", SEQUENCES, "fla", lambda r: r["ratio"], operator.ge, 1.5),
    Goal("fla's time / ours, both", BOTH, "fla", lambda r: r["ratio"], operator.ge, 1.5),
    Goal("floor / forward", SEQUENCES[:2], "ours", lambda r: r["share_of_floor"], operator.ge, 0.6),
    Goal(
        *("a token / its weights' time", ("token",), "ours"),
        *(lambda r: 1 / r["share_of_floor"], operator.le, 1.3),
    ),
]


class Outcome(NamedTuple):
    goal: str
    limit: float
    worst: float | None  # None: nothing was measured
    at: str  # the row that has the worst
    met: int
    of: int


def outcomes(rows: list[Row]) -> list[Outcome]:
    """How each goal is met by what was measured."""
    found = []
    for goal in GOALS:
        values = [
            (goal.value(row), f"{row['pass']} of {row['size']}")
            for row in rows
            if row["pass"] in goal.passes and row["contender"] == goal.contender
        ]
        met = [value for value, _ in values if goal.is_met(value, goal.limit)]
        smallest_is_worst = goal.is_met is operator.ge
        worst, at = (min if smallest_is_worst else max)(values, default=(None, "not measured"))
        found.append(Outcome(goal.text, goal.limit, worst, at, len(met), len(values)))
    return found


def table(found: list[Outcome]) -> str:
    lines = [f"{'goal':<30}{'limit':>6}{'worst':>8}{'met':>8}  worst at"]
    for outcome in found:
        worst = "" if outcome.worst is None else f"{outcome.worst:.2f}"
        met = f"{outcome.met} of {outcome.of}"
        lines.append(f"{outcome.goal:<30}{outcome.limit:>6}{worst:>8}{met:>8}  {outcome.at}")
    return "\n".join(lines)
