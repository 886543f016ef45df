# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The plans by which Transformers shards a model name modules that it has, and only those."""

import copy
import logging

import pytest
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import verify_tp_plan

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForMaskedLM,
    LinearAttentionForQuestionAnswering,
    LinearAttentionForSequenceClassification,
    LinearAttentionForTokenClassification,
    LinearAttentionModel,
)
from hf_linear_attention.mixers.parts.tensor_parallel import TENSOR_PARALLEL_STYLES
from tiny import HYBRID, NEWER, VARIANTS, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CROSS = {"add_cross_attention": True}
MODELS = {
    **VARIANTS,
    "tied": {"tie_word_embeddings": True},
    "cross": CROSS,
    "gated_cross": {**CROSS, "normalizer": "gated_rms_norm"},
    "aaren_cross": {**CROSS, **VARIANTS["aaren"]},
    "aaren_hybrid": {**VARIANTS["aaren"], "layer_types": HYBRID, "sliding_window": 5},
    "gated_softmax": {"normalizer": "gated_rms_norm", "layer_types": ["full_attention"] * 3},
    "aaren_softmax": {**VARIANTS["aaren"], "layer_types": ["full_attention"] * 3},
}
HEADS = (
    LinearAttentionModel,
    LinearAttentionForSequenceClassification,
    LinearAttentionForTokenClassification,
    LinearAttentionForQuestionAnswering,
)
PROJECTIONS = {name.rpartition(".")[2] for name in TENSOR_PARALLEL_STYLES} | {"lm_head"}
UNUSED = ("rules were not applied", "match nothing")


def generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def module_names(model: nn.Module) -> set[str]:
    return {generic(name) for name, _ in model.named_modules()}


@pytest.fixture
def warnings_of_transformers(caplog):
    """The messages, which Transformers' own handler would take."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)


def assert_plans_fit(model: nn.Module) -> None:
    names = module_names(model)
    for plan in (model.tp_plan, model.pp_plan, model.fsdp_plan):
        assert plan.keys() <= names
    # no projection is left out
    projections = {name for name in names if name.rpartition(".")[2] in PROJECTIONS}
    assert projections <= model.tp_plan.keys()


@pytest.mark.parametrize("variant", MODELS)
def test_plans_name_what_the_model_has(variant, warnings_of_transformers):
    model = tiny_model(**MODELS[variant])
    assert_plans_fit(model)
    # Transformers' own checks
    verify_tp_plan(list(model.state_dict()), model.tp_plan)
    model.tp_plan = dict(model.tp_plan)
    if type(model).fsdp_plan.fset:  # which Transformers 5.20 does not have
        model.fsdp_plan = dict(model.fsdp_plan)
    assert not [x for x in warnings_of_transformers() if any(words in x for words in UNUSED)]


@pytest.mark.parametrize("variant", ["paper", "gated", "hybrid", "aaren", *NEWER])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_plans_of_every_head(variant, head):
    model = head(tiny_config(**MODELS[variant], pad_token_id=0))
    assert_plans_fit(model)
    assert len(model.tp_plan) == len(model.config.base_model_tp_plan)


def test_plans_of_an_encoder():
    model = LinearAttentionForMaskedLM(tiny_config(is_causal=False))
    assert_plans_fit(model)
    assert "lm_head" in model.tp_plan


@pytest.mark.parametrize("variant", ["paper", "gated", "aaren", "cross", "learned", *NEWER])
def test_loading_warns_of_no_rule(variant, tmp_path, warnings_of_transformers):
    tiny_model(**MODELS[variant]).save_pretrained(tmp_path)
    for auto_class in (AutoModelForCausalLM, AutoModel):
        auto_class.from_pretrained(tmp_path)
    assert not [x for x in warnings_of_transformers() if any(words in x for words in UNUSED)]


def test_the_plan_follows_the_config():
    config = tiny_config(mixer="aaren", feature_map="exp")
    assert "layers.*.self_attn.q_proj" not in config.base_model_tp_plan
    config.mixer = "linear"
    assert "layers.*.self_attn.q_proj" in config.base_model_tp_plan
    config.normalizer = "gated_rms_norm"
    assert "layers.*.self_attn.g_proj" in config.base_model_tp_plan
    short = tiny_config(
        layer_types=["full_attention"] * 2 + ["linear_attention"], normalizer="gated_rms_norm"
    )
    assert "layers.*.self_attn.g_proj" in short.base_model_tp_plan
    short.num_hidden_layers = 2  # as generate() does it to draft
    assert "layers.*.self_attn.g_proj" not in short.base_model_tp_plan


def test_a_plan_may_be_set():
    config, plan = tiny_config(), {"layers.*.mlp.up_proj": "colwise"}
    config.base_model_tp_plan = plan
    assert config.base_model_tp_plan == copy.deepcopy(config).base_model_tp_plan == plan
    # Transformers adds the embedding, in all releases but the older ones.
    assert LinearAttentionModel(config).tp_plan.keys() - {"embed_tokens"} == plan.keys()
    assert tiny_config().base_model_tp_plan != plan
    assert LinearAttentionConfig.base_model_tp_plan.keys() > plan.keys()  # all there may be


@pytest.mark.parametrize("change", [{}, {"base_model_tp_plan": {"norm": "replicated"}}])
def test_no_plan_is_saved(change, tmp_path):
    config = tiny_config(**VARIANTS["gated"])
    for name, value in change.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    for fields in (config.to_dict(), config.to_diff_dict()):
        assert not [name for name in fields if "plan" in name]
    assert "plan" not in (tmp_path / "config.json").read_text()
