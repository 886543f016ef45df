# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Two versions of the package, side by side: here the installed one, and itself."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import hf_linear_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import compare_wheels  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
INSTALLED = Path(hf_linear_attention.__file__).parent


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "hf_linear_attention-9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in INSTALLED.rglob("*"):
            if "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(INSTALLED.parent))
    return path


@pytest.mark.thorough
def test_the_package_equals_itself(wheel, tmp_path, monkeypatch):
    flags = ["--smallest", "--threads", "1", "--results", str(tmp_path / "results")]
    arguments = ["compare_wheels.py", str(INSTALLED), str(wheel), *flags]
    monkeypatch.setattr(sys, "argv", arguments)
    compare_wheels.main()
    (path,) = (tmp_path / "results").glob("*-wheels-smallest.json")
    document = json.loads(path.read_text())
    setting = compare_wheels.SETTINGS["smallest"]
    assert document["differences"] == {name: {} for name in setting.cases}
    rows = {row["case"]: row for row in document["rows"]}
    timed = [name for name, case in setting.cases.items() if case.is_timed]
    derived = ["a token, 2 x 32, above identity", "import", "import, beyond Llama's"]
    assert list(rows) == timed + derived
    assert all(len(rows[name]["seconds"]["old"]) == setting.rounds for name in timed)
    assert all(rows[name]["old_ms"] > 0 and rows[name]["new_ms"] > 0 for name in timed)
    assert 0 < rows["import, beyond Llama's"]["old_ms"] < rows["import"]["old_ms"]
    table = path.with_suffix(".md").read_text()
    assert "hf_linear_attention (old) and hf_linear_attention-9-py3-none-any.whl (new)" in table
    assert f"PyTorch {torch.__version__}" in table
    assert all(f"| {name} |" in table for name in rows)
    assert "The same bits in 7 of 7 cases." in table


def test_what_is_no_package_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a wheel or a folder with hf_linear_attention"):
        compare_wheels.unpack(tmp_path, tmp_path / "unpacked")


def test_differences_are_found():
    find = compare_wheels.find_differences
    same = {"y": torch.ones(100), "z": torch.zeros(2)}
    assert find("case", same, {"y": torch.ones(100), "z": torch.zeros(2)}) == {}
    other = {"y": torch.ones(100), "z": torch.zeros(2)}
    other["y"][0] += 1e-3
    found = find("case", same, other)
    assert found == {"y": pytest.approx(1e-4, rel=1e-3)}
    assert compare_wheels.summary(found) == "1 tensors differ, y most, by 1.0e-04"
    with pytest.raises(SystemExit, match="nothing was timed: .'case'."):
        compare_wheels.Comparison({}, differences={"case": found}).check()
    compare_wheels.Comparison({}, differences={"case": {"y": 1e-7}}).check()
    other["y"][0] = torch.nan
    with pytest.raises(SystemExit):
        compare_wheels.Comparison({}, differences={"case": find("case", same, other)}).check()
    with pytest.raises(SystemExit, match="only one version has z"):
        find("case", same, {"y": torch.ones(100)})
    with pytest.raises(SystemExit, match="old is \\(2,\\)"):
        find("case", same, {"y": torch.ones(100), "z": torch.zeros(3)})


def test_a_slower_version_is_seen_through_the_noise():
    noise = torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()
    old = [1 + 0.02 * x for x in noise]
    row = compare_wheels.make_row("case", {"old": old, "new": [1.05 * x for x in reversed(old)]})
    assert row["ratio"] == pytest.approx(1.05)
    low, high = row["ratio_range"]
    assert 1.03 < low <= row["ratio"] <= high < 1.07
    assert row["ratio_of_fastest"] == pytest.approx(1.05)
    assert row["old_ms"] == pytest.approx(1010, rel=0.01)


def test_attention_costs_what_is_above_identity_in_the_same_round():
    comparison = compare_wheels.Comparison({})
    for whole, floor in ((5.0, 3.0), (9.0, 8.0)):
        for side in compare_wheels.SIDES:
            comparison._add("a token", side, whole)
            comparison._add("a token" + compare_wheels.IDENTITY, side, floor)
    comparison.subtract_identity()
    assert comparison.seconds["a token, above identity"] == {"old": [2, 1], "new": [2, 1]}
