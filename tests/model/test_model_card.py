# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The README.md that is saved and pushed with a model."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData, repocard
from huggingface_hub.errors import EntryNotFoundError
from test_remote_code import WITHOUT_PACKAGE, run, word_tokenizer
from transformers import Trainer, TrainingArguments

from hf_linear_attention import LinearAttentionCache
from hf_linear_attention.cache.layers import RecurrentLayer
from hf_linear_attention.model.model_card import PLACEHOLDER, linked, state_nbytes
from hf_linear_attention.model.modeling import AUTO_CLASSES
from hf_linear_attention.model.presets import PRESETS
from tiny import VARIANTS, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PIPELINE_TAGS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
OWN = "---\nlicense: mit\n---\n\n# Mine\n"


def header_and_text(readme) -> tuple[dict, str]:
    _, header, text = readme.read_text("utf-8").split("---\n", 2)
    return yaml.safe_load(header), text


@pytest.mark.parametrize("auto_class", AUTO_CLASSES, ids=lambda auto_class: auto_class.__name__)
def test_every_head_is_found_by_its_task(auto_class, tmp_path):
    is_causal = auto_class.__name__ != "AutoModelForMaskedLM"
    tiny_model(AUTO_CLASSES[auto_class], is_causal=is_causal).save_pretrained(tmp_path / "model")
    header, text = header_and_text(tmp_path / "model" / "README.md")
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": PIPELINE_TAGS[auto_class.__name__],
        "tags": ["linear-attention", "custom_code"],
    }
    assert text.startswith("\n# model\n")
    assert f'{auto_class.__name__}.from_pretrained("model", trust_remote_code=True)' in text
    assert "https://arxiv.org/abs/2006.16236" in text
    assert ("model.generate(" in text) == (auto_class.__name__ == "AutoModelForCausalLM")


def test_it_says_how_the_model_is_built(tmp_path):
    model = tiny_model(dtype=torch.float32, **VARIANTS["hybrid"])
    model.save_pretrained(tmp_path)
    _, text = header_and_text(tmp_path / "README.md")
    rows = dict(re.findall(r"^\| (.+) \| (.+) \|$", text, re.M))
    assert rows == {
        "parameters": f"{sum(x.numel() for x in model.parameters()):,}",
        "layers": "1 × linear_attention, 1 × full_attention, 1 × sliding_attention",
        "hidden size": "32",
        "heads": "4 of 8 features, 2 of keys and values",
        "vocabulary": "41",
        "positions": "rotary",
        "mixer": "linear",
        "feature map": "elu+1",
        "decay": "per_token",
        "normaliser": "z",
        "short convolution": "3 tokens",
        "heads of linear attention": "8, 4 of keys with 8 features and of values with 8",
        "memory of linear attention": "2,176 bytes for each row",
        "memory of softmax attention": "128 bytes for each token, "
        "128 bytes for each token of the last 5",
    }


@pytest.mark.parametrize(
    "variant, arxiv",
    {
        "paper": ["2006.16236"],
        "preset_gated_deltanet": ["2412.06464", "2006.16236"],
        "preset_mamba2": ["2405.21060", "2006.16236"],
        "preset_kimi_linear": ["2510.26692", "2006.16236"],
        "preset_softmax": ["1706.03762", "2302.13971"],
    }.items(),
)
def test_it_names_the_system_s_own_paper(variant, arxiv, tmp_path):
    tiny_model(**VARIANTS[variant]).save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    _, sources = text.split("## Sources")
    assert re.findall(r"arxiv.org/abs/([\d.]+)", sources) == arxiv
    if "2006.16236" in arxiv:
        assert f"with linear attention ({linked(source_of_variant(variant))})" in text


def source_of_variant(variant):
    presets = {"paper": "katharopoulos", "preset_kimi_linear": "kda"}
    return PRESETS[presets.get(variant, variant.removeprefix("preset_"))].source


def test_it_says_where_values_share_keys(tmp_path):
    tiny_model(**VARIANTS["preset_mamba2"]).save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    row = "2 of keys with 6 features, 4 of values with 16"
    assert f"| heads of linear attention | {row} |" in text
    assert "| mixer | mamba2 |" in text


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_memory_is_that_of_the_cache(variant, dtype):
    model = tiny_model(dtype=dtype, **VARIANTS[variant])
    cache = LinearAttentionCache(model.config)
    with torch.no_grad():
        model(random_ids(3, 5), past_key_values=cache)
    linear = [layer.tensors for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    nbytes = sum(x.nbytes for tensors in linear for x in tensors.values())
    assert 3 * state_nbytes(model) == nbytes


def test_without_softmax_layers_nothing_grows(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    assert "softmax" not in (tmp_path / "model" / "README.md").read_text("utf-8")


def test_a_user_gives_the_licence_and_more(tmp_path):
    model = tiny_model()
    model.card_metadata = {"license": "apache-2.0", "language": ["en"], "tags": ["poems"]}
    model.add_model_tags("mine")
    model.save_pretrained(tmp_path)
    header, _ = header_and_text(tmp_path / "README.md")
    assert header["license"] == "apache-2.0" and header["language"] == ["en"]
    assert header["tags"] == ["linear-attention", "custom_code", "mine", "poems"]
    assert tiny_model().model_tags == ["linear-attention", "custom_code"]


@pytest.mark.parametrize("metadata", [None, {}, {"tags": None, "license": None}])
def test_none_says_nothing(metadata, tmp_path):
    model = tiny_model()
    model.card_metadata = metadata
    model.save_pretrained(tmp_path)
    header, _ = header_and_text(tmp_path / "README.md")
    assert header["tags"] == ["linear-attention", "custom_code"] and "license" not in header


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tags": "poems"}, r"card_metadata\['tags'\] must be a list of strings, got 'poems'"),
        ({"tags": 3}, r"card_metadata\['tags'\] must be a list of strings, got 3"),
        ({"tags": [None]}, r"card_metadata\['tags'\] must be a list of strings, got \[None\]"),
        ("mit", "card_metadata must be a dict of fields by name, got 'mit'"),
        ({3: 4}, "card_metadata must be a dict of fields by name, got {3: 4}"),
    ],
)
def test_a_wrong_header_is_refused(metadata, message, tmp_path):
    model = tiny_model()
    model.card_metadata = metadata
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path)


def test_a_link_that_leads_nowhere_stays(tmp_path):
    readme = tmp_path / "model" / "README.md"
    readme.parent.mkdir()
    readme.symlink_to(tmp_path / "no" / "where")
    tiny_model().save_pretrained(readme.parent)
    assert readme.is_symlink() and not readme.exists()
    assert (readme.parent / "model.safetensors").is_file()


@pytest.mark.parametrize("own", [OWN.encode(), "Größe".encode("latin-1")])
def test_a_card_that_is_there_stays(own, tmp_path):
    (tmp_path / "README.md").write_bytes(own)
    tiny_model().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == own


def test_only_one_process_writes_it(tmp_path):
    tiny_model().save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("preamble", ["", WITHOUT_PACKAGE], ids=["with", "without"])
def test_what_it_says_about_use_works(preamble, tmp_path):
    model = tiny_model(dtype=torch.float32, pad_token_id=0)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    _, text = header_and_text(tmp_path / "model" / "README.md")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.M)
    end = "\nimport json\nprint(json.dumps(type(model).__module__))"
    module = run(preamble + snippet + end, modules=tmp_path)
    place = "transformers_modules." if preamble else "hf_linear_attention."
    assert module.startswith(place)


class Repository:
    """A repository of the Hub: the card that it has, and the one that is pushed to it."""

    def __init__(self, monkeypatch, folder):
        self.readme, self.pushed = folder / "on_the_hub.md", None
        monkeypatch.setattr(repocard, "hf_hub_download", self.download)
        monkeypatch.setattr(HfApi, "create_repo", self.create)
        monkeypatch.setattr(HfApi, "create_commit", self.commit)

    def create(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def download(self, repo_id, filename, **kwargs):
        if not self.readme.exists():
            raise EntryNotFoundError("no README.md")
        return self.readme

    def commit(self, operations, **kwargs):
        files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
        assert "config.json" in files
        self.pushed = Path(files["README.md"]).read_text("utf-8")


@pytest.fixture
def repository(monkeypatch, tmp_path):
    return Repository(monkeypatch, tmp_path)


def test_it_is_pushed_with_the_model(repository):
    model = tiny_model()
    model.card_metadata["license"] = "mit"
    model.push_to_hub("poet", tags=["poems"])
    card = ModelCard(repository.pushed)
    assert card.data.license == "mit" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["linear-attention", "custom_code", "poems"]
    assert 'AutoModelForCausalLM.from_pretrained("someone/poet", ' in card.text


def test_the_repository_s_card_stays(repository):
    repository.readme.write_text(OWN)
    tiny_model().push_to_hub("poet")
    card = ModelCard(repository.pushed)
    assert card.text == "\n# Mine\n" and card.data.license == "mit"
    assert card.data.tags == ["linear-attention", "custom_code"]  # Transformers adds these


def test_a_form_that_somebody_filled_in_stays(repository):
    form = ModelCard.from_template(ModelCardData(), model_description=PLACEHOLDER)
    form.text = form.text.replace("[More Information Needed]", "Poems.", 1)
    form.save(repository.readme)
    tiny_model().push_to_hub("poet")
    assert "Poems." in repository.pushed and "## Architecture" not in repository.pushed


def test_an_empty_form_is_replaced(repository):
    ModelCard.from_template(ModelCardData(), model_description=PLACEHOLDER).save(repository.readme)
    tiny_model().push_to_hub("poet")
    assert "[More Information Needed]" not in repository.pushed
    assert "## Architecture" in repository.pushed


@pytest.mark.parametrize("own", [None, OWN])
def test_a_folder_is_saved_and_pushed_at_once(own, repository, tmp_path):
    folder = tmp_path / "poet"
    folder.mkdir()
    if own is not None:
        (folder / "README.md").write_text(own)
    tiny_model().save_pretrained(folder, push_to_hub=True)
    assert (folder / "README.md").read_text("utf-8") == repository.pushed
    assert ("# Mine" if own else "## Architecture") in repository.pushed


def test_trainer_writes_a_card_of_its_own_over_it(tmp_path):
    model = tiny_model(dtype=torch.float32)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments)
    trainer.save_model()
    assert "## Architecture" in (tmp_path / "README.md").read_text("utf-8")
    trainer.create_model_card(model_name="poet", tags=["poems"])
    header, text = header_and_text(tmp_path / "README.md")
    assert header["library_name"] == "transformers" and "## Training procedure" in text
    assert set(header["tags"]) >= {"poems", "linear-attention", "custom_code"}
    trainer.save_model()
    assert header_and_text(tmp_path / "README.md") == (header, text)
