# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Forward-mode derivatives and torch.func, which compiled ops don't know: others replace them."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from hf_linear_attention import (
    delta_rule,
    elementwise_scan,
    linear_attention,
    selective_scan,
    short_convolution,
    use_kernels,
)
from hf_linear_attention.fast.linear import hasten
from hf_linear_attention.fast.rms_norm import RMSNorm
from tiny import VARIANTS, random_ids, shallow, tiny_model
from upstream_models import tiny_upstream

B, T, H, D = 1, 6, 2, 4


def random(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def op_calls(backend):
    """By the name of an op: a function of one argument of it, and that argument."""
    heads, channels, weight = random(B, T, H, D), random(B, T, 8), random(8, 3)
    beta, options = random(B, T, H), {"backend": backend}
    return {
        "linear_attention": (lambda v: linear_attention(heads, heads, v, **options), heads),
        "delta_rule": (lambda k: delta_rule(heads, k, heads, beta, **options), heads),
        "short_convolution": (lambda x: short_convolution(x, weight, **options), channels),
        "elementwise_scan": (
            lambda x: elementwise_scan(x, -channels.exp(), **options),
            channels,
        ),
        "selective_scan": (
            lambda x: selective_scan(x, channels, -weight, x[..., :3], x[..., 3:6], **options),
            channels,
        ),
    }


def assert_derivative_is_right(function, x):
    """Against a difference of values, in a random direction."""
    direction, step = torch.randn_like(x), 1e-6
    difference = function(x + step * direction) - function(x - step * direction)
    _, derivative = torch.func.jvp(function, (x,), (direction,))
    torch.testing.assert_close(derivative, difference / (2 * step), rtol=1e-5, atol=1e-6)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction)))
        torch.testing.assert_close(dual.tangent, derivative)


@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
@pytest.mark.parametrize("name", op_calls(None))
def test_ops_have_them(name, backend):
    assert_derivative_is_right(*op_calls(backend)[name])


@pytest.mark.parametrize("name", op_calls(None))
def test_compiled_ops_refuse_instead_of_losing_them(name):
    function, x = op_calls("cpu")[name]
    with pytest.raises(RuntimeError, match="'cpu' can't run: it has no forward-mode derivatives"):
        torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("name", op_calls(None))
def test_ops_have_gradients_by_torch_func_for_each_sample_too(name):
    function, x = op_calls(None)[name]

    def loss(x):
        return function(x).square().sum()

    def gradient(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    samples = torch.stack([x, 1 - x, x / 2])
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient(x))
    by_sample = torch.vmap(torch.func.grad(loss))(samples)
    torch.testing.assert_close(by_sample, torch.stack([*map(gradient, samples)]))


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("layer", [hasten(nn.Linear(8, 8)), RMSNorm(8)])
def test_layers_have_them(layer, is_frozen):
    layer = layer.double().requires_grad_(not is_frozen)
    x = random(B, T, 8)
    if isinstance(layer, nn.Linear):
        return assert_derivative_is_right(layer, x)
    # Transformers' norm takes the mean in float32.
    _, derivative = torch.func.jvp(layer, (x,), (x,))
    _, expected = torch.func.jvp(lambda x: F.rms_norm(x, (8,), eps=1e-6), (x,), (x,))
    torch.testing.assert_close(derivative, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_have_them(variant):
    # torch's fused softmax attention has none.
    model = tiny_model(**shallow(variant), attn_implementation="eager")
    ids = random_ids(1, 7)
    embeddings = model.get_input_embeddings()(ids).detach()

    def loss(x):
        return model(inputs_embeds=x, labels=ids, use_cache=False).loss

    _, derivative = torch.func.jvp(loss, (embeddings,), (embeddings,))
    embeddings.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(embeddings), embeddings)
    # Their loss is in float32 then.
    expected = (gradient * embeddings).sum()
    torch.testing.assert_close(derivative.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "mamba", "qwen3_5_text"])
def test_models_of_transformers_keep_gradients_for_each_sample(name):
    model = tiny_upstream(name)
    model.set_attn_implementation("eager")
    weights = {key: weight.detach() for key, weight in model.named_parameters()}
    ids = torch.randint(2, 60, (2, 9))

    def loss(weights, ids):
        options = dict(labels=ids[None], use_cache=False)
        return torch.func.functional_call(model, weights, (ids[None],), options).loss

    def gradients():
        by_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids)
        return torch.cat([gradient.flatten() for gradient in by_sample.values()])

    expected = gradients()
    use_kernels(model)
    largest = expected.abs().max().item()
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=2e-3 * largest)


def test_models_of_transformers_keep_forward_mode():
    model = tiny_upstream("mamba2").double()
    embeddings = model.get_input_embeddings()(torch.tensor([[3, 5, 9, 4]])).detach()

    def derivative():
        function = lambda x: model(inputs_embeds=x, use_cache=False).logits  # noqa: E731
        return torch.func.jvp(function, (embeddings,), (embeddings,))[1]

    expected = derivative()
    use_kernels(model)
    torch.testing.assert_close(derivative(), expected, rtol=1e-3, atol=1e-4)
