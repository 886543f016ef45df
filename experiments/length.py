# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Time and memory of a training step against the length of its sequences.

    python experiments/length.py            # 2^9 to 2^12 tokens, minutes
    python experiments/length.py --full     # to 2^16, an hour
    python experiments/length.py --gpu      # to 2^16 at a width and depth for a GPU

Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, figure 1: forward and backward for
one sequence, softmax attention (by PyTorch's fused op, and as plain matrix products), Reformer with
1 and 4 rounds of hashing (Transformers' own, causal), linear attention, and what has come since:
the gated delta rule, and a hybrid of it with softmax attention in every fourth layer.

All have the same layers but for attention, and a vocabulary of 256. Short sequences are taken
several at once, as many as make 4,096 tokens; figures are for one of them. A contender is left out
from the length on where its step would take longer than --limit seconds or more than --memory GiB,
by what it took before. Slopes are those of straight lines through the upper half of the lengths on
logarithmic axes: 1 is linear, 2 quadratic.

What is measured is kept in --runs at once: a killed run loses only the step that it was at, and the
same call goes on from there.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from contenders import Size, make_model
from experiment import parser

# isort: split
from compare_systems import Log
from harness import QUIET, OtherProcesses, Report, Row, Timing, peak_memory, plotter, sample_of

VOCABULARY = 256
TOKENS_AT_ONCE = 4096
ROUNDS = 3  # in which all take turns
OURS = "linear"
NAMES = (
    OURS,
    "gated delta rule",
    "hybrid",
    "softmax",
    "softmax, plain products",
    "Reformer, 1 hash",
    "Reformer, 4 hashes",
)


class Setting(NamedTuple):
    size: Size
    lengths: list[int]
    device: str = "cpu"


def powers_of_two(first: int, last: int) -> list[int]:
    return [2**i for i in range(first, last + 1)]


SETTINGS = {
    "smallest": Setting(Size(4, 2, 8), [64, 128]),
    "short": Setting(Size(4, 8), powers_of_two(9, 12)),
    "full": Setting(Size(4, 8), powers_of_two(9, 16)),
    "gpu": Setting(Size(8, 8), powers_of_two(9, 16), "cuda"),
}


# ---- a step ----


def rows_of(length: int) -> int:
    return max(TOKENS_AT_ONCE // length, 1)


def prepare(name: str, setting: Setting, length: int) -> Callable[[], object]:
    """The loss and all gradients of a batch, ready to run."""
    torch.manual_seed(0)
    model = make_model(name, setting.size, VOCABULARY, length).to(setting.device)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tokens = torch.randint(VOCABULARY, (rows_of(length), length), device=setting.device)

    def run() -> float:
        for p in model.parameters():
            p.grad.zero_()  # type: ignore[union-attr]
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.item() + next(model.parameters()).grad.flatten()[0].item()

    return run


# ---- what is measured ----


class LengthReport(Report):
    """Its figures are those of one sequence, its plot has time and memory."""

    def measured(self, contender: str) -> list[Row]:
        """By length."""
        found = [row for row in self.rows if row.contender == contender]
        return sorted(found, key=lambda row: row.x)

    def slopes(self) -> dict[str, dict[str, float]]:
        """By contender, of time and of memory, for those with two points in the upper half."""
        lengths = sorted({row.x for row in self.rows})
        upper = lengths[len(lengths) // 2 - 1 :]
        result = {}
        for name in NAMES:
            rows = [row for row in self.measured(name) if row.x in upper]
            values = {
                "time": [row.milliseconds for row in rows],
                "memory": [row.peak_mib for row in rows if row.peak_mib],
            }
            result[name] = {
                what: slope_of([row.x for row in rows], numbers)
                for what, numbers in values.items()
                if len(numbers) == len(rows) > 1
            }
        return result

    def _plot(self, path: Path) -> None:
        pyplot = plotter()
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        shown = {"ms for a sequence": "milliseconds", "MiB for a sequence": "peak_mib"}
        for axis, (label, figure_of_row) in zip(axes, shown.items(), strict=True):
            for index, name in enumerate(NAMES):
                rows = [row for row in self.measured(name) if getattr(row, figure_of_row)]
                x, y = [row.x for row in rows], [getattr(row, figure_of_row) for row in rows]
                is_ours = name == self.baseline
                color = "black" if is_ours else f"C{index}"
                axis.plot(x, y, color=color, marker="o", markersize=4, label=name)
            axis.set(xlabel=self.x_label, ylabel=label, yscale="log")
            axis.set_xscale("log", base=2)
            axis.grid(True, alpha=0.3)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def slope_of(x: list[int], y: list[float]) -> float:
    """On logarithmic axes."""
    return float(numpy.polyfit(numpy.log(x), numpy.log(y), 1)[0])


def is_within(rows: list[Row], length: int, seconds: float, gib: float) -> bool:
    """Whether a contender that has taken this much so far should be tried at a length: as if time
    and memory of a sequence grew from here on as they did last, or in proportion to its length.
    """
    for measured, limit in (
        ([row.milliseconds for row in rows], 1e3 * seconds),
        ([row.peak_mib or 0 for row in rows], 1024 * gib),
    ):
        if len(measured) > 1 and measured[-2]:
            growth = max(measured[-1] / measured[-2], length / rows[-1].x)
            if measured[-1] * growth * rows_of(length) > limit:
                return False
    return True


def measure(report: LengthReport, log: Log, setting: Setting, length: int) -> None:
    """One length: whoever is not too slow or too large for it."""
    flags, names = report.flags, []
    for name in NAMES:
        rows = report.measured(name)
        if not rows or (rows[-1].x * 2 == length):
            if is_within(rows, length, flags.limit, flags.memory):
                names.append(name)
            else:
                report.notes.append(f"{name} is left out from {length} tokens on")
    peaks = {name: peak_of(report, log, name, setting, length) for name in names}
    timings = time_rounds(report, log, names, setting, length)
    report.add("training step", f"{length} tokens", length, timings, {}, peaks)


def described(report: LengthReport, name: str, setting: Setting, length: int) -> dict[str, Any]:
    """All that a figure depends on."""
    size = setting.size._asdict()
    return {"name": name, "length": length, "size": size, "threads": report.flags.threads}


def peak_of(
    report: LengthReport, log: Log, name: str, setting: Setting, length: int
) -> float | None:
    """MiB for one sequence."""
    key = {"what": "memory", **described(report, name, setting, length)}
    if log.get(key) is None:
        peak = peak_memory(prepare, name, setting, length, here=report.is_smallest)
        log.add(key, {"mib": peak and peak / rows_of(length)})
    return log.get(key)["mib"]


def undisturbed(sample: Callable[[], float], patience: float) -> tuple[float, float]:
    """Its seconds, and the share of the machine that others took meanwhile; again and again, as
    long as they take much and there is patience, in seconds.
    """
    end = time.perf_counter() + patience
    while True:
        others = OtherProcesses()
        seconds, share = sample(), others.share()
        if share < QUIET or time.perf_counter() > end:
            return seconds, share


def time_rounds(
    report: LengthReport, log: Log, names: list[str], setting: Setting, length: int
) -> dict[str, Timing]:
    """Seconds for one sequence."""
    samples: dict[str, Callable[[], float]] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(1 if report.is_smallest else ROUNDS):
        for name in names:
            key = {"what": "time", "round": number, **described(report, name, setting, length)}
            if log.get(key) is None:
                if name not in samples:
                    samples[name] = sample_of(prepare(name, setting, length))
                seconds, disturbance = undisturbed(samples[name], report.flags.patience)
                log.add(key, {"seconds": seconds / rows_of(length), "disturbance": disturbance})
            found[name].append(log.get(key))
    result = {}
    for name, rounds in found.items():
        times = [one["seconds"] for one in rounds]
        disturbance = max(one["disturbance"] for one in rounds)
        middle = statistics.median(times)
        result[name] = Timing(middle, min(times), max(times), len(times), disturbance)
    return result


def main() -> None:
    arguments = parser(__doc__, "length")
    arguments.add_argument("--limit", type=float, default=120, help="seconds for a step")
    arguments.add_argument("--memory", type=float, default=12, help="GiB for a step")
    arguments.add_argument("--longest", type=int, help="tokens; the setting's, if it is not given")
    flags = arguments.parse_args()
    setting = SETTINGS[flags.setting]
    report = LengthReport("length", "tokens", OURS, flags)
    log = Log(flags.runs / f"{flags.setting}.jsonl")
    lengths = [n for n in setting.lengths if n <= (flags.longest or n)]
    for length in lengths:
        measure(report, log, setting, length)
    report.commit = ", ".join(sorted(log.commits))
    for name, slopes in report.slopes().items():
        told = ", ".join(f"{what} {slope:.2f}" for what, slope in slopes.items())
        report.notes.append(f"slopes of {name}: {told or 'too few lengths'}")
    report.save()


if __name__ == "__main__":
    main()
