# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The module that takes LlamaRMSNorm's place: when it leaves the norm to the compiled op."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_linear_attention.fast.rms_norm import RMSNorm
from tiny import VARIANTS, OtherTensor, tiny_model

OPS = {
    torch.ops.hf_linear_attention.rms_norm.default,
    torch.ops.hf_linear_attention.rms_norm_forward.default,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture
def compiled_calls(shapes_given_to):
    """The shapes of x that the compiled op has been given."""
    return shapes_given_to("compiled_rms_norm")


def norm_and_twin(dtype=torch.float32):
    """The module, and a LlamaRMSNorm of the same weight."""
    norm, twin = RMSNorm(24, eps=1e-3), LlamaRMSNorm(24, eps=1e-3)
    nn.init.normal_(norm.weight)
    twin.load_state_dict(norm.state_dict())
    return norm.to(dtype), twin.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24,), (1, 1, 24), (5, 700, 24)])
def test_values_and_gradients_are_those_of_transformers(shape, dtype, compiled_calls):
    norm, twin = norm_and_twin(dtype)
    results = []
    for module in (norm, twin):
        torch.manual_seed(0)
        x = (2 * torch.randn(shape)).to(dtype).requires_grad_()
        y = module(x)
        y.mul(torch.randn(shape).to(dtype)).sum().backward()
        results.append((y.detach(), x.grad, module.weight.grad))
    assert compiled_calls == [shape]
    (y, dx, dweight), (expected, expected_dx, expected_dweight) = results
    if dtype.itemsize == 2:  # both round at the same places: few elements differ, if any
        assert (y != expected).double().mean() < 0.1
    # LlamaRMSNorm's mean is in float32
    precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(y, expected, rtol=4 * precision, atol=4 * precision)
    # of the gradients each has its own rounding
    for gradient, other in ((dx, expected_dx), (dweight, expected_dweight)):
        assert gradient.dtype == dtype
        assert (gradient - other).abs().max() <= 8 * precision * other.abs().max()


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "dtype, weight_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),  # what autocast's products leave behind
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_autocast_and_mixed_dtypes(dtype, weight_dtype, needs_grad, compiled_calls):
    norm, twin = norm_and_twin(weight_dtype)
    results = []
    for module in (norm, twin):
        torch.manual_seed(0)
        x = (2 * torch.randn(5, 24)).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(needs_grad):
            y = module(x)
        if needs_grad:
            y.float().mul(torch.randn(5, 24)).sum().backward()
        results.append([y.detach(), *([x.grad, module.weight.grad] if needs_grad else [])])
    assert compiled_calls == [(5, 24)]
    precision = max(torch.finfo(t).eps for t in (dtype, weight_dtype))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= 8 * precision * theirs.abs().max()


def with_another_tensor(norm, x):
    return norm, x.as_subclass(OtherTensor)


def with_another_weight(norm, x):
    norm.weight = nn.Parameter(norm.weight.as_subclass(OtherTensor))
    return norm, x


def on_meta(norm, x):
    return norm.to("meta"), x.to("meta")


@pytest.mark.parametrize("prepare", [with_another_tensor, with_another_weight, on_meta])
def test_whatever_the_op_does_not_know_goes_the_usual_way(prepare, compiled_calls):
    norm, twin = norm_and_twin()
    torch.manual_seed(0)
    x = torch.randn(2, 24)
    same_twin, same_x = prepare(twin, x)
    norm, x = prepare(norm, x)
    y, expected = norm(x), same_twin(same_x)
    assert not compiled_calls
    assert (y.shape, y.dtype, y.device) == (expected.shape, expected.dtype, expected.device)
    assert y.is_meta or torch.equal(y, expected)


def test_it_is_a_norm_to_everybody_else():
    norm, twin = norm_and_twin()
    assert isinstance(norm, LlamaRMSNorm)
    assert list(norm.state_dict()) == list(twin.state_dict())
    assert repr(norm) == repr(twin).removeprefix("Llama")
    model = tiny_model(**VARIANTS["gated"])
    norms = {name: module for name, module in model.named_modules() if "norm" in name}
    assert all(isinstance(module, RMSNorm) for module in norms.values())
    assert len(norms) == 3 * model.config.num_hidden_layers + 1
    for module in norms.values():
        nn.init.zeros_(module.weight)
        model._init_weights(module)
        assert module.weight.eq(1).all()
    decayed = Trainer.get_decay_parameter_names(None, model)
    assert decayed and not any("norm" in name for name in decayed)


@torch.no_grad()
def test_copies_and_converted_modules_run_compiled(compiled_calls):
    norm, _ = norm_and_twin()
    copy.deepcopy(norm)(torch.ones(1, 24))
    norm.to(torch.bfloat16)(torch.ones(1, 24, dtype=torch.bfloat16))
    assert compiled_calls == [(1, 24)] * 2


@pytest.mark.parametrize("needs_grad", [False, True])
def test_it_compiles_into_one_graph(needs_grad):
    norm, twin = norm_and_twin()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(3, 24)
    with torch.set_grad_enabled(needs_grad):
        y = torch.compile(norm, fullgraph=True, backend=keep)(x)
        torch.testing.assert_close(y, twin(x))
    (graph,) = graphs
    assert OPS & {node.target for node in graph.graph.nodes}


@torch.no_grad()
def test_an_exported_module_needs_no_package():
    norm, twin = norm_and_twin()
    rows = torch.export.Dim("rows")
    program = torch.export.export(norm, (torch.randn(2, 24),), dynamic_shapes=({0: rows},))
    assert not OPS & {node.target for node in program.graph.nodes}
    x = torch.randn(500, 24)
    torch.testing.assert_close(program.module()(x), twin(x))


def test_every_norm_of_a_model_runs_compiled(compiled_calls):
    model = tiny_model(**VARIANTS["gated"])
    model(torch.tensor([[3, 1, 4]])).logits.sum().backward()
    assert len(compiled_calls) == 3 * model.config.num_hidden_layers + 1


def test_equal_rows_and_long_ones_do_not_drift():
    x = torch.full((200_000, 4), 0.3)
    norm = RMSNorm(4, eps=1e-6)
    norm(x).sum().backward()
    of_one = 0.3 / math.sqrt(0.3**2 + 1e-6)
    assert abs(norm.weight.grad / (len(x) * of_one) - 1).max() < 2e-6
    long = RMSNorm(10**6, eps=1e-6)(x[:1, :1].expand(1, 10**6))
    assert (long / of_one - 1).abs().max() < 1e-6
