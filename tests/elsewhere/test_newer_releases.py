# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Releases of Transformers and PyTorch that are newer than any tried, and which have been."""

import configparser
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hf_linear_attention.releases import NEWEST_TRIED, major_and_minor, warn_of_newer
from new_python import run_python

ROOT = Path(__file__).parents[2]
TRIED = {name: f"{version}.0" for name, version in NEWEST_TRIED.items()}


def warned(**versions):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        warn_of_newer({**TRIED, **versions})
    return [str(one.message) for one in given]


@pytest.mark.parametrize("name", NEWEST_TRIED)
def test_a_newer_release_is_named_with_what_to_run_in_one_line(name):
    major, minor = major_and_minor(NEWEST_TRIED[name])
    for newer in (f"{major}.{minor + 1}.0", f"{major}.{minor + 1}.0.dev0", f"{major + 1}.0.0rc1"):
        (message,) = warned(**{name: newer})
        assert f"{name} {newer} (tried: up to {NEWEST_TRIED[name]})" in message
        assert "python -m hf_linear_attention check" in message and "\n" not in message
    for known in (".0.dev0", ".1", ".1+cu130", ".0a0+git12ab"):
        assert warned(**{name: NEWEST_TRIED[name] + known}) == []
    assert warned(**{name: f"{major}.{minor - 1}.9"}) == []


def test_both_are_in_one_warning():
    (message,) = warned(transformers="98.1.0", torch="99.2.0")
    assert "transformers 98.1.0" in message and "torch 99.2.0" in message


def test_the_newest_tried_are_what_the_tests_run_with_and_the_pages_name():
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    pinned = re.findall(r"^transformers==([\d.]+)", constraints, re.M)
    assert major_and_minor(NEWEST_TRIED["transformers"]) == max(map(major_and_minor, pinned))
    (pinned,) = re.findall(r"^torch==([\d.]+)", constraints, re.M)
    assert major_and_minor(NEWEST_TRIED["torch"]) >= major_and_minor(pinned)
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)", metadata["options"]["install_requires"], re.M))
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\w+) +\| ([\d.]+ to [\d.]+)", page, re.M))
    for name, title in {"transformers": "Transformers", "torch": "PyTorch"}.items():
        assert rows[title] == f"{oldest[name]} to {NEWEST_TRIED[name]}"


IMPORTS = """
import transformers
transformers.__version__ = "5.99.0"
import hf_linear_attention
from hf_linear_attention import releases, check_model
"""


@pytest.mark.thorough
def test_the_first_import_says_it_once_and_can_be_told_not_to():
    said = run_python("-c", IMPORTS)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("has not been tried with transformers 5.99.0") == 1
    variable = dict(re.findall("(PYTHONWARNINGS)='(.*?)'", said.stderr))
    silenced = subprocess.run(  # Python reads it when it starts
        [sys.executable, "-c", IMPORTS], env=os.environ | variable, capture_output=True, text=True
    )
    assert silenced.returncode == 0 and variable, silenced.stderr
    assert "has not been tried" not in silenced.stderr
