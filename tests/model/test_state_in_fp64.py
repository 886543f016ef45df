# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""config.state_in_fp64: states in float64, whatever the model computes in."""

import pytest
import torch

from hf_linear_attention import LinearAttentionCache
from hf_linear_attention.cache.layers import RecurrentLayer
from hf_linear_attention.serving.slot_layout import SlotLayout
from saved_models import WITHOUT_PACKAGE, run
from tiny import NEWER, VARIANTS, random_ids, shallow, tiny_model
from without_recordings import without_recordings

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ("paper", "aaren", "hybrid", "preset_hgrn", *NEWER)
some_variants = pytest.mark.parametrize("variant", SOME)


def model_of(variant: str, dtype: torch.dtype = torch.float32, **options):
    return tiny_model(dtype=dtype, **{**shallow(variant), "state_in_fp64": True, **options})


def sums_of(cache) -> list[torch.Tensor]:
    """Of all layers with recurrences."""
    layers = [layer.tensors for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    return [x for of_layer in layers for name, x in of_layer.items() if name in ("kv", "z", "h")]


@torch.no_grad()
def read(model, ids, cache, pieces=1):
    return torch.cat(
        [model(x, past_key_values=cache, use_cache=True).logits for x in ids.chunk(pieces, 1)], 1
    )


@pytest.mark.parametrize("pieces", [2**6, pytest.param(2**12, marks=pytest.mark.thorough)])
def test_the_same_token_again_and_again_does_not_drift(pieces):
    """A state that forgets nothing is so many times what one token adds."""
    ids = torch.full((1, 2**16), 7)
    off_by = {}
    for in_fp64 in (True, False):
        model = model_of(
            "paper",
            position_embedding_type="none",
            num_hidden_layers=1,
            layer_types=None,
            state_in_fp64=in_fp64,
        )
        one, many = LinearAttentionCache(model.config), LinearAttentionCache(model.config)
        read(model, ids[:, :1], one)
        read(model, ids, many, pieces)
        of_one, of_many = (cache.layers[0].tensors["kv"].double() for cache in (one, many))
        error = (of_many - ids.shape[1] * of_one).abs().max() / of_many.abs().max()
        off_by[in_fp64] = error.item()
    assert off_by[True] < 1e-6 < 1e-5 < off_by[False]


@some_variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_float64_and_all_else_is_the_models(variant, dtype):
    model, ids = model_of(variant, dtype), random_ids(2, 12)
    cache = LinearAttentionCache(model.config)
    logits = read(model, ids, cache, pieces=3)
    assert logits.dtype is dtype
    sums = sums_of(cache)
    assert sums and all(x.dtype is torch.float64 for x in sums)
    recurrent = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    windows = [x for layer in recurrent for x in layer.tensors.values()]
    assert {x.dtype for x in windows} <= {torch.float64, torch.float32, dtype}


@some_variants
def test_answers_are_those_of_states_in_float32(variant):
    exact, plain = model_of(variant), model_of(variant, state_in_fp64=False)
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        outputs = [model(ids, attention_mask=mask).logits for model in (exact, plain)]
        texts = [model.generate(ids, attention_mask=mask, **options) for model in (exact, plain)]
        drafted = exact.generate(ids[:1], prompt_lookup_num_tokens=3, **options)
    real = mask.bool()
    torch.testing.assert_close(outputs[0][real], outputs[1][real], rtol=1e-3, atol=1e-3)
    assert torch.equal(*texts)
    assert torch.equal(drafted, exact.generate(ids[:1], **options))


@some_variants
def test_a_trace_answers_as_modules_do(variant):
    model, ids = model_of(variant, torch.bfloat16), random_ids(1, 12)
    caches = [LinearAttentionCache(model.config) for _ in range(2)]
    actual = read(model, ids, caches[0], pieces=12)
    expected = without_recordings(read)(model, ids, caches[1], pieces=12)
    assert torch.equal(actual, expected)
    for ours, theirs in zip(*map(sums_of, caches), strict=True):
        assert torch.equal(ours, theirs)


@some_variants
def test_gradients_are_those_of_states_in_float32(variant):
    gradients = []
    for in_fp64 in (True, False):
        model = model_of(variant, state_in_fp64=in_fp64)
        ids = random_ids(2, 12)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, x in gradients[0].items():
        size = gradients[1][name].abs().max().item()
        torch.testing.assert_close(x, gradients[1][name], rtol=2e-3, atol=2e-3 * max(size, 1e-3))


def test_files_hold_them_and_say_so(tmp_path):
    model, ids = model_of("preset_gated_deltanet"), random_ids(1, 9)
    cache = LinearAttentionCache(model.config)
    read(model, ids, cache)
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config)
    for ours, theirs in zip(sums_of(loaded), sums_of(cache), strict=True):
        assert ours.dtype is torch.float64 and torch.equal(ours, theirs)
    plain = model_of("preset_gated_deltanet", state_in_fp64=False)
    with pytest.raises(ValueError, match="state_in_fp64"):
        LinearAttentionCache.load(tmp_path / "cache", plain.config)
    with pytest.raises(ValueError, match="state_in_fp64=False"):
        read(plain, ids, cache)


def test_slots_have_room_for_them():
    plain = SlotLayout.of_model(model_of("paper", state_in_fp64=False))
    exact = SlotLayout.of_model(model_of("paper"))
    assert exact.nbytes == 2 * plain.nbytes
    assert {part.dtype for part in exact.parts[0].values()} == {torch.float64}


def test_a_folder_without_the_package_has_them_too(tmp_path):
    folder = tmp_path / "model"
    model, ids = model_of("preset_gated_deltanet"), random_ids(1, 9)
    model.save_pretrained(folder)
    script = WITHOUT_PACKAGE + (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "ids = torch.tensor(json.loads(sys.argv[2]))\n"
        "out = model(ids, use_cache=True)\n"
        "state = out.past_key_values.layers[0].tensors['kv']\n"
        "tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)\n"
        "print(json.dumps([str(state.dtype), tokens.tolist()]))\n"
    )
    dtype, tokens = run(script, folder, str(ids.tolist()), modules=tmp_path)
    assert dtype == "torch.float64"
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokens == expected.tolist()


def test_only_true_is_saved():
    config = model_of("paper").config
    assert config.to_dict()["state_in_fp64"] is True
    assert "state_in_fp64" not in model_of("paper", state_in_fp64=False).config.to_dict()
    assert set(SOME) <= set(VARIANTS)
