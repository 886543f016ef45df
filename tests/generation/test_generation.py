# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""generate(): with the cache it gives the tokens that it gives without."""

import inspect

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, set_seed

from hf_linear_attention import LinearAttentionCache
from hf_linear_attention.cache.layers import RecurrentLayer
from hf_linear_attention.releases import CACHE
from tiny import NEWER, VARIANTS, over_variants, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ["paper", "gated", "hybrid", "softmax_first", *NEWER]
PAD = 0


def generate(model, ids, **kwargs):
    kwargs = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, **kwargs}
    return model.generate(ids, **kwargs)


def assert_same_with_and_without_cache(model, ids, **kwargs):
    set_seed(0)
    cached = generate(model, ids, **kwargs)
    set_seed(0)
    uncached = generate(model, ids, use_cache=False, **kwargs)
    assert cached.tolist() == uncached.tolist()
    return cached


@pytest.mark.sample(14)
@over_variants(SOME, "dtype", [torch.float64, torch.float32])
def test_greedy(variant, dtype):
    model = tiny_model(dtype=dtype, **VARIANTS[variant])
    assert_same_with_and_without_cache(model, random_ids(2, 7))


@pytest.mark.sample(13)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_state_would_change_the_tokens(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(4, 7)
    cache = LinearAttentionCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    right = generate(model, ids)
    recurrent = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    states = [layer.tensors["h" if "h" in layer.tensors else "kv"] for layer in recurrent]
    for state in states or [layer.values for layer in cache.layers]:
        state.mul_(0.5)
    wrong = generate(model, right[:, :8], past_key_values=cache, max_new_tokens=15)
    assert wrong.tolist() != right.tolist()


@pytest.mark.sample(7)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True},
        {"do_sample": True, "top_k": 5, "num_return_sequences": 3},
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
        {"num_beams": 3, "do_sample": True},
        {"repetition_penalty": 1.7},
    ],
    ids=["sample", "sequences", "beams", "beam_sequences", "beam_sample", "penalty"],
)
def test_every_way_to_choose_tokens(variant, how):
    model = tiny_model(**VARIANTS[variant])
    assert_same_with_and_without_cache(model, random_ids(2, 5), **how)


@pytest.mark.sample(5)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_left_padded_rows_get_the_tokens_they_get_alone(variant, how):
    model = tiny_model(**VARIANTS[variant])
    ids, lengths = random_ids(3, 6), (6, 3, 1)
    mask = torch.tensor([[0] * (6 - n) + [1] * n for n in lengths])
    padded = ids.masked_fill(mask == 0, PAD)
    batch = assert_same_with_and_without_cache(model, padded, attention_mask=mask, **how)
    for row, n in enumerate(lengths):
        alone = generate(model, ids[row : row + 1, 6 - n :], **how)
        assert batch[row, 6 - n :].tolist() == alone[0].tolist()


@pytest.mark.sample(8)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_returned_cache_continues(variant, more):
    model = tiny_model(**VARIANTS[variant])
    first = generate(model, random_ids(1, 4), max_new_tokens=6, return_dict_in_generate=True)
    cache = first.past_key_values
    assert isinstance(cache, LinearAttentionCache)
    assert cache.get_seq_length() == 9  # the last token was never read
    ids = torch.cat([first.sequences, random_ids(1, more, seed=1)], 1)
    mask = torch.ones_like(ids)  # a 0 may be among them
    expected = generate(model, ids, attention_mask=mask)
    again = generate(model, ids, past_key_values=cache, attention_mask=mask)
    assert again.tolist() == expected.tolist()


@pytest.mark.parametrize("variant", SOME)
def test_a_cache_of_left_padded_rows_continues(variant):
    model = tiny_model(**VARIANTS[variant])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = random_ids(2, 5) * mask
    first = generate(
        model, ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True
    )
    ids = torch.cat([first.sequences, random_ids(2, 2, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    continued = generate(model, ids, attention_mask=mask, past_key_values=first.past_key_values)
    assert continued.tolist() == generate(model, ids, attention_mask=mask).tolist()


@pytest.mark.sample(8)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_prefill_in_chunks(variant, chunk):
    model = tiny_model(**VARIANTS[variant])
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    ids = random_ids(2, 11) * mask
    chunked = generate(model, ids, attention_mask=mask, prefill_chunk_size=chunk)
    assert chunked.tolist() == generate(model, ids, attention_mask=mask).tolist()


@pytest.mark.parametrize("variant", SOME)
def test_prompts_of_embeddings(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 5)
    from_ids = generate(model, ids)
    from_embeddings = generate(model, None, inputs_embeds=model.get_input_embeddings()(ids))
    assert from_embeddings.tolist() == from_ids[:, 5:].tolist()


@pytest.mark.parametrize("variant", SOME)
def test_a_dynamic_cache_passed_in_is_filled(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 5)
    cache = DynamicCache(config=model.config)
    assert generate(model, ids, past_key_values=cache).tolist() == generate(model, ids).tolist()
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("kind", ["dynamic", "offloaded", "static"])
def test_cache_implementation(kind):
    model = tiny_model()
    ids = random_ids(1, 5)
    assert generate(model, ids, cache_implementation=kind).tolist() == generate(model, ids).tolist()


def test_a_cache_that_could_not_hold_the_state_is_refused():
    with pytest.raises(ValueError, match="cache_implementation must be one of .*got 'quantized'"):
        generate(tiny_model(), random_ids(1, 5), cache_implementation="quantized")


def test_all_scores_and_hidden_states_come_back():
    outputs = generate(
        tiny_model(),
        random_ids(2, 5),
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert len(outputs.scores) == len(outputs.logits) == len(outputs.hidden_states) == 3
    assert [layers[0].shape[1] for layers in outputs.hidden_states] == [5, 1, 1]


def test_one_token_prompts_start_from_nothing():
    model = tiny_model(**VARIANTS["gated"])
    assert_same_with_and_without_cache(model, random_ids(3, 1))


class Positions:
    """Notes what positions each forward of a model is given."""

    def __init__(self, model):
        self.given = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model, args, kwargs):
        self.given.append(kwargs.get("position_ids"))


@pytest.mark.parametrize("variant", ["paper", "hybrid"])
def test_positions_that_a_cache_counts_are_not_made_for_each_token(variant):
    model, ids = tiny_model(**VARIANTS[variant]), random_ids(2, 7)
    expected = generate(model, ids)
    positions = Positions(model)
    assert torch.equal(generate(model, ids), expected)
    cache = LinearAttentionCache(model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)  # goes on
    assert len(positions.given) == 33
    if "_mask_length" in inspect.getsource(GenerationMixin.generate):  # from 5.18 on
        assert positions.given == [None] * 33


@pytest.mark.parametrize("variant", ["paper", "hybrid"])
def test_other_positions_are_kept(variant):
    model, ids = tiny_model(**VARIANTS[variant]), random_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = Positions(model)
    padded = generate(model, ids, attention_mask=mask)
    assert positions.given[-1].tolist() == [[18], [21]]
    assert padded[1].tolist() == generate(model, ids)[1].tolist()
    alone = generate(model, ids[:1, 3:])
    assert padded[0, 7:].tolist() == alone[0, 4:].tolist()
    later = torch.arange(7)[None].expand(2, 7) + 40
    shifted = generate(model, ids, position_ids=later)
    assert positions.given[-1].tolist() == [[61], [61]]
    assert torch.equal(shifted, generate(model, ids, position_ids=later, use_cache=False))


@pytest.mark.parametrize("read", [8, 10, 16])
@pytest.mark.parametrize("preset", ["gated_deltanet", "hybrid"])
def test_a_cache_that_has_read_all_of_the_prompt_is_refused(preset, read):
    fields = {"num_hidden_layers": 4} if preset == "hybrid" else {}
    model = tiny_model(**VARIANTS[f"preset_{preset}"] | fields)
    ids = random_ids(1, 16)
    with torch.no_grad():
        cache = model(ids[:, :read], use_cache=True).past_key_values
    message = f"{CACHE} must .* a cache of {read} .* prompt of 8"
    with pytest.raises(ValueError, match=message):
        generate(model, ids[:, :8], past_key_values=cache)
