# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The copy task: loss and symbols copied against steps.

    python experiments/copying.py            # rows of 32, 2 layers of 128: minutes
    python experiments/copying.py --full     # rows of 64, longer: two hours of one core
    python experiments/copying.py --gpu      # the paper's model, rows of 128 and batch
    python experiments/copying.py --full --names softmax linear     # only these

Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, figure 2: a word of 10 symbols, a
separator, the word again (`Copy` in benchmarks/tasks.py). Linear attention is to end at softmax's
loss. Every model sees the same rows in the same order, at the learning rate of the setting that
ends with the lowest loss.

What is done is kept in --runs at once: a killed run loses only the curve that it was at, and the
same call goes on from there.
"""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

from contenders import Size, make_model
from experiment import harness, parser, publish

# isort: split
from compare_systems import Log, make_optimizer, update
from tasks import Copy

NAMES = ("softmax", "linear", "gated delta rule", "Aaren", "Reformer, 1 hash", "Reformer, 4 hashes")


class Setting(NamedTuple):
    """rows: in a batch; every: steps from one point of a curve to the next."""

    task: Copy
    size: Size
    rows: int
    steps: int
    every: int
    learning_rates: tuple[float, ...]
    device: str = "cpu"


SETTINGS = {
    "smallest": Setting(Copy(16, 20), Size(1, 2, 8), 4, 4, 2, (1e-3,)),
    "short": Setting(Copy(32), Size(2, 4), 32, 1500, 50, (3e-3,)),
    "full": Setting(Copy(64), Size(2, 4), 32, 4000, 100, (3e-3,)),
    "gpu": Setting(Copy(128), Size(4, 8), 64, 10_000, 100, (1e-3, 3e-3), "cuda"),
}


class Point(NamedTuple):
    """On the held-out rows: nats for each symbol asked for, and the share that is right."""

    step: int
    loss: float
    copied: float


def train(name: str, setting: Setting, learning_rate: float) -> list[Point]:
    torch.manual_seed(0)
    task, generator = setting.task, torch.Generator().manual_seed(0)
    model = make_model(name, setting.size, task.vocab_size, task.length).to(setting.device)
    optimizer, schedule = make_optimizer(model, learning_rate, setting.steps)
    curve = [evaluate(model, task, 0)]
    steps = tqdm(range(1, setting.steps + 1), desc=f"{name}, {learning_rate:g}")
    for step in steps:
        loss, _ = loss_and_copied(model, task.batch(setting.rows, generator))
        update(model, loss, optimizer)
        schedule.step()
        if step % setting.every == 0:
            curve.append(evaluate(model, task, step))
            steps.set_postfix(loss=curve[-1].loss, copied=curve[-1].copied)
    return curve


def loss_and_copied(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = (x.to(model.device) for x in batch)
    logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float()
    targets = targets.flatten()
    asked = targets >= 0
    copied = (logits[asked].argmax(-1) == targets[asked]).float().mean()
    return F.cross_entropy(logits, targets), copied


@torch.no_grad()
def evaluate(model: torch.nn.Module, task: Copy, step: int) -> Point:
    model.eval()
    loss, copied = loss_and_copied(model, task.held_out())
    model.train()
    return Point(step, loss.item(), copied.item())


def curves(setting: Setting, names: Iterable[str], log: Log) -> dict[str, dict[str, Any]]:
    """By contender: the learning rate that ended with the lowest loss, and its curve."""
    result = {}
    for name in names:
        found = []
        for rate in setting.learning_rates:
            key = {"name": name, "learning_rate": rate, "setting": described(setting)}
            known = log.get(key)
            if known is None:
                known = {"curve": [p._asdict() for p in train(name, setting, rate)]}
                log.add(key, known)
            found.append({"learning_rate": rate, **known})
        result[name] = min(found, key=lambda one: one["curve"][-1]["loss"])
    return result


def described(setting: Setting) -> dict[str, Any]:
    return {**setting._asdict(), "task": asdict(setting.task), "size": setting.size._asdict()}


def plot(result: dict[str, dict[str, Any]], path: Path) -> None:
    pyplot = harness.plotter()
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what in zip(axes, ("loss", "copied"), strict=True):
        for name, found in result.items():
            steps = [point["step"] for point in found["curve"]]
            values = [point[what] for point in found["curve"]]
            axis.plot(steps, values, label=name, color="black" if name == "linear" else None)
        axis.set(xlabel="steps", ylabel=what)
        axis.grid(True, alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    arguments = parser(__doc__, "copying")
    arguments.add_argument(
        "--names", nargs="+", choices=NAMES, default=NAMES, help="only these, in the results too"
    )
    flags = arguments.parse_args()
    torch.set_num_threads(flags.threads)
    setting = SETTINGS[flags.setting]
    log = Log(flags.runs / f"{flags.setting}.jsonl")
    result = curves(setting, flags.names, log)
    figures = {"setting": described(setting), "seed": 0, "curves": result}
    publish(flags, "copying", log.commits, figures, partial(plot, result))
    for name, found in result.items():
        last = found["curve"][-1]
        print(f"{name:22} loss {last['loss']:.4f}, copied {last['copied']:.3f}")


if __name__ == "__main__":
    main()
