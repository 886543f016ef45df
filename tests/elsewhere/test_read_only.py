# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Where only temporary files can be written: the home, the installation and the model are read
only, as in a container that was started so.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from new_python import FIXED
from saved_models import last_line
from tiny import random_ids, tiny_model

# Permissions do not stop root. So the whole system is mounted once more, to be read only, for these
# processes alone. Where /tmp is a system of its own, the home has to be told so itself.
MOUNT = """
mount --bind "$TMPDIR" "$TMPDIR" && mount --bind "$HOME" "$HOME" &&
mount -o remount,bind,ro "$HOME" && mount -o remount,bind,ro / && exec "$@"
"""

# They name folders, if they are set, in place of some in the home or beside temporary files.
CACHES = ("HF_H", "HF_M", "TORCHINDUCTOR_", "XDG_")

PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))

def tokens(model):
    return model.generate(ids, max_new_tokens=20, do_sample=False).tolist()

try:
    with_its_code = tokens(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))
except OSError as error:
    with_its_code = str(error)
import hf_linear_attention
from hf_linear_attention import __main__, linear_attention
compiled = torch.compile(linear_attention)(*torch.rand(3, 1, 16, 2, 8)).isfinite().all().item()
with_the_package = tokens(AutoModelForCausalLM.from_pretrained(folder))
__main__.print_report()
print(json.dumps([with_its_code, with_the_package, compiled]))
"""


@pytest.fixture
def in_read_only(tmp_path):
    """Runs a command there, with a home, and with a folder for temporary files."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()

    def run(*command, **variables):
        return subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, "sh", *command],
            env={n: x for n, x in os.environ.items() if not n.startswith(CACHES)}
            | FIXED
            | {"HOME": str(home), "TMPDIR": str(temporary)}
            | variables,
            capture_output=True,
            text=True,
        )

    try:
        tried = run("true")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if tried.returncode:
        pytest.skip(f"no system can be mounted here to be read only: {tried.stderr.strip()}")
    return run


@pytest.mark.thorough
def test_a_model_runs_where_nothing_can_be_written(tmp_path, in_read_only):
    """And the code of a model is told where it may be copied to."""
    model = tiny_model(dtype=torch.float32)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    ids = random_ids(1, 8)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    command = (sys.executable, "-c", PROGRAM, str(folder), json.dumps(ids.tolist()))

    result = in_read_only(*command)
    said = last_line(result)
    assert said[0].startswith("[Errno 30] Read-only file system") and said[1:] == [expected, True]
    assert "can't be written" in result.stdout and "HF_MODULES_CACHE" in result.stdout

    result = in_read_only(*command, HF_MODULES_CACHE=str(tmp_path / "temporary" / "code"))
    assert last_line(result) == [expected, expected, True]
    assert "can't be written" not in result.stdout
