# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A process that may use one CPU: told so before it begins, or later, or by its container."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from needs import needs_kernels
from new_python import FIXED
from saved_models import last_line
from tiny import random_ids, tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux is asked for CPUs"),
]

# Generates tokens, more than are read before they are recorded.
PROGRAM = """
import json, os, sys
import torch
from hf_linear_attention import LinearAttentionForCausalLM
from hf_linear_attention.__main__ import cpu_limit, print_report

folder, ids, num_threads, cpu = map(json.loads, sys.argv[1:])
if num_threads:
    torch.set_num_threads(num_threads)
if cpu is not None:
    torch.rand(2**18).exp()  # on threads that are there from now on
    os.sched_setaffinity(0, {cpu})
model = LinearAttentionForCausalLM.from_pretrained(folder)
tokens = model.generate(torch.tensor(ids), max_new_tokens=40, do_sample=False)
loss = model(tokens, labels=tokens).loss
loss.backward()
print_report()
print(json.dumps([torch.get_num_threads(), cpu_limit(), tokens.tolist()]))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model whose products are large enough for two threads, a prompt, and what it generates."""
    model = tiny_model(dtype=torch.float32, hidden_size=256, intermediate_size=512)
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    ids = random_ids(1, 8)
    return folder, ids.tolist(), model.generate(ids, max_new_tokens=40, do_sample=False).tolist()


def run(saved, num_threads=0, cpu=None, before=()):
    """What the program prints: 0 threads, as many as torch chooses; with `cpu`, on that one alone
    from a moment on; `before` its command, another one.
    """
    folder, ids, _ = saved
    environment = os.environ | FIXED
    del environment["OMP_NUM_THREADS"]
    arguments = map(json.dumps, (str(folder), ids, num_threads, cpu))
    return subprocess.run(
        [*before, sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


ONE_CPU_FIRST = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.thorough
def test_who_has_one_cpu_from_the_beginning_has_one_thread(saved):
    result = run(saved, before=(sys.executable, "-c", ONE_CPU_FIRST))
    num_threads, _, tokens = last_line(result)
    assert num_threads == 1 and tokens == saved[2]


@pytest.mark.thorough
def test_two_threads_on_one_cpu_compute_the_same(saved):
    result = run(saved, num_threads=2, cpu=min(os.sched_getaffinity(0)))
    num_threads, _, tokens = last_line(result)
    assert num_threads == 2 and tokens == saved[2]


ONE_CPU = {  # of the time of all, in the two versions of control groups: folder, file, content
    "/sys/fs/cgroup/cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"},
    "/sys/fs/cgroup": {"cpu.max": "100000 100000"},
}


@pytest.fixture
def container():
    """A control group whose processes together have the time of one CPU."""
    for folder, files in ONE_CPU.items():
        group = Path(folder, f"hf-linear-attention-{os.getpid()}")
        try:
            group.mkdir()
        except OSError as error:
            why_not = error
            continue
        try:
            for name, content in files.items():
                with open(group / name, "r+") as file:  # which is there, or this is no group
                    file.write(content)
            yield group
            return
        except OSError as error:
            why_not = error
        finally:
            group.rmdir()
    pytest.skip(f"control groups can't be made here: {why_not}")


@pytest.mark.thorough
def test_a_container_with_the_time_of_one_cpu_computes_the_same_and_is_reported(saved, container):
    join = ("sh", "-c", f'echo $$ > {container}/cgroup.procs && exec "$@"', "sh")
    result = run(saved, num_threads=2, before=join)
    assert last_line(result) == [2, 1.0, saved[2]]
    assert "this container has the time of 1 CPUs" in result.stdout
    assert "OMP_NUM_THREADS=1 " in result.stdout
