# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bounded caches, in models of Transformers and in ours, against one forward over everything in
which a mask per layer says what was kept.
"""

import copy
import threading

import pytest
import torch
from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    SinkCache,
    TOVACache,
    use_kernels,
)
from hf_linear_attention.cache.layers import RecurrentLayer
from tiny import HYBRID, VOCAB_SIZE, assert_near, random_ids
from upstream_models import tiny_upstream

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MODELS = {  # model class, config class, fields
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED),
    "mistral": (MistralForCausalLM, MistralConfig, {**GROUPED, "sliding_window": 8}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**GROUPED, "sliding_window": 7}),
    "exaone4": (  # whose full layers have a `sliding_window`, too, and do not use it
        Exaone4ForCausalLM,
        Exaone4Config,
        {**GROUPED, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "phimoe": (  # whose attention is told no window: only the mask has the config's
        PhimoeForCausalLM,
        PhimoeConfig,
        {"num_key_value_heads": 2, "num_local_experts": 2, "sliding_window": 7},
    ),
    "ours": (
        LinearAttentionForCausalLM,
        LinearAttentionConfig,
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rotary"},
    ),
    "hybrid": (
        LinearAttentionForCausalLM,
        LinearAttentionConfig,
        {"layer_types": HYBRID, "sliding_window": 7, "decay": "per_token", "conv_kernel_size": 3},
    ),
}
CACHES = {
    "tova": lambda size: TOVACache(size),
    "sinks": lambda size: SinkCache(size, num_sink_tokens=2),
    "window": lambda size: SinkCache(size, num_sink_tokens=0),
}
IMPLEMENTATIONS = ["eager", "sdpa"]
CASES = [(m, i) for m in MODELS for i in IMPLEMENTATIONS if (m, i) != ("gemma2", "sdpa")]  # softcap
PADDING = torch.tensor([[0] * 7 + [1] * 5, [1] * 12, [0] * 2 + [1] * 10])


def make(name: str, attn_implementation: str = "eager", **kwargs):
    model_class, config_class, fields = MODELS[name]
    config = config_class(**{**SIZES, **fields, **kwargs})
    config._attn_implementation = attn_implementation
    config._experts_implementation = "batched_mm"  # which takes float64
    torch.manual_seed(0)
    return model_class(config).eval()


def generate(model, ids, mask=None, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, **{"do_sample": False, **kwargs}
    )


@torch.no_grad()
def read(model, ids, cache, lengths, mask=None):
    """The logits of ids, read in pieces."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits, stop = [], 0
    for length in lengths:
        start, stop = stop, stop + length
        outputs = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
        )
        logits.append(outputs.logits)
    return torch.cat(logits, 1)


def most_attended(weights, candidates, size):
    return sorted(candidates, key=lambda s: -weights[s])[:size]


def first_and_last(num_sinks):
    def keep(weights, candidates, size):
        return candidates[:num_sinks] + candidates[num_sinks:][num_sinks - size :]

    return keep


KEEP = {"tova": most_attended, "sinks": first_and_last(2), "window": first_and_last(0)}


@torch.no_grad()
def reference(name, ids, lengths, mask, size, keep):
    """The logits of ids, by one forward per piece over all until then, without a cache. What a
    token sees is written down: `seen[layer][row, t, s]`.
    """
    B, T = ids.shape
    may_see = torch.ones(T, T).tril().bool() & mask.bool()[:, None] | torch.eye(T).bool()
    seen = [may_see.clone() for _ in range(3)]
    weights: dict[int, torch.Tensor] = {}

    def attention(module, q, k, v, _, scaling=None, softcap=None, **kwargs):
        n = q.shape[2]
        window = kwargs.get("sliding_window") or T
        if name == "phimoe":
            window = module.config.sliding_window
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        is_near = torch.ones(n, n).triu(1 - window).bool()
        is_seen = seen[module.layer_idx][:, None, :n, :n] & is_near
        w = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        weights[module.layer_idx] = w.mean(1)
        return torch.einsum("bhts,bhsd->bthd", w, v), w

    AttentionInterface.register("written_down", attention)
    model = make(name, "written_down").double()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for stop in torch.tensor(lengths).cumsum(0).tolist():
        logits = model(
            ids[:, :stop],
            # ours: padding for the linear layers
            **({"attention_mask": mask[:, :stop]} if name in ("ours", "hybrid") else {}),
            position_ids=positions[:, :stop],
            use_cache=False,
        ).logits
        for layer, w in weights.items():
            for row in range(B):
                visible = seen[layer][row, stop - 1] & mask[row].bool()
                candidates = [s for s in range(stop) if visible[s]]
                if len(candidates) > size:
                    kept = keep(w[row, stop - 1], candidates, size)
                    dropped = sorted(set(candidates) - set(kept))
                    seen[layer][row, stop:, dropped] = False
    return logits


@pytest.mark.parametrize(("name", "implementation"), CASES)
@pytest.mark.parametrize("kind", CACHES)
def test_it_keeps_what_it_should(name, implementation, kind):
    ids, lengths = random_ids(3, 20), [12, 1, 1, 1, 3, 1, 1]
    mask = torch.nn.functional.pad(PADDING, (0, 8), value=1)
    cache = CACHES[kind](5)
    logits = read(make(name, implementation), ids, cache, lengths, mask)
    expected = reference(name, ids, lengths, mask, 5, KEEP[kind])
    assert_near(logits[mask.bool()].double(), expected[mask.bool()], 1e-3)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "implementation"), CASES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_large_one_is_as_good_as_a_full_one(name, implementation, options):
    model, ids = make(name, implementation), random_ids(3, 12)
    expected = generate(model, ids, PADDING, **options)
    for cache in (TOVACache(24), SinkCache(24)):
        actual = generate(model, ids, PADDING, past_key_values=cache, **options)
        assert torch.equal(actual, expected)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
@pytest.mark.parametrize("kind", CACHES)
def test_eager_and_sdpa_keep_the_same(name, kind):
    tokens, kept = [], []
    for implementation in IMPLEMENTATIONS:
        cache = CACHES[kind](6)
        model = make(name, implementation)
        tokens.append(generate(model, random_ids(3, 12), PADDING, past_key_values=cache))
        kept.append([layer.positions for layer in cache.layers if hasattr(layer, "positions")])
    assert torch.equal(*tokens)
    assert len(kept[0]) >= 2
    torch.testing.assert_close(*kept, rtol=0, atol=0)


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "implementation"), CASES)
@pytest.mark.parametrize("kind", CACHES)
def test_padding_changes_nothing(name, implementation, kind):
    model, ids = make(name, implementation), random_ids(3, 12)
    together = generate(model, ids, PADDING, past_key_values=CACHES[kind](6))
    for row, length in enumerate(PADDING.sum(1).tolist()):
        alone = generate(model, ids[row : row + 1, -length:], past_key_values=CACHES[kind](6))
        assert torch.equal(together[row, -length - 12 :], alone[0, -length - 12 :])


@pytest.mark.parametrize("name", ["llama", "gpt2", "hybrid"])
@pytest.mark.parametrize("kind", CACHES)
def test_its_memory_is_bounded(name, kind):
    model = make(name, "sdpa")
    heads, softmax_layers = (2, 3) if name == "llama" else (4, 2 if name == "hybrid" else 3)
    sizes = []
    for length in (7, 30, 200):
        cache = CACHES[kind](7)
        read(model, random_ids(2, length), cache, [4] + [1] * 3 + [length - 7] * (length > 7))
        assert cache.get_seq_length() == length
        layers = [layer for layer in cache.layers if hasattr(layer, "positions")]
        assert {layer.keys.shape for layer in layers} == {(2, heads, 7, 8)}
        storages = {layer.keys.untyped_storage().nbytes() for layer in layers}
        assert storages == {2 * heads * 7 * 8 * 4}  # no view of something larger
        sizes.append(cache.nbytes)
    recurrent = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    states = sum(x.nbytes for layer in recurrent for x in layer.tensors.values())
    assert (states > 0) == (name == "hybrid")
    assert sizes == [softmax_layers * (2 * 2 * heads * 7 * 8 * 4 + 2 * 7 * 8) + states] * 3


UPSTREAM_HYBRIDS = [
    *("qwen3_5_text", "qwen3_next", "olmo_hybrid", "jamba", "bamba", "granitemoehybrid"),
    *("nemotron_h", "lfm2"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_changed", [False, True], ids=["as it is", "use_kernels"])
@pytest.mark.parametrize("name", UPSTREAM_HYBRIDS)
def test_hybrids_of_transformers_keep_their_states(name, is_changed):
    model, ids = tiny_upstream(name), random_ids(3, 12)
    if is_changed:
        use_kernels(model)
    expected = generate(model, ids, PADDING)
    for make_cache in (TOVACache, SinkCache):
        cache = make_cache(24, config=model.config)
        assert torch.equal(generate(model, ids, PADDING, past_key_values=cache), expected)
        sizes = []
        for length in (12, 40):
            cache = make_cache(6, config=model.config)
            generate(model, random_ids(3, length), past_key_values=cache)
            sizes.append(cache.nbytes)
        bounded = [layer for layer in cache.layers if hasattr(layer, "positions")]
        assert {layer.positions.shape for layer in bounded} == {(3, 6)}
        kept = sum(x.keys.nbytes + x.values.nbytes + x.positions.nbytes for x in bounded)
        assert sizes[0] == sizes[1] > kept  # for there are states
        cache, alone = (make_cache(6, config=model.config) for _ in range(2))
        together = generate(model, ids, PADDING, past_key_values=cache)
        assert torch.equal(together[0, 7:], generate(model, ids[:1, 7:], past_key_values=alone)[0])


@pytest.mark.parametrize("name", ["llama", "mistral", "hybrid"])
def test_other_models_may_be_given_the_config_too(name):
    model, ids = make(name), random_ids(3, 12)
    for cache in (TOVACache(24, config=model.config), SinkCache(24, config=model.config)):
        expected = generate(model, ids, PADDING)
        assert torch.equal(generate(model, ids, PADDING, past_key_values=cache), expected)


@pytest.mark.parametrize("is_changed", [False, True], ids=["as it is", "use_kernels"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba", "falcon_h1"])
def test_hybrids_of_transformers_need_the_config(name, is_changed):
    model = tiny_upstream(name)
    if is_changed:
        use_kernels(model)
    with pytest.raises(ValueError, match="config must be given .* got None"):
        generate(model, random_ids(1, 5), past_key_values=TOVACache(6))


@pytest.mark.parametrize("make_cache", [TOVACache, SinkCache])
def test_a_model_that_begins_with_states_of_its_own_needs_the_config(make_cache):
    fields = {"lru_width": 32, "attention_window_size": 7}
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZES, **fields)).eval()
    ids, lengths = random_ids(2, 12), [9, 1, 2]
    expected = model(ids, use_cache=False).logits
    logits = []
    for cache in (DynamicCache(config=model.config), make_cache(24, config=model.config)):
        pieces = [model(x, past_key_values=cache).logits for x in ids.split(lengths, 1)]
        logits.append(torch.cat(pieces, 1))
    # With a cache, Transformers goes on wrongly from several tokens on, before 5.24 from one on.
    is_right = torch.isclose(logits[0], expected, atol=1e-4).all(2)
    assert is_right[:, : lengths[0]].all()
    assert_near(logits[1][is_right], expected[is_right])
    with pytest.raises(ValueError, match="config must be given .* got None"):
        model(ids, past_key_values=make_cache(24))


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_layers_that_are_both_are_refused(name):
    config = tiny_upstream(name).config
    with pytest.raises(ValueError, match="config must be of .* either softmax .* LinearAttention"):
        SinkCache(6, config=config)


def test_a_prompt_may_come_in_pieces():
    model = make("llama", "sdpa")
    ids = random_ids(1, 12)
    whole = generate(model, ids, past_key_values=TOVACache(24), prefill_chunk_size=5)
    assert torch.equal(whole, generate(model, ids, past_key_values=DynamicCache()))
    pieces = generate(model, ids, past_key_values=TOVACache(6), prefill_chunk_size=5)
    cache = TOVACache(6)
    read(model, ids, cache, [5, 5])
    assert torch.equal(pieces, generate(model, ids, past_key_values=cache))


@pytest.mark.parametrize("name", ["gpt2", "hybrid"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
    ],
    ids=["reorder", "repeat", "select"],
)
def test_its_rows_can_be_moved(name, kind, change, rows):
    model, ids, mask = make(name), random_ids(3, 12)[[0, 1, 2]], PADDING
    moved, expected = CACHES[kind](5), CACHES[kind](5)
    read(model, ids, moved, [11, 1], mask)
    change(moved)
    read(model, ids[rows], expected, [11, 1], mask[rows])
    tokens = torch.cat([ids[rows], random_ids(len(rows), 1, seed=1)], 1)
    mask = torch.nn.functional.pad(mask[rows], (0, 1), value=1)
    assert torch.equal(
        generate(model, tokens, mask, past_key_values=moved),
        generate(model, tokens, mask, past_key_values=expected),
    )


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_after_reset_it_is_as_new(name):
    model, cache = make(name), TOVACache(5)
    first = read(model, random_ids(2, 12), cache, [9, 1, 2])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(read(model, random_ids(2, 12), cache, [9, 1, 2]), first)


def test_a_copy_goes_its_own_way():
    model, ids = make("llama"), random_ids(1, 12)
    cache = TOVACache(5)
    read(model, ids, cache, [10])
    twin = copy.deepcopy(cache)
    expected = generate(model, ids, past_key_values=cache)
    assert twin.get_seq_length() == 10
    assert torch.equal(generate(model, ids, past_key_values=twin), expected)


def test_a_decoder_with_cross_attention():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        init_std=0.4,
        forced_eos_token_id=None,
        eos_token_id=None,
        decoder_start_token_id=1,
    )
    model, ids = BartForConditionalGeneration(config).eval(), random_ids(2, 9)
    caches = [
        EncoderDecoderCache(cache, DynamicCache()) for cache in (DynamicCache(), TOVACache(12))
    ]
    full, large = (generate(model, ids, past_key_values=cache) for cache in caches)
    assert torch.equal(full, large)
    small = EncoderDecoderCache(TOVACache(4), DynamicCache())
    generate(model, ids, past_key_values=small)
    assert {x.keys.shape[2] for x in small.self_attention_cache.layers} == {4}
    assert {x.keys.shape[2] for x in small.cross_attention_cache.layers} == {9}


def test_threads_do_not_meet():
    models = [make("llama"), make("gpt2")]
    ids = random_ids(1, 12)

    def run(model):
        return generate(model, ids, past_key_values=TOVACache(5))

    expected = [run(model) for model in models]
    results = [[], []]
    threads = [
        threading.Thread(target=lambda i=i: results[i].extend(run(models[i]) for _ in range(3)))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(x, expected[i]) for i in range(2) for x in results[i])
    assert [len(x) for x in results] == [3, 3]


def test_a_forward_that_broke_off_touches_no_other_model():
    model, ids = make("llama"), random_ids(1, 12)
    expected = read(model, ids, DynamicCache(), [11, 1])
    cache = TOVACache(5)
    cache.update(torch.ones(1, 2, 7, 8), torch.ones(1, 2, 7, 8), 0)  # and no attention after it
    assert torch.equal(read(model, ids, DynamicCache(), [11, 1]), expected)
    assert cache.layers[0].keys.shape[2] == 7


@pytest.mark.parametrize("cache", [TOVACache(5), SinkCache(5)], ids=["tova", "sinks"])
def test_it_takes_no_tokens_back(cache):
    model, ids = make("llama"), random_ids(1, 12)
    with pytest.raises(RuntimeError, match="it can't be used for assisted generation"):
        generate(model, ids, past_key_values=cache, prompt_lookup_num_tokens=3)
    read(model, ids, cache, [12])
    with pytest.raises(RuntimeError, match=r"crop\(-1\) can't be: \w+Cache takes no tokens back"):
        cache.crop(-1)


def test_sizes_that_are_none_are_refused():
    for size in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match=f"max_cache_len must be .* at least 1, got {size}"):
            TOVACache(size)
        with pytest.raises(ValueError, match="max_cache_len must be an integer of at least 1"):
            SinkCache(size)
    with pytest.raises(ValueError, match="num_sink_tokens must be .* at least 0, got -1"):
        SinkCache(4, -1)
    with pytest.raises(ValueError, match="must be less than max_cache_len=4, got 4"):
        SinkCache(4)


def test_attention_that_it_does_not_know_is_refused():
    AttentionInterface.register("my_own", lambda *args, **kwargs: (args[3], None))
    with pytest.raises(ValueError, match=r"attn_implementation must be one of .*, got 'my_own'"):
        read(make("llama", "my_own"), random_ids(1, 5), TOVACache(4), [5])


def test_attention_that_it_does_not_see_is_refused():
    model = make("gpt2", reorder_and_upcast_attn=True)  # computes by itself
    cache = TOVACache(9)
    with pytest.raises(RuntimeError, match="TOVALayer was not told what the last tokens attended"):
        read(model, random_ids(1, 5), cache, [4, 1])
    cache.reset()
    read(make("gpt2"), random_ids(1, 5), cache, [4, 1])


def test_masks_of_each_head_are_refused():
    model = make("llama")
    mask = torch.zeros(1, 4, 5, 5)
    with pytest.raises(ValueError, match="a bias to the scores of each head"):
        model(random_ids(1, 5), attention_mask=mask, past_key_values=TOVACache(4))


def test_one_of_another_model_is_refused():
    cache = TOVACache(4)
    read(make("llama"), random_ids(1, 5), cache, [5])
    with pytest.raises(ValueError, match="bounded cache that has read nothing"):
        read(make("hybrid"), random_ids(1, 5), cache, [5])
