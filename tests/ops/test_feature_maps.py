# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Feature maps: the kernel phi(q).phi(k) of each against its closed form, and what is learned."""

import math
from types import SimpleNamespace

import pytest
import torch

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM, linear_attention
from hf_linear_attention.ops.feature_maps import (
    MODULES,
    POINTWISE,
    REGISTERED_FEATURE_MAPS,
    FavorPlus,
    FeatureMap,
    build_feature_map,
    check_feature_map,
    register_feature_map,
)

B, T, Hq, Hkv, D = 2, 5, 4, 2, 8


def build(name, head_dim=D, num_key_value_heads=Hkv, **kwargs):
    config = SimpleNamespace(
        feature_map=name,
        feature_map_kwargs=kwargs,
        linear_num_value_heads=Hq,
        linear_num_key_heads=num_key_value_heads,
        linear_key_head_dim=head_dim,
    )
    return build_feature_map(config)


def queries_and_keys(dtype=torch.float64, heads=(Hq, Hkv), scale=1.0):
    return [torch.randn(B, T, H, D, dtype=dtype) * scale for H in heads]


def kernel(name, scale=1.0, **kwargs):
    """phi(q_t).phi(k_j) and q_t.k_j, head by head: (B, Hkv, T, T) both."""
    q, k = queries_and_keys(heads=(Hkv, Hkv), scale=scale)
    module = build(name, **kwargs).double()
    phi_q, phi_k = module.phi(q), module.phi(k)
    product = "bthd,bjhd->bhtj"
    return torch.einsum(product, phi_q, phi_k), torch.einsum(product, q, k)


# ---- closed forms ----


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("identity", lambda x: x),
        ("elu+1", lambda x: torch.nn.functional.elu(x) + 1),
        ("relu", torch.nn.functional.relu),
        ("relu2", lambda x: torch.nn.functional.relu(x) ** 2),
        ("silu", torch.nn.functional.silu),
        ("exp", torch.exp),
    ],
)
def test_pointwise_maps(name, formula):
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(POINTWISE[name](x), formula(x))


def test_elu_plus_one_keeps_its_digits_and_its_gradient_at_the_ends():
    x = torch.tensor([-40.0, 0.0, 1e4], requires_grad=True)
    y = POINTWISE["elu+1"](x)
    torch.testing.assert_close(y, torch.tensor([math.exp(-40), 1.0, 1e4 + 1]), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([math.exp(-40), 1.0, 1.0]), rtol=1e-6, atol=0)


def test_polynomial2_is_the_square_exactly():
    products, dot = kernel("polynomial2")
    torch.testing.assert_close(products, dot**2)


def test_taylor_is_the_second_order_expansion_of_exp_exactly():
    products, dot = kernel("taylor")
    s = dot / math.sqrt(D)
    torch.testing.assert_close(products, 1 + s + s**2 / 2)


@pytest.mark.parametrize("name", ["polynomial2", "taylor"])
def test_attention_through_the_map_is_attention_with_the_closed_form(name):
    q, k = queries_and_keys()
    v = torch.randn(B, T, Hkv, 3, dtype=torch.float64)
    phi_q, phi_k = build(name)(q, k)
    y = linear_attention(phi_q, phi_k, v, eps=0.0)
    k, v = (x.repeat_interleave(Hq // Hkv, dim=2) for x in (k, v))
    dot = torch.einsum("bthd,bjhd->bhtj", q, k)
    s = dot / math.sqrt(D)
    weights = (dot**2 if name == "polynomial2" else 1 + s + s**2 / 2).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(y, torch.einsum("bhtj,bjhd->bthd", weights, v))


def test_softmax_is_a_distribution_over_features():
    q, k = queries_and_keys()
    phi_q, phi_k = build("softmax")(q, k)
    torch.testing.assert_close(phi_q, q.exp() / q.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(phi_k.sum(-1), torch.ones(B, T, Hkv, dtype=torch.float64))


@pytest.mark.parametrize("nu", [1, 3])
def test_dpfp_is_the_products_of_rectified_features_nu_apart(nu):
    x = torch.randn(D, dtype=torch.float64)
    r = [*x.clamp(min=0).tolist(), *(-x).clamp(min=0).tolist()]
    products = [r[i] * r[i - shift] for shift in range(1, nu + 1) for i in range(2 * D)]
    phi, _ = build("dpfp", nu=nu)(x.expand(1, 1, Hq, D), x.expand(1, 1, Hkv, D))
    torch.testing.assert_close(phi[0, 0, 0], torch.tensor(products, dtype=torch.float64))


def test_t2r_is_relu_of_an_affine_map_of_each_head():
    module = build("t2r", num_features=3).double()
    torch.nn.init.normal_(module.k_bias)
    q, k = queries_and_keys()
    _, phi_k = module(q, k)
    for h in range(Hkv):
        torch.testing.assert_close(
            phi_k[:, :, h], (k[:, :, h] @ module.k_weight[h] + module.k_bias[h]).clamp(min=0)
        )


def test_hedgehog_is_two_softmaxes_of_each_head_and_starts_with_the_identity():
    module = build("hedgehog").double()
    q, k = queries_and_keys()
    phi_q, _ = module(q, k)
    torch.testing.assert_close(phi_q, torch.cat([q.softmax(-1), (-q).softmax(-1)], -1))
    torch.nn.init.normal_(module.q_weight)
    phi_q, _ = module(q, k)
    x = q[:, :, 3] @ module.q_weight[3]
    torch.testing.assert_close(phi_q[:, :, 3], torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))


# ---- FAVOR+ ----


def test_favor_estimates_the_softmax_kernel_without_bias_and_at_most_the_variance_of_the_paper():
    """Theorem 2 and Lemma 2 of arXiv 2009.14794 bound the variance by that of independent rows."""
    m, draws = 2 * D, 10_000
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64) * 0.7
    exact = ((q * k).sum() / math.sqrt(D)).exp()
    phi = FavorPlus(1, 1, D, num_features=m * draws).double().phi
    phi_q, phi_k = phi(q), phi(k)
    both_signs = (phi_q * phi_k).view(2, draws, m) * draws  # blocks of D rows are independent
    estimates = both_signs.sum((0, 2))
    square = (q + k).square().sum() / math.sqrt(D)  # of the scaled sum
    of_one_row = square.exp() * exact**2 * (1 - (-square).exp())
    variance = (1 - (-square).exp()) / 2 * of_one_row / m
    assert abs(estimates.mean() - exact) < 4 * (estimates.var() / draws).sqrt()
    assert 0.1 * variance < estimates.var() < 1.1 * variance


@pytest.mark.parametrize("scale", [0.2, 0.4])
def test_favor_s_rows_have_the_variance_of_the_paper(scale):
    """One row of every orthogonal block: they are independent, and Lemma 2 is an equation."""
    draws = 40_000
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64) * scale
    exact = ((q * k).sum() / math.sqrt(D)).exp()
    phi = FavorPlus(1, 1, D, num_features=D * draws).double().phi
    rows = (phi(q) * phi(k)).view(2, draws, D)[:, :, 0].sum(0) * D * draws
    square = (q + k).square().sum() / math.sqrt(D)
    variance = (1 - (-square).exp()) ** 2 / 2 * square.exp() * exact**2
    assert abs(rows.mean() - exact) < 4 * (variance / draws).sqrt()
    torch.testing.assert_close(rows.var(), variance, rtol=0.1, atol=0)


def test_favor_converges_to_the_softmax_kernel():
    few, many = (kernel("favor+", scale=0.4, num_features=m) for m in (16, 160_000))
    (products, dot), (inaccurate, other) = many, few
    torch.testing.assert_close(products, (dot / math.sqrt(D)).exp(), rtol=0.03, atol=0)
    assert ((inaccurate / (other / math.sqrt(D)).exp() - 1).abs() > 0.03).any()


def test_favor_has_orthogonal_blocks_of_rows_as_long_as_normal_vectors():
    W = build("favor+", num_features=2000 * D + 3).projection
    assert W.shape == (2000 * D + 3, D)
    for block in (W[:D], W[D : 2 * D]):
        products = block @ block.T
        torch.testing.assert_close(products, products.diag().diag(), rtol=0, atol=1e-5)
    torch.testing.assert_close(W.square().sum(-1).mean(), torch.tensor(float(D)), rtol=0.02, atol=0)
    torch.testing.assert_close(W.mT @ W / len(W), torch.eye(D), rtol=0, atol=0.05)


def test_favor_draws_the_same_matrix_from_the_same_seed_and_saves_it_unlearned():
    torch.manual_seed(3)
    one = build("favor+")
    torch.manual_seed(3)
    other = build("favor+")
    assert torch.equal(one.projection, other.projection)
    assert list(one.state_dict()) == ["projection"]
    assert list(one.parameters()) == []
    other.reset_parameters()
    assert not torch.equal(one.projection, other.projection)


def test_favor_divides_a_query_s_features_by_their_largest():
    module = build("favor+").double()
    q, k = queries_and_keys(scale=3.0)
    phi_q, phi_k = module(q, k)
    expected = module.phi(q)
    torch.testing.assert_close(phi_q, expected / expected.amax(-1, keepdim=True))
    torch.testing.assert_close(phi_k, module.phi(k))


def test_favor_is_redrawn_in_training_alone():
    module = build("favor+")
    before = module.projection.clone()
    module.eval()
    with pytest.raises(RuntimeError, match="redrawn in training only"):
        module.redraw()
    assert torch.equal(module.projection, before)
    module.train().redraw()
    assert not torch.equal(module.projection, before)
    block = module.projection[:D] @ module.projection[:D].T
    torch.testing.assert_close(block, block.diag().diag(), rtol=0, atol=1e-5)


def test_favor_neither_overflows_nor_vanishes_in_float16():
    module = build("favor+", head_dim=64)
    q, k = (torch.randn(B, T, H, 64, dtype=torch.float16) for H in (Hq, Hkv))
    k[0, 0] = module.projection[0] * 64**0.25  # where a feature is e^(|w|^2 / 2)
    k[0, 1] *= 4
    phi_q, phi_k = module(q, k)
    assert phi_q.dtype == phi_k.dtype == torch.float32
    assert phi_k.half().isinf().any()
    assert not phi_k.half()[0, 1].any()
    expected = module.double()(q.double(), k.double())
    torch.testing.assert_close((phi_q.double(), phi_k.double()), expected, rtol=1e-4, atol=1e-35)


def test_a_model_in_float16_attends_to_favor_features_in_float32():
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2}
    config = LinearAttentionConfig.from_preset(
        "katharopoulos", feature_map="favor+", initializer_range=0.5, num_hidden_layers=2, **sizes
    )
    model = LinearAttentionForCausalLM(config).eval()
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        cache = model.half()(tokens[:, :8], use_cache=True).past_key_values
        steps = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in (8, 9, 10)]
        whole = model(tokens).logits
    assert whole.dtype == torch.float16
    torch.testing.assert_close(whole.float(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 8:], rtol=0.02, atol=0.02)
    assert {layer.dtype for layer in cache.layers} == {torch.float16}


def test_redrawing_a_model_redraws_every_layer_loaded_or_not(tmp_path):
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2}
    config = LinearAttentionConfig.from_preset(
        "katharopoulos", feature_map="favor+", num_hidden_layers=2, **sizes
    )
    LinearAttentionForCausalLM(config).save_pretrained(tmp_path)
    model = LinearAttentionForCausalLM.from_pretrained(tmp_path).train()
    before = [layer.self_attn.feature_map.projection.clone() for layer in model.model.layers]
    model.redraw_features()
    for layer, old in zip(model.model.layers, before, strict=True):
        assert not torch.equal(layer.self_attn.feature_map.projection, old)
    with pytest.raises(RuntimeError, match="needs a model with .*'elu\\+1'"):
        LinearAttentionForCausalLM(
            LinearAttentionConfig.from_preset("katharopoulos", **sizes)
        ).redraw_features()


def test_favor_keeps_the_digits_of_its_exponents_under_autocast():
    module = build("favor+")
    q, k = queries_and_keys(torch.float32)
    plain = module(q, k)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(q, k), plain, rtol=0, atol=0)


# ---- every module ----


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_dtypes_and_gradients(name, dtype):
    module = build(name).to(dtype)
    q, k = (x.requires_grad_() for x in queries_and_keys(dtype))
    phi_q, phi_k = module(q, k)
    assert phi_q.shape == (B, T, Hq, module.feature_dim)
    assert phi_k.shape == (B, T, Hkv, module.feature_dim)
    assert phi_q.dtype == phi_k.dtype == dtype
    loss = (phi_q.float() ** 2).sum() + (phi_k.float() ** 2).sum()
    leaves = [q, k, *module.parameters()]
    for gradient in torch.autograd.grad(loss, leaves):
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", MODULES)
def test_a_module_built_on_meta_is_whole_after_reset_parameters(name):
    torch.manual_seed(5)
    direct = build(name)
    with torch.device("meta"):
        on_meta = build(name)
    on_meta = on_meta.to_empty(device="cpu")
    torch.manual_seed(5)
    on_meta.reset_parameters()
    q, k = queries_and_keys(torch.float32)
    torch.testing.assert_close(on_meta(q, k), direct(q, k), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
def test_the_model_s_initialisation_and_loading_keep_the_modules_values(name, tmp_path):
    config = LinearAttentionConfig.from_preset(
        "katharopoulos",
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        feature_map=name,
    )
    model = LinearAttentionForCausalLM(config)
    modules = [layer.self_attn.feature_map for layer in model.model.layers]
    if name == "hedgehog":
        for module in modules:
            assert torch.equal(module.k_weight, torch.eye(8).expand(1, 8, 8))
    if name == "favor+":
        assert not torch.equal(modules[0].projection, modules[1].projection)
    model.save_pretrained(tmp_path)
    loaded = LinearAttentionForCausalLM.from_pretrained(tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(x, loaded.state_dict()[name]), name
    tokens = torch.arange(11)[None]
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def test_pointwise_maps_have_no_module():
    assert all(build(name) is None for name in POINTWISE)


def test_the_kernels_know_the_pointwise_maps_by_their_order():
    from hf_linear_attention.ops.compiled.linear_attention import FEATURE_MAPS

    assert tuple(POINTWISE) == FEATURE_MAPS


# ---- maps of users ----


class Scaled(FeatureMap):
    """A map with a parameter, which only `reset_parameters` writes, and an option."""

    def __init__(self, num_heads, num_key_value_heads, head_dim, *, start="one"):
        super().__init__(num_heads, num_key_value_heads, head_dim)
        self.scale = torch.nn.Parameter(torch.empty(head_dim))
        self.start = start
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.constant_(self.scale, {"one": 1.0, "two": 2.0}[self.start])

    def phi(self, x):
        return (x * self.scale).relu() ** 3


@pytest.fixture
def registered():
    register_feature_map("scaled", Scaled)
    yield
    del REGISTERED_FEATURE_MAPS["scaled"]


def test_a_registered_map_is_a_choice_like_any_other(registered, tmp_path):
    config = LinearAttentionConfig.from_preset(
        "katharopoulos",
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        feature_map="scaled",
        feature_map_kwargs={"start": "two"},
    )
    model = LinearAttentionForCausalLM(config).eval()
    assert [layer.self_attn.feature_map.scale.mean() for layer in model.model.layers] == [2, 2]
    tokens = torch.arange(11)[None]
    logits = model(tokens).logits
    logits.sum().backward()
    assert model.model.layers[0].self_attn.feature_map.scale.grad.abs().sum() > 0
    model.save_pretrained(tmp_path)
    loaded = LinearAttentionForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, logits)
    with pytest.raises(ValueError, match="of 'scaled' may hold 'start', got 'end'"):
        check_feature_map("scaled", {"end": "two"})


def test_a_map_that_only_says_phi_has_head_dim_features():
    class Cube(FeatureMap):
        def phi(self, x):
            return x**3

    module = Cube(Hq, Hkv, D)
    q, k = queries_and_keys()
    assert module.feature_dim == D
    torch.testing.assert_close(module(q, k), (q**3, k**3))


def test_only_new_names_and_feature_maps_are_registered():
    with pytest.raises(ValueError, match="the package's own feature maps, got 'relu'"):
        register_feature_map("relu", Scaled)
    with pytest.raises(ValueError, match="must be a subclass of FeatureMap, got .*relu"):
        register_feature_map("mine", torch.relu)
    assert REGISTERED_FEATURE_MAPS == {}


# ---- bad values ----


def test_an_unknown_map_lists_the_choices():
    message = r"'identity', 'elu\+1', .*'hedgehog', got 'elu' \(.*register_feature_map\('elu', "
    with pytest.raises(ValueError, match=message):
        check_feature_map("elu")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("favor+", {"features": 3}, "of 'favor\\+' may hold 'num_features', got 'features'"),
        ("dpfp", {"num_features": 3}, "of 'dpfp' may hold 'nu', got 'num_features'"),
        ("taylor", {"nu": 3}, "of 'taylor' may hold nothing, got 'nu'"),
        ("elu+1", {"nu": 3}, "of 'elu\\+1' may hold nothing, got 'nu'"),
        ("t2r", {"num_features": 0}, r"\['num_features'\] must be an integer of at least 1, got 0"),
        ("t2r", {"num_features": 2.0}, "must be an integer of at least 1, got 2.0"),
    ],
)
def test_wrong_options_are_named(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(name, **kwargs)
