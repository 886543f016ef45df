# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`convert`: with its softmax layers kept a model computes what it did; what is new is listed."""

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from hf_linear_attention import LinearAttentionForCausalLM, convert
from hf_linear_attention.conversion.convert import forms
from softmax_models import COMMON, SOFTMAX_MODELS, softmax_model, some_ids

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
EXACT = {"rtol": 1e-4, "atol": 3e-5}  # float32, beside logits of about 10


@pytest.fixture(scope="module", params=SOFTMAX_MODELS)
def pair(request):
    """A model, and the same with all layers kept."""
    model = softmax_model(request.param)
    return model, *convert(model, softmax_layers="all")


@torch.no_grad()
def test_with_its_layers_kept_it_gives_the_same_logits(pair):
    model, converted, _ = pair
    ids = some_ids(2, 25)
    logits = model(ids).logits
    assert logits.std() > 0.5
    torch.testing.assert_close(converted(ids).logits, logits, **EXACT)


@torch.no_grad()
def test_with_its_layers_kept_padded_rows_give_the_same_logits(pair):
    model, converted, _ = pair
    ids, mask = some_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    real = mask.bool()
    torch.testing.assert_close(
        converted(ids, attention_mask=mask).logits[real], logits[real], **EXACT
    )


def test_with_its_layers_kept_it_generates_the_same_tokens(pair):
    model, converted, _ = pair
    ids, mask = some_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    ids = ids * mask
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), converted.generate(ids, **options))


CHANGED = {  # of models with other weights than ours: modules, and how they are changed
    "gemma": ("norm", r"1 \+ weight"),
    "granite": ("embed_tokens|q_proj|o_proj|down_proj|model.norm", r"times [\d.]+"),
    "gemma3_text": ("norm", r"1 \+ weight"),
    "phi3": ("[qkv]_proj|gate_proj|up_proj", "rows of (qkv|gate_up)_proj"),
}


def test_with_its_layers_kept_every_parameter_is_copied_and_none_is_new(pair):
    model, converted, report = pair
    given, has = (dict(x.named_parameters()) for x in (model, converted))
    assert report.new == report.left_out == ()
    assert {*report.copied, *report.changed} == set(has)
    assert {*report.copied} <= set(given)
    modules, how = CHANGED.get(model.config.model_type, ("^$", ""))
    assert set(report.changed) == {name for name in has if re.search(modules, name)}
    assert all(re.fullmatch(f"{how}.*", change) for change in report.changed.values())
    for name in report.copied:
        x = converted.get_parameter(name)
        assert torch.equal(x, given[name])
        assert x.data_ptr() != given[name].data_ptr()


def test_layer_types_are_those_of_the_original():
    names = ("llama", "mistral", "qwen2_sliding", "smollm3_sliding")
    kept = {name: convert(softmax_model(name), softmax_layers="all").model.config for name in names}
    assert kept["llama"].layer_types == [FULL] * 3
    assert kept["mistral"].layer_types == [SLIDING] * 3
    assert kept["mistral"].sliding_window == 4
    assert kept["qwen2_sliding"].layer_types == [FULL, SLIDING, SLIDING]
    assert kept["smollm3_sliding"].layer_types == [FULL, FULL, SLIDING]
    assert kept["smollm3_sliding"].rotary_layers == [True, True, False]


@pytest.mark.parametrize(
    ("softmax_layers", "kept"),
    [("none", ()), ("all", (0, 1, 2, 3)), (2, (1, 3)), (4, (3,)), ([0, 2], (0, 2)), ([], ())],
)
def test_the_layers_that_are_named_stay(softmax_layers, kept):
    model = softmax_model("llama", num_hidden_layers=4)
    config = convert(model, softmax_layers=softmax_layers).model.config
    assert config.layer_types == [FULL if i in kept else LINEAR for i in range(4)]
    again = convert(model, layer_types=config.layer_types).model.config
    assert again.layer_types == config.layer_types


@pytest.mark.parametrize("mixer", forms())
@pytest.mark.parametrize("name", ["llama_with_biases", "qwen3", "qwen2", "gemma", "olmo3"])
def test_linear_layers_start_from_the_projections_and_what_is_new_is_listed(mixer, name):
    model = softmax_model(name)
    converted, report = convert(model, mixer, softmax_layers=[1])
    given, has = dict(model.named_parameters()), dict(converted.named_parameters())
    assert {*report.copied, *report.changed, *report.new} == set(has)
    assert {*report.copied, *report.changed, *report.left_out} == set(given)
    assert not set(report.new) & set(given)
    assert not set(report.left_out) & set(has)
    for name in (*report.new, *report.left_out):
        assert ".self_attn." in name
        assert ".1." not in name
    assert all(("_norm" in name) for name in report.left_out)
    for kind in "qkvo":
        weight = f"model.layers.0.self_attn.{kind}_proj.weight"
        expected = given[weight]
        if weight in report.changed:  # heads repeated
            heads = expected.unflatten(0, (model.config.num_key_value_heads, -1))
            groups = has[weight].shape[0] // expected.shape[0]
            expected = torch.stack([head for head in heads for _ in range(groups)]).flatten(0, 1)
        torch.testing.assert_close(has[weight], expected, rtol=0, atol=0)
    for x in has.values():
        assert x.isfinite().all()
    assert str(report).count("\n") < 40


@pytest.mark.parametrize("mixer", forms())
def test_the_converted_model_trains_and_generates(mixer):
    model, report = convert(softmax_model("llama"), mixer, softmax_layers=3)
    ids = some_ids(2, 10)
    model.train()
    model(ids, labels=ids).loss.backward()
    for name in report.new:
        assert model.get_parameter(name).grad is not None, name
    model.eval()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 13)


@pytest.mark.parametrize("name", ["llama_with_biases", "qwen3", "smollm3", "qwen2", "gemma"])
def test_a_window_as_long_as_the_text_gives_the_logits_of_the_original_untrained(name):
    model = softmax_model(name)
    converted, report = convert(model, window_size=25, window_sinks=0)
    assert report.left_out == ()
    assert {name.split("self_attn.")[1] for name in report.new} == {
        "mixing.log_factor",
        "feature_map.q_weight",
        "feature_map.k_weight",
    }
    with torch.no_grad():
        ids = some_ids(2, 25)
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, **EXACT)
        longer = some_ids(2, 40)  # which older tokens are read by other weights
        assert not torch.allclose(converted(longer).logits, model(longer).logits, atol=1e-2)


@pytest.mark.parametrize("name", ["mistral", "qwen2_sliding"])
def test_a_window_is_no_larger_than_the_one_that_the_layer_had(name):
    model = softmax_model(name)  # whose window is of 4 tokens
    converted = convert(model).model
    assert converted.config.window_size == 4
    ids = some_ids(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, **EXACT)
    assert convert(model, window_size=3).model.config.window_size == 3
    with pytest.raises(ValueError, match="window_size must be at most 4, the sliding_window .* 5"):
        convert(model, window_size=5)
    assert convert(model, "t2r", window_size=5).model.config.window_size == 5
    assert convert(model, softmax_layers="all").model.config.window_size == 64


def test_the_original_is_left_as_it_is():
    model = softmax_model("smollm").train()
    before = {name: x.clone() for name, x in model.named_parameters()}
    converted = convert(model).model
    assert converted.training
    with torch.no_grad():
        for x in converted.parameters():
            x.zero_()
    for name, x in model.named_parameters():
        assert torch.equal(x, before[name])
    assert "linear" not in model.config.model_type


def test_the_generation_config_the_dtype_and_special_tokens_come_along():
    model = softmax_model("qwen2").to(torch.bfloat16)
    model.generation_config.temperature = 0.3
    model.generation_config.do_sample = True
    converted = convert(model).model
    assert converted.generation_config.temperature == 0.3
    assert converted.generation_config is not model.generation_config
    assert converted.dtype == converted.config.dtype == torch.bfloat16
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(converted.config, name) == COMMON[name]


def test_whether_embeddings_are_tied_is_seen_in_the_weights():
    model = softmax_model("smollm")
    assert convert(model).model.config.tie_word_embeddings
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)  # as merged adapters are
    converted = convert(model, softmax_layers="all").model
    assert not converted.config.tie_word_embeddings
    ids = some_ids(1, 5)
    torch.testing.assert_close(converted(ids).logits, model(ids).logits, **EXACT)


def test_a_converted_model_is_saved_and_loaded(tmp_path):
    converted = convert(softmax_model("smollm3"), "gated_deltanet", softmax_layers=[0]).model
    converted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LinearAttentionForCausalLM
    assert loaded.config.rotary_layers == [True, False, True]
    ids = some_ids(1, 7)
    torch.testing.assert_close(loaded(ids).logits, converted(ids).logits)


# ---- refusals ----


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("gpt2", {}, "model must be one of 'llama', 'mistral', .* got 'gpt2'"),
        ("mixtral", {}, "got 'mixtral', which has a mixture of experts"),
        ("qwen2_moe", {}, "got 'qwen2_moe', which has a mixture of experts"),
        ("gemma2", {}, "got 'gemma2', which has soft-capping of attention scores and of logits"),
        ("gemma", {"use_bidirectional_attention": True}, "got 'gemma', which has attention in bo"),
        ("linear_attention", {}, "got 'linear_attention', which has layers that are linear alr"),
        (
            "linear_attention",
            {"layer_types": [FULL] * 3, "softmax_mixer": "mla"},
            "got 'linear_attention', which has latent attention",
        ),
    ],
)
def test_an_architecture_that_is_not_supported_is_named_with_what_it_has(
    model_type, fields, message
):
    fields = {**COMMON, **fields} if model_type != "gpt2" else dict(n_embd=32, n_head=2, n_layer=1)
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        convert(model)


def test_rotary_positions_of_another_kind_are_refused_by_name():
    model = softmax_model("llama")
    model.config.rope_parameters = {"rope_type": "twisted", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type.* must be one of .*'yarn'.*, got 'twisted'"):
        convert(model)


def test_a_quantised_or_absent_weight_is_refused():
    model = softmax_model("llama")
    layer = model.model.layers[1].mlp
    whole = layer.up_proj.weight
    layer.up_proj.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="quantised or sharded: .*up_proj.weight is .*int8"):
        convert(model)
    layer.up_proj.weight = nn.Parameter(whole.to("meta"))
    with pytest.raises(ValueError, match="up_proj.weight is on the meta device"):
        convert(model)


def test_shapes_and_names_that_do_not_fit_the_config_are_refused():
    model = softmax_model("llama")
    mlp = model.model.layers[2].mlp
    mlp.up_proj = nn.Linear(32, 40, bias=False)
    with pytest.raises(ValueError, match=r"2.mlp.up_proj.weight must .*\(48, 32\).* \(40, 32\)"):
        convert(model)
    mlp.up_proj = nn.Linear(32, 48, bias=True)
    with pytest.raises(ValueError, match="model has a model.layers.2.mlp.up_proj.bias"):
        convert(model)
    mlp.up_proj = nn.Identity()
    with pytest.raises(ValueError, match="model has no model.layers.2.mlp.up_proj.weight"):
        convert(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "hyena"}, "mixer must be one of 'hedgehog', .*'window', got 'hyena'"),
        ({"softmax_layers": "some"}, "softmax_layers must be none, all, .* got 'some'"),
        ({"softmax_layers": 0}, "softmax_layers=0 must be at least 1"),
        ({"softmax_layers": True}, "softmax_layers must be none, all, .* got True"),
        ({"softmax_layers": [1, 3]}, r"softmax_layers must be from 0 to 2, got \[3\]"),
        ({"softmax_layers": [0.5]}, r"softmax_layers must be none, .* got \[0.5\]"),
        ({"layer_types": [LINEAR]}, "layer_types must have an entry for each of 3 layers, got 1"),
        ({"layer_types": [LINEAR, SLIDING, LINEAR]}, r"layer_types\[1\] .*'full_attention', as it"),
        ({"layer_types": [FULL] * 3, "softmax_layers": 2}, "say the same: give one, got 2"),
        ({"feature_map": "elu"}, "feature_map must be one of .* got 'elu'"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        convert(softmax_model("llama"), **options)


def test_what_is_no_language_model_is_refused():
    config = LlamaConfig(**COMMON)
    with pytest.raises(ValueError, match="must be a LlamaForCausalLM, got LlamaModel"):
        convert(AutoModel.from_config(config))
    with pytest.raises(ValueError, match="a model of Transformers, got Linear; .*merge_and_unload"):
        convert(nn.Linear(2, 2))


@pytest.mark.parametrize("softmax_layers", [None, 1.5, True, "some", [1.0]])
def test_what_names_no_layers_is_refused(softmax_layers):
    with pytest.raises(ValueError, match="softmax_layers must be"):
        convert(softmax_model("llama"), softmax_layers=softmax_layers)


def test_what_names_no_mixer_is_refused():
    with pytest.raises(ValueError, match=r"mixer must be one of .* got \['window'\]"):
        convert(softmax_model("llama"), ["window"])
