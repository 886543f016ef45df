# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a release says of itself in several places, and what runs where the code is hosted."""

import configparser
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hf_linear_attention

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
METADATA = configparser.ConfigParser()
METADATA.read(ROOT / "setup.cfg", encoding="utf-8")


def jobs_of(workflow: Path) -> dict[str, dict]:
    return yaml.safe_load(workflow.read_text("utf-8"))["jobs"]


def commands_of(workflow: Path) -> list[str]:
    steps = [step for job in jobs_of(workflow).values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_all_name_one_version():
    version = hf_linear_attention.__version__
    printed = subprocess.check_output(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, text=True
    )
    assert printed.split()[-1] == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == version
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## \[([^]]+)\]", changes, re.M)[1] == version


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_ask_make_for_what_it_has(workflow):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    asked = [
        word
        for command in commands_of(workflow)
        for words in re.findall(r"^make (.*)$", command, re.M)
        for word in shlex.split(words)
        if "=" not in word and not word.startswith(".venv/")
    ]
    assert set(asked) <= targets, set(asked) - targets


def test_workflows_test_all_that_is_supported():
    matrix = jobs_of(ROOT / ".github" / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]
    options = METADATA["options"]
    assert matrix["python"][0] == options["python_requires"].removeprefix(">=")
    oldest = dict(re.findall(r"(\w+)>=([\d.]+)", options["install_requires"]))
    wanted = " ".join(f"{name}=={oldest[name]}.*" for name in ("transformers", "torch"))
    assert wanted in {one.get("oldest") for one in matrix["include"]}


def test_the_newest_releases_are_tested_every_week_without_constraints():
    workflow = ROOT / ".github" / "workflows" / "newest.yml"
    triggers = yaml.safe_load(workflow.read_text("utf-8"))[True]  # as YAML reads "on"
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", triggers["schedule"][0]["cron"])
    commands = "\n".join(commands_of(workflow))
    assert "make PYTHON=python test-newest" in commands and "constraint" not in commands
    database = subprocess.run(
        ["make", "--dry-run", "--always-make", "test-newest", "PYTHON=python3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "--upgrade-strategy eager" in database and "--constraint" not in database
    folders = set(re.findall(r"tests/\w+", database))
    assert {"tests/upstream", "tests/generation", "tests/clients"} <= folders
    assert all((ROOT / folder).is_dir() for folder in folders)
