# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a user meets on another machine: new processes, and paths that are not plain."""

import os
import subprocess
import sys

import pytest
import torch

from needs import needs_kernels
from new_python import FIXED, run_python
from tiny import tiny_model

# OpenMP's threads, which torch computes with, are not there in a child of fork(): so it sets one
# thread, as DataLoader's workers do. A thread of the parent computes while it forks.
FORKS = """
import threading

import pytest
import torch
import torch.multiprocessing

from hf_linear_attention import linear_attention


def work(queue=None, num_threads=2):
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 256, 8, 64, generator=generator) for _ in range(3))
    y = linear_attention(q, k, v, normalize=False, backend="cpu")
    if queue:
        queue.put(y.numpy().tobytes())
    return y.numpy().tobytes()


context = torch.multiprocessing.get_context("fork")
expected = work()
stop = threading.Event()

def keep_computing():
    while not stop.is_set():
        work(num_threads=1)

thread = threading.Thread(target=keep_computing)
thread.start()
try:
    for _ in range(5):
        queue = context.Queue()
        context.Process(target=work, args=(queue, 1), daemon=True).start()
        assert queue.get(timeout=60) == expected
finally:
    stop.set()
    thread.join()
print("all the same")
"""


@needs_kernels
def test_forked_processes_compute_while_their_parent_does():
    result = run_python("-c", FORKS)
    assert result.stdout == "all the same\n", result.stderr


# Such a child imports what it needs, and has threads of its own.
SPAWNS = """
import pytest
import torch
import torch.multiprocessing

from hf_linear_attention import linear_attention


def work(queue=None):
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 256, 8, 64, generator=generator) for _ in range(3))
    y = linear_attention(q, k, v, normalize=False, backend="cpu").numpy().tobytes()
    if queue:
        queue.put(y)
    return y


if __name__ == "__main__":
    expected = work()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=work, args=(queue,), daemon=True).start()
    assert queue.get(timeout=120) == expected
    print("the same")
"""


@pytest.mark.thorough
@needs_kernels
def test_a_spawned_process_computes_on_threads_of_its_own(tmp_path):
    program = tmp_path / "spawns.py"
    program.write_text(SPAWNS)
    result = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert result.stdout == "the same\n", result.stderr


LOAD = """
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__.split(".")[0], model(torch.arange(5)[None]).logits.argmax(-1).tolist())
"""


@pytest.mark.thorough
def test_a_path_may_have_spaces_and_any_letters_also_where_python_speaks_ascii(tmp_path):
    folder = tmp_path / "ein schönes Modell, 模型"
    model = tiny_model().eval()
    model.save_pretrained(folder)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, folder],
        env=os.environ
        | FIXED
        | {"HF_MODULES_CACHE": str(folder / "code für alle"), "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
    )
    expected = model(torch.arange(5)[None]).logits.argmax(-1)
    assert result.stdout == f"hf_linear_attention {expected.tolist()}\n", result.stderr
