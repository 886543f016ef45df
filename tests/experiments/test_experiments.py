# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Every experiment runs, in its smallest setting, and writes figures and a picture."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "experiments")]

import copying  # noqa: E402
import harness  # noqa: E402
import length  # noqa: E402
from contenders import BASELINE, CONTENDERS, Size, make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def run(experiment, folder: Path, monkeypatch, *more: str) -> dict:
    """What the experiment writes."""
    flags = ["--smallest", "--threads", "1", "--results", str(folder), *more]
    monkeypatch.setattr(sys, "argv", [experiment.__file__, *flags])
    experiment.main()
    (path,) = folder.glob("*-smallest.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_have_as_many_weights(name):
    size = Size(4, 4, 16)
    softmax = make_model(BASELINE, size, 100, 64)
    model = make_model(name, size, 100, 64)
    assert model.num_parameters() == pytest.approx(softmax.num_parameters(), rel=0.01)


def test_lengths_are_measured(tmp_path, monkeypatch):
    document = run(length, tmp_path, monkeypatch)
    lengths = length.SETTINGS["smallest"].lengths
    measured = {(row["contender"], row["x"]) for row in document["rows"]}
    assert measured == {(name, n) for name in length.NAMES for n in lengths}
    assert sum(note.startswith("slopes of") for note in document["notes"]) == len(length.NAMES)


def test_slopes_are_those_of_powers():
    x = [512, 1024, 2048]
    assert length.slope_of(x, [3 * n**2 for n in x]) == pytest.approx(2)


def rows(*seconds_and_mib: tuple[float, float]) -> list[harness.Row]:
    """Of a contender, at 4,096 tokens, 8,192 and so on."""
    return [
        harness.Row("", "", 4096 * 2**i, "", 1e3 * s, 0, 0, 3, 1, 0, peak_mib=mib)
        for i, (s, mib) in enumerate(seconds_and_mib)
    ]


def test_who_would_take_too_long_is_left_out():
    quadratic = rows((1, 10), (4, 20))
    assert length.is_within(quadratic, 16384, 17, 1)
    assert not length.is_within(quadratic, 16384, 15, 1)
    assert not length.is_within(rows((1, 300), (2, 1200)), 16384, 100, 4)
    assert length.is_within(rows((1, 10)), 8192, 0.1, 1)  # nothing is known of its growth


def test_copying_goes_on_where_it_was_ended(tmp_path, monkeypatch):
    runs = ["--runs", str(tmp_path / "runs")]
    document = run(copying, tmp_path / "first", monkeypatch, *runs)
    assert list(document["curves"]) == list(copying.NAMES)
    setting = copying.SETTINGS["smallest"]
    for found in document["curves"].values():
        assert [point["step"] for point in found["curve"]] == [0, 2, 4]
    monkeypatch.setattr(copying, "train", None)  # would be called where nothing is known
    again = run(copying, tmp_path / "second", monkeypatch, *runs)
    assert again["curves"] == document["curves"]
    assert setting.learning_rates[0] == document["curves"]["softmax"]["learning_rate"]
