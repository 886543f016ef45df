# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""LinearAttentionCache by itself: what it holds, and what may be done to it."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from hf_linear_attention import LinearAttentionCache, StaticLinearAttentionCache
from hf_linear_attention.cache.growing import GrowingLayer
from hf_linear_attention.cache.layers import SlidingWindowLayer
from hf_linear_attention.releases import CACHE
from tiny import (
    HYBRID,
    NEWER,
    VARIANTS,
    assert_near,
    moves_of_rows,
    random_ids,
    tiny_config,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CACHED = ["paper", "gated", "hybrid", *NEWER]


@torch.no_grad()
def read(model, ids, cache=None):
    """The logits of ids after what the cache has read, and the cache."""
    outputs = model(ids, past_key_values=cache, use_cache=True)
    return outputs.logits, outputs.past_key_values


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "hybrid"])
def test_its_size_does_not_depend_on_the_number_of_tokens(variant):
    kwargs = {**VARIANTS[variant], "max_position_embeddings": 2000, "num_hidden_layers": 1}
    for name in ("layer_types", "local_rotary_layers", "local_rope_parameters"):  # of three layers
        kwargs.pop(name, None)
    model = tiny_model(**kwargs)
    sizes = [read(model, random_ids(2, length))[1].nbytes for length in (1, 10, 1000)]
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_nbytes_counts_every_tensor():
    model = tiny_model(**VARIANTS["hybrid"])
    _, cache = read(model, random_ids(2, 9))
    kv = 2 * 4 * 8 * 8 * 8  # B Hkv K V float64
    z = 2 * 4 * 8 * 8
    conv = 2 * 2 * (64 + 32 + 32) * 8  # B (kernel size - 1) channels float64
    full, sliding = 2 * 2 * 2 * 9 * 8 * 8, 2 * 2 * 2 * 4 * 8 * 8
    assert cache.nbytes == kv + z + conv + full + sliding


def test_softmax_layers_keep_their_own_cache_layers():
    cache = LinearAttentionCache(tiny_config(layer_types=HYBRID, sliding_window=5))
    assert [type(layer) for layer in cache.layers[1:]] == [GrowingLayer, SlidingWindowLayer]
    assert cache.is_sliding == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_states_are_float32_or_better(dtype):
    model = tiny_model(dtype=dtype, initializer_range=0.05, **VARIANTS["hybrid"])
    cache = None
    for length in (5, 1):
        _, cache = read(model, random_ids(1, length), cache)
    tensors = cache.layers[0].tensors
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert tensors["kv"].dtype == tensors["z"].dtype == expected
    assert tensors["q_conv"].dtype == cache.layers[1].keys.dtype == dtype


def test_addresses_stay():
    model = tiny_model(**VARIANTS["gated"])
    _, cache = read(model, random_ids(2, 1))

    def addresses():
        return [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors.values()]

    first = addresses()
    read(model, random_ids(2, 7), cache)
    read(model, random_ids(2, 1), cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    read(model, random_ids(2, 3), cache)
    assert addresses() == first


@pytest.mark.parametrize("variant", CACHED)
def test_it_counts_tokens(variant):
    model = tiny_model(**VARIANTS[variant])
    cache = LinearAttentionCache(model.config)
    assert cache.get_seq_length() == 0
    assert not cache.has_previous_state(0)
    for length, total in ((4, 4), (1, 5), (3, 8)):
        read(model, random_ids(1, length), cache)
        assert [cache.get_seq_length(layer) for layer in range(3)] == [total] * 3
    assert cache.get_mask_sizes(2, 0) == (10, 0)
    assert cache.has_previous_state(0)


@pytest.mark.parametrize("variant", CACHED)
def test_after_reset_it_is_as_new(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 8)
    expected, cache = read(model, ids)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(read(model, ids, cache)[0], expected)
    cache.reset()
    one_by_one = [read(model, ids[:, t : t + 1], cache)[0] for t in range(8)]
    assert_near(torch.cat(one_by_one, 1), expected)
    cache.reset()
    assert_near(read(model, ids[:1], cache)[0], expected[:1])  # of another batch size


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("more", [1, 4])
@moves_of_rows
def test_its_rows_can_be_moved(variant, more, change, rows):
    model = tiny_model(**VARIANTS[variant])
    ids, new = random_ids(2, 8), random_ids(4, more, seed=1)[: len(rows)]
    whole, _ = read(model, torch.cat([ids[rows], new], 1))
    _, cache = read(model, ids)
    change(cache)
    assert_near(read(model, new, cache)[0], whole[:, 8:])


@pytest.mark.parametrize("make", [LinearAttentionCache, StaticLinearAttentionCache])
@moves_of_rows
def test_an_empty_cache_stays_empty_when_its_rows_are_moved(make, change, rows):
    config = tiny_config(**VARIANTS["gated"], add_cross_attention=True)
    cache = make(config, 9) if make is StaticLinearAttentionCache else make(config)
    change(cache)
    cache.reset()
    change(cache)
    assert not any(layer.has_state for layer in cache.layers)


@pytest.mark.parametrize("variant", CACHED)
def test_a_copy_goes_its_own_way(variant):
    model = tiny_model(**VARIANTS[variant])
    ids, more = random_ids(1, 6), random_ids(1, 3, seed=1)
    whole, _ = read(model, torch.cat([ids, more], 1))
    _, cache = read(model, ids)
    twin = copy.deepcopy(cache)
    for _ in range(2):
        read(model, random_ids(1, 1, seed=2), cache)
    assert twin.get_seq_length() == 6
    assert_near(read(model, more, twin)[0], whole[:, 6:])


def test_it_outlives_inference_mode():
    model = tiny_model(**VARIANTS["gated"])
    ids = random_ids(1, 7)
    whole, _ = read(model, ids)
    with torch.inference_mode():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    last = [read(model, ids[:, t : t + 1], cache)[0] for t in (4, 5, 6)]
    assert_near(torch.cat(last, 1), whole[:, 4:])


@pytest.mark.parametrize("variant", CACHED)
def test_gradients_flow_through_it(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 9)

    def gradients(logits):
        model.zero_grad()
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole = gradients(model(ids).logits)
    first = model(ids[:, :5], use_cache=True)
    cache = first.past_key_values
    parts = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in (5, 6)]
    parts.append(model(ids[:, 7:], past_key_values=cache).logits)
    for name, gradient in gradients(torch.cat([first.logits, *parts], 1)).items():
        assert_near(gradient, whole[name])


def test_without_gradients_it_lets_the_graph_go():
    model = tiny_model()
    ids = random_ids(1, 6)
    outputs = model(ids[:, :3], use_cache=True)
    cache = outputs.past_key_values
    read(model, ids[:, 3:4], cache)
    assert not any(
        tensor.requires_grad for layer in cache.layers for tensor in layer.tensors.values()
    )
    outputs.logits.sum().backward()  # whose values the step must have left alone


def test_without_linear_layers_it_can_be_cropped():
    model = tiny_model(layer_types=["full_attention"] * 3)
    ids = random_ids(1, 6)
    whole, cache = read(model, ids)
    cache.crop(-2)
    assert_near(read(model, ids[:, 4:], cache)[0], whole[:, 4:])


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("with_config", [False, True])
def test_an_empty_dynamic_cache_gets_the_layers_it_needs(variant, with_config):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 8)
    whole, _ = read(model, ids)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    _, returned = read(model, ids[:, :5], cache)
    assert returned is cache and cache.get_seq_length() == 5
    assert_near(read(model, ids[:, 5:], cache)[0], whole[:, 5:])


def test_a_foreign_cache_is_refused():
    model = tiny_model()
    filled = DynamicCache()
    filled.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 0)
    other = LinearAttentionCache(tiny_config(num_hidden_layers=2))
    static = StaticCache(config=tiny_config(layer_types=HYBRID, sliding_window=5), max_cache_len=9)
    static.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 1)
    for cache in (filled, other, static):
        with pytest.raises(ValueError, match=f"{CACHE} must be a LinearAttentionCache"):
            read(model, random_ids(1, 2), cache)


def test_a_static_cache_that_does_not_know_its_length_is_refused():
    model = tiny_model(**VARIANTS["preset_sliding"])  # a window of 4
    cache = StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match="must be a StaticLinearAttentionCache.*window of 4"):
        read(model, random_ids(1, 2), cache)
    ids = random_ids(1, 3)
    short = StaticCache(config=model.config, max_cache_len=3)
    assert_near(read(model, ids, short)[0], read(model, ids)[0])


def test_only_a_static_cache_lets_generate_compile():
    config = tiny_config(layer_types=HYBRID, sliding_window=5)
    assert not LinearAttentionCache(config).is_compileable
    assert StaticLinearAttentionCache(config, max_cache_len=9).is_compileable


def test_without_a_layer_to_offload_there_is_no_offloading():
    layer_types = ["linear_attention", "sliding_attention", "linear_attention"]
    config = tiny_config(layer_types=layer_types, sliding_window=5)
    assert not LinearAttentionCache(config, offloading=True).offloading
    assert not StaticLinearAttentionCache(config, 9, offloading=True).offloading


def test_offloading_leaves_the_states_alone():
    model = tiny_model()
    cache = LinearAttentionCache(model.config, offloading=True)
    ids = random_ids(1, 5)
    whole, _ = read(model, ids)
    read(model, ids[:, :3], cache)
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert_near(read(model, ids[:, 3:], cache)[0], whole[:, 3:])


@pytest.mark.parametrize("variant", ["paper", "gated", "aaren", "hybrid", "cross", *NEWER])
@pytest.mark.parametrize("length", [2, 9])
def test_data_parallel_gathers_the_caches_of_its_replicas(variant, length, monkeypatch):
    class GatherOnTheCPU:  # torch's own takes CUDA tensors only
        @staticmethod
        def apply(device, dim, *tensors):
            return torch.cat(tensors, dim)

    monkeypatch.setattr(torch.nn.parallel.scatter_gather, "Gather", GatherOnTheCPU)
    kwargs = {**VARIANTS, "cross": {"add_cross_attention": True}}[variant]
    model, ids = tiny_model(**kwargs), random_ids(3, length + 3)
    batch = {"input_ids": ids}
    if variant == "cross":
        batch["encoder_hidden_states"] = torch.randn(3, 4, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = model(**batch).logits
        batch["input_ids"] = ids[:, :length]
        replicas = [
            model(**{name: x[rows] for name, x in batch.items()}, use_cache=True)
            for rows in (slice(0, 1), slice(1, 3))
        ]
    outputs = torch.nn.parallel.scatter_gather.gather(replicas, 0)
    assert_near(outputs.logits, expected[:, :length])
    cache = outputs.past_key_values
    assert type(cache) is LinearAttentionCache
    assert cache.get_seq_length() == length
    assert_near(read(model, ids[:, length:], cache)[0], expected[:, length:])
    assert cache.config is model.config


def test_a_gathered_cache_is_saved_and_joined_when_its_model_has_read_with_it(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        cache = LinearAttentionCache(list(model(random_ids(2, 4)).past_key_values))
        for use in (lambda: cache.save(tmp_path / "file"), lambda: cache.join([cache, cache])):
            with pytest.raises(ValueError, match="must be one that its model has read with"):
                use()
        model(random_ids(2, 1), past_key_values=cache)
    cache.save(tmp_path / "file")
    assert cache.join([cache, cache]).get_seq_length() == 5


def test_caches_that_have_read_nothing_are_not_gathered():
    with pytest.raises(ValueError, match="only caches that have read a token"):
        LinearAttentionCache(iter(LinearAttentionCache(tiny_model().config)))


@pytest.mark.parametrize("config", [None, LlamaConfig()])
def test_a_cache_is_made_for_a_config_of_ours(config):
    for make in (LinearAttentionCache, lambda x: StaticLinearAttentionCache(x, 5)):
        with pytest.raises(ValueError, match="config must be a LinearAttentionConfig, got "):
            make(config)


def test_a_prompt_that_has_been_read_is_refused_in_pieces_too():
    # Transformers before 5.22 reads it again, piece by piece, with prefill_chunk_size
    model, ids = tiny_model(), random_ids(1, 2)
    with torch.no_grad():
        cache = getattr(model(random_ids(1, 5), use_cache=True), CACHE)
    with pytest.raises(
        ValueError, match="must have read less .* 5 tokens for a prompt of 2, or a piece"
    ):
        model.prepare_inputs_for_generation(
            ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}
        )


@pytest.mark.parametrize("length", [0, -3, 2.5, None, True])
def test_a_static_cache_of_no_length_is_refused(length):
    with pytest.raises(ValueError, match=f"max_cache_len must be an integer .* got {length}"):
        StaticLinearAttentionCache(tiny_model().config, length)


def test_what_is_no_cache_is_refused():
    with pytest.raises(ValueError, match=r"caches must be .* got \['DynamicCache', 'int'\]"):
        LinearAttentionCache.join([DynamicCache(), 3])
    with pytest.raises(ValueError, match=f"{CACHE} must be a Cache, got tuple"):
        tiny_model()(random_ids(1, 3), past_key_values=((1, 2),))


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 7},
        {"conv_kernel_size": 3, "normalizer": "rms_norm"},
        {"decay": "retnet", "normalizer": "rms_norm"},
    ],
)
def test_a_cache_of_another_model_is_refused(fields):
    model = tiny_model(num_hidden_layers=2, **fields)
    ids = random_ids(1, 6)
    other = copy.deepcopy(model.config)
    model(ids, past_key_values=LinearAttentionCache(other), use_cache=True)  # it is the same
    if "sliding_window" in fields:
        other.sliding_window = 5
    elif "conv_kernel_size" in fields:
        other.conv_kernel_size = 4
    else:
        other.decay = "lightning"
    with pytest.raises(ValueError, match=f"{CACHE} must be made for this model, with "):
        model(ids, past_key_values=LinearAttentionCache(other), use_cache=True)


def test_as_many_masks_as_caches_are_joined():
    model = tiny_model()
    caches = [model(random_ids(1, 3), use_cache=True).past_key_values for _ in range(2)]
    for masks in ([torch.ones(1, 3)], [torch.ones(1, 3)] * 3):
        with pytest.raises(ValueError, match=rf"one for each of 2 caches, got {len(masks)}"):
            LinearAttentionCache.join(caches, masks)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
    ],
    ids=["select", "repeat"],
)
def test_a_static_cache_with_softmax_layers_keeps_its_rows_whole(change):
    model, ids = tiny_model(**VARIANTS["hybrid"]), random_ids(2, 6)
    cache = StaticLinearAttentionCache(model.config, 8)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        model(ids[:, :5], past_key_values=cache)
        with pytest.raises(RuntimeError, match="Use a LinearAttentionCache"):
            change(cache)
        assert_near(model(ids[:, 5:], past_key_values=cache).logits, expected)  # not one changed
