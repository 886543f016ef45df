# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Compiled and exported models: one graph for every token, with the answers of the plain model."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig

from hf_linear_attention import LinearAttentionCache, StaticLinearAttentionCache
from hf_linear_attention.ops import backends
from tiny import NEWER, VARIANTS, assert_near, random_ids, shallow, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ["gated", "hybrid", *NEWER]  # compiling a layer takes seconds


@pytest.fixture(autouse=True)
def new_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@torch.no_grad()
def read(forward, ids, cache, pieces):
    """The logits of ids, read in pieces."""
    pieces = ids.split(pieces, dim=1)
    return torch.cat([forward(piece, past_key_values=cache).logits for piece in pieces], 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        ("paper", "eager"),
        ("softmax_first", "eager"),
        ("gated", "aot_eager"),
        ("hybrid", "eager"),
        ("aaren", "eager"),
        ("preset_gated_deltanet", "aot_eager"),
        ("preset_kimi_linear", "eager"),
    ],
)
def test_a_static_cache_grows_without_another_graph(variant, backend):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    ids = random_ids(2, 40)
    whole = read(model, ids, None, 40)
    cache = StaticLinearAttentionCache(model.config, max_cache_len=40)
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    prompt = read(model, ids[:, :9], cache, 9)
    steps = read(compiled, ids[:, 9:16], cache, 1)
    assert num_graphs() == 1
    pieces = read(compiled, ids[:, 16:36], cache, 5)
    assert num_graphs() == 2
    last = read(compiled, ids[:, 36:], cache, 1)
    assert num_graphs() == 2
    assert_near(torch.cat([prompt, steps, pieces, last], 1), whole)


@pytest.mark.thorough
def test_a_memory_of_any_length_is_read_by_the_same_graph():
    model = tiny_model(dtype=torch.float32, add_cross_attention=True)
    ids = random_ids(2, 9)
    cache = StaticLinearAttentionCache(model.config, max_cache_len=20)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    for length in (5, 8, 8):
        memory = torch.randn(2, length, 32)
        whole = model(ids, encoder_hidden_states=memory, use_cache=False).logits
        with torch.no_grad():
            prompt = model(ids[:, :4], encoder_hidden_states=memory, past_key_values=cache).logits
        logits = torch.cat([prompt, read(compiled, ids[:, 4:], cache, 1)], 1)
        assert_near(logits, whole)
        assert num_graphs() == 1
        cache.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["paper"])
def test_the_usual_cache_grows_without_many_graphs(variant):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    ids = random_ids(2, 30)
    cache = LinearAttentionCache(model.config)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    logits = [read(model, ids[:, :9], cache, 9), read(compiled, ids[:, 9:11], cache, 1)]
    graphs = num_graphs()  # the second one takes any number of tokens in the cache
    logits.append(read(compiled, ids[:, 11:], cache, 1))
    assert num_graphs() == graphs <= 2
    assert_near(torch.cat(logits, 1), read(model, ids, None, 30))


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", SOME)
def test_a_prompt_compiles_into_one_graph(variant):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    ids = random_ids(2, 12)
    cache = StaticLinearAttentionCache(model.config, max_cache_len=20)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert_near(read(compiled, ids, cache, 12), read(model, ids, None, 12))
    assert num_graphs() == 1


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["hybrid", "aaren"])
def test_addresses_never_change(variant):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    cache = StaticLinearAttentionCache(model.config, max_cache_len=40)
    ids = random_ids(2, 9)
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    first = read(model, ids, cache, 4)
    before = {name: x.data_ptr() for name, x in cache.static_tensors().items()}
    read(compiled, ids, cache, 1)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(read(compiled, ids, cache, 1), first)
    assert {name: x.data_ptr() for name, x in cache.static_tensors().items()} == before
    for x in cache.static_tensors().values():  # what CUDA graphs need to know
        assert getattr(x, "_dynamo_static_input_type", None) == "unguarded"


def compile_everywhere(**kwargs) -> CompileConfig:
    config = CompileConfig(fullgraph=True, mode=None, **kwargs)
    config._compile_all_devices = True  # generate() would only on GPUs
    return config


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", SOME)
def test_generate_compiles_one_graph_for_all_tokens(variant):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    ids = random_ids(2, 9)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    static = {
        "cache_implementation": "static",
        "compile_config": compile_everywhere(backend="eager"),
    }
    for mask_of_call in (torch.ones_like(mask), mask):  # each makes a cache of its own
        inputs = {"input_ids": ids * mask_of_call, "attention_mask": mask_of_call, **how}
        plain = model.generate(**inputs)
        compiled = model.generate(**inputs, **static)
        assert compiled.tolist() == plain.tolist()
        assert num_graphs() == 1
    longer = model.generate(random_ids(2, 5), **how, **static)
    assert longer.tolist() == model.generate(random_ids(2, 5), **how).tolist()
    assert num_graphs() == 1  # the cache has room for the longest so far


def test_a_static_cache_takes_no_tokens_back():
    model = tiny_model()
    cache = StaticLinearAttentionCache(model.config, max_cache_len=20)
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="a static cache takes no tokens back"):
        model.generate(random_ids(1, 5), past_key_values=cache, prompt_lookup_num_tokens=2)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits


class Step(nn.Module):
    """One more token, with the cache in buffers."""

    def __init__(self, model, cache):
        super().__init__()
        self.model, self.cache = model, cache
        for name, x in cache.static_tensors().items():
            self.register_buffer(name, x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, past_key_values=self.cache).logits


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.sample(1)
@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *((variant, None) for variant in SOME),
        # of these torch.export can't prove what it asks of lengths, and says so
        *((variant, "chunked") for variant in SOME if "rwkv" not in variant),
    ],
)
def test_forward_is_exported_for_any_length(variant, backend, monkeypatch):
    monkeypatch.setattr(backends, "FORCED_BACKEND", backend)
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(
        Logits(model), (random_ids(2, 7),), dynamic_shapes={"input_ids": {1: T}}
    )
    run = saved_and_loaded(program)
    for length in (2, 64, 65, 200):
        ids = random_ids(2, length)
        assert_near(run(ids), model(ids).logits)


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize("variant", SOME)
def test_a_step_is_exported_with_its_cache(variant):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    ids = random_ids(2, 20)
    cache = StaticLinearAttentionCache(model.config, max_cache_len=20)
    model(ids[:, :1], past_key_values=cache)
    cache.reset()
    program = torch.export.export(Step(model, cache), (random_ids(2, 1),), strict=True)
    run = saved_and_loaded(program)
    logits = [run(token.clone()) for token in ids.split(1, dim=1)]
    assert_near(torch.cat(logits, 1), model(ids).logits)


@pytest.mark.parametrize("variant", ["paper", "hybrid", "softmax_first"])
def test_static_tensors_are_of_a_cache_that_has_read(variant):
    cache = StaticLinearAttentionCache(tiny_model(**VARIANTS[variant]).config, max_cache_len=9)
    with pytest.raises(RuntimeError, match="needs a cache that has read a token"):
        cache.static_tensors()
