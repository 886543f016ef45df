# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Log decays: their formulas, their domain, and that no cast or load changes what is fixed."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM, linear_attention
from hf_linear_attention.mixers.parts.decays import (
    REGISTERED_DECAYS,
    Decay,
    build_decay,
    check_decay,
    register_decay,
)
from tiny import VARIANTS, random_ids, tiny_model

B, T, H, HIDDEN, LAYERS = 2, 5, 4, 16, 3
FIXED = ["retnet", "lightning"]
LEARNED = ["per_head", "per_token"]


def build(name, layer_idx=1, num_layers=LAYERS):
    config = SimpleNamespace(
        decay=name,
        num_key_value_heads=H,
        num_state_heads=H,
        head_dim=HIDDEN // H,
        linear_key_head_dim=HIDDEN // H,
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
    config = LinearAttentionConfig.from_preset(
        "katharopoulos",
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
    config = LinearAttentionConfig.from_preset(
        "katharopoulos",
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
    del REGISTERED_DECAYS["halving"]
    with pytest.raises(ValueError, match=r"got 'halving' \(.*register_decay\('halving', "):
        LinearAttentionForCausalLM.from_pretrained(tmp_path)


def test_only_new_names_and_decays_are_registered():
    with pytest.raises(ValueError, match="the package's own decays, got 'retnet'"):
        register_decay("retnet", Halving)
    with pytest.raises(ValueError, match="must be a subclass of Decay, got 3"):
        register_decay("mine", 3)
    assert REGISTERED_DECAYS == {}


def test_an_unknown_decay_lists_the_choices():
    with pytest.raises(ValueError, match="'none', 'retnet', 'lightning', .*, got 'mamba'"):
        check_decay("mamba")


def test_a_copy_of_an_hgrn2_model_reads_its_own_lower_bounds(tmp_path):
    model, ids = tiny_model(**VARIANTS["preset_hgrn2"]), random_ids(1, 5)
    names = [name for name in model.state_dict() if "bounds" in name]
    assert names == ["model.lower_bounds.weight"]
    model.save_pretrained(tmp_path)
    torch.save(model, tmp_path / "pickle")
    before = model(ids).logits
    for other in (
        copy.deepcopy(model),
        torch.load(tmp_path / "pickle", weights_only=False),
        LinearAttentionForCausalLM.from_pretrained(tmp_path, dtype=model.dtype),
    ):
        assert torch.equal(other(ids).logits, before)
        other.model.lower_bounds.weight.data.normal_()
        assert not torch.equal(other(ids).logits, before)
        assert torch.equal(model(ids).logits, before)


def test_lower_bounds_that_peft_trains_are_those_that_layers_read():
    model = tiny_model(**VARIANTS["preset_hgrn2"])
    model.model.lower_bounds.weight.data.normal_()
    tuning = LoraConfig(target_modules=["v_proj"], modules_to_save=["lower_bounds"])
    model = get_peft_model(model, tuning)
    ids = random_ids(2, 5)
    model(ids, labels=ids).loss.backward()
    bounds = [x for name, x in model.named_parameters() if "lower_bounds" in name]
    trained = [x for x in bounds if x.requires_grad]
    assert len(trained) == 1 and trained[0].grad.any()
    before = model(ids).logits
    trained[0].data.normal_(std=5)
    assert not torch.allclose(model(ids).logits, before)


def test_hgrn2_in_the_first_layer_alone_has_no_lower_bounds():
    types = ["linear_attention", "full_attention"]
    fields = {"num_hidden_layers": 2, "layer_types": types}
    model = tiny_model(**VARIANTS["preset_hgrn2"] | fields).train()
    ids = random_ids(1, 5)
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
