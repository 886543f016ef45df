# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of Transformers' own recurrent families, with random weights so large that a wrong
state changes the tokens.
"""

import inspect

import torch
import transformers
from packaging.version import Version
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from hf_linear_attention.releases import CACHE_NAMES
from hf_linear_attention.upstream import tiny_models
from hf_linear_attention.upstream.families import FAMILIES
from hf_linear_attention.upstream.family import Family
from hf_linear_attention.upstream.tiny_models import fill_weights

VOCAB_SIZE = tiny_models.VOCAB_SIZE

VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    out_hidden_size=32,
    projection_intermediate_size=16,
    image_size=28,
)
# What the tiny models have beside their sizes, by their types.
SETTINGS = {
    "olmo_hybrid": dict(linear_allow_neg_eigval=True),
    "lfm2_moe": dict(conv_bias=True),
}
# Types of text models whose name is another than that of their module.
OF_TEXT = {
    f"{name}_text": name
    for name in ("qwen3_5", "qwen3_5_moe", "qwen4_exp", "inkling", "inkling2", "inkling2_loop")
}
MULTIMODAL = {
    "glm5_next": dict(
        text_config=FAMILIES["glm5_next"].sizes,
        vision_config=VISION,
        image_token_id=60,
        video_token_id=61,
        image_start_token_id=62,
        image_end_token_id=62,
        video_start_token_id=63,
        video_end_token_id=63,
    )
}

# Models whose states are on their modules, or in a list, and not in a cache.
WITHOUT_CACHE = {name: FAMILIES[name].sizes for name in ("recurrent_gemma", "rwkv")}


def family_for(model_type: str) -> Family:
    return FAMILIES[OF_TEXT.get(model_type, model_type)]


# model type -> its config's fields
OF_ALL_MODELS = {
    model_type: {**family_for(model_type).sizes, **SETTINGS.get(model_type, {})}
    for model_type in (*OF_TEXT, *FAMILIES)
    if model_type not in (*OF_TEXT.values(), *MULTIMODAL, *WITHOUT_CACHE)
} | MULTIMODAL


# Models and classes that the oldest Transformers lacks, or is left alone with, and since when not.
SINCE = {
    "bailing_hybrid": "5.20",
    "inkling": "5.21",  # before, its own drafts and beams fail
    "inkling_text": "5.21",
    "inkling2": "5.23",
    "inkling2_text": "5.23",
    "inkling2_loop": "5.24",
    "inkling2_loop_text": "5.24",
    "lara_mini": "5.24",
    "lfm3": "5.23",
    "NemotronHRMSNormGated": "5.20",
}


def is_here(name: str) -> bool:
    """Whether the installed Transformers has this model or class."""
    return Version(transformers.__version__) >= Version(SINCE.get(name, "5.17"))


CONFIGS = {name: config for name, config in OF_ALL_MODELS.items() if is_here(name)}
# One model of each family of recurrent layers.
ONE_OF_EACH = ("qwen3_5_text", "kimi_linear", "mamba2", "minimax", "lfm2", "mamba")


def tiny_upstream(model_type: str, **changes) -> torch.nn.Module:
    """In evaluation mode; the same weights each time."""
    config = AutoConfig.for_model(
        model_type, **{**(CONFIGS | WITHOUT_CACHE)[model_type], **changes}
    )
    auto_class = AutoModelForCausalLM if type(config) in CAUSAL else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto_class.from_config(config, experts_implementation="eager").eval()  # any dtype
    fill_weights(model, torch.default_generator)
    for name, weight in model.named_buffers():
        assert weight.isfinite().all(), name
    return model


def close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 2e-5) -> None:
    """Relative to the largest value."""
    size = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * size)


def cache_name(model: torch.nn.Module) -> str:
    """What the installed release calls a cache, among a model's arguments and in its outputs."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in a dtype, as from_pretrained makes it: some models keep parts in float32."""
    kept = model._keep_in_fp32_modules_strict or ()
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, x in tensors:
            if x.is_floating_point() and not any(part in name for part in kept):
                x.data = x.data.to(dtype)
    return model
