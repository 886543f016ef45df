# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A notebook, in Jupyter's own kernel: progress bars are other classes there, cells are stopped by
hand, and modules are loaded again.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from needs import needs_kernels
from new_python import FIXED
from saved_models import PACKAGE
from tiny import random_ids, tiny_model

MODEL = """
import os, signal, sys, threading
import torch
from transformers import AutoModelForCausalLM
import hf_linear_attention

model = AutoModelForCausalLM.from_pretrained({folder!r})
ids = torch.tensor({ids})
def tokens(number=20, **options):
    return model.generate(ids, max_new_tokens=number, do_sample=False, **options).tolist()
print(sys.executable, tokens())
"""

# As the button that stops a cell does it.
STOPPED = """
stop = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
stop.start()
tokens(10**6, min_new_tokens=10**6)
"""

TRAINED = """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    {folder!r}, max_steps=2, logging_steps=1, eval_strategy="steps", dataloader_num_workers=2,
    report_to=[], use_cpu=True,
)
data = [{{"input_ids": ids[0], "labels": ids[0]}}] * 16
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
trainer.train()
print([line["loss"] for line in trainer.state.log_history if "loss" in line])
"""

# What is registered with torch is registered again.
RELOADED = """
%load_ext autoreload
%autoreload 2
import hf_linear_attention.fast.linear, hf_linear_attention.ops.compiled.linear_attention as native
for module in (hf_linear_attention.fast.linear, native):
    with open(module.__file__, "a") as file:
        file.write("WAS_CHANGED = True")
"""

COMPUTED = """
q = torch.rand(1, 8, 2, 4, requires_grad=True)
hf_linear_attention.linear_attention(q, q, q).sum().backward()
fast = hf_linear_attention.fast.linear
print(fast.WAS_CHANGED, native.WAS_CHANGED, q.grad.isfinite().all().item())
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Runs a cell in a kernel that is there for all tests, and returns what it puts out. The kernel
    has a copy of the package, which cells may change.
    """
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(PACKAGE, "hf_linear_attention"), copy / "hf_linear_attention")
    client = NotebookClient(new_notebook(), timeout=300, kernel_name="python3")
    environment = os.environ | FIXED | {"PYTHONPATH": str(copy)}

    def run(source):
        cell = new_code_cell(source)
        client.nb.cells.append(cell)
        client.execute_cell(cell, len(client.nb.cells) - 1)
        return cell.outputs

    with client.setup_kernel(env=environment):
        yield run


def printed(outputs):
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


@pytest.fixture(scope="module")
def generated(notebook, tmp_path_factory):
    """What a model generates here, once it has generated the same in the notebook."""
    folder, ids = tmp_path_factory.mktemp("model"), random_ids(1, 8)
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(folder)
    tokens = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    outputs = notebook(MODEL.format(folder=str(folder), ids=ids.tolist()))
    assert printed(outputs) == f"{sys.executable} {tokens}\n"
    return tokens


@pytest.mark.thorough
def test_a_model_goes_on_after_a_cell_was_stopped(notebook, generated):
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook(STOPPED)
    assert printed(notebook("print(tokens())")) == f"{generated}\n"


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["%run -m", "!{sys.executable} -m"])
def test_the_report_is_printed_in_a_cell(notebook, generated, command):
    said = printed(notebook(f"{command} hf_linear_attention"))
    assert "backends, in order of preference" in said
    assert f"python {sys.version.split()[0]}" in " ".join(said.split())
    assert printed(notebook("print(tokens())")) == f"{generated}\n"


def test_trainer_shows_its_table_and_trains(notebook, generated, tmp_path):
    outputs = notebook(TRAINED.format(folder=str(tmp_path)))
    tables = [o.data["text/html"] for o in outputs if o.output_type == "display_data"]
    assert any("Validation Loss" in table for table in tables)
    first, last = json.loads(printed(outputs).splitlines()[-1])
    assert last < first


@pytest.mark.thorough
@needs_kernels
def test_modules_that_were_changed_are_loaded_again(notebook, generated):
    notebook(RELOADED)
    assert printed(notebook(COMPUTED)).endswith("True True True\n")
    assert printed(notebook("print(tokens())")) == f"{generated}\n"
