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


def run_in_a_fork(command, *, env, cwd=None, timeout=300, **_) -> subprocess.CompletedProcess:
    """As subprocess.run, of a Python."""
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


def test_everything_runs_on_a_cpu_and_is_written_down(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k 'small_cases or compiled_step'")
    assert not run("--device", "cpu", "--seed", "3", "--results", tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-cpu.json")
    document = json.loads(path.read_text())
    assert document["seed"] == 3
    assert {n: c["outcome"] for n, c in document["checks"].items()} == {
        "numerics": "passed",
        "benchmark": "passed",
    }
    contenders = {(row["pass"], row["contender"]) for row in document["measured"]["rows"]}
    assert {("forward", "ours"), ("forward + backward", "chunked"), ("decode", "ours")} < contenders


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(run):
    message = run()
    assert "No check was made" in message
    assert "finds no CUDA device here" in message
