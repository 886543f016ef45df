# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What is run on a GPU, tried where there is none: the script, its tests and its benchmark."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from new_python import run_python

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_check  # noqa: E402

run_itself = subprocess.run


def run_in_a_fork(command, *, env, cwd=None, timeout=300, **options):
    """As subprocess.run, where it is a Python."""
    if command[0] == "git":
        return run_itself(command, env=env, cwd=cwd, timeout=timeout, **options)
    assert command[0] == sys.executable
    others = {name: value for name, value in env.items() if os.environ.get(name) != value}
    result = run_python(*command[1:], cwd=cwd, timeout=timeout, **others)
    print(result.stdout, result.stderr)
    return result


@pytest.fixture
def run(monkeypatch):
    """Runs the script with these arguments, and returns what it exits with."""
    monkeypatch.setattr(subprocess, "run", run_in_a_fork)

    def main(*arguments: object) -> str | int | None:
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            gpu_check.main()
        return ended.value.code

    return main


@pytest.mark.thorough
def test_everything_runs_on_a_cpu_and_is_written_down(run, tmp_path, monkeypatch):
    chosen = "small_cases or compiled_step or by_slot or (in_place and float32)"
    chosen += " or ((compiled_op or torch_demands) and fixed)"
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-k '{chosen}'")
    assert not run("--device", "cpu", "--seed", "3", "--results", tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-cpu.json")
    document = json.loads(path.read_text())
    assert document["seed"] == 3
    here = run_itself(["git", "rev-parse", "HEAD"], cwd=gpu_check.ROOT, capture_output=True)
    if here.returncode == 0:
        assert document["commit"].removesuffix("-dirty") == here.stdout.decode().strip()
    assert {n: c["outcome"] for n, c in document["checks"].items()} == {
        "numerics": "passed",
        "benchmark": "passed",
    }
    contenders = {(row["pass"], row["contender"]) for row in document["measured"]["rows"]}
    assert {("forward", "ours"), ("forward + backward", "chunked"), ("decode", "ours")} < contenders
    assert {
        ("plain forward", "ours"),
        ("gated delta + bwd", "chunked"),
        ("token", "ours"),
    } < contenders
    assert [goal["limit"] for goal in document["measured"]["goals"]] == [1.5, 1.5, 0.6, 1.3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(run):
    message = run()
    assert "No check was made" in message
    assert "finds no CUDA device here" in message
