# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A recurrence that is added by its own file and a line does all that the package's own do."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import moving_average
from hf_linear_attention import LinearAttentionCache, StaticLinearAttentionCache
from hf_linear_attention.cache.layers import RecurrentLayer
from hf_linear_attention.mixers.facts import REGISTERED_MIXERS
from hf_linear_attention.model.model_card import state_nbytes
from hf_linear_attention.ops.tokens import Tokens
from moving_average import MovingInputs, MovingSum, MovingSumMixer
from tiny import HYBRID, assert_near, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread", "registered")


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(REGISTERED_MIXERS, "moving_sum", MovingSumMixer)


@pytest.fixture(params=["pure", "hybrid"])
def model(request):
    layers = {"layer_types": HYBRID, "sliding_window": 5} if request.param == "hybrid" else {}
    return tiny_model(mixer="moving_sum", **layers)


@torch.no_grad()
def read(model, ids, **kwargs):
    return model(ids, **kwargs).logits


def test_it_takes_less_than_80_lines():
    lines = Path(moving_average.__file__).read_text("utf-8").splitlines()
    assert len(lines) < 80


@pytest.mark.parametrize("cache_class", [LinearAttentionCache, StaticLinearAttentionCache])
def test_cached_is_uncached_and_reset_forgets(model, cache_class):
    sizes = [] if cache_class is LinearAttentionCache else [12]
    cache, ids = cache_class(model.config, *sizes), random_ids(2, 9)
    for _ in range(2):
        pieces = [read(model, piece, past_key_values=cache) for piece in ids.split([4, 1, 3, 1], 1)]
        assert_near(torch.cat(pieces, 1), read(model, ids))
        cache.reset()


def test_padded_is_unpadded_and_packed_is_separate(model):
    ids, mask = random_ids(1, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    real = mask[0] != 0
    assert_near(read(model, ids, attention_mask=mask)[:, real], read(model, ids[:, real]))
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = read(model, ids, cu_seq_lens_q=bounds)
    assert_near(packed, torch.cat([read(model, ids[:, :3]), read(model, ids[:, 3:])], 1))


def test_tokens_are_taken_back_and_drafts_change_nothing(model):
    ids = random_ids(1, 12)
    cache = LinearAttentionCache(model.config)
    cache.activate_past_recording()
    for piece in ids.split([6, 1, 5], 1):
        read(model, piece, past_key_values=cache)
    cache.crop(-7)
    assert_near(read(model, ids[:, 5:], past_key_values=cache), read(model, ids)[:, 5:])
    options = {"max_new_tokens": 10, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), plain)
    model.generate(ids, num_beams=3, **options)


def test_caches_are_saved_joined_and_branched(model, tmp_path):
    prompts, more = [random_ids(1, n, seed=n) for n in (8, 3)], random_ids(2, 4, seed=9)
    caches = []
    for ids in prompts:
        caches.append(LinearAttentionCache(model.config))
        read(model, ids, past_key_values=caches[-1])
    cache = LinearAttentionCache.join(caches)
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config)
    texts = [torch.cat([a, b[None]], 1) for a, b in zip(prompts, more, strict=True)]
    expected = torch.cat([read(model, ids)[:, -4:] for ids in texts])
    for one in (copy.deepcopy(cache), cache, loaded):
        assert_near(read(model, more, past_key_values=one), expected)


def test_the_card_knows_its_size_and_the_model_is_saved(model, tmp_path):
    cache = LinearAttentionCache(model.config)
    read(model, random_ids(1, 3), past_key_values=cache)
    layers = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    assert state_nbytes(model) == sum(layer.tensors["m"].nbytes for layer in layers)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = random_ids(2, 5)
    assert_near(read(again.eval(), ids), read(model, ids))


@pytest.mark.parametrize("cuts", [[5], [2, 3], [1, 1, 3]], ids=str)
def test_pieces_combine_to_the_whole(cuts):
    recurrence, tokens = MovingSum(4), Tokens(is_causal=True)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    pieces = [recurrence.piece(MovingInputs(part), tokens) for part in x.split(cuts, 1)]
    stacked = {name: torch.stack([piece[name] for piece in pieces]) for name in pieces[0]}
    _, whole = recurrence.run(MovingInputs(x), {}, tokens)
    torch.testing.assert_close(recurrence.combine(stacked)["m"], whole["m"])


def test_it_trains(model):
    ids = random_ids(2, 9)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
