# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What is run on a GPU, tried where there is none: the script, its tests and its benchmark."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environment):
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_everything_runs_on_a_cpu_and_is_written_down(tmp_path):
    chosen = dict(PYTEST_ADDOPTS="-k 'small_cases or compiled_step'")
    result = run("--device", "cpu", "--seed", "3", "--results", tmp_path, **chosen)
    assert result.returncode == 0, result.stdout + result.stderr
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
def test_without_a_gpu_it_says_so_and_fails():
    result = run()
    assert result.returncode != 0
    assert "No check was made" in result.stderr
    assert "finds no CUDA device here" in result.stderr
