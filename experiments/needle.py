# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Needles in a text: what is found again, by the length of the text and the place in it.

    python experiments/needle.py            # trained on 256 tokens, asked in up to 16k: 20 minutes
    python experiments/needle.py --full     # trained on 1,024, more systems: two hours
    python experiments/needle.py --gpu      # larger models
    python experiments/needle.py --systems softmax kda      # only these
    python experiments/needle.py --full --systems softmax --steps 4000  # who learns it late

Keys, each followed by a value, are hidden in the source of Python's standard library, one in each
part of it, and the keys stand at its end once more (`Needles` in benchmarks/tasks.py). Models learn
that from short texts, the first half of their steps from quarters of these, with Muon: else softmax
attention doesn't learn to look up in so few steps. Then they are asked in longer ones. They have as
many weights, but for attention are alike, and are presets of this package: pure recurrences,
hybrids, and softmax attention.

What is done is kept in --runs at once: a killed run loses only the model that it was at, and the
same call goes on from there.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiment import harness, parser, publish

# isort: split
from compare_systems import Log, answers, fitted, make_schedule, training_step
from hf_linear_attention import LinearAttentionForCausalLM
from muon import MuonWithAdamW
from systems import Size, Trial
from tasks import HELD_OUT_SEED, Needles, Text

PURE = ("katharopoulos", "gla", "gated_deltanet", "kda")
HYBRID = ("hybrid", "qwen3_next", "kimi_linear")
SYSTEMS = (*PURE, *HYBRID, "softmax")
SHORTER = 4  # times, is the text from which is learned first


@dataclass(frozen=True)
class Setting:
    """lengths: of the texts in which is asked; asked: rows of each length."""

    trial: Trial
    lengths: tuple[int, ...]
    asked: int
    device: str = "cpu"


def trial_of(text: Text, needles: int, size: Size, **of_training: Any) -> Trial:
    return Trial(Needles(text, needles, needles), size, seeds=1, **of_training)


K = 1024
SETTINGS = {
    "smallest": Setting(
        trial_of(
            Text(300, 32, 60_000), 2, Size(32, 64, 4, 2),
            rows=2, steps=2, learning_rates=(1e-3,), systems=("gated_deltanet", "hybrid"),
        ),
        (64, 128), 2,
    ),
    "short": Setting(
        trial_of(
            Text(512, 256, 2_000_000), 8, Size(64, 176, 4, 2),
            rows=8, steps=1000, learning_rates=(6e-3,),
            systems=(
                "katharopoulos", "gated_deltanet", "kda", "qwen3_next", "kimi_linear", "softmax",
            ),
        ),
        (256, K, 4 * K, 16 * K), 8,
    ),
    "full": Setting(
        trial_of(
            Text(1024, K), 16, Size(128, 336, 4, 4),
            rows=8, steps=1000, learning_rates=(4e-3,), systems=SYSTEMS,
        ),
        (K, 2 * K, 4 * K, 8 * K, 16 * K), 16,
    ),
    "gpu": Setting(
        trial_of(
            Text(8192, 2 * K), 32, Size(512, 1344, 8, 8),
            rows=32, steps=10_000, learning_rates=(1e-3,), systems=SYSTEMS,
        ),
        (K, 2 * K, 4 * K, 8 * K, 16 * K), 64, "cuda",
    ),
}  # fmt: skip


def train_and_ask(name: str, setting: Setting) -> dict[str, list[float]]:
    """By length: the share found of the needles in each part of the text, from the first on."""
    torch.manual_seed(0)
    trial, generator = setting.trial, torch.Generator().manual_seed(0)
    model = LinearAttentionForCausalLM(fitted(name, trial)).to(setting.device).train()
    optimizer = MuonWithAdamW(model, trial.learning_rates[0], (0.9, 0.95), weight_decay=0.1)
    schedule = make_schedule(optimizer, trial.steps)
    text = trial.task.text
    shorter = replace(trial.task, text=replace(text, length=text.length // SHORTER))
    steps = tqdm(range(trial.steps), desc=name)
    for step in steps:
        is_first = step < trial.steps // 2
        task, rows = (shorter, SHORTER * trial.rows) if is_first else (trial.task, trial.rows)
        loss = training_step(model, task.batch(rows, generator), optimizer)
        schedule.step()
        if step % 20 == 0:
            steps.set_postfix(loss=loss.item())
    model.eval()
    return {
        str(length): found(model, trial.task, length, setting.asked)
        for length in tqdm(setting.lengths, desc=f"{name}, asked")
    }


@torch.no_grad()
def found(model: LinearAttentionForCausalLM, task: Needles, length: int, rows: int) -> list[float]:
    right, generator = torch.zeros(task.needles), torch.Generator().manual_seed(HELD_OUT_SEED)
    for _ in range(rows):  # one at a time: a long one is large enough
        batch, parts = task.hidden(1, length, generator)
        logits, asked = answers(model, batch)
        right[parts[0]] += (logits.argmax(-1) == asked).cpu()
    return (right / rows).tolist()


def described(setting: Setting) -> dict[str, Any]:
    """All that a result depends on."""
    trial = asdict(setting.trial)
    del trial["systems"]
    return {**asdict(setting), "trial": trial}


def plot(results: dict[str, dict[str, list[float]]], by_chance: float, path: Path) -> None:
    """All that is found against length, and a map of length and place for each system."""
    pyplot = harness.plotter()
    figure, axes = pyplot.subplots(
        1, 1 + len(results), figsize=(4 + 2.2 * len(results), 3.4), layout="constrained",
        width_ratios=[2, *[1] * len(results)],
    )  # fmt: skip
    for axis, (name, by_length) in zip(axes[1:], results.items(), strict=True):
        lengths = [int(length) for length in by_length]
        means = [sum(parts) / len(parts) for parts in by_length.values()]
        style = "--" if name in (*HYBRID, "softmax") else "-"
        axes[0].plot(lengths, means, style, marker="o", markersize=4, label=name)
        axis.imshow([*by_length.values()], vmin=0, vmax=1, aspect="auto")
        axis.set(title=name, xlabel="place", xticks=[])
        axis.set_yticks(range(len(lengths)), lengths)
    axes[0].axhline(by_chance, color="black", linestyle=":", label="by chance")
    axes[0].set_xscale("log", base=2)
    axes[0].set(xlabel="tokens of text", ylabel="needles found", ylim=(-0.03, 1.03))
    axes[0].grid(True, alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    arguments = parser(__doc__, "needle")
    arguments.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, help="only these, in the results too"
    )
    arguments.add_argument("--steps", type=int, help="of training, instead of the setting's")
    flags = arguments.parse_args()
    torch.set_num_threads(flags.threads)
    setting = SETTINGS[flags.setting]
    if flags.steps is not None:
        setting = replace(setting, trial=replace(setting.trial, steps=flags.steps))
    log = Log(flags.runs / f"{flags.setting}.jsonl")
    results = {}
    for name in flags.systems or setting.trial.systems:
        key = {"system": name, "setting": described(setting)}
        if log.get(key) is None:
            log.add(key, train_and_ask(name, setting))
        results[name] = log.get(key)
    figures = {"setting": described(setting), "seed": 0, "found": results}
    publish(
        flags, "needle", log.commits, figures, partial(plot, results, 1 / setting.trial.task.kinds)
    )
    for name, by_length in results.items():
        told = (f"{length}: {sum(p) / len(p):.2f}" for length, p in by_length.items())
        print(f"{name:16}", ", ".join(told))


if __name__ == "__main__":
    main()
