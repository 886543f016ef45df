# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""MAD: what separates recurrences, in six small tasks.

    python experiments/mad.py            # 6 systems, 4 layers of 64: minutes
    python experiments/mad.py --full     # all presets, rows as in the paper: two hours
    python experiments/mad.py --gpu      # and the paper's width

Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures", arXiv 2403.17844: recall in
context, with keys of several tokens, and in noise; copying of some tokens among blanks; compression
of a row to one token; and memory in weights (benchmarks/mad_tasks.py). Systems are the presets,
with as many weights, trained alike by benchmarks/compare_systems.py.

What is done is kept in --runs at once: a killed run loses only the model that it was at, and the
same call goes on from there.
"""

import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiment import harness, parser, publish

# isort: split
import compare_systems
from mad_tasks import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopy
from systems import SYSTEMS, Setting, Size, Trial
from tasks import Task

SHORT_SYSTEMS = ("katharopoulos", "gla", "gated_deltanet", "kda", "hybrid", "softmax")


def setting_of(tasks: dict[str, Task], device: str = "cpu", **of_trial: Any) -> Setting:
    trials = {name: Trial(task, seeds=1, **of_trial) for name, task in tasks.items()}
    return Setting(trials, contexts=(), device=device)


def tasks_of(length: int, memorized: int) -> dict[str, Task]:
    """Rows of so many tokens, half as many to be compressed, and a vocabulary to be memorized."""
    return {
        "in-context recall": InContextRecall(16, length),
        "fuzzy recall": FuzzyRecall(16, length),
        "noisy recall": InContextRecall(32, length, 0.2),
        "selective copying": SelectiveCopy(16, length, length // 8),
        "compression": Compression(16, length // 4),
        "memorization": Memorization(memorized, 32),
    }


PAPER = {**tasks_of(128, 256), "selective copying": SelectiveCopy()}
SETTINGS = {
    "smallest": setting_of(
        {"fuzzy recall": FuzzyRecall(16, 32, 2, held_out_rows=4), "compression": Compression(8, 8)},
        size=Size(32, 64, 4, 2), rows=2, steps=2, learning_rates=(1e-3,), systems=SHORT_SYSTEMS[:2],
    ),
    "short": setting_of(
        tasks_of(64, 256),
        size=Size(64, 176, 4, 2), rows=16, steps=200, learning_rates=(4e-3,), systems=SHORT_SYSTEMS,
    ),
    "full": setting_of(
        PAPER,
        size=Size(64, 176, 4, 2), rows=16, steps=500, learning_rates=(4e-3,),
        systems=tuple(SYSTEMS),
    ),
    "gpu": setting_of(
        PAPER, "cuda",
        size=Size(128, 336, 4, 8), rows=128, steps=20_000, learning_rates=(5e-4, 1e-3, 2e-3),
        systems=tuple(SYSTEMS),
    ),
}  # fmt: skip


def scores(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By system and task; a loss that was no number is a score of 0."""
    return {
        row["system"]: {
            task: statistics.fmean(found["scores"] or [0.0]) for task, found in row["tasks"].items()
        }
        for row in rows
    }


def plot(table: dict[str, dict[str, float]], path: Path) -> None:
    """The scores as a map, with the mean of all tasks beside them."""
    pyplot = harness.plotter()
    tasks = [*next(iter(table.values())), "mean"]
    values = [[*row.values(), statistics.fmean(row.values())] for row in table.values()]
    figure, axis = pyplot.subplots(figsize=(9, 1.5 + 0.4 * len(table)), layout="constrained")
    axis.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            color = "black" if value > 0.6 else "white"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=color)
    axis.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    axis.set_yticks(range(len(table)), table)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    flags = parser(__doc__, "mad").parse_args()
    torch.set_num_threads(flags.threads)
    setting = SETTINGS[flags.setting]
    systems = [*next(iter(setting.trials.values())).systems]
    log = compare_systems.Log(flags.runs / f"{flags.setting}.jsonl")
    rows = compare_systems.compare(setting, log, systems, [*setting.trials])
    assert rows is not None  # there is no time to run out of
    figures = {"setting": asdict(setting), "rows": rows}
    table = scores(rows)
    publish(flags, "mad", log.commits, figures, partial(plot, table))
    for name, row in table.items():
        print(f"{name:16}", ", ".join(f"{task} {value:.2f}" for task, value in row.items()))


if __name__ == "__main__":
    main()
