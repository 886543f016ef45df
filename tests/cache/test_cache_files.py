# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Caches as things that users own: kept in files, branched, and joined into batches."""

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionForCausalLM,
    StaticLinearAttentionCache,
)
from hf_linear_attention.cache.files import FILE_FORMATS, read_file, write_file
from hf_linear_attention.cache.layers import RecurrentLayer
from new_python import run_python
from tiny import (
    NEWER,
    VARIANTS,
    assert_near,
    over_variants,
    random_ids,
    tiny_config,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CACHED = ["paper", "gated", "learned", "hybrid", "softmax_first", *NEWER]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@torch.no_grad()
def read(model, ids, cache=None, mask=None):
    outputs = model(ids, past_key_values=cache, attention_mask=mask, use_cache=True)
    return outputs.logits, outputs.past_key_values


def tensors_of(cache):
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            yield from (layer.tensors[name] for name in sorted(layer.tensors))
        else:
            yield from (layer.keys, layer.values)


@pytest.mark.sample(12)
@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 20])
def test_a_file_gives_back_every_bit(variant, dtype, length, tmp_path):
    model = tiny_model(dtype=dtype, **VARIANTS[variant])
    _, cache = read(model, random_ids(2, length))
    cache.save(tmp_path / "cache.safetensors")
    loaded = LinearAttentionCache.load(tmp_path / "cache.safetensors", model.config, dtype=dtype)
    assert loaded.get_seq_length() == length
    for x, y in zip(tensors_of(loaded), tensors_of(cache), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
    for more in (1, 4, 1, 1):
        ids = random_ids(2, more, seed=1)
        assert torch.equal(read(model, ids, loaded)[0], read(model, ids, cache)[0])
    assert os.listdir(tmp_path) == ["cache.safetensors"]


CONTINUE = """
import sys, torch
from hf_linear_attention import LinearAttentionCache, LinearAttentionForCausalLM
torch.set_num_threads(1)
model = LinearAttentionForCausalLM.from_pretrained("model").eval()
cache = LinearAttentionCache.load("cache.safetensors", model.config, model.device)
ids = torch.tensor([[int(x) for x in sys.argv[1].split(",")]])
outputs = model.generate(
    ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0,
    return_dict_in_generate=True, output_logits=True,
)
torch.save((outputs.sequences, outputs.logits), "continued.pt")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["gated", "hybrid"])
def test_another_process_generates_the_same_bits(variant, tmp_path):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    ids = random_ids(1, 30)
    _, cache = read(model, ids[:, :-1])
    model.save_pretrained(tmp_path / "model")
    cache.save(tmp_path / "cache.safetensors")
    numbers = ",".join(str(x) for x in ids[0].tolist())
    continued = run_python("-c", CONTINUE, numbers, cwd=tmp_path)
    assert continued.returncode == 0, continued.stderr
    here = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sequences, logits = torch.load(tmp_path / "continued.pt")
    assert torch.equal(sequences, here.sequences)
    assert all(torch.equal(x, y) for x, y in zip(logits, here.logits, strict=True))


def test_an_empty_cache_may_be_saved(tmp_path):
    config = tiny_config(**VARIANTS["hybrid"])
    LinearAttentionCache(config).save(tmp_path / "cache")
    assert LinearAttentionCache.load(tmp_path / "cache", config).get_seq_length() == 0


def test_a_cache_without_its_memory_is_saved_after_its_rows_have_moved(tmp_path):
    model = tiny_model(add_cross_attention=True)
    _, cache = read(model, random_ids(2, 6))
    cache.batch_select_indices(torch.tensor([1]))
    assert [layer.get_seq_length() for layer in cache.layers] == [6] * 3 + [0] * 3
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config, dtype=torch.float64)
    ids = random_ids(1, 3, seed=1)
    assert_near(read(model, ids, loaded)[0], read(model, ids, cache)[0])


def test_a_recording_cache_is_saved_as_it_is_now(tmp_path):
    model = tiny_model(**VARIANTS["hybrid"])
    cache = LinearAttentionCache(model.config)
    cache.activate_past_recording()
    read(model, random_ids(1, 12), cache)
    cache.crop(-2)
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config)
    assert not loaded.layers[0].record_past
    ids = random_ids(1, 3, seed=1)
    assert_near(read(model, ids, loaded)[0], read(model, ids, cache)[0])


@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("length", [3, 12])
def test_a_static_cache_comes_back_as_another(variant, length, tmp_path):
    model = tiny_model(**VARIANTS[variant])
    _, expected = read(model, random_ids(2, length))
    cache = StaticLinearAttentionCache(model.config, max_cache_len=20)
    read(model, random_ids(2, length), cache)
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config)
    joined = LinearAttentionCache.join([cache])
    ids = random_ids(2, 3, seed=1)
    logits, _ = read(model, ids, expected)
    assert_near(read(model, ids, loaded)[0], logits)
    assert_near(read(model, ids, joined)[0], logits)


@pytest.fixture
def saved(tmp_path):
    """A model, and a file with its cache."""
    model = tiny_model(dtype=torch.float32, **VARIANTS["gated"])
    read(model, random_ids(1, 5))[1].save(tmp_path / "cache")
    return model, tmp_path / "cache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": "none"}, "model with decay='none', as config has it, .* decay='per_token'"),
        ({"num_hidden_layers": 2, "layer_types": None}, "num_hidden_layers=2, as config has it"),
        (
            {"hidden_size": 64},
            "hidden_size=64, .*as config has it, and is from one with .*hidden_size=32",
        ),
    ],
    ids=["decay", "layers", "size"],
)
def test_a_cache_of_another_model_is_refused(saved, change, message):
    _, path = saved
    with pytest.raises(ValueError, match=message):
        LinearAttentionCache.load(path, tiny_config(**{**VARIANTS["gated"], **change}))


def test_a_cache_of_another_dtype_is_refused(saved):
    model, path = saved
    message = "computes in torch.bfloat16, and is from one in float32"
    with pytest.raises(ValueError, match=message):
        LinearAttentionCache.load(path, model.config, dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16  # as from_pretrained sets it
    with pytest.raises(ValueError, match=message):
        LinearAttentionCache.load(path, model.config)
    LinearAttentionCache.load(path, model.config, dtype=torch.float32)


def test_what_a_state_does_not_depend_on_may_differ(saved):
    _, path = saved
    config = tiny_config(**VARIANTS["gated"], use_cache=False, eos_token_id=3)
    assert LinearAttentionCache.load(path, config).get_seq_length() == 5


def test_a_truncated_file_is_refused(saved):
    model, path = saved
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            LinearAttentionCache.load(path, model.config)


def test_a_damaged_file_is_refused(saved):
    model, path = saved
    whole = path.read_bytes()
    for place in range(8, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged|not a whole|must be a file that"):
            LinearAttentionCache.load(path, model.config)


def without(key):
    return lambda x: {name: value for name, value in x.items() if name != key}


def of_layers(change):
    return lambda metadata: (
        metadata | {"layers": json.dumps([change(x) for x in json.loads(metadata["layers"])])}
    )


CRAFTED = {  # what becomes of the metadata and of the tensors
    "no config": (without("config"), None),
    "no JSON": (lambda metadata: metadata | {"config": "{"}, None),
    "a config that is none": (lambda metadata: metadata | {"config": "3"}, None),
    "a config of wrong types": (lambda metadata: metadata | {"config": '{"mixer": 3}'}, None),
    "an unknown mixer": (lambda metadata: metadata | {"config": '{"mixer": "none"}'}, None),
    "no layers": (without("layers"), None),
    "too few layers": (lambda metadata: metadata | {"layers": "[]"}, dict.clear),
    "layers without a length": (of_layers(without("num_tokens")), None),
    "a length that is no integer": (of_layers(lambda x: x | {"num_tokens": "5"}), None),
    "no dtype": (of_layers(without("dtype")), None),
    "a dtype that is none": (of_layers(lambda x: x | {"dtype": "nn"}), None),
    "a layer that is not there": (None, lambda x: x.update({"layers.9.keys": torch.ones(1)})),
    "a tensor of no layer": (None, lambda x: x.update({"keys": torch.ones(1)})),
    "no keys": (None, lambda x: x.pop("layers.1.keys")),
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_whole_file_that_holds_something_else_is_refused(crafted, tmp_path):
    path, config = tmp_path / "cache", tiny_config(**VARIANTS["hybrid"])
    read(LinearAttentionForCausalLM(config), random_ids(1, 5))[1].save(path)
    tensors, metadata = read_file(path, FILE_FORMATS, "")
    of_metadata, of_tensors = CRAFTED[crafted]
    if of_tensors is not None:
        of_tensors(tensors)
    write_file(path, tensors, metadata if of_metadata is None else of_metadata(metadata))
    for dtype in (None, torch.float32):
        with pytest.raises(ValueError, match=f"{path} must "):
            LinearAttentionCache.load(path, config, dtype=dtype)


def test_other_files_are_refused(saved, tmp_path):
    model, path = saved
    save_file(load_file(path), tmp_path / "other")
    with pytest.raises(ValueError, match=r"LinearAttentionCache.save wrote, .*got format None"):
        LinearAttentionCache.load(tmp_path / "other", model.config)
    with pytest.raises(FileNotFoundError):
        LinearAttentionCache.load(tmp_path / "nothing", model.config)


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()
    _, cache = read(model, random_ids(1, 3))

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("variant", CACHED)
def test_one_prefix_has_many_continuations(variant):
    model = tiny_model(**VARIANTS[variant])
    prefix, more = random_ids(1, 9), random_ids(3, 4, seed=1)
    _, cache = read(model, prefix)
    branches = copy.deepcopy(cache)
    branches.batch_repeat_interleave(3)
    whole, _ = read(model, torch.cat([prefix.expand(3, -1), more], 1))
    assert_near(read(model, more, branches)[0], whole[:, 9:])
    assert_near(read(model, more[:1], cache)[0], whole[:1, 9:])


@pytest.mark.sample(12)
@over_variants(CACHED, "lengths", [(9, 3, 6), (1, 12), (5, 5), (2, 3)])
def test_joined_caches_go_on_as_each_alone(variant, lengths):
    model = tiny_model(**VARIANTS[variant])
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    more = random_ids(len(lengths), 6, seed=99)
    caches = [read(model, ids)[1] for ids in prompts]
    expected = [
        read(model, torch.cat([ids, more[i : i + 1]], 1))[0][:, ids.shape[1] :]
        for i, ids in enumerate(prompts)
    ]
    cache = LinearAttentionCache.join(caches)
    branch = copy.deepcopy(cache)
    logits = [read(model, piece, cache)[0] for piece in more.split([1, 3, 1, 1], dim=1)]
    assert_near(torch.cat(logits, 1), torch.cat(expected))
    # A mask may go with it, of the new tokens or of all, which then need not know of the padding.
    ones = torch.ones(len(lengths), max(lengths) + 6, dtype=torch.long)
    logits = [
        read(model, more[:, :2], branch, ones[:, :2])[0],
        read(model, more[:, 2:], branch, ones)[0],
    ]
    assert_near(torch.cat(logits, 1), torch.cat(expected))


@pytest.mark.parametrize("variant", CACHED)
def test_joined_caches_generate(variant):
    model = tiny_model(**VARIANTS[variant])
    prompts = [random_ids(1, n, seed=n) for n in (8, 3)]
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cache = LinearAttentionCache.join([read(model, ids[:, :-1])[1] for ids in prompts])
    ids = torch.zeros(2, 8, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[-prompt.shape[1] :] = prompt[0]
    together = model.generate(ids, past_key_values=cache, **how)
    for row, prompt in zip(together, prompts, strict=True):
        alone = model.generate(prompt, **how)[0]
        assert row[-len(alone) :].tolist() == alone.tolist()


@pytest.mark.parametrize("variant", CACHED)
def test_padded_caches_are_joined_with_their_masks(variant):
    model = tiny_model(**VARIANTS[variant])
    first_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    first, second, more = random_ids(2, 5), random_ids(1, 8, seed=1), random_ids(3, 2, seed=2)
    ones = torch.ones(2, 2, dtype=torch.long)
    expected = [
        read(model, torch.cat([first, more[:2]], 1), None, torch.cat([first_mask, ones], 1))[0],
        read(model, torch.cat([second, more[2:]], 1))[0],
    ]
    caches = [read(model, first, None, first_mask)[1], read(model, second)[1]]
    masks = [first_mask, torch.ones(1, 8, dtype=torch.long)]
    cache = LinearAttentionCache.join(caches, masks)
    logits, _ = read(model, more, cache)
    assert_near(logits, torch.cat([x[:, -2:] for x in expected]))


MOVES = {  # of a cache of three rows, and which of them it then holds
    "select": (lambda cache, path: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "reorder": (lambda cache, path: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "repeat": (lambda cache, path: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "join": (lambda cache, path: LinearAttentionCache.join([cache, cache]), [0, 1, 2, 0, 1, 2]),
    "gather": (lambda cache, path: LinearAttentionCache(cache), [0, 1, 2]),
    "file": (
        lambda cache, path: cache.save(path) or LinearAttentionCache.load(path, cache.config),
        [0, 1, 2],
    ),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("variant", CACHED)
@pytest.mark.parametrize("move", MOVES)
def test_a_joined_cache_counts_its_rows_wherever_they_go(variant, move, tmp_path):
    model = tiny_model(**VARIANTS[variant])
    prompts = [random_ids(1, n, seed=n) for n in (9, 3, 6)]
    cache = LinearAttentionCache.join([read(model, ids)[1] for ids in prompts])
    change, rows = MOVES[move]
    cache = change(cache, tmp_path / "cache") or cache
    more = random_ids(len(rows), 4, seed=5)
    logits = torch.cat([read(model, x, cache)[0] for x in more.split([3, 1], 1)], 1)
    for row, prompt in enumerate(rows):
        whole, _ = read(model, torch.cat([prompts[prompt], more[[row]]], 1))
        assert_near(logits[[row]], whole[:, -4:])


def test_what_can_not_be_joined_says_why():
    model = tiny_model(**VARIANTS["gated"])
    other = tiny_model()
    _, cache = read(model, random_ids(1, 3))
    _, half = read(copy.deepcopy(model).float(), random_ids(1, 3))
    for caches, message in (
        ([], "at least one cache, got none"),
        ([cache, read(other, random_ids(1, 3))[1]], "of one model"),
        ([cache, LinearAttentionCache(model.config)], "got an empty one"),
        ([cache, half], r"of one dtype, got \['float32', 'float64'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            LinearAttentionCache.join(caches)
    with pytest.raises(ValueError, match=r"attention_masks .* \(1, 3\) .* got \(1, 2\)"):
        LinearAttentionCache.join([cache], [torch.ones(1, 2)])


@pytest.mark.parametrize(("padding", "fits"), [(1, True), (2, True), (3, False), (6, False)])
def test_padding_that_has_pushed_tokens_out_of_a_sliding_window_is_refused(padding, fits):
    layer_types = ["linear_attention", "sliding_attention", "linear_attention"]
    model = tiny_model(layer_types=layer_types, sliding_window=6, position_embedding_type="none")
    ids, more, ones = random_ids(1, 3), random_ids(1, 1, seed=1), torch.ones(1, 3)
    padded, mask = F.pad(ids, (0, padding)), F.pad(ones, (0, padding))
    _, cache = read(model, padded, None, mask)
    if not fits:
        with pytest.raises(ValueError, match=r"attention_masks .* window of 6: rows need \[3\]"):
            LinearAttentionCache.join([cache], [mask])
        return
    logits, _ = read(model, more, LinearAttentionCache.join([cache], [mask]))
    assert_near(logits, read(model, torch.cat([ids, more], 1))[0][:, 3:])
