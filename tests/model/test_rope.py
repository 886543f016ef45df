# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Rotary positions take the `rope_parameters` that Transformers' Llama takes, and do the same."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from tiny import HYBRID, assert_near, random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINAL = 16  # tokens that the model is made for
SHORT, LONG = 10, 40
THETA = {"rope_theta": 100.0}
STRETCHED = {**THETA, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", **THETA, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", **THETA, "factor": 4.0},
    "yarn": {"rope_type": "yarn", **STRETCHED},
    "llama3": {
        "rope_type": "llama3",
        **STRETCHED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "rope_type": "longrope",
        **STRETCHED,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.5, 3.0, 3.5],
    },
    "proportional": {"rope_type": "proportional", **THETA, "partial_rotary_factor": 0.5},
    "partial": {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5},
    "partial_yarn": {"rope_type": "yarn", **THETA, "factor": 4.0, "partial_rotary_factor": 0.5},
    "of_config_json": {"type": "linear", **THETA, "factor": 2},
}
OF_LLAMA = [name for name in ROPES if not name.startswith("partial")]  # it turns all features
CHANGING = ("dynamic", "longrope")  # frequencies of a long text are others than of a short one
LAYERS = {
    "linear": {},
    "gated": {"decay": "per_token", "normalizer": "gated_rms_norm", "conv_kernel_size": 3},
    "hybrid": {"layer_types": HYBRID, "sliding_window": 5},
    "softmax": {"layer_types": ["full_attention"] * 3},
}


def rotary(name: str, **kwargs) -> dict:
    # copies: Transformers fills in what is not given
    rope_parameters = copy.deepcopy(ROPES[name])
    fields = {"position_embedding_type": "rotary", "max_position_embeddings": ORIGINAL}
    return {**fields, "rope_parameters": rope_parameters, **kwargs}


def llama_config(name: str) -> LlamaConfig:
    sizes = tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return LlamaConfig(
        **{key: sizes[key] for key in (*names, "num_attention_heads")},
        max_position_embeddings=ORIGINAL,
        rope_parameters=copy.deepcopy(ROPES[name]),
        bos_token_id=None,
        eos_token_id=None,
    )


def softmax_model_and_llama(name: str) -> tuple[LinearAttentionForCausalLM, LlamaForCausalLM]:
    model = tiny_model(**rotary(name), **LAYERS["softmax"], rms_norm_eps=1e-6)
    llama = LlamaForCausalLM(llama_config(name)).double().eval()
    llama.load_state_dict(model.state_dict())
    return model, llama


def cos_and_sin(model, length: int) -> torch.Tensor:
    x = torch.zeros(1, length, 32)
    return torch.stack(model.model.rotary_emb(x, torch.arange(length)[None]))


# Against Llama


@pytest.mark.parametrize("name", OF_LLAMA)
def test_angles_are_those_of_llama(name):
    model = tiny_model(**rotary(name), dtype=torch.float32)
    llama = LlamaRotaryEmbedding(llama_config(name))
    for length in (SHORT, LONG, SHORT):  # back again, too
        expected = llama(torch.zeros(1, length, 32), torch.arange(length)[None])
        torch.testing.assert_close(cos_and_sin(model, length), torch.stack(expected))
    assert model.model.rotary_emb.attention_scaling == llama.attention_scaling


def test_late_angles_are_exact_where_llama_s_are_not():
    model = tiny_model(**rotary("default"), dtype=torch.float32)
    llama = LlamaRotaryEmbedding(llama_config("default"))
    x, early, late = torch.zeros(1, 1, 32), torch.tensor([[4095]]), torch.tensor([[1_000_003]])
    for ours, theirs in zip(model.model.rotary_emb(x, early), llama(x, early), strict=True):
        assert torch.equal(ours, theirs)
    angles = late[0, 0] * model.model.rotary_emb.inv_freq.double()
    exact = torch.cat([angles, angles]).cos()

    def off_by(rotary_emb) -> float:
        return (rotary_emb(x, late)[0].flatten() - exact).abs().max().item()

    assert off_by(model.model.rotary_emb) < 1e-6 < 3e-3 < off_by(llama)


@pytest.mark.parametrize("name", ["partial", "partial_yarn"])
def test_angles_of_a_part_are_those_of_qwen(name):
    model = tiny_model(**rotary(name), dtype=torch.float32)
    fields = {"head_dim": 8, "rope_parameters": copy.deepcopy(ROPES[name])}
    qwen = Qwen3NextRotaryEmbedding(Qwen3NextConfig(max_position_embeddings=ORIGINAL, **fields))
    expected = torch.stack(qwen(torch.zeros(1, LONG, 32), torch.arange(LONG)[None]))
    assert expected.shape[-1] == 4
    torch.testing.assert_close(cos_and_sin(model, LONG), expected)


@pytest.mark.parametrize("name", OF_LLAMA)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_softmax_model_is_llama(name, length):
    model, llama = softmax_model_and_llama(name)
    ids = random_ids(2, length)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        assert_near(model(ids).logits, llama(ids).logits)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        is_real = mask.bool()
        assert_near(model(**batch).logits[is_real], llama(**batch).logits[is_real])


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", OF_LLAMA)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=str,
)
def test_a_softmax_model_generates_as_llama_beyond_the_original_length(name, options):
    model, llama = softmax_model_and_llama(name)
    ids = random_ids(2, SHORT)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    how = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    expected = llama.generate(ids, **how, **options)
    assert expected.shape[1] > ORIGINAL
    assert model.generate(ids, **how, **options).tolist() == expected.tolist()


# As Transformers tests its models: which frequencies change, and when


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
def test_scaling_changes_the_texts_that_it_is_for(layers, name):
    ids = {SHORT: random_ids(1, SHORT), LONG: random_ids(1, LONG)}
    plain, scaled = (tiny_model(**rotary(x), **LAYERS[layers]) for x in ("default", name))
    with torch.no_grad():
        differs = {
            length: not torch.allclose(plain(x).logits, scaled(x).logits, atol=1e-5)
            for length, x in ids.items()
        }
    assert differs == {SHORT: name != "dynamic", LONG: True}


def test_linear_scaling_slows_every_pair():
    plain, scaled = (tiny_model(**rotary(x), dtype=torch.float32) for x in ("default", "linear"))
    every_fourth = cos_and_sin(scaled, LONG)[..., ::4, :]
    torch.testing.assert_close(every_fourth, cos_and_sin(plain, LONG // 4))


def test_dynamic_scaling_begins_after_the_original_length():
    plain, scaled = (tiny_model(**rotary(x), dtype=torch.float32) for x in ("default", "dynamic"))
    torch.testing.assert_close(cos_and_sin(scaled, ORIGINAL), cos_and_sin(plain, ORIGINAL))
    before = scaled.model.rotary_emb.inv_freq.clone()
    assert not torch.allclose(cos_and_sin(scaled, LONG), cos_and_sin(plain, LONG))
    assert (scaled.model.rotary_emb.inv_freq[1:] < before[1:]).all()
    torch.testing.assert_close(cos_and_sin(scaled, SHORT), cos_and_sin(plain, SHORT))


@pytest.mark.parametrize("name", ["yarn", "llama3"])
def test_slow_pairs_are_slowed_by_the_factor(name):
    plain, scaled = (tiny_model(**rotary(x), dtype=torch.float32) for x in ("default", name))
    before, after = (model.model.rotary_emb.inv_freq for model in (plain, scaled))
    assert (after <= before).all()
    torch.testing.assert_close(after[-1], before[-1] / 4)


# Linear attention with them


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", [name for name in ROPES if name not in CHANGING])
def test_pieces_continue_beyond_the_original_length(layers, name):
    model, ids = tiny_model(**rotary(name), **LAYERS[layers]), random_ids(2, LONG)
    with torch.no_grad():
        whole, cache, logits = model(ids).logits, None, []
        for piece in ids.split([SHORT, 1, 1, LONG - SHORT - 2], dim=1):
            outputs = model(piece, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
    assert_near(torch.cat(logits, 1), whole)


@pytest.mark.sample(14)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", ROPES)
def test_generation_with_and_without_padding_agrees(layers, name):
    model, ids = tiny_model(**rotary(name), **LAYERS[layers]), random_ids(1, SHORT)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    how = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, **how)
    assert tokens.shape[1] > ORIGINAL
    with_padding = model.generate(padded, attention_mask=(padded != 0).long(), **how)
    assert with_padding[:, 3:].tolist() == tokens.tolist()
    static = model.generate(ids, **how, cache_implementation="static")
    assert static.tolist() == tokens.tolist()


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", ROPES)
def test_packed_sequences_have_positions_of_their_own(layers, name):
    model, ids = tiny_model(**rotary(name), **LAYERS[layers]), random_ids(1, 3 * SHORT)
    lengths = [SHORT, SHORT - 2, SHORT + 2]  # each shorter than the original length
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(piece).logits for piece in ids.split(lengths, dim=1)]
    assert_near(packed, torch.cat(alone, 1))


# The config


@pytest.mark.parametrize("name", ROPES)
def test_rope_parameters_come_back_from_a_file(name, tmp_path):
    model = tiny_model(**rotary(name), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = LinearAttentionForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert loaded.config.rope_parameters.items() >= ROPES[name].items()
    config = LinearAttentionConfig.from_pretrained(tmp_path)
    assert config.rope_parameters == loaded.config.rope_parameters
    ids = random_ids(1, LONG)
    assert_near(loaded(ids).logits, model(ids).logits)


def test_older_names_are_understood():
    config = tiny_config(
        position_embedding_type="rotary",
        rope_theta=100.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    expected = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    assert config.rope_parameters.items() >= expected.items()
    assert tiny_config().rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


WRONG = {
    "kind": ({"rope_type": "spiral"}, r"\['rope_type'\] must be one of 'default', .*'spiral'"),
    "list": ({"rope_type": ["yarn"]}, r"\['rope_type'\] must be one of .*got \['yarn'\]"),
    "one_pair": (
        {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25},
        'must not be "dynamic" where .* leave one pair',
    ),
    "text_in_yarn": (
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"},
        r"\['beta_fast'\] must be a number of more than 0, got '32'",
    ),
    "other_kind": ({"rope_type": "axial"}, "must be one of 'default'"),
    "no_factor": ({"rope_type": "linear"}, r"must have \['factor'\] with rope_type='linear'"),
    "none": ({"rope_type": "dynamic", "factor": None}, r"must have \['factor'\]"),
    "no_frequencies": (
        {"rope_type": "llama3", "factor": 2.0},
        r"must have \['low_freq_factor', 'high_freq_factor'\]",
    ),
    "no_lists": ({"rope_type": "longrope"}, r"must have \['short_factor', 'long_factor'\]"),
    "small": ({"rope_type": "yarn", "factor": 0.5}, r"\['factor'\] must be .* at least 1, got 0.5"),
    "text": ({"rope_type": "linear", "factor": "4"}, r"\['factor'\] must be a number"),
    "true": ({"rope_type": "linear", "factor": True}, r"\['factor'\] must be a number"),
    "theta": ({"rope_theta": -1.0}, r"\['rope_theta'\] must be a number of more than 0, got -1.0"),
    "theta_1": (
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        r"\['rope_theta'\] must not be 1 with rope_type='yarn'.*got 1.0",
    ),
    "length_1": (
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 1,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
        r"\['original_max_position_embeddings'\] must not be 1 with rope_type='longrope'.*got 1",
    ),
    "infinite": (
        {"rope_type": "yarn", "factor": float("inf")},
        r"\['factor'\] must be finite, got inf",
    ),
    "text_in_mscale": (
        {"rope_type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1.0},
        r"\['mscale'\] must be a finite number, got '1'",
    ),
    "zero": (
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 4.0},
        r"\['low_freq_factor'\] must be a number of more than 0, got 0",
    ),
    "length": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        r"\['original_max_position_embeddings'\] must be a number of at least 1, got 0",
    ),
    "order": (
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 1.0,
        },
        r"\['high_freq_factor'\] must be more than low_freq_factor=4.0, got 1.0",
    ),
    "too_few": (
        {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4},
        r"\['short_factor'\] must be a list of head_dim / 2 = 4 numbers, got \[1.0, 1.0, 1.0\]",
    ),
    "no_list": (
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": 2.0},
        r"\['long_factor'\] must be a list of head_dim / 2 = 4 numbers, got 2.0",
    ),
    "partial": (
        {"rope_type": "default", "partial_rotary_factor": 0.2},
        r"at most 1 and leave an even number of head_dim=8 features, got 0.2",
    ),
    "all_of_it": (
        {"rope_type": "proportional", "partial_rotary_factor": 1.5},
        "at most 1 .*got 1.5",
    ),
    "per_layer_type": (
        {"full_attention": ROPES["default"], "linear_attention": ROPES["linear"]},
        "must be one dict for all layers, got one per type",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["rotary", "none"])
def test_wrong_parameters_are_refused_by_the_config(wrong, kind):
    rope_parameters, message = WRONG[wrong]
    rope_parameters = copy.deepcopy(rope_parameters)
    with pytest.raises(ValueError, match=message):
        tiny_config(position_embedding_type=kind, rope_parameters=rope_parameters)


def test_parameters_that_were_changed_are_checked_by_the_model():
    config = tiny_config(**rotary("linear"))
    config.rope_parameters = {"rope_type": "linear"}
    with pytest.raises(ValueError, match=r"must have \['factor'\]"):
        LinearAttentionForCausalLM(config)
