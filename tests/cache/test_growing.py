# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The layer of keys and values that writes new ones behind the others: whatever is done with it, it
holds what Transformers' does.
"""

import copy
import pickle

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_linear_attention.cache.growing import GrowingLayer, let_grow
from seeds import over_seeds


def tokens(count: int, rows: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, 3, count, 4, generator=generator).unbind()


def assert_same(layer, other):
    assert layer.get_seq_length() == other.get_seq_length()
    if other.is_initialized and layer.get_seq_length() > 0:
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


CHANGES = {
    "crop": lambda x: x.crop(-min(2, x.get_seq_length())),
    "rows": lambda x: x.batch_select_indices(torch.tensor([1, 0])),
    "reorder": lambda x: x.reorder_cache(torch.tensor([0, 0])),
    "twice": lambda x: x.batch_repeat_interleave(2) or x.batch_select_indices(torch.arange(2)),
}


@over_seeds(60)
def test_any_calls_leave_what_transformers_has(seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = [(GrowingLayer(), DynamicLayer())]
    for step in range(25):
        number = int(torch.randint(len(pairs), (), generator=generator))
        layer, other = pairs[number]
        choice = int(torch.randint(10, (), generator=generator))
        if choice < 6:
            count = int(torch.randint(1, 70, (), generator=generator)) if choice == 0 else 1
            new = tokens(count, seed=100 * seed + step)
            for mine, theirs in zip(layer.update(*new), other.update(*new), strict=True):
                assert torch.equal(mine, theirs)
        elif choice < 8 and layer.get_seq_length() > 2:
            names = sorted(CHANGES)
            change = CHANGES[names[int(torch.randint(len(names), (), generator=generator))]]
            change(layer), change(other)
        elif choice == 8 and layer.is_initialized:
            how = (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))
            made = how[int(torch.randint(3, (), generator=generator))]
            pairs.append((made(layer), made(other)))
        for pair in pairs:
            assert_same(*pair)


def test_a_token_is_written_behind_the_others():
    layer = GrowingLayer()
    layer.update(*tokens(100))
    before = layer.keys.data_ptr()
    seen, first = layer.keys, layer.keys.clone()
    for step in range(20):
        layer.update(*tokens(1, seed=step))
    assert layer.keys.data_ptr() == before and torch.equal(seen, first)


def test_reset_forgets_and_leaves_views_alone():
    layer = GrowingLayer()
    seen, _ = layer.update(*tokens(5))
    before = seen.clone()
    layer.reset()
    assert layer.get_seq_length() == 0
    new = tokens(2, seed=1)
    assert torch.equal(layer.update(*new)[1], new[1]) and torch.equal(seen, before)


def test_inference_mode_and_gradients():
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(*tokens(3))
    keys, values = tokens(1, seed=1)
    keys.requires_grad_()
    got, _ = layer.update(keys, values)
    got.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))


def test_layers_of_transformers_caches_become_such():
    cache = DynamicCache()
    cache.update(*tokens(3), 0)
    keys = cache.layers[0].keys
    let_grow(cache)
    cache.update(*tokens(1), 0)
    cache.update(*tokens(4), 1)
    assert [type(layer) for layer in cache.layers] == [GrowingLayer, GrowingLayer]
    assert torch.equal(cache.layers[0].keys[:, :, :3], keys)
    other = type("Other", (DynamicCache,), {})()
    other.update(*tokens(3), 0)
    let_grow(other)
    assert type(other.layers[0]) is DynamicLayer
