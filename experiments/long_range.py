# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Labels of long sequences: how often they are right, at what speed, in how much memory.

    python experiments/long_range.py            # rows of 64 tokens, 2 layers of 64: minutes
    python experiments/long_range.py --full     # rows of 256: two hours
    python experiments/long_range.py --gpu      # the paper's lengths, 832 to 4,096
    python experiments/long_range.py --full --tasks digits text     # only these

Tay et al., "Long Range Arena", arXiv 2011.04006, with tasks that need no download (sequences.py):
ListOps as there, text by the byte, images by the pixel, and Pathfinder. All models are encoders
with a head of AutoModelForSequenceClassification's and as many weights: this package's, of which
the gated delta rule reads from left to right only, and those that Transformers has of the paper's
kind. Everyone sees the same rows in the same order.

What is done is kept in --runs at once: a killed run loses only the model that it was at, and the
same call goes on from there.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from contenders import ENCODERS, PAD, SYMBOLS, UNMASKED, Size, make_encoder
from experiment import harness, parser, publish

# isort: split
from compare_systems import Log, make_optimizer, update
from sequences import Digits, ListOps, Passages, Pathfinder, Rows, Task

OURS = ("softmax", "linear", "Performer", "gated delta rule")  # the others are Transformers'
TOKENS_AT_ONCE = 4096  # of a timed step


class Setting(NamedTuple):
    """rows: in a batch; train, test: rows to train on and to test on; lengths: at which a step is
    timed.
    """

    tasks: dict[str, Task]
    size: Size
    rows: int
    steps: int
    train: int
    test: int
    learning_rate: float
    lengths: tuple[int, ...]
    device: str = "cpu"


def tasks_of(symbols: int, side: int, distractors: int) -> dict[str, Task]:
    """With at most so many symbols, or pixels by pixels."""
    return {
        "digits": Digits(side),
        "ListOps": ListOps(symbols // 5, symbols),
        "text": Passages(symbols),
        "Pathfinder": Pathfinder(side, distractors),
    }


LENGTHS = (1024, 2048, 3072, 4096)
PAPER = {
    "digits": Digits(),
    "ListOps": ListOps(),
    "text": Passages(),
    "Pathfinder": Pathfinder(),
}
SETTINGS = {
    "smallest": Setting(tasks_of(62, 7, 0), Size(1, 2, 8), 2, 2, 8, 4, 1e-3, (64,)),
    "short": Setting(tasks_of(62, 7, 0), Size(2, 2), 32, 150, 4000, 500, 3e-3, LENGTHS[::3]),
    "full": Setting(tasks_of(254, 14, 2), Size(2, 2), 16, 800, 4500, 500, 2e-3, LENGTHS),
    "gpu": Setting(PAPER, Size(4, 4, 64), 32, 5000, 50_000, 2000, 1e-3, LENGTHS, "cuda"),
}


# ---- learning ----


class Learned(NamedTuple):
    accuracy: float
    train_seconds: float


def learn(name: str, title: str, setting: Setting, train: Rows, test: Rows) -> Learned:
    torch.manual_seed(0)
    task, generator = setting.tasks[title], torch.Generator().manual_seed(0)
    model = make_encoder(name, setting.size, task.vocab_size, task.length, task.num_labels)
    model = model.to(setting.device)
    optimizer, schedule = make_optimizer(model, setting.learning_rate, setting.steps)
    steps = tqdm(range(setting.steps), desc=f"{title}, {name}")
    for _ in steps:
        chosen = torch.randint(len(train.labels), (setting.rows,), generator=generator)
        labels = train.labels[chosen].to(setting.device)
        loss = F.cross_entropy(logits_of(model, name, train.tokens[chosen]), labels)
        update(model, loss, optimizer)
        schedule.step()
    return Learned(accuracy(model, name, setting, test), steps.format_dict["elapsed"])


def logits_of(model: torch.nn.Module, name: str, tokens: Tensor) -> Tensor:
    tokens = tokens.to(model.device)
    mask = None if name in UNMASKED else (tokens != PAD).long()
    return model(input_ids=tokens, attention_mask=mask).logits.float()


@torch.no_grad()
def accuracy(model: torch.nn.Module, name: str, setting: Setting, test: Rows) -> float:
    model.eval()
    answers = [
        logits_of(model, name, batch).argmax(-1).cpu() for batch in test.tokens.split(setting.rows)
    ]
    return (torch.cat(answers) == test.labels).float().mean().item()


def learn_all(setting: Setting, titles: list[str], log: Log) -> dict[str, dict[str, Any]]:
    """By task and contender."""
    result: dict[str, dict[str, Any]] = {}
    for title in titles:
        task, rows = setting.tasks[title], None
        result[title] = {}
        for name in ENCODERS:
            key = {"name": name, "task": title, "setting": described(setting)}
            if log.get(key) is None:
                rows = rows or task.split(setting.train, setting.test)
                log.add(key, learn(name, title, setting, *rows)._asdict())
            result[title][name] = log.get(key)
    return result


def described(setting: Setting) -> dict[str, Any]:
    tasks = {title: asdict(task) for title, task in setting.tasks.items()}
    return {**setting._asdict(), "tasks": tasks, "size": setting.size._asdict()}


# ---- time and memory ----


def rows_of(length: int) -> int:
    return max(TOKENS_AT_ONCE // length, 1)


def prepare(name: str, setting: Setting, length: int) -> Callable[[], object]:
    """The loss and all gradients of a batch of so long rows, ready to run."""
    torch.manual_seed(0)
    model = make_encoder(name, setting.size, SYMBOLS + 256, length, 10).to(setting.device)
    tokens = torch.randint(SYMBOLS, SYMBOLS + 256, (rows_of(length), length))
    labels = torch.zeros(len(tokens), dtype=torch.long, device=setting.device)

    def run() -> float:
        model.zero_grad()
        loss = F.cross_entropy(logits_of(model, name, tokens), labels)
        loss.backward()
        return loss.item() + next(model.parameters()).grad.flatten()[0].item()  # waits for a GPU

    return run


def measure_all(setting: Setting, log: Log, is_smallest: bool) -> dict[str, dict[str, Any]]:
    """By length and contender: sequences per second, and MiB for one."""
    result: dict[str, dict[str, Any]] = {}
    for length in setting.lengths:
        key = {"length": length, "setting": described(setting)}
        if log.get(key) is None:
            count = rows_of(length)
            peaks = {
                name: harness.peak_memory(prepare, name, setting, length, here=is_smallest)
                for name in tqdm(ENCODERS, desc=f"memory, {length} tokens")
            }
            samples = {name: harness.sample_of(prepare(name, setting, length)) for name in ENCODERS}
            timings = harness.interleave(samples, 0 if is_smallest else 15)
            found = {
                name: {
                    "sequences_per_second": count / timing.median,
                    "rounds": timing.rounds,
                    "disturbance": timing.disturbance,
                    "peak_mib": None if peaks[name] is None else peaks[name] / count,
                }
                for name, timing in timings.items()
            }
            log.add(key, found)
        result[str(length)] = log.get(key)
    return result


# ---- what is told ----


def plot(learned: dict, measured: dict, setting: Setting, path: Path) -> None:
    pyplot = harness.plotter()
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 8), layout="constrained")
    for axis, (title, found) in zip(axes.flat, learned.items(), strict=False):
        names = list(found)[::-1]
        colors = ["black" if name in OURS else "C0" for name in names]
        axis.barh(names, [found[name]["accuracy"] for name in names], color=colors)
        axis.axvline(1 / setting.tasks[title].num_labels, color="C3", linestyle="--")
        axis.set(title=f"{title}: accuracy (dashes: by chance)")
    for axis, (label, figure_of) in zip(
        axes.flat[-2:],
        {"sequences per second": "sequences_per_second", "MiB for a sequence": "peak_mib"}.items(),
        strict=True,
    ):
        lengths = [int(length) for length in measured]
        for name in ENCODERS:
            values = [found[name][figure_of] for found in measured.values()]
            style = "-" if name in OURS else "--"
            axis.plot(lengths, values, style, marker="o", markersize=4, label=name)
        axis.set(title=f"a training step: {label}", xlabel="tokens", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(True, alpha=0.3)
    axes.flat[-1].legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> None:
    arguments = parser(__doc__, "long_range")
    arguments.add_argument(
        "--tasks", nargs="+", choices=PAPER, help="only these, in the results too"
    )
    flags = arguments.parse_args()
    torch.set_num_threads(flags.threads)
    setting = SETTINGS[flags.setting]
    log = Log(flags.runs / f"{flags.setting}.jsonl")
    learned = learn_all(setting, flags.tasks or [*setting.tasks], log)
    measured = measure_all(setting, log, flags.setting == "smallest")
    figures = {
        "setting": described(setting),
        "seed": 0,
        "accuracy": learned,
        "training_step": measured,
    }
    publish(flags, "long-range", log.commits, figures, partial(plot, learned, measured, setting))
    for title, found in learned.items():
        for name, one in found.items():
            print(f"{title:12} {name:18} {one['accuracy']:.3f}, {one['train_seconds']:.0f} s")


if __name__ == "__main__":
    main()
