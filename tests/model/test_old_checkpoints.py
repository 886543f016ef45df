# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints outlive versions: those of 0.1.0 load, run on today's kernels, and answer as then.

The package's classes load them in place of their code. Without the package that runs; where
Transformers' caches have another name than it knows, generate() is right with use_cache=False only.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hf_linear_attention.releases import CACHE
from saved_models import WITHOUT_PACKAGE, run

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoint_0_1_0"
MODELS = ["hybrid", "aaren", "favor"]
IS_OUTDATED = CACHE == "cache"  # their own code, by the installed Transformers

# Prints for every model the logits, the tokens, the module of its class, the compiled ops that ran,
# and for code of 0.1.0 which backends it sees.
ANSWERS = """
import json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
torch.set_num_threads(1)
CLASS = "modeling_linear_attention.LinearAttentionForCausalLM"

def load(folder, is_first):
    if sys.argv[1] == "installed":
        return AutoModelForCausalLM.from_pretrained(folder)
    if is_first:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    # The first one's code has imported the package, whose classes the Auto classes now prefer.
    return get_class_from_dynamic_module(CLASS, folder).from_pretrained(folder)

class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "hf_linear_attention":
            self.ops.add(op._opname)
        return op(*args, **(kwargs or {}))

found = []
for folder, ids in json.loads(sys.argv[2]):
    model = load(folder, is_first=not found)
    ids = torch.tensor(ids)
    with torch.no_grad(), Calls() as calls:
        logits = model(ids).logits
        use_cache = "without cache" not in sys.argv
        tokens = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=use_cache)
    module = type(model).__module__
    op = sys.modules.get(module.rpartition(".")[0] + ".linear_attention")
    report = None if op is None else op.backend_report()
    found.append([logits.tolist(), tokens.tolist(), module, sorted(calls.ops), report])
print(json.dumps(found))
"""


def answers(tmp_path: Path, preamble: str = "", how: str = "remote", *others, **variables: str):
    """Loads all models in one new process, and checks their logits and tokens; returns of each the
    module of its class, the compiled ops that ran, and its report of backends.
    """
    expected = [json.loads((DATA / name / "expected.json").read_text()) for name in MODELS]
    models = []
    for name, wanted in zip(MODELS, expected, strict=True):  # as `save_pretrained` left them
        shutil.copytree(DATA / name, tmp_path / name)
        shutil.copytree(DATA / "code", tmp_path / name, dirs_exist_ok=True)
        models.append([str(tmp_path / name), wanted["input_ids"]])
    modules = tmp_path / "modules"
    modules.mkdir()
    found = run(preamble + ANSWERS, how, json.dumps(models), *others, modules=modules, **variables)
    for (logits, tokens, *_), wanted in zip(found, expected, strict=True):
        actual, exact = torch.tensor(logits), torch.tensor(wanted["logits"])
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-4)
        assert tokens == wanted["tokens"]
    return [others for _, _, *others in found]


def assert_compiled(ops: list[str]) -> None:
    """A prompt, single tokens, products and norms all ran on compiled kernels."""
    assert {"linear_attention", "linear_attention_step_", "linear", "rms_norm"} <= {*ops}


def test_with_the_package_they_run_on_its_kernels(tmp_path):
    for module, ops, _ in answers(tmp_path):
        assert_compiled(ops)
        assert module == "hf_linear_attention.model.modeling"


def test_their_own_code_runs_without_the_package(tmp_path):
    others = ["without cache"] if IS_OUTDATED else []
    for module, ops, report in answers(tmp_path, WITHOUT_PACKAGE, "remote", *others):
        assert module.startswith("transformers_modules")
        assert ops == []
        assert "hf_linear_attention" in report["cpu"]


def test_the_package_s_own_classes_load_them(tmp_path):
    found = answers(tmp_path, "import hf_linear_attention\n", how="installed")
    for module, ops, _ in found:
        assert module == "hf_linear_attention.model.modeling"
        assert_compiled(ops)


@pytest.mark.sample(1)
@pytest.mark.parametrize("forced", ["cpu", "reference"])
def test_their_backend_can_be_forced(forced, tmp_path):
    for _, ops, _ in answers(tmp_path, HF_LINEAR_ATTENTION_BACKEND=forced):
        if forced == "cpu":
            assert_compiled(ops)
        else:
            assert ops == []
