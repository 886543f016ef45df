# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Log decays: their formulas, their domain, and that no cast or load changes what is fixed."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    StaticLinearAttentionCache,
    linear_attention,
)
from hf_linear_attention.decays import (
    REGISTERED,
    Decay,
    build_decay,
    check_decay,
    register_decay,
)

B, T, H, HIDDEN, LAYERS = 2, 5, 4, 16, 3
FIXED = ["retnet", "lightning"]
LEARNED = ["per_head", "per_token"]


def build(name, layer_idx=1, num_layers=LAYERS):
    config = SimpleNamespace(
        decay=name,
        num_key_value_heads=H,
        head_dim=HIDDEN // H,
        hidden_size=HIDDEN,
        num_hidden_layers=num_layers,
    )
    return build_decay(config, layer_idx)


def hidden_states(dtype=torch.float32):
    return torch.randn(B, T, HIDDEN, dtype=dtype)


def test_none_is_none():
    assert build("none")(hidden_states()) is None


def test_retnet():
    expected = [math.log(1 - 2 ** (-5 - h)) for h in range(H)]
    torch.testing.assert_close(build("retnet")(hidden_states())[1, 2], torch.tensor(expected))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_lightning_has_the_slopes_of_minimax(num_layers):
    config = MiniMaxConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=H,
        num_key_value_heads=H,
        layer_types=["linear_attention"] * num_layers,
    )
    for layer in range(num_layers):
        slopes = MiniMaxLightningAttention(config, layer).slope_rate.flatten()
        log_decay = build("lightning", layer, num_layers)(hidden_states())
        torch.testing.assert_close(log_decay[0, 0], -slopes)


def test_per_head_starts_as_retnet_and_learns():
    module = build("per_head")
    torch.testing.assert_close(module(hidden_states()), build("retnet")(hidden_states()))
    (gradient,) = torch.autograd.grad(module(hidden_states()).sum(), module.parameters())
    assert (gradient < 0).all()


def test_per_token_is_mamba2_s():
    module = build("per_token")
    x = hidden_states()
    dt = (x @ module.dt_proj.weight.T + module.dt_bias).exp().log1p()
    torch.testing.assert_close(module(x), -module.A_log.exp() * dt)
    torch.manual_seed(0)
    A, dt = [], []
    for _ in range(200):
        module.reset_parameters()
        A.append(module.A_log.exp())
        dt.append(torch.nn.functional.softplus(module.dt_bias))
    A, dt = torch.cat(A), torch.cat(dt)
    assert 1 <= A.min() < 1.5 and 15.5 < A.max() <= 16 + 1e-4
    assert 0.001 - 1e-6 <= dt.min() < 0.0012 and 0.08 < dt.max() <= 0.1 + 1e-4
    for gradient in torch.autograd.grad(module(x).sum(), list(module.parameters())):
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", [*FIXED, *LEARNED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_shape_dtype_and_sign(name, dtype):
    module = build(name).to(dtype)
    log_decay = module(hidden_states(dtype) * 1e3)
    assert log_decay.shape == (B, T, H)
    assert log_decay.dtype in (torch.float32, torch.float64)
    assert (log_decay <= 0).all() and not log_decay.isnan().any()


@pytest.mark.parametrize("name", FIXED)
def test_fixed_decays_are_not_rounded_by_a_cast_nor_saved_nor_copied(name):
    module = build(name)
    before = module(hidden_states())
    after = module.to(torch.bfloat16)(hidden_states(torch.bfloat16))
    assert torch.equal(before, after)
    assert after.stride()[:2] == (0, 0)
    assert module.state_dict() == {}


@pytest.mark.parametrize("name", [*FIXED, *LEARNED])
def test_a_module_built_on_meta_is_whole_after_reset_parameters(name):
    torch.manual_seed(5)
    direct = build(name)
    with torch.device("meta"):
        on_meta = build(name)
    on_meta = on_meta.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in reversed(list(on_meta.modules())):  # dt_proj first, as in the constructor
        module.reset_parameters()
    x = hidden_states()
    assert torch.equal(on_meta(x), direct(x))


@pytest.mark.parametrize("name", [*FIXED, *LEARNED])
def test_saving_and_loading_a_model_keeps_the_decay(name, tmp_path):
    config = LinearAttentionConfig(
        vocab_size=11,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        decay=name,
    )
    model = LinearAttentionForCausalLM(config)
    model.save_pretrained(tmp_path)
    loaded = LinearAttentionForCausalLM.from_pretrained(tmp_path)
    x = hidden_states()
    for layer, again in zip(model.model.layers, loaded.model.layers, strict=True):
        log_decay = layer.self_attn.decay(x)
        torch.testing.assert_close(again.self_attn.decay(x), log_decay, rtol=0, atol=0)
    tokens = torch.arange(11)[None]
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize("name", [*FIXED, *LEARNED])
def test_attention_with_the_decay_is_the_masked_parallel_form(name):
    """(Q K^T * D) V with D_tj = exp(g_{j+1} + ... + g_t): equation 5 of arXiv 2307.08621."""
    q, k, v = torch.randn(3, B, T, H, 6, dtype=torch.float64)
    log_decay = build(name).double()(hidden_states(torch.float64)).double()
    y = linear_attention(q, k, v, log_decay, normalize=False)
    total = log_decay.cumsum(1)
    D = (total[:, :, None] - total[:, None]).exp().permute(0, 3, 1, 2).tril()
    scores = torch.einsum("bthd,bjhd->bhtj", q, k) * D
    torch.testing.assert_close(y, torch.einsum("bhtj,bjhd->bthd", scores, v))


# ---- Aaren ----


def aaren_attention(module, k, v, pieces=None, **kwargs):
    """The op with the decay, in pieces of so many tokens."""
    state, past_max, outputs = None, None, []
    for k_piece, v_piece in zip(*(x.split(pieces or T, 1) for x in (k, v)), strict=True):
        phi_k, log_decay, running_max = module(k_piece, past_max=past_max, **kwargs)
        y, state = linear_attention(
            torch.ones_like(phi_k),
            phi_k,
            v_piece,
            log_decay,
            initial_state=state,
            return_state=True,
            eps=0.0,
            **kwargs,
        )
        past_max = running_max[:, -1]
        outputs.append(y)
    return torch.cat(outputs, 1)


def learned_query_softmax(module, k, v):
    scores = torch.einsum("hd,bjhd->bhj", module.query, k) * k.shape[-1] ** -0.5
    scores = scores[:, :, None].expand(-1, -1, k.shape[1], -1)
    future = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhtj,bjhd->bthd", weights, v)


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small", "large"])
@pytest.mark.parametrize("pieces", [None, [1] * T, [2, 3], [4, 1]], ids=str)
def test_aaren_is_softmax_attention_of_a_learned_query(scale, pieces):
    module = build("aaren").double()
    k, v = torch.randn(2, B, T, H, HIDDEN // H, dtype=torch.float64)
    k = k * scale
    torch.testing.assert_close(
        aaren_attention(module, k, v, pieces), learned_query_softmax(module, k, v)
    )


def scores_of(module, *scores):
    """Keys (1, T, H, D) with these scores for every head."""
    query = module.query.detach()
    unit = query / query.square().sum(-1, keepdim=True) * query.shape[-1] ** 0.5
    return torch.tensor(scores)[None, :, None, None] * unit


@pytest.mark.parametrize("scores", [(1e4, -1e4, 1e4, 9999.0), (-1e4, -9999.0, 0.0, 1e4)])
def test_aaren_survives_scores_of_any_size_in_float32(scores):
    module = build("aaren")
    k = scores_of(module, *scores).requires_grad_()
    v = torch.randn(1, 4, H, 3, requires_grad=True)
    y = aaren_attention(module, k, v)
    expected = learned_query_softmax(module, k, v)
    torch.testing.assert_close(y, expected, rtol=0.01, atol=0.01)  # 1e4 has few digits left
    gradients = torch.autograd.grad(y.square().sum(), [k, v, module.query])
    assert all(x.isfinite().all() for x in gradients)
    phi_k, log_decay, _ = module(k)
    assert phi_k.max() <= 1 and log_decay.max() <= 0


def test_the_gradient_is_that_of_softmax_though_the_maximum_has_none():
    module = build("aaren").double()
    k, v = torch.randn(2, B, T, H, HIDDEN // H, dtype=torch.float64).requires_grad_().unbind()
    leaves = [k, v, module.query]
    weights = torch.randn(B, T, H, HIDDEN // H, dtype=torch.float64)
    actual, expected = (
        torch.autograd.grad((attention(module, k, v) * weights).sum(), leaves)
        for attention in (aaren_attention, learned_query_softmax)
    )
    torch.testing.assert_close(actual, expected)


def test_aaren_does_not_see_padding():
    module = build("aaren").double()
    k, v = torch.randn(2, 1, T, H, HIDDEN // H, dtype=torch.float64)
    key_mask = torch.tensor([[False, True, False, True, True]])
    k[:, ~key_mask[0]] = 1e6
    k.requires_grad_()
    y = aaren_attention(module, k, v, key_mask=key_mask)
    real = key_mask[0]
    expected = learned_query_softmax(module, k[:, real], v[:, real])
    torch.testing.assert_close(y[:, real], expected)
    for gradient in torch.autograd.grad(y.sum(), [k, module.query]):
        assert gradient.isfinite().all()


def test_aaren_begins_anew_in_every_packed_sequence():
    module = build("aaren").double()
    bounds = [0, 1, 1, 10, 16]
    k, v = torch.randn(2, 1, 16, H, HIDDEN // H, dtype=torch.float64)
    k[:, 3] *= 1e4  # beside which all of the next sequence would be 0
    cu_seqlens = torch.tensor(bounds)
    phi_k, log_decay, running_max = module(k, cu_seqlens=cu_seqlens)
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        alone = module(k[:, start:end])
        packed = (x[:, start:end] for x in (phi_k, log_decay, running_max))
        torch.testing.assert_close(tuple(packed), alone, rtol=0, atol=0)


def test_aaren_keeps_the_digits_of_its_scores_under_autocast():
    module = build("aaren")
    k = torch.randn(B, T, H, HIDDEN // H)
    expected = module(k)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(k), expected, rtol=0, atol=0)


def test_aaren_s_maximum_is_part_of_the_cache_and_of_its_size():
    config = LinearAttentionConfig.from_preset(
        "aaren", vocab_size=11, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=H
    )
    model = LinearAttentionForCausalLM(config)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        size = cache.nbytes
        layer = cache.layers[1]
        address = layer.tensors["running_max"].data_ptr()
        assert layer.tensors["kv"].shape == (1, H, 1, HIDDEN // H)
        assert layer.running_max.shape == (1, H)
        model(tokens[:, :1], past_key_values=cache)
    assert cache.nbytes == size
    assert layer.tensors["running_max"].data_ptr() == address


def test_a_static_cache_forgets_the_maximum_too():
    config = LinearAttentionConfig.from_preset(
        "aaren", vocab_size=11, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=H
    )
    model = LinearAttentionForCausalLM(config)
    with torch.no_grad():
        # scores of which a maximum of 0 would leave nothing
        model.model.layers[0].self_attn.decay.query.mul_(1e4)
        cache = StaticLinearAttentionCache(config, max_cache_len=16)
        first, second = torch.randint(11, (2, 1, 6))
        for tokens in (first, second):
            expected = model(tokens).logits
            cache.reset()
            pieces = [model(x, past_key_values=cache).logits for x in tokens.split([3, 1, 2], 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)
        assert cache.layers[0].running_max.isfinite().all()
        cache.reset()
        assert (cache.layers[0].running_max == -torch.inf).all()


# ---- decays of users ----


class Halving(Decay):
    """Forgets half at every token, by a parameter that only `reset_parameters` writes."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.rate = torch.nn.Parameter(torch.empty(config.num_key_value_heads))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.constant_(self.rate, math.log(2))

    def forward(self, hidden_states):
        return (-self.rate.abs()).expand(*hidden_states.shape[:2], -1)


def test_a_registered_decay_is_a_choice_like_any_other(tmp_path):
    register_decay("halving", Halving)
    config = LinearAttentionConfig(
        vocab_size=11,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=H,
        decay="halving",
    )
    model = LinearAttentionForCausalLM(config).eval()
    tokens = torch.arange(11)[None]
    logits = model(tokens).logits
    logits.sum().backward()
    assert model.model.layers[0].self_attn.decay.rate.grad.abs().sum() > 0
    model.save_pretrained(tmp_path)
    loaded = LinearAttentionForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, logits)
    del REGISTERED["halving"]
    with pytest.raises(ValueError, match=r"got 'halving' \(.*register_decay\('halving', "):
        LinearAttentionForCausalLM.from_pretrained(tmp_path)


def test_only_new_names_and_decays_are_registered():
    with pytest.raises(ValueError, match="the package's own decays, got 'retnet'"):
        register_decay("retnet", Halving)
    with pytest.raises(ValueError, match="must be a subclass of Decay, got 3"):
        register_decay("mine", 3)
    assert REGISTERED == {}


def test_an_unknown_decay_lists_the_choices():
    with pytest.raises(ValueError, match="'none', 'retnet', 'lightning', .*, got 'mamba'"):
        check_decay("mamba")
