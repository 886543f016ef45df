# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A saved directory loads anywhere: in new processes, with and without the installed package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_linear_attention
from hf_linear_attention.linear_attention import choose_backend
from tiny import VARIANTS, VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "w3 w14 w15 w9 w26"
NEW_TOKENS = 12
WITHOUT_PACKAGE = 'import sys; sys.modules["hf_linear_attention"] = None\n'  # its import fails
GENERATE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
tokens = model.generate(ids, max_new_tokens=int(sys.argv[3]), do_sample=False)[0].tolist()
folder = type(model).__module__.rpartition(".")[0]
backend = sys.modules[folder + ".linear_attention"].choose_backend(None, "cpu").name
print(json.dumps([tokens, folder, backend]))
"""
PIPELINE = """
import json, sys
import torch
from transformers import TextStreamer, pipeline
torch.set_num_threads(1)
pipe = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
streamer = TextStreamer(pipe.tokenizer)
options = {"max_new_tokens": int(sys.argv[3]), "do_sample": False, "return_tensors": True}
tokens = pipe(sys.argv[2], streamer=streamer, **options)[0]["generated_token_ids"]
print()
print(json.dumps([list(map(int, tokens)), type(pipe.model).__module__]))
"""
EVERY_AUTO_CLASS = """
import json, sys
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
found = {}
for name in json.loads(sys.argv[2]):
    auto_class = getattr(transformers, name)
    model = auto_class.from_pretrained(sys.argv[1], trust_remote_code=True)
    model(torch.tensor([[3, 1, 4]]))
    found[name] = type(model).__name__
    if name == "AutoModelForCausalLM":
        model.save_pretrained(sys.argv[3])
assert "LinearAttentionForCausalLM" in NAMES.values()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a model and a tokenizer, and the tokens that the model gives here."""
    folder = tmp_path_factory.mktemp("model")
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    model = tiny_model(dtype=torch.float32, pad_token_id=0, **VARIANTS["hybrid"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    return folder, tokens


def run(script: str, *arguments: str | Path, modules: Path):
    """The last line that a new Python prints, read as JSON."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(hf_linear_attention.__file__).parents[1]),
        "HF_MODULES_CACHE": str(modules),
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        cwd=modules,  # not the repository, which is importable
        stdin=subprocess.DEVNULL,  # nobody answers questions
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_directory_holds_all_its_code(saved):
    folder, _ = saved
    code = {path.name for path in folder.glob("*.py")}
    assert code == {
        "cache_linear_attention.py",
        "chunked.py",
        "configuration_linear_attention.py",
        "decays.py",
        "feature_maps.py",
        "linear.py",
        "linear_attention.py",
        "loss_linear_attention.py",
        "modeling_linear_attention.py",
    }
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    modeling = "modeling_linear_attention.LinearAttention"
    assert auto_map == {
        "AutoConfig": "configuration_linear_attention.LinearAttentionConfig",
        "AutoModel": modeling + "Model",
        "AutoModelForCausalLM": modeling + "ForCausalLM",
        "AutoModelForSequenceClassification": modeling + "ForSequenceClassification",
        "AutoModelForTokenClassification": modeling + "ForTokenClassification",
        "AutoModelForQuestionAnswering": modeling + "ForQuestionAnswering",
    }


def test_with_the_package_it_runs_on_its_kernels(saved, tmp_path):
    folder, expected = saved
    tokens, module, backend = run(GENERATE, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
    assert tokens == expected
    assert module.startswith("transformers_modules")  # the code came from the directory
    assert backend == choose_backend(None, "cpu").name


def test_without_the_package_it_runs_on_pytorch(saved, tmp_path):
    folder, expected = saved
    script = WITHOUT_PACKAGE + GENERATE
    tokens, module, backend = run(script, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
    assert tokens == expected
    assert module.startswith("transformers_modules")
    assert backend == "chunked"


def test_it_runs_in_a_pipeline(saved, tmp_path):
    folder, expected = saved
    tokens, module = run(PIPELINE, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
    assert tokens == expected
    assert module.startswith("transformers_modules")


def test_it_serves_every_auto_class_and_can_be_saved_again(saved, tmp_path):
    folder, expected = saved
    names = json.loads((folder / "config.json").read_text())["auto_map"]
    names = {name: path.split(".")[1] for name, path in names.items() if name != "AutoConfig"}
    again = tmp_path / "again"
    script = WITHOUT_PACKAGE + EVERY_AUTO_CLASS
    assert run(script, folder, json.dumps(list(names)), again, modules=tmp_path) == names
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in again.glob("*.py")}
    model = AutoModelForCausalLM.from_pretrained(again)  # by the package's own classes
    prompt = torch.tensor([expected[:-NEW_TOKENS]])
    tokens = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert tokens[0].tolist() == expected


def test_code_from_the_directory_lives_beside_the_package(saved, tmp_path):
    script = "import hf_linear_attention\n" + GENERATE.replace(
        "print(",
        """
local = hf_linear_attention.LinearAttentionForCausalLM.from_pretrained(sys.argv[1])
assert type(local).__module__.startswith("hf_linear_attention")
assert local.generate(ids, max_new_tokens=int(sys.argv[3]), do_sample=False)[0].tolist() == tokens
from importlib import import_module, reload
reload(import_module("hf_linear_attention.modeling_linear_attention"))
reload(hf_linear_attention)
print(""",
    ).replace("sys.modules[folder +", "sys.modules['hf_linear_attention' +")
    folder, expected = saved
    tokens, _, _ = run(script, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
    assert tokens == expected


def test_a_saved_config_alone_loads(tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.config.save_pretrained(tmp_path / "config")
    script = WITHOUT_PACKAGE + (
        "import sys, json\nfrom transformers import AutoConfig\n"
        "config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(json.dumps(config.feature_map))"
    )
    assert run(script, tmp_path / "config", modules=tmp_path) == "elu+1"
