# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How exact recurrences are after many tokens: errors against float64, by length.

    python benchmarks/bench_long.py           # up to 2^17 tokens, in two minutes
    python benchmarks/bench_long.py --full    # up to 10^7, token by token to 10^6; two hours

Each recurrence reads tokens that are all alike, for which a sum drifts most, and random ones around
a mean: as one prompt, in pieces of 1,000 tokens, and token by token, and in float32 and with states
in float64. An error is the largest of the last 64 outputs, and of the state, relative to the
largest value of the same computation in float64. So are those of gradients of the sum of all
outputs by each input, of one prompt of random tokens (of tokens that are alike some are zero), of
which the worst is told. Nothing is timed. A killed run goes on where it was.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from harness import commit, parser, plotter, write_result
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.delta_rule import DeltaInputs, DeltaRecurrence
from hf_linear_attention.recurrences.elementwise_scan import (
    ElementwiseInputs,
    ElementwiseRecurrence,
)
from hf_linear_attention.recurrences.interface import Inputs, Recurrence, State, is_floating
from hf_linear_attention.recurrences.linear_attention import LinearInputs, LinearRecurrence
from hf_linear_attention.recurrences.selective_scan import (
    SelectiveInputs,
    SelectiveScanRecurrence,
)

OUTPUTS = Path(__file__).parents[1] / "outputs" / "long"
D = 8  # of keys, values and channels
PIECE = 1000
LAST = 64
WAYS = ("one prompt", "pieces", "token by token")
STATES = ("float32", "float64")
LENGTHS = {  # odd, for after an even number what reflects is back at zero
    "smallest": (65, 129),
    "short": (1001, 4097, 16385, 131073),
    "full": (1001, 10_001, 100_001, 1_000_001, 10_000_001),
}
MOST_TOKENS = {"smallest": 129, "short": 16385, "full": 1_000_001}  # that are read one by one
TRAINED = {"smallest": 129, "short": 16385, "full": 100_001}  # tokens that gradients are for


class Kind(NamedTuple):
    """A recurrence, and its inputs for T tokens, given a function that makes numbers (1, T, n)."""

    recurrence: Recurrence
    inputs: Callable[[Callable[[int], Tensor], int], Inputs]


def sums(log_decay: float | None, by_channel: bool = False, normalize: bool = False) -> Kind:
    shape = (1, D) if by_channel else (1,)

    def inputs(numbers: Callable[[int], Tensor], T: int) -> LinearInputs:
        g = None if log_decay is None else torch.full((1, T, *shape), log_decay)
        q, k, v = (numbers(D).unflatten(2, (1, D)) for _ in range(3))
        return LinearInputs(q, k, 0.1 * v, g)

    return Kind(LinearRecurrence(1, D, D, "identity", normalize=normalize), inputs)


def delta(beta: float, log_decay: float) -> Kind:
    def inputs(numbers: Callable[[int], Tensor], T: int) -> DeltaInputs:
        q, k, v = (numbers(D).unflatten(2, (1, D)) for _ in range(3))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        full = (torch.full((1, T, 1), x) for x in (beta, log_decay))
        return DeltaInputs(q, k, 0.1 * v, *full)

    return Kind(DeltaRecurrence(1, D, D), inputs)


def elementwise(log_decay: float) -> Kind:
    def inputs(numbers: Callable[[int], Tensor], T: int) -> ElementwiseInputs:
        return ElementwiseInputs(0.1 * numbers(D), torch.full((1, T, D), log_decay))

    return Kind(ElementwiseRecurrence(1, D), inputs)


def selective(rate: float) -> Kind:
    A_log = torch.full((D, 4), rate).log()

    def inputs(numbers: Callable[[int], Tensor], T: int) -> SelectiveInputs:
        return SelectiveInputs(0.1 * numbers(D), torch.ones(1, T, D), numbers(4), numbers(4))

    return Kind(SelectiveScanRecurrence(A_log, torch.zeros(D)), inputs)


KINDS = {
    "sums": sums(None),
    "sums, normalised": sums(None, normalize=True),
    "sums, decay 1e-6": sums(-1e-6),
    "sums, decay 1e-3": sums(-1e-3),
    "sums by channel, decay 1e-6": sums(-1e-6, by_channel=True),
    "delta rule": delta(0.5, 0.0),
    "delta rule that reflects": delta(2.0, 0.0),
    "gated delta rule, decay 1e-3": delta(0.5, -1e-3),
    "elementwise, decay 1e-4": elementwise(-1e-4),
    "selective scan, decay 1e-3": selective(1e-3),
}


def numbers_of(summands: str, T: int) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(0)
    if summands == "alike":
        return lambda n: torch.ones(1, T, n)
    return lambda n: torch.rand(1, T, n, generator=generator)


def read(kind: Kind, inputs: Inputs, way: str, in_fp64: bool) -> tuple[Tensor, Tensor]:
    """The last outputs, and the state's largest part."""
    recurrence: Any = dataclasses.replace(kind.recurrence, in_fp64=in_fp64)
    inputs = recurrence.exact(inputs)
    T, tokens = inputs[0].shape[1], Tokens(is_causal=True)
    size = {"one prompt": T, "pieces": PIECE, "token by token": 1}[way]
    state: State = {}
    outputs: list[Tensor] = []
    for start in range(0, T, size):
        piece = recurrence.tokens_of(inputs, lambda x, start=start: x[:, start : start + size])
        if size == 1:
            state = state or recurrence.start(piece)
            y = recurrence.step_(piece, state, tokens)
        else:
            y, state = recurrence.run(piece, state, tokens)
        outputs = [*outputs, y[:, -LAST:]][-LAST:]
    return torch.cat(outputs, 1)[:, -LAST:].double(), state.get("kv", state.get("h")).double()


def errors(kind: Kind, summands: str, T: int, most: int) -> Iterator[dict[str, Any]]:
    """By way and dtype of states."""
    inputs = kind.inputs(numbers_of(summands, T), T)
    exact = read(kind, inputs, "one prompt", True)
    for way in WAYS:
        for states in STATES:
            if (way == "token by token" and most < T) or (way == WAYS[0] and states == STATES[1]):
                continue
            found = read(kind, inputs, way, states == "float64")
            off_by = [
                ((x - y).abs().max() / y.abs().max()).item()
                for x, y in zip(found, exact, strict=True)
            ]
            yield {"way": way, "states": states, "outputs": off_by[0], "state": off_by[1]}


def gradients(kind: Kind, inputs: Inputs, in_fp64: bool) -> list[Tensor]:
    """Of the sum of all outputs, of one prompt."""
    recurrence: Any = dataclasses.replace(kind.recurrence, in_fp64=in_fp64)
    inputs = recurrence.exact(inputs)
    leaves = [x.requires_grad_() for x in inputs if is_floating(x)]
    y, _ = recurrence.run(inputs, {}, Tokens(is_causal=True))
    return [gradient.double() for gradient in torch.autograd.grad(y.sum(), leaves)]


@torch.enable_grad()
def error_of_gradients(kind: Kind, T: int) -> float:
    """The worst of all inputs'."""
    inputs = kind.inputs(numbers_of("random", T), T)
    found, exact = (gradients(kind, inputs, in_fp64) for in_fp64 in (False, True))
    return max(
        ((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, exact, strict=True)
    )


class Kept:
    """What was measured so far, line by line in a file, which a killed run leaves to the next one
    of the same commit.
    """

    def __init__(self, path: Path):
        self.path, self.commit = path, commit()
        self.found: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            of_commit, key, value = json.loads(line)
            if of_commit == self.commit:
                self.found[key] = value

    def take(self, key: str, measure: Callable[[], Any]) -> Any:
        if key not in self.found:
            self.found[key] = measure()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([self.commit, key, self.found[key]]) + "\n")
        print(f"{key}: {self.found[key]}", flush=True)
        return self.found[key]


@torch.no_grad()
def main() -> None:
    assert __doc__ is not None
    flags = parser(__doc__).parse_args()
    torch.set_num_threads(flags.threads)
    most, trained = MOST_TOKENS[flags.setting], TRAINED[flags.setting]
    kept = Kept(OUTPUTS / f"{flags.setting}.jsonl")
    rows, of_gradients = [], []
    for name, kind in KINDS.items():
        for summands, T in product(("alike", "random"), LENGTHS[flags.setting]):
            key = f"{name}, {summands}, {T} tokens"
            for row in kept.take(key, lambda k=kind, x=summands, T=T: [*errors(k, x, T, most)]):
                rows.append({"kind": name, "summands": summands, "tokens": T, **row})
        key = f"{name}, gradients, {trained} tokens"
        error = kept.take(key, lambda k=kind: error_of_gradients(k, trained))
        of_gradients.append({"kind": name, "tokens": trained, "error": error})
    figures = {"is_complete": True, "commit": kept.commit, "rows": rows, "gradients": of_gradients}
    path = write_result(flags.results, "long", flags.setting, [], figures)
    draw(rows, path.with_suffix(".png"))
    print(f"wrote {path} and .png")


def draw(rows: list[dict[str, Any]], path: Any) -> None:
    """Errors of the state against the length, a panel for each recurrence, of tokens alike."""
    pyplot = plotter()
    columns = 5
    figure, axes = pyplot.subplots(
        -(-len(KINDS) // columns), columns, figsize=(16, 6.4), sharey=True, layout="constrained"
    )
    for axis, name in zip(axes.flat, KINDS, strict=False):
        for number, way in enumerate(WAYS):
            for states in STATES:
                points = sorted(
                    (row["tokens"], max(row["state"], 1e-9))
                    for row in rows
                    if (row["kind"], row["summands"]) == (name, "alike")
                    and (row["way"], row["states"]) == (way, states)
                )
                if points:
                    style = {"linestyle": "-" if states == "float32" else ":", "marker": "o"}
                    label = f"{way}, states in {states}"
                    axis.plot(*zip(*points, strict=True), color=f"C{number}", label=label, **style)
        axis.set(xscale="log", yscale="log", title=name, xlabel="tokens")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error of the state")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
