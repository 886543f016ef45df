# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The model card, README.md, that is saved and pushed with a model."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from ..mixers.facts import facts_of
from .presets import LINEAR, PAPER, PRESETS, all_presets

TAGS = ["linear-attention", "custom_code"]
# Of what a preset's layers of linear attention are told from those of others.
TOLD_BY = ("mixer", "feature_map", "decay", "normalizer")
RECURRENT_FORM, SOFTMAX = PRESETS["katharopoulos"].source, PRESETS["softmax"].source
PIPELINE_TAGS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
# What Transformers pushes, within a template to be filled in, where a repository has no card.
PLACEHOLDER = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model "
    "card has been automatically generated."
)
TEXT = """
# {name}

A {kind} with {attention}, made with `hf-linear-attention` for Transformers.

## Architecture

| | |
|---|---|
{architecture}

## How to use it

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
{example}```

`trust_remote_code=True` takes the model's code from here, so nothing needs to be installed but
Transformers. Where the package `hf-linear-attention` is installed, `import hf_linear_attention`
makes it unnecessary; its compiled kernels are used either way.

## Sources

{sources}
"""
GENERATE = """
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
"""


class ModelCardMixin:
    """For a PreTrainedModel: `save_pretrained` and `push_to_hub` write a card, unless there is one
    that somebody wrote.

    `card_metadata` says what its header has beside our own fields.
    """

    card_metadata: dict[str, Any]
    _card_before: bytes | None  # what was in the folder before Transformers wrote into it

    def save_pretrained(self, save_directory, is_main_process=True, *args, **kwargs):
        """As in Transformers, and a model card, README.md.

        Raises:
            ValueError: card_metadata is no dict of a card's fields.
        """
        readme = Path(save_directory, "README.md")
        self._card_before = readme.read_bytes() if readme.is_file() else None
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore
        is_saved = is_main_process and readme.parent.is_dir() and not self._saves_adapters
        if is_saved and not os.path.lexists(readme):  # a link is somebody's, wherever it leads
            make_model_card(self, readme.parent.resolve().name, self.card_metadata).save(readme)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """As in Transformers, which has just written the repository's card into the directory, or a
        form to be filled in. In place of the form goes the card that was there, or ours.
        """
        readme = Path(working_dir, "README.md")
        form = ModelCard.load(readme)
        if is_placeholder(form) and not self._saves_adapters:
            if self._card_before is not None:
                readme.write_bytes(self._card_before)
            else:
                metadata = {**checked_metadata(self.card_metadata), "tags": form.data.tags}
                make_model_card(self, repo_id, metadata).save(readme)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore

    @property
    def _saves_adapters(self) -> bool:
        """Whether save_pretrained saves PEFT's adapters instead of the model."""
        return getattr(self, "_hf_peft_config_loaded", False)


def make_model_card(model: PreTrainedModel, name: str, metadata: dict[str, Any]) -> ModelCard:
    """The card of a model that can be loaded as `name`; `metadata` are fields of `ModelCardData`,
    such as license, which win over ours.
    """
    metadata = checked_metadata(metadata)
    config, auto_class = model.config, auto_class_of(model)
    data = {
        "library_name": "transformers",
        "pipeline_tag": PIPELINE_TAGS.get(auto_class),
        **metadata,
        "tags": [*(model.model_tags or []), *metadata["tags"]],  # each once
    }
    rows = describe(model)
    source = source_of(config)
    attention = {f"linear attention ({linked(source)})": LINEAR in config.layer_types}
    attention["softmax attention"] = {*config.layer_types} != {LINEAR}
    sources = dict.fromkeys((source, RECURRENT_FORM)) if LINEAR in config.layer_types else ()
    text = TEXT.format(
        name=name,
        kind="language model" if config.is_causal else "bidirectional encoder",
        attention=" and ".join(kind for kind, is_there in attention.items() if is_there),
        sources="\n".join(f"- {linked(source)}" for source in sources or [SOFTMAX]),
        architecture="\n".join(f"| {what} | {value} |" for what, value in rows.items()),
        auto_class=auto_class,
        example=GENERATE if auto_class == "AutoModelForCausalLM" else "",
    )
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n{text}")


def auto_class_of(model: PreTrainedModel) -> str:
    """The name of the Auto class that loads a model, or a subclass of a user's."""
    found = {own: auto.__name__ for auto, own in getattr(model, "auto_classes", {}).items()}
    return next((found[x] for x in type(model).__mro__ if x in found), "AutoModel")


def source_of(config: PreTrainedConfig) -> str:
    """Of the first preset whose linear attention a config has; else of linear attention as such."""
    for preset in all_presets().values():
        fields = {**PAPER, **preset.fields}
        if LINEAR in preset.layer_pattern and all(
            getattr(config, name) == fields[name] for name in TOLD_BY
        ):
            return preset.source
    return RECURRENT_FORM


def linked(source: str) -> str:
    """A source with links to what it names of arXiv."""
    return re.sub(r"(?:arXiv )?(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """`card_metadata` with a list of tags, which may be empty; None says nothing.

    Raises:
        ValueError: it is no dict of fields by name, or its tags are no list of strings.
    """
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping) or not are_strings([*metadata]):
        raise ValueError(f"card_metadata must be a dict of fields by name, got {metadata!r}")
    tags = metadata.get("tags")
    tags = [] if tags is None else tags
    if not isinstance(tags, (list, tuple)) or not are_strings(tags):
        raise ValueError(f"card_metadata['tags'] must be a list of strings, got {tags!r}")
    return {**metadata, "tags": [*tags]}


def are_strings(values: Sequence[Any]) -> bool:
    return all(isinstance(x, str) for x in values)


def describe(model: PreTrainedModel) -> dict[str, str]:
    """What a reader wants to know of a model's architecture."""
    config, dtype = model.config, model.dtype
    layers = [f"{n} × {kind}" for kind, n in Counter(config.layer_types).items()]
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "layers": ", ".join(layers),
        "hidden size": f"{config.hidden_size:,}",
        "heads": f"{config.num_attention_heads} of {config.head_dim} features, "
        f"{config.num_key_value_heads} of keys and values",
        "vocabulary": f"{config.vocab_size:,}",
        "positions": config.position_embedding_type,
    }
    if "linear_attention" in config.layer_types:
        Hk, K = config.linear_num_key_heads, config.linear_key_head_dim
        Hv, V = config.linear_num_value_heads, config.linear_value_head_dim
        as_softmax = config.num_key_value_heads, config.num_attention_heads
        if (Hk, Hv) != as_softmax or {K, V} != {config.head_dim}:
            shares = facts_of(config.mixer).queries_share_keys
            of_keys = f"{Hk} of keys with {K} features"
            rows["heads of linear attention"] = (
                f"{Hv}, {of_keys} and of values with {V}"
                if shares
                else f"{of_keys}, {Hv} of values with {V}"
            )
        rows |= {
            "mixer": config.mixer,
            "feature map": config.feature_map,
            "decay": config.decay,
            "normaliser": config.normalizer,
            "short convolution": f"{config.conv_kernel_size} tokens"
            if config.conv_kernel_size > 0
            else "none",
        }
    if config.is_causal:
        rows["memory of linear attention"] = f"{state_nbytes(model):,} bytes for each row"
        growth: Counter[str] = Counter()
        for kind, layer in zip(config.layer_types, model.base_model.layers, strict=True):
            growth[kind] += getattr(layer.self_attn, "num_cached", 0) * dtype.itemsize
        del growth[LINEAR]
        if growth:
            rows["memory of softmax attention"] = ", ".join(
                f"{nbytes:,} bytes for each token"
                + (f" of the last {config.sliding_window}" if kind == "sliding_attention" else "")
                for kind, nbytes in growth.items()
            )
    return rows


def state_nbytes(model: PreTrainedModel) -> int:
    """Bytes that a cache holds for one row in all layers with recurrences."""
    dtype = model.dtype
    return sum(
        math.prod(size.shape) * (one.dtype_of_sums(dtype) if size.is_sum else dtype).itemsize
        for layer in model.base_model.layers
        for one in getattr(layer.self_attn, "recurrences", ())
        for size in one.state_sizes().values()
    )


def is_placeholder(card: ModelCard) -> bool:
    """Whether nobody has written anything into the card that Transformers pushes by itself."""
    placeholder = ModelCard.from_template(ModelCardData(), model_description=PLACEHOLDER)
    return card.text.strip() == placeholder.text.strip()
