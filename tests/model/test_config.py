# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The configuration: defaults, errors, and what a saved one holds."""

import json
import warnings

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.model.config_checks import unused_fields
from hf_linear_attention.model.configuration import DERIVED
from hf_linear_attention.model.presets import PRESETS
from tiny import VARIANTS, tiny_config

AAREN = {"mixer": "aaren", "feature_map": "exp"}
MAMBA2 = VARIANTS["preset_mamba2"]
HGRN = VARIANTS["preset_hgrn"]
RWKV7 = VARIANTS["preset_rwkv7"]
DELTA = {"mixer": "delta_rule", "feature_map": "identity", "normalizer": "rms_norm"}
WINDOW = {"mixer": "window"}
MLA = {"softmax_mixer": "mla", "layer_types": ["full_attention"] * 3}


def test_the_paper_s_form_is_the_one_of_its_preset_and_of_folders_that_say_nothing():
    config = LinearAttentionConfig.from_preset("katharopoulos")
    assert LinearAttentionConfig.from_dict({}).to_dict() == config.to_dict()
    assert config.mixer == "linear"
    assert config.feature_map == "elu+1"
    assert config.decay == "none"
    assert config.normalizer == "z"
    assert config.attention_eps == 1e-6
    assert config.conv_kernel_size == 0
    assert config.position_embedding_type == "sinusoidal"
    assert set(config.layer_types) == {"linear_attention"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"feature_map": "elu"}, "feature_map .*'elu\\+1'.*'hedgehog'.*got 'elu'"),
        ({"feature_map_kwargs": {"m": 3}}, "feature_map_kwargs .*got 'm'"),
        (
            {"feature_map": "favor+", "feature_map_kwargs": {"num_features": True}},
            r"feature_map_kwargs\['num_features'\] must be an integer of at least 1, got True",
        ),
        ({"decay": "learned"}, "decay .*'retnet'.*got 'learned'"),
        ({"normalizer": "rms"}, "normalizer .*'rms_norm', 'gated_rms_norm', .*, got 'rms'"),
        ({"gate_act": "tanh"}, "gate_act .*'sigmoid', 'silu', got 'tanh'"),
        ({"hidden_act": "silly"}, "hidden_act .*'silu'.*got 'silly'"),
        ({"position_embedding_type": "rope"}, "position_embedding_type .*'rotary'.*got 'rope'"),
        ({"layer_types": ["softmax"] * 3}, "layer_types .*'full_attention'.*got .*'softmax'"),
        ({"layer_types": ["full_attention"]}, "layer_types .*num_hidden_layers=3 .*got 1"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window must be given"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"num_attention_heads": 5}, "hidden_size=32 must be a multiple of num_attention_heads=5"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .*num_key_value_heads=3"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "linear_num_value_heads=3 .*=2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"head_dim": 7, "position_embedding_type": "rotary"}, "head_dim=7 must be even"),
        ({"hidden_size": 33, "num_attention_heads": 3}, "hidden_size=33 must be even"),
        ({"conv_kernel_size": 1}, "conv_kernel_size .*got 1"),
        ({"conv_kernel_size": -4}, "conv_kernel_size .*got -4"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"attention_eps": -1e-6}, "attention_eps=-1e-06 must be at least 0 and finite"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be at least 0 and finite"),
        ({"expand_v": float("inf")}, "expand_v=inf must be at least 0 and finite"),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0"),
        ({"value_act": "relu"}, "value_act .*None, 'silu', got 'relu'"),
        ({"mixer": "aaren"}, "feature_map must be 'exp' with mixer='aaren', got 'elu\\+1'"),
        ({"mixer": "softmax"}, "mixer must be one of 'linear', 'aaren', 'delta_.*got 'softmax'"),
        ({"softmax_mixer": "linear"}, "softmax_mixer .*'softmax', 'mla', got 'linear'"),
        ({**DELTA, "feature_map": "exp"}, "feature_map must be 'identity' with .*delta.*got 'exp'"),
        ({**DELTA, "normalizer": "z"}, "normalizer must be 'rms_norm' or 'gated_.*got 'z'"),
        ({**DELTA, "is_causal": False}, 'mixer must not be "delta_rule" with is_causal=False'),
        (
            {**MLA, "position_embedding_type": "rotary"},
            "position_emb.* must be 'sinusoidal' or .*mla.* 'rotary'",
        ),
        ({**MLA, "position_embedding_type": "none", "use_qk_norm": True}, "use_qk_norm .*mla"),
        (
            {**DELTA, "decay": "hgrn2"},
            "mixer must be 'linear' or 'hgrn' with decay='hgrn2', .* 'delta_rule'",
        ),
        ({**HGRN, "decay": "gla"}, "decay must be 'hgrn2' with mixer='hgrn', got 'gla'"),
        ({**HGRN, "normalizer": "z"}, "normalizer must be 'rms_norm' or .*hgrn.*got 'z'"),
        ({**HGRN, "is_causal": False}, 'mixer must not be "hgrn" with is_causal=False'),
        ({**HGRN, "num_key_value_heads": 2}, "linear_num_key_heads must be .*hgrn.*got 2"),
        ({**HGRN, "expand_k": 1}, "linear_key_head_dim must be linear_value_head_dim=12 .*got 8"),
        ({**AAREN, "decay": "per_head"}, "decay must be 'none' with mixer='aaren', got 'per_head'"),
        ({**AAREN, "is_causal": False}, 'mixer must not be "aaren" with is_causal=False'),
        ({**MAMBA2, "is_causal": False}, 'mixer must not be "mamba2" with is_causal=False'),
        ({**MAMBA2, "normalizer": "z"}, "normalizer must be 'rms_norm_of_gated' with .*mamba2"),
        ({**MAMBA2, "decay": "gla"}, "decay must be 'none' with mixer='mamba2', got 'gla'"),
        ({**MAMBA2, "linear_num_key_heads": 3}, "linear_num_value_heads=4 .*=3"),
        ({**MAMBA2, "time_step_min": 5.0}, "time_step_min, time_step_max .*got 5.0, 2.0 and"),
        ({**MAMBA2, "time_step_floor": 0}, "time_step_floor must be more than 0"),
        ({**MAMBA2, "time_step_limit": [0.1]}, "time_step_limit must be two numbers .*0.1"),
        (
            {**WINDOW, "linear_num_key_heads": 2},
            "linear_num_key_heads must be num_key_value_heads=4 .*got 2",
        ),
        ({"decay": "kda_bounded", "decay_lower_bound": 1}, "decay_lower_bound=1 must be less than"),
        ({"output_norm_eps": -1.0}, "output_norm_eps=-1.0 must be at least 0"),
        (
            {**WINDOW, "linear_num_value_heads": 8},
            "linear_num_value_heads must be num_att.*=4 .*got 8",
        ),
        ({"normalizer": "layer_norm"}, "normalizer must be 'z' or .*mixer='linear', got 'layer_n"),
        ({**RWKV7, "normalizer": "z"}, "normalizer must be 'layer_norm' with mixer='rwkv7'"),
        ({**RWKV7, "decay": "gla"}, "decay must be 'none' with mixer='rwkv7', got 'gla'"),
        ({**RWKV7, "is_causal": False}, 'mixer must not be "rwkv7" with is_causal=False'),
        ({**RWKV7, "add_cross_attention": True}, "add_cross_attention must be False with .*rwkv7"),
        ({**RWKV7, "conv_kernel_size": 4}, "conv_kernel_size must be 0 with mixer='rwkv7', got 4"),
        ({**RWKV7, "linear_num_key_heads": 2}, "linear_num_key_heads must be .*=4 .*rwkv7.*got 2"),
        ({**RWKV7, "a_low_rank_dim": 0}, "a_low_rank_dim=0 must be at least 1"),
        (
            {**RWKV7, "layer_types": ["full_attention", *["linear_attention"] * 2]},
            "layer_types must be \"linear_attention\" alone with mixer='rwkv7'",
        ),
        ({**MAMBA2, "time_step_max": float("inf")}, "time_step_max .*finite, .*got .*, inf and"),
        ({**MAMBA2, "time_step_floor": float("nan")}, "time_step_floor must be .*finite, .* nan"),
        ({"expand_k": 0.01}, "linear_key_head_dim=0 must be at least 1"),
        ({"expand_k": 2, "position_embedding_type": "rotary"}, "must be head_dim=8 with rotary"),
        ({"decay": "gla", "feature_map": "t2r"}, "feature_map must be .*'silu'.* got 't2r'"),
        ({"decay": "hgrn2", "is_causal": False}, "decay .*is_causal=False.*got 'hgrn2'"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be at least 0"),
        ({**AAREN, "normalizer": "gated_rms_norm"}, "normalizer must be 'z' with .*aaren"),
        ({**AAREN, "num_key_value_heads": 2}, "num_key_value_heads must be .*=4 .*got 2"),
        (
            {**AAREN, "position_embedding_type": "rotary"},
            "position_emb.* must be .*aaren.* 'rotary'",
        ),
        ({**WINDOW, "feature_map": "identity"}, "feature_map must be 'elu.*window.*got 'identity'"),
        ({**WINDOW, "feature_map": "favor+"}, "feature_map must be 'elu.*window.*got 'favor"),
        ({**WINDOW, "normalizer": "rms_norm"}, "normalizer must be 'z' with mixer='window'"),
        ({**WINDOW, "is_causal": False}, 'mixer must not be "window" with is_causal=False'),
        ({**WINDOW, "window_size": 0}, "window_size=0 must be at least 1"),
        ({**WINDOW, "window_sinks": -1}, "window_sinks=-1 must be at least 0"),
        ({"rotary_layers": [True]}, "rotary_layers must have num_hidden_layers=3 entries, got 1"),
        ({"is_causal": False, "decay": "retnet"}, "decay .*is_causal=False.*got 'retnet'"),
    ],
)
def test_a_wrong_value_is_refused_and_the_choices_listed(wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**wrong)


def test_a_value_of_the_wrong_type_names_its_field():
    with pytest.raises(Exception, match="hidden_size"):
        tiny_config(hidden_size="wide")


@pytest.mark.sample(6)
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_and_loaded_it_is_the_same(variant, tmp_path):
    config = tiny_config(**VARIANTS[variant])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LinearAttentionConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    for name in LinearAttentionConfig.__annotations__.keys() - unused_fields(config):
        assert getattr(loaded, name) == getattr(config, name), name


@pytest.mark.sample(5)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_saves_at_most_30_fields(preset, tmp_path):
    fields = {"num_hidden_layers": max(2, len(PRESETS[preset].layer_pattern))}
    sizes = dict(vocab_size=41, hidden_size=32, num_attention_heads=4, intermediate_size=48)
    config = LinearAttentionConfig.from_preset(preset, **sizes, **fields)
    LinearAttentionForCausalLM(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert len(saved) <= 30, sorted(saved)


def test_only_latent_attention_has_fields_for_which_clients_take_a_model_that_has_it():
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for config in (tiny_config(), LinearAttentionConfig.from_preset("qwen3_next")):
        assert [getattr(config, name) for name in names] == [None] * 4
    config.softmax_mixer = "mla"
    assert None not in [getattr(config, name) for name in names]


def test_a_config_that_names_every_field_is_the_same():
    """As versions before this one saved it."""
    for fields in VARIANTS.values():
        config = tiny_config(**fields)
        flat = {name: getattr(config, name) for name in LinearAttentionConfig.__annotations__}
        del flat["layer_types"]
        again = LinearAttentionConfig(**flat, layer_types=config.layer_types)
        assert {name: getattr(again, name) for name in flat} == flat


@pytest.mark.parametrize(
    "fields", [{"num_householder": 4}, {"learn_initial_state": True}, {"window_size": 3}]
)
def test_fields_of_other_mixers_that_are_set_are_named(fields):
    ((name, value),) = fields.items()
    with pytest.warns(UserWarning, match=f"{name}={value} changes nothing .* mixer='delta_rule'"):
        LinearAttentionConfig(**fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LinearAttentionConfig(**{name: getattr(LinearAttentionConfig, name)})
        for preset in PRESETS:
            LinearAttentionConfig.from_preset(preset)


def test_misspelt_fields_are_named_with_the_nearest():
    for wrong, right in {
        "featuremap": "'feature_map'",
        "num_heads": "'num_attention_heads'",
        "hiddensize": "'hidden_size'",
    }.items():
        with pytest.warns(UserWarning, match=f"no field '{wrong}'.* did you mean .*{right}"):
            tiny_config(**{wrong: 3})


def test_fields_of_transformers_and_of_users_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = tiny_config(num_labels=3, dtype="bfloat16", mask_token_id=3, colour="blue")
        LinearAttentionForCausalLM(config).save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).colour == "blue"


def test_derived_values_follow_what_they_are_derived_from(tmp_path):
    config = tiny_config(num_attention_heads=8)
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers = 64, 4, 2
    config.save_pretrained(tmp_path)
    for current in (config, AutoConfig.from_pretrained(tmp_path)):
        assert current.head_dim == 16
        assert current.num_key_value_heads == 4
        assert (current.linear_num_key_heads, current.linear_num_value_heads) == (4, 4)
        assert (current.linear_key_head_dim, current.linear_value_head_dim) == (16, 16)
        assert current.layer_types == ["linear_attention"] * 2
    shallow = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=1)
    assert shallow.layer_types == ["linear_attention"]


def test_a_width_that_heads_can_not_share_is_refused_later_too(tmp_path):
    config = tiny_config()
    config.hidden_size = 34
    message = "hidden_size=34 must be a multiple of num_attention_heads=4"
    with pytest.raises(ValueError, match=message):
        LinearAttentionForCausalLM(config)
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        config.save_pretrained(tmp_path)
    config.head_dim = 8
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == 34


def test_embeddings_are_scaled_where_sinusoidal_positions_are_added_or_as_is_said():
    config = tiny_config()
    assert config.scale_embeddings is True
    config.position_embedding_type = "none"
    assert config.scale_embeddings is False
    assert tiny_config(position_embedding_type="rotary", scale_embeddings=True).scale_embeddings


@pytest.mark.parametrize("field", DERIVED)
def test_none_leaves_a_field_to_the_others_also_later(field, tmp_path):
    """What a model does must not change when it is saved and loaded: None is saved as nothing."""
    is_latent = getattr(tiny_config(), field) is None
    config = tiny_config(num_hidden_layers=2, **({"softmax_mixer": "mla"} if is_latent else {}))
    derived = getattr(config, field)
    for _ in range(2):  # derived until now, then given
        setattr(config, field, None)
        assert getattr(config, field) == derived
        assert config.to_dict().get(field) is None
        setattr(config, field, derived)
        assert config.to_dict()[field] == derived
    setattr(config, field, None)
    config.hidden_size = 64  # and it follows them
    LinearAttentionForCausalLM(config)
    config.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path), field) == getattr(config, field)


def test_no_heads_are_refused_by_the_model_where_they_are_set_later():
    config = tiny_config()
    config.num_attention_heads = 0
    with pytest.raises(ValueError, match="num_attention_heads=0 must be at least 1"):
        LinearAttentionForCausalLM(config)


def test_given_values_do_not_follow():
    config = tiny_config(head_dim=4, num_key_value_heads=2)
    config.hidden_size, config.num_attention_heads = 64, 8
    assert (config.head_dim, config.num_key_value_heads) == (4, 2)
    config = tiny_config(linear_value_head_dim=5)
    config.head_dim = 6
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (6, 5)
    config.hidden_size = 64
    assert config.head_dim == 6
    assert config.to_dict()["head_dim"] == 6


@pytest.mark.parametrize("preset", ["gated_deltanet", "kda", "mamba2", "retnet"])
def test_heads_that_nothing_turns_may_have_any_size(preset, tmp_path):
    fields = dict(hidden_size=32, num_attention_heads=2, position_embedding_type="none")
    config = LinearAttentionConfig.from_preset(preset, **fields, head_dim=11)
    config.save_pretrained(tmp_path)
    assert LinearAttentionConfig.from_pretrained(tmp_path).head_dim == 11
