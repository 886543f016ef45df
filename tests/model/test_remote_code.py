# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A saved directory loads anywhere: in new processes, with and without the installed package."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_linear_attention import FeatureMap, LinearAttentionForMaskedLM, register_feature_map
from hf_linear_attention.ops.backends import choose_backend
from hf_linear_attention.ops.feature_maps import REGISTERED_FEATURE_MAPS
from saved_models import WITHOUT_PACKAGE, run, word_tokenizer
from tiny import PRESET_VARIANTS, VARIANTS, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "w3 w14 w15 w9 w26"
NEW_TOKENS = 12
GENERATE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
tokens = model.generate(ids, max_new_tokens=int(sys.argv[3]), do_sample=False)[0].tolist()
backends = sys.modules.get("hf_linear_attention.ops.backends")
backend = None if backends is None else backends.choose_backend(None, "cpu").name
print(json.dumps([tokens, type(model).__module__, backend]))
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
    options = {"is_causal": False, "decay": "none"} if name == "AutoModelForMaskedLM" else {}
    model = auto_class.from_pretrained(sys.argv[1], trust_remote_code=True, **options)
    model(torch.tensor([[3, 1, 4]]))
    found[name] = type(model).__name__
    if name == "AutoModelForCausalLM":
        model.save_pretrained(sys.argv[3])
assert "LinearAttentionForCausalLM" in NAMES.values()
print(json.dumps(found))
"""


PRESET_TOKENS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
found = {}
for name in json.loads(sys.argv[2]):
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    tokens = torch.tensor([json.loads(sys.argv[3])])
    found[name] = model.generate(tokens, max_new_tokens=8, do_sample=False)[0].tolist()
print(json.dumps(found))
"""
FILL_MASK = """
import json, sys
import torch
from transformers import AutoModelForTokenClassification, pipeline
torch.set_num_threads(1)
pipe = pipeline("fill-mask", model=sys.argv[1], trust_remote_code=True)
answers = [answer["token"] for answer in pipe(sys.argv[2], top_k=5)]
head = AutoModelForTokenClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert head(torch.tensor([[3, 1, 4]])).logits.shape == (1, 3, 2)
print(json.dumps([answers, type(pipe.model).__name__]))
"""
OWN_MAP = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ValueError as error:
    message = str(error)

import hf_linear_attention

class Cube(hf_linear_attention.FeatureMap):
    def phi(self, x):
        return x.relu() ** 3

hf_linear_attention.register_feature_map("cube", Cube)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)
print(json.dumps([message, tokens[0].tolist()]))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a model and a tokenizer, and the tokens that the model gives here."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = word_tokenizer()
    model = tiny_model(dtype=torch.float32, pad_token_id=0, **VARIANTS["hybrid"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    return folder, tokens


def test_the_directory_holds_all_its_code(saved):
    folder, _ = saved
    assert {path.name for path in folder.glob("*.py")} == {
        "configuration_linear_attention.py",
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
    script = GENERATE.replace(
        "print(",
        """
from hf_linear_attention import TOVACache
options = {"past_key_values": TOVACache(99), "max_new_tokens": int(sys.argv[3])}
assert model.generate(ids, do_sample=False, **options)[0].tolist() == tokens
print(""",
    )
    folder, expected = saved
    tokens, module, backend = run(script, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
    assert tokens == expected
    assert module.startswith("hf_linear_attention.")  # whose classes take the place of others
    assert backend == choose_backend(None, "cpu").name


def test_without_the_package_it_runs_on_pytorch(saved, tmp_path):
    folder, expected = saved
    script = WITHOUT_PACKAGE + GENERATE
    tokens, module, backend = run(script, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
    assert tokens == expected
    assert module.startswith("transformers_modules")
    assert backend is None


def test_a_decoder_reads_a_memory_without_the_package(tmp_path):
    model = tiny_model(dtype=torch.float32, add_cross_attention=True, feature_map="hedgehog")
    model.save_pretrained(tmp_path / "model")
    script = WITHOUT_PACKAGE + (
        "import json, sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "memory = torch.linspace(-1, 1, 160).view(1, 5, 32)\n"
        "ids, options = torch.tensor([[3, 1]]), dict(max_new_tokens=9, do_sample=False)\n"
        "print(json.dumps(model.generate(ids, encoder_hidden_states=memory, **options).tolist()))"
    )
    memory = torch.linspace(-1, 1, 160).view(1, 5, 32)
    expected = model.generate(
        torch.tensor([[3, 1]]), encoder_hidden_states=memory, max_new_tokens=9, do_sample=False
    )
    assert run(script, tmp_path / "model", modules=tmp_path) == expected.tolist()


def test_it_runs_in_a_pipeline(saved, tmp_path):
    folder, expected = saved
    for preamble, place in {
        "": "hf_linear_attention",
        WITHOUT_PACKAGE: "transformers_modules",
    }.items():
        tokens, module = run(preamble + PIPELINE, folder, PROMPT, NEW_TOKENS, modules=tmp_path)
        assert tokens == expected
        assert module.startswith(place)


def test_it_serves_every_auto_class_and_can_be_saved_again(saved, tmp_path):
    folder, expected = saved
    names = json.loads((folder / "config.json").read_text())["auto_map"]
    names = {name: path.split(".")[1] for name, path in names.items() if name != "AutoConfig"}
    assert "AutoModel" in names
    names["AutoModel"] = names.pop("AutoModel")  # last: no head may depend on it
    again = tmp_path / "again"
    script = WITHOUT_PACKAGE + EVERY_AUTO_CLASS
    assert run(script, folder, json.dumps(list(names)), again, modules=tmp_path) == names
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in again.glob("*.py")}
    model = AutoModelForCausalLM.from_pretrained(again)  # by the package's own classes
    prompt = torch.tensor([expected[:-NEW_TOKENS]])
    tokens = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert tokens[0].tolist() == expected


@pytest.mark.thorough
def test_every_preset_and_a_window_run_without_the_package(tmp_path):
    prompt, expected = [3, 14, 15, 9, 26], {}
    for name, fields in {**PRESET_VARIANTS, "window": VARIANTS["window"]}.items():
        model = tiny_model(dtype=torch.float32, **fields)
        model.save_pretrained(tmp_path / "models" / name)
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        expected[name] = tokens[0].tolist()
    script = WITHOUT_PACKAGE + PRESET_TOKENS
    arguments = (tmp_path / "models", json.dumps(list(expected)), json.dumps(prompt))
    assert run(script, *arguments, modules=tmp_path) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("preamble", ["", WITHOUT_PACKAGE], ids=["with", "without"])
def test_an_encoder_fills_masks_in_a_pipeline(preamble, tmp_path):
    model = tiny_model(LinearAttentionForMaskedLM, dtype=torch.float32, is_causal=False)
    model.save_pretrained(tmp_path / "model")
    tokenizer = word_tokenizer(mask_token="w40")
    tokenizer.save_pretrained(tmp_path / "model")
    sentence = "w3 w14 w40 w9 w26"
    logits = model(**tokenizer(sentence, return_tensors="pt")).logits[0, 2]
    expected = [logits.topk(5).indices.tolist(), "LinearAttentionForMaskedLM"]
    assert run(preamble + FILL_MASK, tmp_path / "model", sentence, modules=tmp_path) == expected


def test_a_user_s_feature_map_is_found_once_registered(tmp_path):
    class Cube(FeatureMap):
        def phi(self, x):
            return x.relu() ** 3

    register_feature_map("cube", Cube)
    model = tiny_model(dtype=torch.float32, feature_map="cube")
    model.save_pretrained(tmp_path / "model")
    del REGISTERED_FEATURE_MAPS["cube"]
    expected = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)
    error, tokens = run(OWN_MAP, tmp_path / "model", modules=tmp_path)
    assert "feature_map must be one of 'identity', " in error
    assert "call hf_linear_attention.register_feature_map('cube', ...) first" in error
    assert tokens == expected[0].tolist()


def test_with_the_package_both_ways_of_loading_give_one_class(saved, tmp_path):
    script = "import hf_linear_attention\n" + GENERATE.replace(
        "print(",
        """
local = hf_linear_attention.LinearAttentionForCausalLM.from_pretrained(sys.argv[1])
assert type(local) is type(model) and type(local.config) is type(model.config)
from importlib import import_module, reload
reload(import_module("hf_linear_attention.model.modeling"))
reload(hf_linear_attention)
print(""",
    )
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
