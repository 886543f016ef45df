# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The benchmark of conversions, in its smallest setting: an original, both stages, the table."""

import json
import math
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_conversion  # noqa: E402
import report  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
STAGES = ("converted", "transferred", "distilled")


def run(folder: Path, monkeypatch, *more: str) -> Path:
    flags = ["--smallest", "--threads", "1", "--results", str(folder / "results")]
    flags += ["--runs", str(folder / "runs"), *more]
    monkeypatch.setattr(sys, "argv", ["bench_conversion.py", *flags])
    bench_conversion.main()
    (path,) = (folder / "results").glob("*-conversion-smallest.json")
    return path


@pytest.mark.thorough
def test_an_original_is_trained_converted_and_compared_and_nothing_is_done_twice(
    tmp_path, monkeypatch
):
    path = run(tmp_path, monkeypatch)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    assert not document["is_full"]
    (row,) = document["rows"]
    assert row["original"] == "softmax"
    assert row["training"]["recall_tokens"] == 3 * 2 * 32
    assert row["training"]["train_tokens"] == 3 * 2 * 32 + 2 * 2 * 64
    names = [f"{name}, {stage}" for name in ("linear", "hybrid") for stage in STAGES]
    assert list(row["models"])[3:] == names
    lines = report.section_of_conversion(path, document).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:13]] == list(row["models"])

    for step in ("train_causal_lm.Trainer", "convert.Trainer", "convert_report.measure"):
        monkeypatch.setattr(step, None)
    assert json.loads(run(tmp_path, monkeypatch).read_text())["rows"] == document["rows"]


def test_an_unknown_original_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, monkeypatch, "--originals", "GPT")
    assert "--originals must be of ['softmax'], got ['GPT']" in capsys.readouterr().err


def flags_of(text: str) -> dict[str, str]:
    return dict(zip(*[iter(shlex.split(text))] * 2, strict=True))


def test_both_stages_spend_a_fifth_of_the_originals_tokens_at_most():
    setting = bench_conversion.SETTINGS["full"]
    tokens = 0
    for phase in (setting.recall, setting.training):
        flags = flags_of(f"{setting.data} {phase}")
        sizes = ("max_steps", "block_size", "per_device_train_batch_size")
        tokens += math.prod(int(flags[f"--{name}"]) for name in sizes)
    stages = flags_of(setting.conversion)
    spent = [int(stages[f"--{name}_tokens"]) for name in ("transfer", "distill")]
    assert sum(spent) <= tokens / 5
