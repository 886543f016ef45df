# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A mixer that the package does not have, in one class with its facts, and one line that registers
it, is what the package's own are to the config, presets, caches and their files, parallel ranks,
model cards, vLLM and conversion.

Shapes: B batch, T time, C hidden size, H heads.
"""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init

from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionConfig,
    MixerFacts,
    convert,
    register_mixer,
)
from hf_linear_attention.fast.linear import project
from hf_linear_attention.mixers.facts import QKV, REGISTERED_MIXERS
from hf_linear_attention.mixers.linear_attention import Heads, LinearAttentionBase
from hf_linear_attention.model.model_card import make_model_card
from hf_linear_attention.model.presets import Preset
from hf_linear_attention.recurrences.linear_attention import LinearInputs, LinearRecurrence
from hf_linear_attention.vllm.refusals import check_model, check_ranks
from tiny import assert_near, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread", "registered")

FIELDS = {"feature_map": "identity", "normalizer": "rms_norm", "fading_rate": 0.5}
SOURCE = "A. Student, Fading Attention, arXiv 2611.00001"


class Fading(LinearAttentionBase):
    """Linear attention that forgets at one rate, and writes each token as strongly as it says."""

    facts = MixerFacts(
        needs={"normalizer": ("rms_norm",), "decay": ("none",)},
        fields=("fading_rate",),
        projections=(*QKV, "w_proj"),
        conversions={"fading": FIELDS},
        presets={
            "fading": Preset(
                SOURCE, {"mixer": "fading", "position_embedding_type": "none"} | FIELDS
            )
        },
    )

    def __init__(self, config, layer_idx):
        heads = Heads.sharing_queries(config)
        super().__init__(config, config.hidden_size, heads)
        self.layer_idx = layer_idx
        self.log_decay = -config.fading_rate
        self.w_proj = nn.Linear(config.hidden_size, heads.keys, bias=False)
        self.boost = nn.Parameter(torch.empty(1))
        self.recurrence = LinearRecurrence(
            heads.values, heads.key_dim, heads.value_dim, normalize=False
        )

    def reset_parameters(self):
        init.constant_(self.boost, 2.0)

    def forward(self, hidden_states, tokens, past_key_values=None, **kwargs):
        B, T, C = hidden_states.shape
        hidden_states, _, memory = self.begin(hidden_states, tokens, past_key_values)
        q, k, v = (project(getattr(self, name), hidden_states) for name in QKV)
        q, (k, v) = self.by_heads(q, self.heads.key_dim), self.split(k, v)
        strength = project(self.w_proj, hidden_states).sigmoid() * self.boost
        log_decay = torch.full_like(strength, self.log_decay)
        inputs = LinearInputs(q, k * strength[..., None], v, log_decay)
        y = memory.run(self.recurrence, inputs)
        memory.write(v.dtype)
        return self.project_out(hidden_states, y, None).view(B, T, C), None


@pytest.fixture
def registered():
    register_mixer("fading", Fading)
    yield
    del REGISTERED_MIXERS["fading"]


def fading_model(**fields):
    return tiny_model(mixer="fading", **(FIELDS | fields))


@torch.no_grad()
def read(model, ids, **kwargs):
    return model(ids, **kwargs).logits


def test_a_config_checks_its_fields_saves_its_own_and_has_its_preset(tmp_path, recwarn):
    config = LinearAttentionConfig.from_preset("fading", hidden_size=32, num_attention_heads=4)
    assert (config.mixer, config.fading_rate) == ("fading", 0.5)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.mixer, loaded.fading_rate) == ("fading", 0.5)
    assert not [warning for warning in recwarn if "fading_rate" in str(warning.message)]
    assert "fading_rate" not in LinearAttentionConfig(fading_rate=0.5).to_dict()
    for wrong, message in {
        "normalizer": "normalizer must be 'rms_norm' with mixer='fading', got 'z'",
        "linear_num_key_heads": "must be num_key_value_heads=4 with mixer='fading', got 2",
        "is_causal": 'mixer must not be "fading" with is_causal=False',
    }.items():
        value = {"normalizer": "z", "linear_num_key_heads": 2, "is_causal": False}[wrong]
        with pytest.raises(ValueError, match=message):
            fading_model(**{wrong: value})
    with pytest.raises(ValueError, match="preset must be one of .*'fading', got 'fadin'"):
        LinearAttentionConfig.from_preset("fadin")


def test_a_model_starts_as_its_class_says_trains_and_is_saved(tmp_path):
    config = fading_model().config
    model = AutoModelForCausalLM.from_config(config)
    assert all(layer.self_attn.boost.item() == 2 for layer in model.model.layers)
    ids = random_ids(2, 9)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read(again, ids), read(model, ids))


def test_generate_goes_on_from_its_cache_and_beams_and_drafts_follow():
    model, ids = fading_model(), random_ids(2, 7)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    answer = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, use_cache=False, **options), answer)
    model.generate(ids, num_beams=3, **options)
    drafted = model.generate(ids[:1], prompt_lookup_num_tokens=3, **options)
    assert torch.equal(drafted, answer[:1])


def test_its_cache_goes_to_a_file_and_not_to_a_model_with_another_of_its_fields(tmp_path):
    model, ids = fading_model(), random_ids(1, 9)
    cache = LinearAttentionCache(model.config)
    read(model, ids[:, :5], past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config)
    expected = read(model, ids)[:, 5:]
    assert_near(read(model, ids[:, 5:], past_key_values=loaded), expected)
    other = fading_model(fading_rate=0.25)
    with pytest.raises(ValueError, match="fading_rate=0.25, as .* one with fading_rate=0.5"):
        LinearAttentionCache.load(tmp_path / "cache", other.config)
    with pytest.raises(ValueError, match="made for this model, with fading_rate=0.25, got"):
        read(other, ids[:, 5:], past_key_values=cache)


def test_ranks_share_its_projections_by_the_plan():
    plan = fading_model().config.base_model_tp_plan
    styles = {name.split(".")[-1]: style for name, style in plan.items() if "self_attn" in name}
    of_heads = dict.fromkeys((*QKV, "w_proj"), "colwise")
    assert styles == {**of_heads, "o_proj": "rowwise"}


def test_its_card_names_its_source_and_the_size_of_its_state():
    model = fading_model()
    card = str(make_model_card(model, "someone/fading", {}))
    assert "A. Student, Fading Attention, [arXiv 2611.00001]" in card
    assert "| mixer | fading |" in card
    cache = LinearAttentionCache(model.config)
    read(model, random_ids(1, 3), past_key_values=cache)
    nbytes = sum(x.nbytes for layer in cache.layers for x in layer.tensors.values())
    assert f"| memory of linear attention | {nbytes:,} bytes" in card


def test_vllm_takes_it_on_as_many_ranks_as_share_its_heads():
    config = fading_model().config
    check_model(config, longest=100)
    check_ranks(config, ranks=2)
    with pytest.raises(ValueError, match="num_key_value_heads=4 must be a multiple of .*=3"):
        check_ranks(fading_model(intermediate_size=48).config, ranks=3)


def test_softmax_layers_become_it_by_its_name():
    types = ["full_attention"] * 3
    model = tiny_model(layer_types=types, position_embedding_type="rotary")
    converted, report = convert(model, "fading", fading_rate=0.125)
    assert converted.config.mixer == "fading"
    assert {layer.self_attn.log_decay for layer in converted.model.layers} == {-0.125}
    name = "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(converted.state_dict()[name], model.state_dict()[name])
    assert "model.layers.0.self_attn.w_proj.weight" in report.new


def test_only_new_names_and_modules_with_facts_are_registered():
    with pytest.raises(ValueError, match="the package's own mixers, got 'hgrn'"):
        register_mixer("hgrn", Fading)
    for wrong in (3, nn.Linear, MixerFacts()):
        with pytest.raises(ValueError, match="must be a subclass of torch.nn.Module with facts"):
            register_mixer("mine", wrong)
    assert REGISTERED_MIXERS == {"fading": Fading}


def test_a_name_that_nobody_registered_says_how():
    with pytest.raises(
        ValueError, match=r"'window', 'fading', got 'fade' .*register_mixer\('fade'"
    ):
        LinearAttentionConfig(mixer="fade")
