# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""One file changes Transformers, and says what."""

import json
import re
from pathlib import Path

import pytest

import changed_transformers
import hf_linear_attention
from hf_linear_attention.model import auto
from new_python import run_python

SUPPORT = Path(changed_transformers.__file__)


@pytest.mark.thorough
def test_one_module_changes_transformers_and_lists_what():
    """Of all that models, `use_kernels`, bounded caches and a server do in a process."""
    package = Path(hf_linear_attention.__file__).parents[1]
    ran = run_python(SUPPORT, PYTHONPATH=str(package))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    listed = set(re.findall(r"^- `(.+)`$", auto.__doc__, re.M))
    assert {name for name, _ in found} == listed
    functions = {name: file for name, file in found if file is not None and "[" not in name}
    assert functions and set(functions.values()) == {"auto"}
