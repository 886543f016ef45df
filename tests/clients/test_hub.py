# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models on the Hub (a stand-in for it): pushed, and loaded again, with and without the package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fake_hub import TOKEN, FakeHub, running_hub
from hf_linear_attention import LinearAttentionForSequenceClassification
from saved_models import WITHOUT_PACKAGE, last_line, new_process, word_tokenizer
from tiny import VARIANTS, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "w3 w14 w15 w9 w26"
SENTENCES = ["w3 w14 w15", "w20", "w7 w7 w31 w4 w12 w12"]
PUSH = """
import json, sys
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
import hf_linear_attention
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("someone/model", max_shard_size="40KB")
tokenizer.push_to_hub("someone/model")
classifier = AutoModelForSequenceClassification.from_pretrained(sys.argv[2])
classifier.push_to_hub("someone/classifier")
tokenizer.push_to_hub("someone/classifier")
print(json.dumps("pushed"))
"""
LOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained("someone/model", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("someone/model", trust_remote_code=True)
ids = tokenizer(sys.argv[1], return_tensors="pt").input_ids
tokens = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
model.push_to_hub("someone/copy")

generator = pipeline("text-generation", model="someone/model", trust_remote_code=True)
options = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
generated = list(map(int, generator(sys.argv[1], **options)[0]["generated_token_ids"]))
classifier = pipeline("text-classification", model="someone/classifier", trust_remote_code=True)
answers = classifier(json.loads(sys.argv[2]), batch_size=3, top_k=None)
scores = [[{x["label"]: x["score"] for x in answer}[f"LABEL_{i}"] for i in range(2)]
          for answer in answers]
print(json.dumps([tokens, generated, scores, type(model).__module__]))
"""


def talk_to(hub: FakeHub, cache) -> dict[str, str]:
    """Environment variables for a process that takes `hub` for the Hub."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def run(script: str, *arguments: str | Path, modules: Path, **variables: str):
    """The last line that a process prints, which is new in all: it imports Transformers, too."""
    process = new_process(modules, **variables)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return last_line(subprocess.run(command, **process, capture_output=True, timeout=300))


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """A Hub with a language model and a classifier, and what they answer here."""
    folder = tmp_path_factory.mktemp("pushed")
    tokenizer = word_tokenizer()
    options = {"dtype": torch.float32, "pad_token_id": 0}
    model = tiny_model(**options, **VARIANTS["hybrid"])
    classifier = tiny_model(
        LinearAttentionForSequenceClassification, **options, **VARIANTS["gated"]
    )
    for name, saved in {"model": model, "classifier": classifier}.items():
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
        scores = [
            classifier(**tokenizer(sentence, return_tensors="pt")).logits[0].softmax(-1).tolist()
            for sentence in SENTENCES
        ]
    with running_hub() as hub:
        models = (folder / "model", folder / "classifier")
        assert run(PUSH, *models, modules=folder, **talk_to(hub, folder / "home"))
        yield hub, tokens, scores


@pytest.mark.sample(1)
@pytest.mark.parametrize("preamble", ["", WITHOUT_PACKAGE], ids=["with", "without"])
def test_what_is_pushed_is_what_anybody_loads(preamble, pushed, tmp_path):
    hub, tokens, scores = pushed
    arguments = (PROMPT, json.dumps(SENTENCES))
    variables = talk_to(hub, tmp_path / "home")
    loaded = run(preamble + LOAD, *arguments, modules=tmp_path, **variables)
    assert loaded[0] == tokens
    assert loaded[1] == tokens
    torch.testing.assert_close(torch.tensor(loaded[2]), torch.tensor(scores))
    place = "transformers_modules.someone.model" if preamble else "hf_linear_attention."
    assert loaded[3].startswith(place)

    original, copy = hub.repos["someone/model"], hub.repos["someone/copy"]
    code = {path: content for path, content in original.items() if path.endswith(".py")}
    assert code == {path: content for path, content in copy.items() if path.endswith(".py")}
    (tmp_path / "copy").mkdir()
    for path, content in copy.items():
        (tmp_path / "copy" / path).write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    ids = torch.tensor([tokens[:-12]])
    assert model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist() == tokens


def test_what_a_repository_holds(pushed):
    hub, _, _ = pushed
    for name, task in {"model": "text-generation", "classifier": "text-classification"}.items():
        card = hub.repos[f"someone/{name}"]["README.md"].decode()
        assert f"pipeline_tag: {task}" in card
        assert f'from_pretrained("someone/{name}", trust_remote_code=True)' in card
    paths = hub.repos["someone/model"]
    assert {"config.json", "tokenizer.json"} <= paths.keys()
    assert sum(path.endswith(".safetensors") for path in paths) > 2  # as max_shard_size asks
