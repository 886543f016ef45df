# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Ranks that share sequences compute what one process does: loss and all gradients, in float64."""

import json
import subprocess
from pathlib import Path

import pytest
from test_training import assert_same_steps

from new_python import launch, run_python
from shared_sequences import CHECKS_OF, FIRST
from trainer_runs import CONTEXT_PARALLEL, train

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.usefixtures("one_thread")


def made_checks(folder: Path, ranks: int, *names: str) -> subprocess.CompletedProcess:
    script = SUPPORT / "shared_sequences.py"
    return run_python(script, folder, ranks, *names, CUDA_VISIBLE_DEVICES="", timeout=600)


def test_two_ranks_share_sequences(tmp_path):
    ran = made_checks(tmp_path, 2, *FIRST)
    for check in FIRST:
        assert f"holds: {check}\n" in ran.stdout, ran.stderr[-6000:]


@pytest.fixture(scope="module")
def all_checks(tmp_path_factory):
    """Of so many ranks, made when first asked for."""
    runs = {}

    def run(ranks: int) -> subprocess.CompletedProcess:
        if ranks not in runs:
            runs[ranks] = made_checks(tmp_path_factory.mktemp(f"ranks_{ranks}"), ranks)
        return runs[ranks]

    return run


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "check"), [(ranks, check) for ranks, checks in CHECKS_OF.items() for check in checks]
)
def test_ranks_share_sequences_as_one_process_reads_them(ranks, check, all_checks):
    # the script ends with the first check that fails
    ran = all_checks(ranks)
    assert f"holds: {check}\n" in ran.stdout, ran.stderr[-6000:]


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """The folder of Trainer's runs in two processes."""
    folder = tmp_path_factory.mktemp("together")
    launch("fsdp2", SUPPORT / "trainer_runs.py", folder, *CONTEXT_PARALLEL)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("run", CONTEXT_PARALLEL)
def test_trainer_shares_sequences_by_cp_size(run, tmp_path, together):
    expected = train(run, tmp_path)
    actual = json.loads((together / run / "steps.json").read_text())
    assert_same_steps(actual, expected, 1e-6)  # losses are logged in float32
