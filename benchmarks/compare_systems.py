# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Every preset, trained alike: what its attention learns, what it costs, what it keeps.

    python benchmarks/compare_systems.py            # or --short: in minutes
    python benchmarks/compare_systems.py --full     # for docs/results.md: an hour of one core
    python benchmarks/compare_systems.py --gpu      # larger models, tasks as in the papers
    python benchmarks/compare_systems.py --medium   # six systems, 10 M weights, 3.3 M tokens: hours
    python benchmarks/compare_systems.py --large    # the same and 50 M tokens: days
    python benchmarks/compare_systems.py --large --device cuda      # on a GPU, not yet timed
    python benchmarks/compare_systems.py --full --systems gla softmax --parts recall

All systems get the same number of weights (the MLP makes up for what attention lacks), the same
tokens in the same order, the same optimizer and schedule, and the same learning rates to choose
from: that with the lowest held-out loss is kept, and trained with further seeds. The tasks
(tasks.py) are held-out bits per byte of text, of all of it and by how much was read before,
recall of values by their keys (MQAR), and copying.
Some presets train with other positions, too, on text only. Then the presets' models for text are
timed, in turn: a training step, and a token after contexts that were read.

Each result is written to --runs at once, and so is the state of a training run every ten minutes:
the next call goes on from there, and a killed one loses minutes at most. `--stop-after 150` ends it
by itself after so many seconds, in the middle of a training run as well. When all is there,
results/ gets the table and the plot; `--report` writes what is there, and trains nothing. `--report
--earlier results/FILE.json` takes from an earlier comparison the scores that are missing, or of
fewer seeds, of tasks and numbers of weights that are the same: after a change of one preset the
others need not be trained again.
"""

import copy
import functools
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import harness
from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
)
from mad_tasks import Compression, FromLastToken
from report import systems_table
from systems import ALL_SYSTEMS, SETTINGS, SYSTEMS, VARIANTS, Setting, Trial, fit, num_weights
from tasks import UNASKED, Batch, Task, Text

OUTPUTS = Path(__file__).parents[1] / "outputs" / "compare"
EVAL_TOKENS = 8192  # at once
PROMPT_PIECE = 2048  # tokens of a context that are read at once
STEPS = 8  # tokens in a sample of decoding
SAVE_EVERY = 600  # seconds of a training run
TOLERANCE = 1e-4  # of decoding, relative, to reading all at once


# ---- training ----


@dataclass(frozen=True)
class Run:
    """One training run; everything that its result depends on."""

    system: str
    task: str
    learning_rate: float
    seed: int
    config: LinearAttentionConfig
    trial: Trial
    device: str
    autocast: bool = False

    def key(self) -> dict[str, Any]:
        """What tells its result from others, in a file."""
        fields = self.config.to_dict()
        fields.pop("transformers_version", None)
        trial = {"task": asdict(self.trial.task), "rows": self.trial.rows}
        how = [self.trial.steps, self.device, self.autocast]
        setup = json.dumps([fields, trial, *how], sort_keys=True)
        return {
            "system": self.system,
            "task": self.task,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "setup": hashlib.sha256(setup.encode()).hexdigest()[:12],
        }


def train(run: Run, file: Path | None = None, deadline: float = math.inf) -> dict[str, Any] | None:
    """Trains and tests. Loss and score are None where the loss was no number.

    Goes on from the state in the file, if there is one, and keeps it there every SAVE_EVERY
    seconds. At the deadline, by time.perf_counter(), it is kept as well, and None returned.
    """
    torch.manual_seed(run.seed)
    trial, generator = run.trial, torch.Generator().manual_seed(run.seed)
    model = LinearAttentionForCausalLM(run.config)
    if isinstance(trial.task, Compression):
        model.model = FromLastToken(model.model, run.config.hidden_size)
    model = model.to(run.device).train()
    optimizer, schedule = make_optimizer(model, run.learning_rate, trial.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done, seconds = 0, 0.0
    if file is not None and file.exists():
        saved = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        generator.set_state(saved["generator"])
        done, seconds = saved["done"], saved["seconds"]
    start = saved_at = time.perf_counter()
    start -= seconds
    for step in range(done + 1, trial.steps + 1):
        batch = trial.task.batch(trial.rows, generator)
        loss = training_step(model, batch, optimizer, run.autocast)
        schedule.step()
        now = time.perf_counter()
        is_over = now > deadline
        if file is None or step == trial.steps or not (is_over or now > saved_at + SAVE_EVERY):
            continue
        state = {name: part.state_dict() for name, part in parts.items()}
        told = {"generator": generator.get_state(), "done": step, "seconds": now - start}
        save_state(state | told, file)
        saved_at = time.perf_counter()
        if is_over:
            return None
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"loss": None, "score": None}
    if math.isfinite(loss.item()):
        result = evaluate(model, trial.task, run.autocast)
    return result | {"train_seconds": round(seconds, 2), "parameters": model.num_parameters()}


def save_state(state: dict[str, Any], file: Path) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def make_optimizer(
    model: LinearAttentionForCausalLM, learning_rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, with the schedule that all have."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    return optimizer, make_schedule(optimizer, steps)


def make_schedule(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """A twentieth of the steps to warm up, then half a cosine to a tenth of the rate."""
    warmup = max(steps // 20, 1)

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def training_step(
    model: LinearAttentionForCausalLM,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    autocast: bool = False,
) -> Tensor:
    logits, targets = answers(model, batch, autocast)
    loss = model.loss_function(logits, None, logits.shape[-1], shift_labels=targets)
    update(model, loss, optimizer)
    return loss.detach()


def update(model: torch.nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def answers(
    model: LinearAttentionForCausalLM, batch: Batch, autocast: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits (n, V) where something is asked, and what was asked for (n,).

    In bfloat16 on a GPU, on a CPU if `autocast` says so.
    """
    tokens, targets = (x.to(model.device) for x in batch)
    device = model.device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast or device != "cpu"):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        asked = targets != UNASKED
        return model.lm_head(hidden[asked]), targets[asked]


@torch.no_grad()
def evaluate(
    model: LinearAttentionForCausalLM, task: Task, autocast: bool = False
) -> dict[str, Any]:
    """The loss in nats per answer, and the task's score, on its held-out rows; and for text its
    score by position.
    """
    model.eval()
    batch = task.held_out()
    all_nats, num_correct = [], 0
    rows = max(EVAL_TOKENS // task.length, 1)
    for tokens, targets in zip(batch.tokens.split(rows), batch.targets.split(rows), strict=True):
        logits, asked = answers(model, Batch(tokens, targets), autocast)
        all_nats.append(F.cross_entropy(logits.float(), asked, reduction="none").cpu())
        num_correct += (logits.argmax(-1) == asked).sum().item()
    nats, asked = torch.cat(all_nats), batch.targets[batch.targets != UNASKED]
    total = nats.sum(dtype=torch.float64).item()
    result = {"loss": total / len(asked), "score": task.score(total, num_correct, asked)}
    if isinstance(task, Text):
        result["by_position"] = task.by_position(nats.view_as(batch.targets), batch.targets)
    return result


# ---- results, kept one by one ----


class Log:
    """A file of one JSON object per line, {"key", "result", "commit"}: what has been done."""

    def __init__(self, path: Path):
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        self.commits: set[str] = set()  # of the results
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # killed while writing
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            self._take(json.loads(line))

    @staticmethod
    def _name(key: dict[str, Any]) -> str:
        return json.dumps(key, sort_keys=True)

    def get(self, key: dict[str, Any]) -> dict[str, Any] | None:
        return self.results.get(self._name(key))

    def add(self, key: dict[str, Any], result: dict[str, Any]) -> None:
        entry = {"key": key, "result": result, "commit": harness.commit()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        self.results[self._name(entry["key"])] = entry["result"]
        self.commits.add(entry["commit"])

    def state_of(self, key: dict[str, Any]) -> Path:
        """The file for the state of a training run that is not at its end."""
        digest = hashlib.sha256(self._name(key).encode()).hexdigest()[:12]
        return self.path.with_suffix(f".{digest}.pt")


# ---- the runs ----


def all_runs(setting: Setting, systems: list[str], parts: list[str], log: Log) -> Iterator[Run]:
    """Every training run, first those of the first seed. Which learning rate further seeds take
    is known when the results of those are in the log.
    """
    trials = {task: trial for task, trial in setting.trials.items() if task in parts}
    for seed in range(max((trial.seeds for trial in trials.values()), default=0)):
        for task, trial in trials.items():
            for name in systems:
                if seed >= trial.seeds or name not in trial.systems:
                    continue
                run = first_run(setting, name, task)
                rates = trial.learning_rates if seed == 0 else [best_rate(run, log)]
                for rate in rates:
                    yield replace(run, learning_rate=rate, seed=seed)


@functools.cache
def fitted(name: str, trial: Trial) -> LinearAttentionConfig:
    return fit(ALL_SYSTEMS[name], trial)


def first_run(setting: Setting, name: str, task: str) -> Run:
    trial = setting.trials[task]
    config = fitted(name, trial)
    rate = trial.learning_rates[0]
    return Run(name, task, rate, 0, config, trial, setting.device, setting.autocast)


def best_rate(run: Run, log: Log) -> float:
    """The learning rate with the lowest held-out loss, of the first seed."""

    def loss(rate: float) -> float:
        result = log.get(replace(run, learning_rate=rate, seed=0).key())
        assert result is not None
        return math.inf if result["loss"] is None else result["loss"]

    return min(run.trial.learning_rates, key=loss)


def systems_of(setting: Setting) -> list[str]:
    """Those that are trained for anything."""
    trained = {name for trial in setting.trials.values() for name in trial.systems}
    return [name for name in ALL_SYSTEMS if name in trained]


def num_runs(setting: Setting, systems: list[str], parts: list[str]) -> int:
    return sum(
        len(trial.learning_rates) + trial.seeds - 1
        for task, trial in setting.trials.items()
        for name in systems
        if task in parts and name in trial.systems
    )


# ---- times ----


def timing_key(setting: Setting, what: str) -> dict[str, Any]:
    trial = setting.trials["text"]
    sizes = {name: fitted(name, trial).intermediate_size for name in SYSTEMS}
    setup = json.dumps([asdict(trial.size), sizes, trial.rows, trial.task.length])
    return {
        "timing": what,
        "threads": torch.get_num_threads(),
        "device": setting.device,
        "setup": hashlib.sha256(setup.encode()).hexdigest()[:12],
    }


def timings(setting: Setting) -> dict[str, Callable[[float], dict[str, Any]]]:
    """What is timed, and the function of the patience that times it: seconds, by system."""
    return {"training": functools.partial(time_training, setting)} | {
        f"decoding after {context}": functools.partial(time_decoding, setting, context)
        for context in setting.contexts
    }


def time_training(setting: Setting, patience: float) -> dict[str, Any]:
    """A step on a batch for text."""
    trial = setting.trials["text"]

    def sample_of_step(name: str) -> Callable[[], float]:
        model = make_model(setting, name).train()
        optimizer, _ = make_optimizer(model, 1e-3, 1)
        tokens = random_tokens(trial, trial.rows, trial.task.length + 1)
        batch = Batch(tokens[:, :-1], tokens[:, 1:])
        step = functools.partial(training_step, model, batch, optimizer, setting.autocast)
        return lambda: seconds(step, setting.device)

    samples = {name: sample_of_step(name) for name in SYSTEMS if name in trial.systems}
    timed = harness.interleave(samples, setting.timing_seconds, patience)
    return {name: timing._asdict() for name, timing in timed.items()}


@torch.no_grad()
def time_decoding(setting: Setting, context: int, patience: float) -> dict[str, Any]:
    """A token of one row after `context` tokens, in float32, and the bytes that the cache holds."""
    readers = {name: Reader(setting, name, context) for name in SYSTEMS}
    samples = {name: reader.sample for name, reader in readers.items()}
    timed = harness.interleave(samples, setting.timing_seconds, patience)
    return {
        name: timing._asdict() | {"cache_bytes": readers[name].cache.nbytes}
        for name, timing in timed.items()
    }


class Reader:
    """A model that has read `context` tokens."""

    def __init__(self, setting: Setting, name: str, context: int):
        self.model = make_model(setting, name).eval()
        tokens = random_tokens(setting.trials["text"], 1, context + 1).to(setting.device)
        self._check(tokens[:, :32], name)
        self.cache = self._read(tokens[:, :-1])
        self.token = tokens[:, -1:]

    def forward(self, tokens: Tensor, cache: LinearAttentionCache | None) -> Tensor:
        """Logits of the last token."""
        return self.model(
            tokens, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1
        ).logits

    def _read(self, tokens: Tensor) -> LinearAttentionCache:
        cache = LinearAttentionCache(self.model.config)
        for piece in tokens.split(PROMPT_PIECE, dim=1):
            self.forward(piece, cache)
        return cache

    def _check(self, tokens: Tensor, name: str) -> None:
        """That the cache changes nothing."""
        actual = self.forward(tokens[:, -1:], self._read(tokens[:, :-1]))
        harness.check_close(name, actual, self.forward(tokens, None), TOLERANCE)

    def sample(self) -> float:
        """Seconds per token."""
        cache = copy.deepcopy(self.cache)
        self.forward(self.token, cache)  # what the others left in the processor's caches is gone

        def steps() -> None:
            for _ in range(STEPS):
                self.forward(self.token, cache)

        return seconds(steps, self.model.device.type) / STEPS


def make_model(setting: Setting, name: str) -> LinearAttentionForCausalLM:
    torch.manual_seed(0)
    return LinearAttentionForCausalLM(fitted(name, setting.trials["text"])).to(setting.device)


def random_tokens(trial: Trial, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(trial.task.vocab_size, shape, generator=generator)


def seconds(work: Callable[[], object], device: str) -> float:
    synchronize = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


# ---- tables and plots ----


def summary(setting: Setting, systems: list[str], log: Log) -> list[dict[str, Any]]:
    """A row for each system, with what the log has of it."""
    return [
        {
            "system": name,
            "parameters": {
                task: num_weights(fitted(name, trial))
                for task, trial in setting.trials.items()
                if name in trial.systems
            },
            "tasks": scores_of(setting, name, log),
            "times": times_of(setting, name, log),
        }
        for name in systems
    ]


def add_earlier(
    rows: list[dict[str, Any]], setting: Setting, earlier: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows with the scores of an earlier result, where that has more of them and all was the
    same.
    """
    before = {row["system"]: row for row in earlier["rows"]}
    same_tasks = [
        task
        for task, trial in setting.trials.items()
        if _what_matters(asdict(trial)) == _what_matters(earlier["setting"]["trials"].get(task, {}))
    ]
    for row in rows:
        old = before.get(row["system"], {"tasks": {}, "parameters": {}})
        for task in same_tasks:
            is_same = row["parameters"].get(task) == old["parameters"].get(task)
            scores, old_scores = (
                x["tasks"].get(task, {"scores": []})["scores"] for x in (row, old)
            )
            if is_same and len(old_scores) > len(scores):
                row["tasks"][task] = old["tasks"][task]
    return rows


def _what_matters(trial: dict[str, Any]) -> str:
    """All of a trial that a score depends on, as JSON has it."""
    return json.dumps({key: value for key, value in trial.items() if key != "systems"})


def scores_of(setting: Setting, name: str, log: Log) -> dict[str, dict[str, Any]]:
    """By task: the best learning rate, and the score of every seed with it."""
    result = {}
    for task, trial in setting.trials.items():
        if name not in trial.systems:
            continue
        run = first_run(setting, name, task)
        tried = [log.get(replace(run, learning_rate=rate).key()) for rate in trial.learning_rates]
        if None in tried:
            continue
        rate = best_rate(run, log)
        seeds = [
            log.get(replace(run, learning_rate=rate, seed=s).key()) for s in range(trial.seeds)
        ]
        scored = [seed for seed in seeds if seed and seed["score"] is not None]
        scores = [seed["score"] for seed in scored]
        result[task] = {"learning_rate": rate, "scores": scores}
        if isinstance(trial.task, Text):
            result[task]["by_position"] = [seed["by_position"] for seed in scored]
    return result


def times_of(setting: Setting, name: str, log: Log) -> dict[str, Any]:
    if "text" not in setting.trials or name not in SYSTEMS:
        return {}
    trial = setting.trials["text"]
    times: dict[str, Any] = {}
    training = log.get(timing_key(setting, "training"))
    if training is not None and name in training:
        times["training_tokens_per_second"] = (
            trial.rows * trial.task.length / training[name]["median"]
        )
    for context in setting.contexts:
        decoding = log.get(timing_key(setting, f"decoding after {context}"))
        if decoding is not None:
            speeds = times.setdefault("decoding_tokens_per_second", {})
            speeds[str(context)] = 1 / decoding[name]["median"]
            sizes = times.setdefault("cache_bytes", {})
            sizes[str(context)] = decoding[name]["cache_bytes"]
    return times


def save(folder: Path, name: str, setting: Setting, rows: list[dict[str, Any]], log: Log) -> Path:
    """Writes the table as JSON, and the plot beside it; `name` is the setting's."""
    date, machine = datetime.now(timezone.utc), harness.describe_machine()
    if setting.device != "cpu":
        machine["cpu"] += f", {torch.cuda.get_device_name()}"
    path = harness.result_path(folder, date, machine, "compare", name)
    document = {
        "bench": "compare",
        "is_full": name == "full",
        "is_complete": True,
        "date": date.isoformat(timespec="seconds"),
        "commit": ", ".join(sorted(log.commits)),
        "machine": machine,
        "setting": asdict(setting),
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(rows, setting, path.with_suffix(".png"))
    return path


def plot(rows: list[dict[str, Any]], setting: Setting, path: Path) -> None:
    """Scores by system, each seed a point; those of text by position, too; tokens per second; bytes
    and speed by context.
    """
    pyplot = harness.plotter()
    softmax = [row for row in rows if row["system"] == "softmax"]
    texts = [task for task in setting.trials if any(by_position(row, task) for row in softmax)]
    timed = [row for row in rows if row["times"]]
    num_panels = len(setting.trials) + len(texts)
    rows_of_panels = math.ceil(num_panels / 3)
    num_rows, num_columns = rows_of_panels + bool(timed), 3 if timed else min(num_panels, 3)
    size = 16 / 3 * num_columns, 5.5 * num_rows
    figure, axes = pyplot.subplots(
        num_rows, num_columns, figsize=size, layout="constrained", squeeze=False
    )
    unused = [*axes.flat[num_panels : rows_of_panels * num_columns]]
    if timed and not setting.contexts:
        unused += axes[-1][:2]
    for axis in unused:
        axis.axis("off")
    for axis, (task, trial) in zip(axes.flat, setting.trials.items(), strict=False):
        plot_scores(axis, task, trial, [row for row in reversed(rows) if task in row["tasks"]])
    for axis, task in zip(axes.flat[len(setting.trials) :], texts, strict=False):
        plot_positions(axis, task, rows)
    if timed:
        plot_times(axes[-1], timed)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def plot_scores(axis: Any, task: str, trial: Trial, rows: list[dict[str, Any]]) -> None:
    means = [statistics.fmean(row["tasks"][task]["scores"] or [math.nan]) for row in rows]
    colors = [f"C{row['system'] in VARIANTS:d}" for row in rows]
    axis.barh([row["system"] for row in rows], means, color=colors, alpha=0.5)
    for row in rows:
        scores = row["tasks"][task]["scores"]
        axis.plot(scores, [row["system"]] * len(scores), "k.")
    axis.set(title=f"{task}: {trial.task.metric}, {trial.steps} steps")
    if trial.task.lower_is_better and means:
        axis.set_xlim(left=0.9 * min(means))


def plot_positions(axis: Any, task: str, rows: list[dict[str, Any]]) -> None:
    """The means over seeds, less softmax attention's: what comes after one token differs from what
    comes after many by more than systems do.
    """
    scores = {row["system"]: by_position(row, task) for row in rows}
    softmax = scores.get("softmax", {})
    for index, (name, score) in enumerate(scores.items()):
        places = [place for place in score if place in softmax]
        if not places:
            continue
        axis.semilogx(
            [int(place) for place in places],
            [score[place] - softmax[place] for place in places],
            **style_of(index, name),
        )
    axis.set(title=f"{task}: bits per byte, less softmax's", xlabel="tokens read before")
    axis.legend(fontsize="small", ncols=2)


def by_position(row: dict[str, Any], task: str) -> dict[str, float]:
    """The mean over seeds; empty where none was scored by position."""
    seeds = row["tasks"].get(task, {}).get("by_position", [])
    return {place: statistics.fmean(seed[place] for seed in seeds) for place in (seeds or [{}])[0]}


def style_of(index: int, name: str) -> dict[str, Any]:
    """Of a system's curve: colours, and when there are no more of them, other lines."""
    from matplotlib import pyplot

    color = pyplot.get_cmap("tab20")(index % 20)
    return {"marker": ".", "color": color, "ls": ["-", "--"][index // 20 % 2], "label": name}


def plot_times(axes: Any, rows: list[dict[str, Any]]) -> None:
    decoding, memory, training = axes
    for index, row in enumerate(rows):
        style = style_of(index, row["system"])
        for axis, what in (
            (decoding, "decoding_tokens_per_second"),
            (memory, "cache_bytes"),
        ):
            by_context = row["times"].get(what, {})
            axis.loglog([int(context) for context in by_context], by_context.values(), **style)
    decoding.set(title="tokens/s, decoding one row", xlabel="tokens of context")
    memory.set(title="bytes in the cache", xlabel="tokens of context")
    memory.legend(fontsize="small", ncols=3, loc=(0.02, 0.13))
    training.barh(
        [row["system"] for row in reversed(rows)],
        [row["times"].get("training_tokens_per_second", 0) for row in reversed(rows)],
    )
    training.set(title="tokens/s, training")


def compare(
    setting: Setting,
    log: Log,
    systems: list[str],
    parts: list[str],
    stop_after: float = math.inf,
    patience: float = 0,
) -> list[dict[str, Any]] | None:
    """Does what the log lacks, and says so; the rows of the table, or None where time ran out."""
    start = time.perf_counter()
    total = num_runs(setting, systems, parts)
    for number, run in enumerate(all_runs(setting, systems, parts, log), 1):
        if log.get(run.key()) is not None:
            continue
        if time.perf_counter() - start > stop_after:
            print(f"stopped: {number - 1} of {total} training runs are done, in {log.path}")
            return None
        label = f"{run.task}, {run.system}, rate {run.learning_rate:g}, seed {run.seed}"
        print(f"[{number}/{total}] {label}: ", end="", flush=True)
        file = log.state_of(run.key())
        result = train(run, file, start + stop_after)
        if result is None:
            print(f"stopped, to be gone on with from {file}")
            return None
        log.add(run.key(), result)
        file.unlink(missing_ok=True)
        score = "no number" if result["score"] is None else f"{result['score']:.3f}"
        print(f"{run.trial.task.metric} {score}, {result['train_seconds']:.0f} s", flush=True)
    for what, measure in timings(setting).items() if "timing" in parts else ():
        key = timing_key(setting, what)
        if log.get(key) is not None:
            continue
        if time.perf_counter() - start > stop_after:
            print(f"stopped before timing {what}")
            return None
        print(f"timing {what}", flush=True)
        log.add(key, measure(patience))
    return summary(setting, systems, log)


def main() -> None:
    assert __doc__ is not None
    flags = harness.parser(__doc__, ("short", "full", "gpu", "medium", "large"))
    flags.add_argument("--systems", nargs="+", choices=ALL_SYSTEMS, metavar="NAME")
    flags.add_argument("--parts", nargs="+", metavar="PART", help="tasks of the setting, or timing")
    flags.add_argument("--runs", type=Path, help="file of single results")
    flags.add_argument("--device", help="cpu or cuda, instead of the setting's")
    flags.add_argument("--report", action="store_true", help="train nothing, write the results")
    flags.add_argument("--earlier", type=Path, help="a result, for what is missing in a report")
    flags.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    flags = flags.parse_args()
    name, setting = flags.setting, SETTINGS[flags.setting]
    if flags.device:
        setting = replace(setting, device=flags.device)
    if flags.budget:
        setting = replace(setting, timing_seconds=flags.budget)
    torch.set_num_threads(flags.threads)
    log = Log(flags.runs or OUTPUTS / f"{name}.jsonl")
    all_parts = [*setting.trials, "timing"]
    systems, parts = flags.systems or systems_of(setting), flags.parts or all_parts
    unknown = set(parts) - set(all_parts)
    if unknown:
        raise SystemExit(f"--parts must be of {all_parts}, got {sorted(unknown)}")
    if flags.report:
        rows = summary(setting, systems, log)
        if flags.earlier:
            earlier = json.loads(flags.earlier.read_text(encoding="utf-8"))
            rows = add_earlier(rows, setting, earlier)
            log.commits.add(earlier["commit"])
    else:
        rows = compare(setting, log, systems, parts, flags.stop_after, flags.patience)
    if rows is None:
        return
    print("\n".join(systems_table(rows)))
    if flags.systems or flags.parts:
        print("results/ is written when all systems and parts are compared: leave these flags out")
    else:
        print(f"wrote {save(flags.results, name, setting, rows, log)} and .png")


if __name__ == "__main__":
    main()
