# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The model card, README.md, that is saved and pushed with a model."""

from collections import Counter
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from .chunked import accumulation_dtype
from .feature_maps import build_feature_map

TAGS = ["linear-attention", "custom_code"]
ATTENTION = {  # by whether a layer is of linear attention
    True: "linear attention ([Katharopoulos et al., 2020](https://arxiv.org/abs/2006.16236))",
    False: "softmax attention",
}
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
tokenizer = AutoTokenizer.from_pretrained("{name}")
{example}```

`trust_remote_code=True` takes the model's code from here, so nothing needs to be installed but
Transformers. Where the package `hf-linear-attention` is installed, `import hf_linear_attention`
makes it unnecessary; its compiled kernels are used either way.

## Citation

```bibtex
@inproceedings{{katharopoulos2020transformers,
  title     = {{Transformers are {{RNNs}}: Fast Autoregressive Transformers with Linear Attention}},
  author    = {{Katharopoulos, Angelos and Vyas, Apoorv and Pappas, Nikolaos and
               Fleuret, Fran{{\\c{{c}}}}ois}},
  booktitle = {{Proceedings of the 37th International Conference on Machine Learning}},
  year      = {{2020}}
}}
```
"""
GENERATE = """
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
"""


def make_model_card(model: PreTrainedModel, name: str, metadata: dict[str, Any]) -> ModelCard:
    """The card of a model that can be loaded as `name`; `metadata` are fields of `ModelCardData`,
    such as license, which win over ours.
    """
    config, auto_class = model.config, model._auto_class or "AutoModel"  # of classes of one's own
    data = {
        "library_name": "transformers",
        "pipeline_tag": PIPELINE_TAGS.get(auto_class),
        **metadata,
        "tags": [*(model.model_tags or []), *metadata.get("tags", [])],  # each once
    }
    rows = describe(config, model.dtype)
    kinds = {layer_type == "linear_attention" for layer_type in config.layer_types}
    text = TEXT.format(
        name=name,
        kind="language model" if config.is_causal else "bidirectional encoder",
        attention=" and ".join(ATTENTION[is_linear] for is_linear in sorted(kinds, reverse=True)),
        architecture="\n".join(f"| {what} | {value} |" for what, value in rows.items()),
        auto_class=auto_class,
        example=GENERATE if auto_class == "AutoModelForCausalLM" else "",
    )
    return ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n{text}")


def describe(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, str]:
    """What a reader wants to know of a model's architecture."""
    layers = [f"{n} × {kind}" for kind, n in Counter(config.layer_types).items()]
    rows = {
        "layers": ", ".join(layers),
        "hidden size": f"{config.hidden_size:,}",
        "heads": f"{config.num_attention_heads} of {config.head_dim} features, "
        f"{config.num_key_value_heads} of keys and values",
        "vocabulary": f"{config.vocab_size:,}",
        "positions": config.position_embedding_type,
    }
    if "linear_attention" in config.layer_types:
        rows |= {
            "feature map": config.feature_map,
            "decay": config.decay,
            "normaliser": config.normalizer,
            "short convolution": f"{config.conv_kernel_size} tokens"
            if config.conv_kernel_size > 0
            else "none",
        }
    if config.is_causal:
        rows["memory of linear attention"] = f"{state_nbytes(config, dtype):,} bytes for each row"
        softmax = [kind for kind in config.layer_types if kind != "linear_attention"]
        if softmax:
            per_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
            growth = {kind: f"{n * per_token:,}" for kind, n in Counter(softmax).items()}
            rows["memory of softmax attention"] = ", ".join(
                f"{nbytes} bytes for each token"
                + (f" of the last {config.sliding_window}" if kind == "sliding_attention" else "")
                for kind, nbytes in growth.items()
            )
    return rows


def state_nbytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that a cache holds for one row in all linear-attention layers of a model in `dtype`."""
    heads, D = config.num_key_value_heads, config.head_dim
    is_aaren = config.decay == "aaren"
    with torch.device("meta"):
        feature_map = build_feature_map(config)
    K = 1 if is_aaren else D if feature_map is None else feature_map.feature_dim
    numbers = heads * K * D  # S
    if config.normalizer == "z":
        numbers += heads * K
    if is_aaren:
        numbers += heads  # the running maximum
    nbytes = numbers * accumulation_dtype(dtype).itemsize
    if config.conv_kernel_size > 0:
        q_heads = 0 if is_aaren else config.num_attention_heads
        nbytes += (config.conv_kernel_size - 1) * (q_heads + 2 * heads) * D * dtype.itemsize
    return nbytes * config.layer_types.count("linear_attention")


def is_placeholder(card: ModelCard) -> bool:
    """Whether nobody has written anything into the card that Transformers pushes by itself."""
    placeholder = ModelCard.from_template(ModelCardData(), model_description=PLACEHOLDER)
    return card.text.strip() == placeholder.text.strip()
