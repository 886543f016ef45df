# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Two versions of the package, side by side: the same numbers, and how much faster or slower.

    python benchmarks/compare_wheels.py old.whl new.whl
    python benchmarks/compare_wheels.py .venv/lib/python3.11/site-packages new.whl --full
    make compare OLD=old.whl NEW=new.whl

A version is a wheel, a folder that has hf_linear_attention in it, or that folder itself. Both
define the same operators, so each runs in a process of its own (wheel_worker.py) and finds only
its own package; torch and Transformers are those of this Python.

First every case's outputs are compared. The program says which are not the same bits, and ends
where they differ by more than rounding. Then the versions take turns, sample by sample: old, new,
new, old. Figures are medians over the rounds. The ratio is new over old, so 1.03 is three percent
slower; its range is where 95 % of the ratios of resampled rounds lie. "Fastest" is the ratio of
the fastest rounds, which on a busy machine tells more. "Above identity" is a token's time less
that of the same model without attention, in the same round: what attention costs in all, cache
included. "Import, beyond Llama's" is what the import takes when Transformers' Llama is imported.
"""

import argparse
import compileall
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import harness
from processes import Worker

HERE = Path(__file__).parent
PACKAGE = "hf_linear_attention"
SIDES = ("old", "new")
SAMPLE_SECONDS = 0.03  # shorter calls are repeated until one sample takes this long
TOLERANCE = 1e-5  # relative; what is more is not rounding
RESAMPLES = 1000


class Case(NamedTuple):
    """What wheel_worker.py makes: a function's name and its arguments."""

    maker: str
    arguments: tuple = ()
    options: dict[str, Any] = {}
    is_timed: bool = True


class Setting(NamedTuple):
    cases: dict[str, Case]
    rounds: int
    imports: int  # of each version


def op_cases(*shapes: tuple[int, int, int, int]) -> dict[str, Case]:
    """Shapes are (B, T, H, D)."""
    makers = {"forward": "forward", "forward + backward": "forward_and_backward"}
    return {
        f"{what}, (B, T, H, D) = {shape}": Case(maker, shape)
        for shape in shapes
        for what, maker in makers.items()
    } | {"one step, (B, H, D) = (1, 12, 64)": Case("step", (1, 12, 64))}


def token_cases(context: int, layers: int, hidden_size: int, heads: int) -> dict[str, Case]:
    model = {"layers": layers, "hidden_size": hidden_size, "heads": heads}
    return {
        f"a token, {layers} x {hidden_size}{suffix}": Case("token", (is_identity, context), model)
        for suffix, is_identity in (("", False), (IDENTITY, True))
    }


def model_cases(*presets: str) -> dict[str, Case]:
    size = {"layers": 4, "hidden_size": 64, "heads": 4}
    return {
        f"logits and gradients, {preset}": Case(
            "logits_and_gradients", (), {**size, "preset": preset}, is_timed=False
        )
        for preset in presets
    }


IDENTITY = ", identity attention"
STEP = {"layers": 4, "hidden_size": 128, "heads": 4}
CASES = {
    **op_cases((1, 1024, 8, 64), (1, 4096, 8, 64), (1, 2048, 16, 128)),
    **token_cases(128, 12, 768, 12),
    **token_cases(128, 12, 64, 1),  # so small that what Python does is most of it
    "training step, 4 x 128, 4 x 256 tokens": Case("training_step", (4, 256), STEP),
    # presets that are the same models in all versions
    **model_cases("katharopoulos", "polynomial", "aaren", "based", "hybrid"),
}
SETTINGS = {
    "smallest": Setting(
        op_cases((1, 20, 2, 16))
        | token_cases(16, 2, 32, 2)
        | {"training step": Case("training_step", (2, 16), STEP)}
        | model_cases("hybrid"),
        rounds=2,
        imports=1,
    ),
    "short": Setting(CASES, rounds=20, imports=3),
    "full": Setting(CASES, rounds=100, imports=15),
}


# ---- two processes ----


def unpack(source: Path, folder: Path) -> None:
    """Puts the package of a wheel or a folder into the folder, and its modules' bytecode.

    Raises:
        ValueError: there is none in it.
    """
    if source.suffix == ".whl" and source.is_file():
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(folder)
    for found in (source / PACKAGE, source):
        if (found / "__init__.py").is_file():
            shutil.copytree(found, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
            break
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise ValueError(f"expected a wheel or a folder with {PACKAGE} in it, got {source}")
    compileall.compile_dir(folder, quiet=1)


class Version(Worker):
    """A process with one version of the package: its worker's methods are what it can be asked."""

    def __init__(self, folder: Path, threads: int):
        super().__init__(
            [sys.executable, HERE / "wheel_worker.py", threads, folder],
            {
                "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
                "OMP_WAIT_POLICY": "passive",  # who waits for its turn must not take time
            },
        )
        self.import_seconds = self.answer("import")


# ---- verified, then timed ----


def in_turn(i: int) -> list[str]:
    """Old and new, or in odd rounds new and old."""
    return sorted(SIDES, reverse=i % 2 == 0)


@dataclass
class Comparison:
    """Seconds of every sample, by case and version, round by round."""

    versions: dict[str, Version]
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    # Of each case the tensors that are not the same bits, with the relative difference.
    differences: dict[str, dict[str, float]] = field(default_factory=dict)

    def verify(self, name: str, case: Case, folder: Path) -> float | None:
        """Makes the case in both, and compares what they compute; the seconds of a call."""
        outputs, took = {}, []
        for side, version in self.versions.items():
            file = folder / f"{side}.pt"
            answer = version.ask(
                "prepare",
                case=name,
                maker=case.maker,
                arguments=list(case.arguments),
                options=case.options,
                is_timed=case.is_timed,
                file=str(file),
            )
            outputs[side] = torch.load(file)
            took.append(answer["seconds"])
        self.differences[name] = find_differences(name, **outputs)
        print(f"{name}: {summary(self.differences[name])}", flush=True)
        return max(took) if case.is_timed else None

    def check(self) -> None:
        """Ends the program where something differs by more than rounding."""
        wrong = [
            name
            for name, found in self.differences.items()
            if any(not error <= TOLERANCE for error in found.values())  # NaN, too
        ]
        if wrong:
            sys.exit(f"more than rounding ({TOLERANCE:.0e}), so nothing was timed: {wrong}")

    def time(self, names: dict[str, float], rounds: int) -> None:
        """`names` are of cases, with the seconds of a call."""
        for i in range(rounds):
            for name, took in names.items():
                repeats = 1 + int(SAMPLE_SECONDS / took)
                for side in in_turn(i):
                    answer = self.versions[side].ask("sample", case=name, repeats=repeats)
                    self._add(name, side, answer["seconds"])

    def time_import(self, side: str, seconds: dict[str, float]) -> None:
        self._add("import", side, seconds["import"])
        self._add("import, beyond Llama's", side, seconds["beyond Llama's"])

    def _add(self, name: str, side: str, seconds: float) -> None:
        self.seconds.setdefault(name, {side: [] for side in SIDES})[side].append(seconds)

    def subtract_identity(self) -> None:
        """Adds what attention costs, round by round."""
        for name in list(self.seconds):
            if name + IDENTITY in self.seconds:
                for side, whole in self.seconds[name].items():
                    for a, b in zip(whole, self.seconds[name + IDENTITY][side], strict=True):
                        self._add(f"{name}, above identity", side, a - b)


def find_differences(name: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, float]:
    """The tensors that are not the same bits, and the relative difference in Euclidean norm."""
    if old.keys() != new.keys():
        sys.exit(f"{name}: only one version has {', '.join(sorted(old.keys() ^ new.keys()))}")
    errors = {}
    for key, before in old.items():
        after = new[key]
        if before.shape != after.shape or before.dtype != after.dtype:
            sys.exit(
                f"{name}, {key}: old is {tuple(before.shape)} {before.dtype}, "
                f"new {tuple(after.shape)} {after.dtype}"
            )
        if not torch.equal(before, after):
            gap, size = (after.double() - before.double()).norm(), before.double().norm()
            errors[key] = (gap / size.clamp(min=1e-30)).item()
    return errors


def summary(differences: dict[str, float]) -> str:
    if not differences:
        return "the same bits"
    worst = max(differences, key=lambda key: differences[key])
    return f"{len(differences)} tensors differ, {worst} most, by {differences[worst]:.1e}"


# ---- results ----


def make_row(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, their ratio, and the range of the ratio over resampled rounds."""
    old, new = seconds["old"], seconds["new"]
    generator = random.Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        chosen = generator.choices(range(len(old)), k=len(old))
        ratios.append(median(new, chosen) / median(old, chosen))
    ratios.sort()
    every = range(len(old))
    return {
        "case": name,
        "old_ms": median(old, every) * 1e3,
        "new_ms": median(new, every) * 1e3,
        "ratio": median(new, every) / median(old, every),
        "ratio_of_fastest": min(new) / min(old),
        "ratio_range": [ratios[RESAMPLES // 40], ratios[-1 - RESAMPLES // 40]],
        "rounds": len(old),
        "seconds": seconds,
    }


def median(values: Sequence[float], chosen: Sequence[int]) -> float:
    return statistics.median(values[i] for i in chosen)


def to_markdown(document: dict[str, Any]) -> str:
    machine = document["machine"]
    lines = [
        f"{document['old']} (old) and {document['new']} (new) on {machine['cpu']}, threads: "
        f"{machine['threads']}, {machine['torch_capability']}, PyTorch {machine['torch']}, "
        f"Transformers {machine['transformers']}, at commit {document['commit']}, "
        f"{document['date'][:10]}.",
        "",
        "| | old, ms | new, ms | new / old | 95 % range | fastest | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        low, high = row["ratio_range"]
        lines.append(
            f"| {row['case']} | {row['old_ms']:.4g} | {row['new_ms']:.4g} | {row['ratio']:.3f} | "
            f"{low:.3f} to {high:.3f} | {row['ratio_of_fastest']:.3f} | {row['rounds']} |"
        )
    differences = document["differences"]
    differing = {name: found for name, found in differences.items() if found}
    same = len(differences) - len(differing)
    lines += ["", f"The same bits in {same} of {len(differences)} cases."]
    lines += [f"- {name}: {summary(found)}" for name, found in differing.items()]
    return "\n".join(lines) + "\n"


def compare(flags: argparse.Namespace) -> dict[str, Any]:
    """Everything; what is written to a file."""
    setting = SETTINGS[flags.setting]
    document = {
        "bench": "wheels",
        "is_full": flags.setting == "full",
        "is_complete": True,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": harness.commit(),
        "machine": harness.describe_machine(),
        "old": flags.old.name,
        "new": flags.new.name,
    }
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = {side: Path(name, side) for side in SIDES}
        for side, folder in folders.items():
            unpack(getattr(flags, side), folder)

        def start(side: str) -> Version:
            version = Version(folders[side], flags.threads)
            stack.callback(version.close)
            return version

        comparison = Comparison({side: start(side) for side in SIDES})
        timed = {}
        for case_name, case in setting.cases.items():
            took = comparison.verify(case_name, case, Path(name))
            if took is not None:
                timed[case_name] = took
        comparison.check()
        comparison.time(timed, flags.rounds or setting.rounds)
        comparison.subtract_identity()
        stack.close()
        for side, version in comparison.versions.items():
            comparison.time_import(side, version.import_seconds)
        for i in range(1, setting.imports):
            for side in in_turn(i):
                comparison.time_import(side, start(side).import_seconds)
                stack.close()
    rows = [make_row(case, seconds) for case, seconds in comparison.seconds.items()]
    return document | {"differences": comparison.differences, "rows": rows}


def main() -> None:
    assert __doc__ is not None
    parser = harness.parser(__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, help="samples of each case and version")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    harness.wait_until_quiet(flags.patience)
    document = compare(flags)
    date = datetime.fromisoformat(document["date"])
    path = harness.result_path(flags.results, date, document["machine"], "wheels", flags.setting)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = to_markdown(document)
    path.with_suffix(".md").write_text(table, encoding="utf-8")
    print(f"\n{table}\nwrote {path} and .md")


if __name__ == "__main__":
    main()
