# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Cross attention to a memory: the formula, what a cache keeps, and encoder-decoder models."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionForCausalLM,
    LinearAttentionModel,
    StaticLinearAttentionCache,
    TOVACache,
)
from hf_linear_attention.cache.layers import MemoryLayer
from hf_linear_attention.mixers.cross import CrossAttention
from hf_linear_attention.ops.feature_maps import POINTWISE
from tiny import NEWER, VARIANTS, VOCAB_SIZE, assert_near, random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = [name for name, x in VARIANTS.items() if "rwkv" not in x.get("mixer", "")]  # which has none
SOME = [name for name in ("paper", "gated", "hybrid", *NEWER) if name in ALL]
MEMORY_SIZE = 24
M = 6  # tokens in the memory
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]])


def decoder(variant="hybrid", **kwargs):
    cross = {"add_cross_attention": True, "cross_attention_hidden_size": MEMORY_SIZE}
    return tiny_model(**{**VARIANTS[variant], **cross, **kwargs})


def random_memory(B=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, M, MEMORY_SIZE, generator=generator, dtype=torch.float64)


def given(memory, mask=MASK):
    return {"encoder_hidden_states": memory, "encoder_attention_mask": mask}


@torch.no_grad()
def read(model, ids, cache=None, **kwargs):
    return model(ids, past_key_values=cache, **kwargs).logits


@pytest.mark.parametrize("variant", ALL)
def test_it_is_the_formula(variant):
    torch.manual_seed(0)
    config = tiny_config(
        **VARIANTS[variant], add_cross_attention=True, cross_attention_hidden_size=MEMORY_SIZE
    )
    layer = CrossAttention(config, layer_idx=0).double()
    x, memory = torch.randn(3, 5, 32).double(), random_memory()
    y = layer(x, memory, MASK)

    K, V, Hq = config.linear_key_head_dim, config.linear_value_head_dim, layer.heads.queries
    q, k = (z.unflatten(-1, (-1, K)) for z in (layer.q_proj(x), layer.k_proj(memory)))
    v = layer.v_proj(memory).unflatten(-1, (-1, V))
    if config.value_act == "silu":
        v = v * v.sigmoid()
    if layer.feature_map is None:
        q, k = POINTWISE[config.feature_map](q), POINTWISE[config.feature_map](k)
    else:
        q, k = layer.feature_map(q, k)
    k, v = (z.repeat_interleave(Hq // z.shape[2], dim=2) for z in (k, v))
    weights = torch.einsum("bthf,bmhf->bhtm", q, k) * MASK[:, None, None]
    if config.normalizer == "z":
        weights = weights / (weights.sum(-1, keepdim=True) + config.attention_eps)
    expected = torch.einsum("bhtm,bmhd->bthd", weights, v)
    if config.normalizer != "z":
        gate = None
        if config.low_rank_gate:
            gate = layer.gate_act(layer.g_b_proj(layer.g_a_proj(x)))
        elif "gate" in config.normalizer:
            gate = layer.gate_act(layer.g_proj(x))
        expected = normalized(config, expected, gate)
    assert_near(y, layer.o_proj(expected.flatten(2)), 1e-5)


def normalized(config, y, gate):
    """y (B, T, Hq, V) at unit mean square over what the config says, before or after the gate."""
    if config.normalizer == "gate":
        return y * gate.view(y.shape)
    is_first = config.normalizer == "rms_norm_of_gated"
    if gate is not None and is_first:
        y = y * gate.view(y.shape)
    groups = {
        "rms_norm": y.shape[2],
        "gated_rms_norm": y.shape[2],
        "rms_norm_of_gated": config.num_key_value_heads,
    }.get(config.normalizer, 1)
    together = y.flatten(2).unflatten(2, (groups, -1))
    together = together / (together.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    y = together.view(y.shape)
    return y if gate is None or is_first else y * gate.view(y.shape)


@pytest.mark.parametrize("variant", SOME)
def test_hidden_tokens_are_not_there(variant):
    model, ids, memory = decoder(variant), random_ids(3, 7), random_memory()
    together = read(model, ids, **given(memory.masked_fill(MASK[..., None] == 0, torch.nan)))
    for row in range(3):
        alone = memory[row : row + 1, MASK[row].bool()]
        assert_near(together[row], read(model, ids[row : row + 1], encoder_hidden_states=alone)[0])
    assert_near(
        read(model, ids, **given(memory, None)), read(model, ids, **given(memory, MASK > -1))
    )


def test_a_memory_changes_something_and_none_nothing():
    model, ids = decoder("paper"), random_ids(3, 7)
    without = read(model, ids)
    assert (read(model, ids, **given(random_memory())) - without).abs().max() > 0.1
    plain = tiny_model()
    plain.load_state_dict(
        {name: x for name, x in model.state_dict().items() if "cross_att" not in name}
    )
    assert torch.equal(read(plain, ids), without)
    nothing = read(model, ids, **given(random_memory(), torch.zeros(3, M)))
    assert_near(nothing, without)


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("lengths", [[9], [1] * 9, [4, 1, 1, 3]])
def test_any_split_equals_the_whole(variant, lengths):
    model, ids, memory = decoder(variant), random_ids(3, 9), random_memory()
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :3] = mask[1, :5] = 0
    expected = read(model, ids, attention_mask=mask, **given(memory))
    cache = LinearAttentionCache(model.config)
    logits, stop = [], 0
    for piece in ids.split(lengths, dim=1):
        stop += piece.shape[1]
        logits.append(read(model, piece, cache, attention_mask=mask[:, :stop], **given(memory)))
    real = mask.bool()
    assert_near(torch.cat(logits, 1)[real], expected[real])


def test_it_is_folded_once_and_not_looked_at_again():
    model, ids, memory = decoder(), random_ids(3, 9), random_memory()
    folded = []
    for layer in model.model.layers:
        layer.cross_attn.k_proj.register_forward_hook(lambda *_: folded.append(1))
    cache = LinearAttentionCache(model.config)
    read(model, ids[:, :4], cache, **given(memory))
    assert len(folded) == 3
    twin = copy.deepcopy(cache)
    nan = given(torch.full_like(memory, torch.nan))
    assert_near(read(model, ids[:, 4:5], cache, **nan), read(model, ids[:, 4:5], twin))
    assert len(folded) == 3
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, **given(memory))
    assert len(folded) == 6
    again = model.generate(ids, max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert len(folded) == 6
    assert torch.equal(generated, again)


def test_its_size_does_not_depend_on_the_memory():
    model, sizes = decoder("paper"), []
    for length in (1, 500):
        cache = LinearAttentionCache(model.config)
        read(
            model, random_ids(2, 3), cache, encoder_hidden_states=torch.ones(2, length, 24).double()
        )
        sizes.append(cache.nbytes)
    per_layer = 2 * 4 * 8 * (8 + 1) * 8  # B H K (V + 1) float64
    assert sizes == [3 * 2 * per_layer] * 2


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "repeat", "select"],
)
def test_its_rows_can_be_moved(variant, change, rows):
    model, ids, memory = decoder(variant), random_ids(3, 6), random_memory()
    cache = LinearAttentionCache(model.config)
    read(model, ids, cache, **given(memory))
    change(cache)
    new = random_ids(len(rows), 2, seed=1)
    whole = read(model, torch.cat([ids[rows], new], 1), **given(memory[rows], MASK[rows]))
    assert_near(read(model, new, cache), whole[:, 6:])


@pytest.mark.parametrize("variant", SOME)
def test_removed_tokens_leave_the_memory(variant):
    model, ids, memory = decoder(variant), random_ids(3, 9), random_memory()
    cache = LinearAttentionCache(model.config)
    cache.activate_past_recording()
    read(model, ids[:, :6], cache, **given(memory))
    cache.crop(-2)
    assert cache.is_croppable
    assert_near(read(model, ids[:, 4:], cache), read(model, ids, **given(memory))[:, 4:])


def test_drafts_do_not_change_what_is_generated():
    model, ids, memory = decoder(), random_ids(1, 6).repeat(1, 2), random_memory(1)
    options = {"max_new_tokens": 12, "do_sample": False, "encoder_hidden_states": memory}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), plain)


def test_after_reset_another_memory_can_be_read():
    model, ids = decoder(), random_ids(3, 6)
    for cache in (LinearAttentionCache(model.config), StaticLinearAttentionCache(model.config, 6)):
        for seed in (0, 1):
            memory = given(random_memory(seed=seed))
            logits = [read(model, ids[:, :5], cache, **memory), read(model, ids[:, 5:], cache)]
            assert_near(torch.cat(logits, 1), read(model, ids, **memory))
            cache.reset()


def test_a_cache_comes_back_from_a_file(tmp_path):
    model, ids, memory = decoder(), random_ids(3, 9), random_memory()
    cache = LinearAttentionCache(model.config)
    read(model, ids[:, :6], cache, **given(memory))
    cache.save(tmp_path / "cache")
    loaded = LinearAttentionCache.load(tmp_path / "cache", model.config)
    assert torch.equal(read(model, ids[:, 6:], loaded), read(model, ids[:, 6:], cache))
    other = tiny_config(**VARIANTS["hybrid"], add_cross_attention=True)
    with pytest.raises(ValueError, match="cross_attention_hidden_size"):
        LinearAttentionCache.load(tmp_path / "cache", other)


@pytest.mark.parametrize("with_memory", [True, False])
def test_caches_with_memories_can_be_joined(with_memory):
    model, memory = decoder(), random_memory()
    texts, new = [random_ids(1, length) for length in (7, 4)], random_ids(2, 2, seed=1)
    caches = []
    for row, ids in enumerate(texts):
        caches.append(LinearAttentionCache(model.config))
        read(model, ids, caches[-1], **(given(memory[[row]], MASK[[row]]) if with_memory else {}))
    cache = LinearAttentionCache.join(caches)
    together = read(model, new, cache)
    for row, alone in enumerate(caches):
        assert_near(together[row], read(model, new[[row]], alone)[0])


def test_other_caches_get_the_layers_they_need():
    model, ids, memory = decoder(), random_ids(3, 9), random_memory()
    expected = read(model, ids, **given(memory))
    for cache in (
        DynamicCache(),
        EncoderDecoderCache(DynamicCache(), DynamicCache()),
        TOVACache(9),
    ):
        logits = [read(model, ids[:, :6], cache, **given(memory)), read(model, ids[:, 6:], cache)]
        assert_near(torch.cat(logits, 1), expected)
    assert [type(layer) for layer in cache.layers[3:]] == [MemoryLayer] * 3


@pytest.mark.parametrize("variant", SOME)
def test_gradients_reach_the_memory(variant):
    model, ids = decoder(variant), random_ids(3, 6)
    memory = random_memory().requires_grad_()
    x = torch.linspace(-1, 1, 3 * 6 * VOCAB_SIZE).view(3, 6, VOCAB_SIZE).double()
    (model(ids, use_cache=False, **given(memory)).logits * x).sum().backward()
    assert (memory.grad[MASK == 0] == 0).all()

    direction = torch.randn_like(memory) * MASK[..., None]
    h = 1e-4
    up, down = (read(model, ids, **given(memory + s * h * direction)) for s in (1, -1))
    slope = ((up - down) * x).sum() / (2 * h)
    assert abs((memory.grad * direction).sum() - slope) < 1e-3 * slope.abs().clamp(min=1)

    cached = random_memory().requires_grad_()
    cache = LinearAttentionCache(model.config)
    first = model(ids[:, :4], past_key_values=cache, **given(cached)).logits
    logits = torch.cat([first, model(ids[:, 4:], past_key_values=cache).logits], 1)
    (logits * x).sum().backward()
    assert_near(cached.grad, memory.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant):
    model, ids = decoder().train(), random_ids(3, 6)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        memory = random_memory().requires_grad_()
        model.zero_grad()
        model(ids, labels=ids, **given(memory)).loss.backward()
        gradients.append([memory.grad, model.model.layers[0].cross_attn.k_proj.weight.grad])
    for a, b in zip(*gradients, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype):
    model, ids = decoder(initializer_range=0.05), random_ids(3, 6)
    expected = read(model, ids, **given(random_memory()))
    cache = LinearAttentionCache(model.config)
    logits = read(model.to(dtype), ids, cache, **given(random_memory().to(dtype)))
    assert logits.dtype == dtype
    assert cache.layers[3].tensors["kv"].dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=0.05, atol=0.05)
    model.float()
    with torch.autocast("cpu", dtype=dtype):
        cache = LinearAttentionCache(model.config)
        logits = read(model, ids, cache, **given(random_memory().float()))
    assert cache.layers[3].tensors["kv"].dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=0.05, atol=0.05)


def test_wrong_memories_are_refused():
    model, ids = decoder(), random_ids(3, 6)
    with pytest.raises(ValueError, match="need a config with add_cross_attention=True"):
        read(tiny_model(), ids, **given(random_memory()))
    for memory in (random_memory(2), torch.ones(3, M, 32), torch.ones(3, 20)):
        with pytest.raises(ValueError, match=r"must have shape .* = \(3, M, 24\), got"):
            read(model, ids, encoder_hidden_states=memory)
    with pytest.raises(ValueError, match=r"encoder_attention_mask must have shape \(B, M\)"):
        read(model, ids, **given(random_memory(), MASK[:, 1:]))
    with pytest.raises(ValueError, match="must be None with packed sequences"):
        packed = torch.tensor([0, 2, 1]).repeat(3, 2).cumsum(1) % 3
        read(model, ids, position_ids=packed, use_cache=False, **given(random_memory()))
    with pytest.raises(ValueError, match="cross_attention_hidden_size=0 must be at least 1"):
        tiny_config(cross_attention_hidden_size=0)


ENCODERS = {
    "bert": lambda: BertModel(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=MEMORY_SIZE,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=28,
            initializer_range=0.4,
            pad_token_id=0,
        )
    ),
    "ours": lambda: tiny_model(
        LinearAttentionModel, torch.float32, is_causal=False, hidden_size=MEMORY_SIZE
    ),
}


def encoder_decoder(encoder="bert", variant="hybrid", **kwargs):
    torch.manual_seed(0)
    model = EncoderDecoderModel(
        encoder=ENCODERS[encoder](), decoder=decoder(variant, dtype=torch.float32, **kwargs)
    )
    model.config.decoder_start_token_id = 1
    model.config.pad_token_id = 0
    model.generation_config.decoder_start_token_id = 1
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(model, **kwargs):
    ids = random_ids(3, M) * MASK
    options = {"max_new_tokens": 12, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=MASK, **options)


@pytest.mark.sample(5)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_an_encoder_decoder_model_generates(encoder, variant, num_beams):
    model = encoder_decoder(encoder, variant)
    tokens = generate(model, num_beams=num_beams)
    assert torch.equal(generate(model, num_beams=num_beams, use_cache=False), tokens)
    outputs = generate(model, num_beams=num_beams, return_dict_in_generate=True)
    assert type(outputs.past_key_values) is LinearAttentionCache
    assert len({tuple(row) for row in tokens.tolist()}) == 3  # they depend on what is encoded


def test_prompts_in_pieces_leave_the_mask_of_the_memory_whole():
    model = encoder_decoder()
    assert torch.equal(generate(model, prefill_chunk_size=2), generate(model))


def test_an_encoder_decoder_model_takes_other_caches():
    model = encoder_decoder()
    tokens = generate(model)
    assert torch.equal(generate(model, cache_implementation="static", disable_compile=True), tokens)
    for cache in (LinearAttentionCache(model.decoder.config), TOVACache(12)):
        assert torch.equal(generate(model, past_key_values=cache), tokens)


@pytest.mark.parametrize("size", [MEMORY_SIZE, None])
def test_an_encoder_decoder_model_comes_back_from_a_folder(size, tmp_path):
    model = encoder_decoder(cross_attention_hidden_size=size)
    assert hasattr(model, "enc_to_dec_proj") == (size is None)  # by Transformers
    model.save_pretrained(tmp_path)
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    assert type(loaded.decoder) is LinearAttentionForCausalLM
    assert torch.equal(generate(loaded), generate(model))
    config = AutoConfig.from_pretrained(tmp_path).decoder
    assert (config.add_cross_attention, config.cross_attention_hidden_size) == (True, size)


def test_an_encoder_decoder_model_trains():
    model = encoder_decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids, labels = random_ids(3, M), random_ids(3, 4, seed=1)
    losses = []
    with pytest.warns(FutureWarning):  # of Transformers, about labels
        for _ in range(30):
            loss = model(input_ids=ids, attention_mask=MASK, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_other_decoders_keep_their_cache():
    sizes = {"n_embd": MEMORY_SIZE, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB_SIZE}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=ENCODERS["bert"](), decoder=gpt2).eval()
    outputs = generate(
        model, decoder_start_token_id=1, pad_token_id=0, return_dict_in_generate=True
    )
    assert type(outputs.past_key_values) is EncoderDecoderCache
