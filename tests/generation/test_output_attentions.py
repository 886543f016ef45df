# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`output_attentions` gives the maps of the softmax layers, as Transformers' own hybrids do
(Qwen3-Next, LFM2): one entry per such layer, none for linear attention.
"""

import pytest
import torch
from transformers import BertConfig, BertModel, EncoderDecoderModel, LlamaConfig, LlamaForCausalLM

from tiny import VARIANTS, random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, NEW = 8, 5
FULL = ["full_attention"] * 3
MODELS = {
    "paper": {},
    "gated": VARIANTS["gated"],
    "aaren": VARIANTS["aaren"],
    "one_of_three": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "two_of_three": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "all": {"layer_types": FULL},
}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
    "assistant": {"assistant_model": "same"},
    "other_assistant": {"assistant_model": "other"},
    "no_cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}
DRAFTS = ("prompt_lookup", "assistant", "other_assistant")


def generate(model, mode, ids, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **MODES[mode], **options}
    which = options.pop("assistant_model", None)
    if which is not None:
        options["assistant_model"] = model if which == "same" else tiny_model(seed=1)
    options |= {"output_attentions": True, "return_dict_in_generate": True}
    return model.generate(ids, **options)


def repeating_ids() -> torch.Tensor:
    return random_ids(1, LENGTH // 2).repeat(1, 2)  # something to be looked up


def llama() -> LlamaForCausalLM:
    sizes = tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = LlamaConfig(**{name: sizes[name] for name in (*names, "num_attention_heads")})
    config.bos_token_id = config.eos_token_id = None
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def shapes_of_llama():
    """By mode, of the map of one layer for each token."""
    model, ids = llama(), repeating_ids()
    shapes = {}
    for mode in MODES:
        how = "prompt_lookup" if mode in DRAFTS else mode
        shapes[mode] = [tuple(step[0].shape) for step in generate(model, how, ids).attentions]
    return shapes


@pytest.mark.sample(25)
@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_every_token_has_the_maps_of_the_softmax_layers(variant, mode, shapes_of_llama):
    model = tiny_model(**MODELS[variant], attn_implementation="eager")
    outputs = generate(model, mode, repeating_ids())
    num_maps = model.config.layer_types.count("full_attention")
    assert [[tuple(x.shape) for x in step] for step in outputs.attentions] == [
        [shape] * num_maps for shape in shapes_of_llama[mode]
    ]


@pytest.mark.parametrize("variant", ["one_of_three", "all"])
def test_drafts_change_no_map(variant):
    model = tiny_model(**MODELS[variant], attn_implementation="eager")
    expected, actual = (
        generate(model, mode, repeating_ids()) for mode in ("greedy", "prompt_lookup")
    )
    assert actual.sequences.tolist() == expected.sequences.tolist()
    for steps in zip(actual.attentions, expected.attentions, strict=True):
        for maps in zip(*steps, strict=True):
            torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["paper", "one_of_three"])
@pytest.mark.parametrize("mode", ["greedy", *DRAFTS])
def test_fused_attention_gives_no_maps(variant, mode):
    model = tiny_model(**MODELS[variant], attn_implementation="sdpa")
    outputs = generate(model, mode, repeating_ids())
    assert outputs.attentions == ((),) * NEW
    assert outputs.sequences.shape == (1, LENGTH + NEW)


@pytest.mark.parametrize("variant", ["paper", "one_of_three"])
def test_drafts_from_embeddings_and_until_a_stop(variant):
    model = tiny_model(**MODELS[variant], attn_implementation="eager")
    ids = repeating_ids()
    from_ids = generate(model, "prompt_lookup", ids)
    stop = int(from_ids.sequences[0, LENGTH + 1])
    until = generate(model, "prompt_lookup", ids, eos_token_id=stop, pad_token_id=0)
    greedy = generate(model, "greedy", ids, eos_token_id=stop, pad_token_id=0)
    assert until.sequences.tolist() == greedy.sequences.tolist()
    assert len(until.attentions) == len(greedy.attentions) < NEW


def test_without_a_dict_there_are_tokens_only():
    ids = repeating_ids()
    how = {"max_new_tokens": NEW, "do_sample": False, "output_attentions": True}
    expected = tiny_model().generate(ids, **how)
    assert tiny_model().generate(ids, **how, prompt_lookup_num_tokens=2).equal(expected)


@pytest.mark.parametrize("variant", ["paper", "one_of_three"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt_lookup"])
def test_a_decoder_has_no_maps_of_its_memory(variant, mode):
    decoder = tiny_model(
        **MODELS[variant],
        add_cross_attention=True,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    encoder = BertModel(BertConfig(vocab_size=41, intermediate_size=40, **sizes))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    model.generation_config.decoder_start_token_id = 1
    outputs = generate(model, mode, repeating_ids(), pad_token_id=0)
    assert outputs.cross_attentions == ((),) * NEW
    num_maps = decoder.config.layer_types.count("full_attention")
    assert [len(step) for step in outputs.decoder_attentions] == [num_maps] * NEW


def test_a_forward_returns_maps_only_when_asked():
    ids = random_ids(2, 5)
    for kwargs, num_maps in (({}, 0), (MODELS["two_of_three"], 2)):
        for cross in (False, True):
            model = tiny_model(**kwargs, add_cross_attention=cross, attn_implementation="eager")
            outputs = model(ids, output_attentions=True)
            assert [tuple(x.shape) for x in outputs.attentions] == [(2, 4, 5, 5)] * num_maps
            assert outputs.cross_attentions == (() if cross else None)
            outputs = model(ids)
            assert outputs.attentions is None and outputs.cross_attentions is None
