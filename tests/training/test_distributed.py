# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Two processes compute what one does: two forks, and two that Accelerate's launcher starts."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from test_training import assert_same_steps
from transformers import AutoModelForCausalLM

from new_python import launch, run_python
from tiny import assert_near, random_ids
from trainer_runs import train
from two_ranks import CHECKS

SUPPORT = Path(__file__).parents[1] / "support"
RUNS = {
    "ddp": (
        *("plain", "performer", "accumulated", "checkpointed", "smoothed", "bfloat16"),
        *("transferred", "distilled"),
    ),
    "fsdp2": (
        *("plain", "performer", "retnet", "hgrn2", "mamba2", "tied", "hybrid"),
        *("accumulated", "checkpointed", "smoothed", "bfloat16", "resumed"),
    ),
}
TOLERANCES = {
    "bfloat16": 0.1,  # FSDP2 rounds the decays' parameters, too
    "transferred": 0.25,  # errors are relative to what each process has seen
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> subprocess.CompletedProcess:
    folder = tmp_path_factory.mktemp("two_ranks")
    return run_python(SUPPORT / "two_ranks.py", folder, CUDA_VISIBLE_DEVICES="")


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_agree_with_one(check, two_ranks):
    # the script ends with the first check that fails
    assert f"holds: {check}\n" in two_ranks.stdout, two_ranks.stderr[-6000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The steps and the folder of a run in one process, made when first asked for."""
    runs = {}

    def run(name: str):
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            runs[name] = train(name, folder), folder
        return runs[name]

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder of all runs of two processes under an accelerate config, by its name."""
    folders = {}

    def run(config: str):
        if config not in folders:
            folder = tmp_path_factory.mktemp(config)
            launch(config, SUPPORT / "trainer_runs.py", folder, *RUNS[config])
            folders[config] = folder
        return folders[config]

    return run


@pytest.mark.thorough
@pytest.mark.parametrize(("config", "name"), [(x, name) for x in RUNS for name in RUNS[x]])
def test_accelerate_trains_as_one_process_does(config, name, alone, together):
    expected, folder = alone(name)
    actual = json.loads((together(config) / name / "steps.json").read_text())
    tolerance = TOLERANCES.get(name, 1e-4)
    assert_same_steps(actual, expected, tolerance)
    ids = random_ids(2, 9)
    with torch.no_grad():
        logits, expected_logits = (
            AutoModelForCausalLM.from_pretrained(path)(ids).logits
            for path in (together(config) / name, folder)
        )
    assert_near(logits, expected_logits, tolerance)
