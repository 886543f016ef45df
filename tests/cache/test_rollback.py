# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Taking tokens back: crop(), and the ways of generate() that draft tokens and drop many."""

import copy

import pytest
import torch
from transformers import DynamicCache, set_seed

from hf_linear_attention import LinearAttentionCache
from hf_linear_attention.cache import rollback
from hf_linear_attention.cache.layers import RecurrentLayer
from tiny import (
    NEWER,
    VARIANTS,
    assert_near,
    moves_of_rows,
    over_variants,
    random_ids,
    tiny_model,
    tokenizer_of_letters,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ["paper", "gated", "hybrid", "softmax_first", *NEWER]
REMOVABLE = [4, 0, 1, 2, 9, 12]


@torch.no_grad()
def read(model, ids, cache, mask=None):
    """The logits of ids after what the cache has read, within a mask of everything."""
    if mask is not None:
        mask = mask[:, : cache.get_seq_length() + ids.shape[1]]
    return model(ids, past_key_values=cache, attention_mask=mask).logits


def recording(model) -> LinearAttentionCache:
    cache = LinearAttentionCache(model.config)
    cache.activate_past_recording()
    return cache


def read_all(model, ids, cache, lengths, mask=None):
    """Reads ids in pieces."""
    for piece in ids.split(lengths, dim=1):
        read(model, piece, cache, mask)
    return cache


def assert_same_state(cache, expected):
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if isinstance(layer, RecurrentLayer):
            assert layer.tensors.keys() == other.tensors.keys()
            for name, tensor in layer.tensors.items():
                assert_near(tensor, other.tensors[name])


@pytest.mark.sample(20)
@over_variants(SOME, "removed", REMOVABLE)
def test_removed_tokens_leave_no_trace(variant, removed):
    model = tiny_model(**VARIANTS[variant])
    ids, more = random_ids(2, 12), random_ids(2, 4, seed=1)
    left = 12 - removed
    cache = read_all(model, ids, recording(model), [5, 1, 1, 3, 2])
    cache.crop(-removed)
    assert cache.get_seq_length() == left
    expected = recording(model)
    if left > 0:
        read(model, ids[:, :left], expected)
        assert_same_state(cache, expected)
    for piece in more.split([1, 1, 2], dim=1):
        assert_near(read(model, piece, cache), read(model, piece, expected))


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("removed", [1, 3, 6])
def test_removed_padding_leaves_no_trace(variant, removed):
    model = tiny_model(**VARIANTS[variant])
    ids, more = random_ids(3, 10), random_ids(3, 2, seed=1)
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :7] = mask[1, 5:8] = mask[2, 8:] = 0
    left = 10 - removed
    cache = read_all(model, ids, recording(model), [4, 1, 5], mask)
    cache.crop(-removed)
    expected = read_all(model, ids[:, :left], recording(model), [left], mask)
    mask = torch.cat([mask[:, :left], mask.new_ones(3, 2)], 1)
    assert_near(read(model, more, cache, mask), read(model, more, expected, mask))


@pytest.mark.parametrize("variant", SOME)
def test_tokens_that_a_crop_left_can_be_removed_later(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 60)
    cache = read_all(model, ids, recording(model), [50, 10])
    for removed in (1, 4, 0, 6, 5):
        cache.crop(-removed)
    expected = read_all(model, ids[:, :44], recording(model), [44])
    assert cache.get_seq_length() == 44
    assert_near(read(model, ids[:, :3], cache), read(model, ids[:, :3], expected))


@pytest.mark.parametrize("variant", SOME)
@moves_of_rows
def test_rows_move_with_what_can_be_removed(variant, change, rows):
    model = tiny_model(**VARIANTS[variant])
    ids, more = random_ids(2, 9), random_ids(len(rows), 2, seed=1)
    cache = read_all(model, ids, recording(model), [4, 5])
    change(cache)
    cache.crop(-3)
    expected = read_all(model, ids[rows, :6], recording(model), [6])
    assert_near(read(model, more, cache), read(model, more, expected))


@pytest.mark.parametrize("variant", SOME)
def test_a_copy_is_cropped_alone(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 9)
    cache = read_all(model, ids, recording(model), [4, 1, 4])
    twin = copy.deepcopy(cache)
    cache.crop(-4)
    twin.crop(-1)
    for other, left in ((cache, 5), (twin, 8)):
        expected = read_all(model, ids[:, :left], recording(model), [left])
        assert_near(read(model, ids[:, :2], other), read(model, ids[:, :2], expected))


@pytest.mark.parametrize("variant", SOME)
def test_recording_may_begin_and_end_at_any_time(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 12)
    cache = LinearAttentionCache(model.config)
    read_all(model, ids[:, :6], cache, [5, 1])
    cache.activate_past_recording()
    read_all(model, ids[:, 6:9], cache, [1, 2])
    cache.crop(-3)
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False  # as generate() does at its end
    expected = LinearAttentionCache(model.config)
    read_all(model, ids[:, :6], expected, [6])
    assert all(layer.recording is None for layer in cache.layers if hasattr(layer, "recording"))
    for piece in ids[:, 6:].split([1, 5], dim=1):
        assert_near(read(model, piece, cache), read(model, piece, expected))


def test_reset_while_recording():
    model = tiny_model(**VARIANTS["gated"])
    ids = random_ids(1, 8)
    cache = read_all(model, ids, recording(model), [6, 2])
    cache.reset()
    read_all(model, ids, cache, [1, 4, 1, 2])
    cache.crop(-7)
    expected = read_all(model, ids[:, :1], recording(model), [1])
    assert_near(read(model, ids[:, 2:], cache), read(model, ids[:, 2:], expected))


def test_a_dynamic_cache_goes_on_recording():
    model = tiny_model(**VARIANTS["hybrid"])
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    ids = random_ids(1, 9)
    read_all(model, ids, cache, [7, 2])
    cache.crop(-3)
    expected = read_all(model, ids[:, :6], recording(model), [6])
    assert_near(read(model, ids[:, :2], cache), read(model, ids[:, :2], expected))


def test_it_works_in_inference_mode():
    model = tiny_model(**VARIANTS["gated"])
    ids = random_ids(1, 9)
    with torch.inference_mode():
        cache = read_all(model, ids, recording(model), [4, 1, 4])
        cache.crop(-4)
    expected = read_all(model, ids[:, :5], recording(model), [5])
    for piece in ids[:, :3].split(1, dim=1):
        assert_near(read(model, piece, cache), read(model, piece, expected))


def test_gradients_flow_through_a_crop():
    model = tiny_model(**VARIANTS["gated"])
    ids, more = random_ids(1, 7), random_ids(1, 2, seed=1)

    def gradient(cache):
        model.zero_grad()
        model(more, past_key_values=cache).logits.square().sum().backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    cache = recording(model)
    model(ids[:, :3], past_key_values=cache)
    model(ids[:, 3:], past_key_values=cache)
    cache.crop(-2)
    expected = recording(model)
    model(ids[:, :5], past_key_values=expected)
    assert_near(gradient(cache), gradient(expected))


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("wrong", [-5, -100])
def test_what_was_not_recorded_stays(variant, wrong):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 12)
    cache = LinearAttentionCache(model.config)
    read(model, ids[:, :8], cache)
    with pytest.raises(RuntimeError, match="of the 8 tokens read, 0 can be removed. Call activate"):
        cache.crop(-1)
    cache.activate_past_recording()
    read(model, ids[:, 8:], cache)
    with pytest.raises(RuntimeError, match="of the 12 tokens read, 4 can be removed"):
        cache.crop(wrong)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0, or negative .*got 2"):
        cache.crop(2)
    expected = LinearAttentionCache(model.config)
    read(model, ids, expected)
    assert_near(read(model, ids[:, :2], cache), read(model, ids[:, :2], expected))


def test_a_sliding_window_says_what_it_has_forgotten():
    model = tiny_model(layer_types=["sliding_attention"] * 3, sliding_window=4)
    cache = LinearAttentionCache(model.config)
    read(model, random_ids(1, 9), cache)
    cache.activate_past_recording()
    read(model, random_ids(1, 2), cache)
    with pytest.raises(RuntimeError, match="of the 11 tokens read, 2 can be removed"):
        cache.crop(-3)


@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("is_recording", [True, False])
def test_layers_before_a_sliding_window_that_can_not_be_cropped_stay(first, is_recording):
    layer_types = [first, "sliding_attention", first]
    model = tiny_model(layer_types=layer_types, sliding_window=4, position_embedding_type="none")
    ids = random_ids(1, 33)
    cache = LinearAttentionCache(model.config)
    if is_recording:
        cache.activate_past_recording()
    read(model, ids[:, :30], cache)
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"crop\(-22\) can't be: of the 30 tokens read"):
        cache.crop(-22)
    assert [layer.get_seq_length() for layer in cache.layers] == [30] * 3
    expected = read_all(model, ids[:, :30], recording(model), [30])
    assert_near(read(model, ids[:, 30:], cache), read(model, ids[:, 30:], expected))


@pytest.mark.parametrize("variant", ["paper", "gated", "preset_gated_deltanet"])
def test_a_cache_that_nobody_crops_stays_small(variant, monkeypatch):
    monkeypatch.setattr(rollback, "RECORDED_TOKENS", 8)
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 60)
    cache = recording(model)
    read(model, ids[:, :20], cache)
    size = cache.nbytes
    sizes = []
    for t in range(20, 60):
        read(model, ids[:, t : t + 1], cache)
        sizes.append(cache.nbytes)
    assert max(sizes) < 3 * size
    cache.crop(-8)
    expected = read_all(model, ids[:, :52], recording(model), [52])
    assert_near(read(model, ids[:, :2], cache), read(model, ids[:, :2], expected))


def test_a_crop_lets_go_of_what_it_can():
    model = tiny_model(**VARIANTS["gated"])
    cache = recording(model)
    sizes = []
    for _ in range(60):
        read(model, random_ids(1, 5), cache)
        cache.crop(-2)
        sizes.append(cache.nbytes)
    assert max(sizes[20:]) <= max(sizes[:20])


def test_recording_copies_no_state_per_token():
    model = tiny_model(**VARIANTS["paper"])
    cache = recording(model)
    read(model, random_ids(1, 5), cache)
    addresses = set()
    for _ in range(6):
        read(model, random_ids(1, 1), cache)
        cache.crop(0)
        addresses.add(cache.layers[0].tensors["kv"].data_ptr())
    assert len(addresses) == 1


# generate()


def drafting(model, how):
    """The arguments of generate() for a way to draft, which is sometimes right and often wrong."""
    if how == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    if how == "early_exit":
        return {"assistant_early_exit": 2}
    assistant = copy.deepcopy(model)
    if how == "assistant":
        with torch.no_grad():
            for parameter in assistant.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return {"assistant_model": assistant}


DRAFTS = ["lookup", "assistant", "itself", "early_exit"]


def generate(model, ids, **kwargs):
    return model.generate(
        ids,
        max_new_tokens=24,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


@pytest.mark.sample(5)
@over_variants(SOME, "how", DRAFTS)
def test_drafts_do_not_change_the_tokens(variant, how):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 9).repeat(1, 2)
    plain = generate(model, ids, do_sample=False)
    assisted = generate(model, ids, do_sample=False, **drafting(model, how))
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    assert_near(torch.cat(assisted.logits), torch.cat(plain.logits))


@pytest.mark.sample(6)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("how", DRAFTS)
def test_sampled_tokens_come_from_the_right_logits(variant, how):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 9).repeat(1, 2)
    set_seed(0)
    outputs = generate(model, ids, do_sample=True, top_k=0, **drafting(model, how))
    with torch.no_grad():
        whole = model(outputs.sequences).logits[0, 17:-1]
    assert_near(torch.cat(outputs.logits), whole.float())


def test_the_drafts_of_these_tests_are_right_and_wrong(monkeypatch):
    removed = []
    crop = LinearAttentionCache.crop
    monkeypatch.setattr(
        LinearAttentionCache, "crop", lambda cache, n: removed.append(-n) or crop(cache, n)
    )
    model = tiny_model(**VARIANTS["gated"])
    ids = random_ids(1, 9).repeat(1, 2)
    for how in ("assistant", "early_exit"):
        removed.clear()
        generate(model, ids, do_sample=False, **drafting(model, how))
        assert max(removed) > 1 and len(removed) < 2 * 24


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", SOME)
def test_a_crop_that_left_the_state_alone_would_show(variant, monkeypatch):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 9).repeat(1, 2)
    plain = generate(model, ids, do_sample=False)

    def crop(layer, tokens_to_remove):
        layer.num_tokens += tokens_to_remove

    monkeypatch.setattr(RecurrentLayer, "crop", crop)
    assisted = generate(model, ids, do_sample=False, **drafting(model, "assistant"))
    assert (torch.cat(assisted.logits) - torch.cat(plain.logits)).abs().max() > 0.1


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", SOME)
def test_an_assisted_generation_continues(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 9).repeat(1, 2)
    first = generate(model, ids, do_sample=False, prompt_lookup_num_tokens=4)
    cache = first.past_key_values
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    ids = torch.cat([first.sequences, random_ids(1, 3, seed=1)], 1)
    # a 0 that was generated is no padding
    kwargs = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    again = generate(model, ids, past_key_values=cache, prompt_lookup_num_tokens=4, **kwargs)
    assert again.sequences.tolist() == generate(model, ids, **kwargs).sequences.tolist()


def test_plain_generation_records_nothing():
    model = tiny_model(**VARIANTS["gated"])
    cache = generate(model, random_ids(1, 5), do_sample=False).past_key_values
    assert all(layer.recording is None for layer in cache.layers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", SOME)
def test_an_assistant_may_have_another_tokenizer(variant):
    """New letters may join with old ones: then the assistant drops tokens confirmed long ago."""
    ours, theirs = tokenizer_of_letters("th/qu/ox/er"), tokenizer_of_letters("he/ui/ey/ju/mp")
    long = {**VARIANTS[variant], "max_position_embeddings": 200}
    model = tiny_model(**{**long, "vocab_size": len(ours)})
    assistant = tiny_model(**{**long, "vocab_size": len(theirs)}, seed=1)
    ids = torch.tensor([ours.encode("the quick brown fox jumps over the lazy dog")])
    plain = generate(model, ids, do_sample=False)
    assisted = generate(
        model,
        ids,
        do_sample=False,
        assistant_model=assistant,
        tokenizer=ours,
        assistant_tokenizer=theirs,
    )
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    assert_near(torch.cat(assisted.logits), torch.cat(plain.logits))
