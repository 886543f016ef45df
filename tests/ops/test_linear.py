# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The layer that takes nn.Linear's place: when it leaves the product to the compiled op."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hf_linear_attention import linear
from hf_linear_attention.linear import MAX_ROWS, Linear
from tiny import OtherTensor, tiny_model

OP = torch.ops.hf_linear_attention.linear.default


@pytest.fixture
def compiled_calls(shapes_given_to):
    """The shapes of x that the compiled op has been given."""
    return shapes_given_to("few_rows_product")


def layer_and_twin(inputs=24, outputs=10, bias=True, dtype=torch.float32):
    """The layer, and a torch.nn.Linear of the same weights."""
    layer = Linear(inputs, outputs, bias=bias)
    twin = nn.Linear(inputs, outputs, bias=bias)
    twin.load_state_dict(layer.state_dict())
    return layer.to(dtype), twin.to(dtype)


@pytest.mark.parametrize("dtype", MAX_ROWS)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_few_rows_run_compiled_and_many_do_not(bias, dtype, compiled_calls):
    layer, twin = layer_and_twin(bias=bias, dtype=dtype)
    few, many = (torch.randn(rows, 1, 24, dtype=dtype) for rows in (MAX_ROWS[dtype], 100))
    for x in (few[0], few, many):
        # torch may round a sum in half precision twice
        torch.testing.assert_close(layer(x), twin(x), rtol=2e-2, atol=2e-2)
    assert compiled_calls == [few[0].shape, few.shape]


def with_grad(layer, x):
    return torch.enable_grad(), layer, x


def with_autocast(layer, x):
    return torch.autocast("cpu", torch.bfloat16), layer, x


def with_another_tensor(layer, x):
    return nullcontext(), layer, x.as_subclass(OtherTensor)


def with_another_weight(layer, x):
    layer.weight = nn.Parameter(layer.weight.as_subclass(OtherTensor))
    return nullcontext(), layer, x


def with_a_strided_weight(layer, x):
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t())
    return nullcontext(), layer, x


def with_a_computed_weight(layer, x):
    return nullcontext(), parametrizations.weight_norm(layer), x


@pytest.mark.parametrize(
    "prepare",
    [
        with_grad,
        with_autocast,
        with_another_tensor,
        with_another_weight,
        with_a_strided_weight,
        with_a_computed_weight,
    ],
)
@torch.no_grad()
def test_whatever_the_op_does_not_know_goes_the_usual_way(prepare, compiled_calls):
    layer, twin = layer_and_twin()
    _, same_twin, same_x = prepare(twin, torch.ones(1, 24))
    context, layer, x = prepare(layer, torch.ones(1, 24))
    with context:
        y = layer(x)
        assert torch.equal(y, same_twin(same_x))
    assert not compiled_calls
    assert y.requires_grad == (prepare is with_grad)


@torch.no_grad()
def test_an_input_that_does_not_fit_is_an_error():
    layer, _ = layer_and_twin()
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.ones(1, 24, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"weight must have shape \(10, 23\), got \(10, 24\)"):
        layer(torch.ones(1, 23))


def test_it_is_an_nn_linear_to_everybody_else():
    layer, twin = layer_and_twin()
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(twin.state_dict())
    assert repr(layer) == repr(twin)
    assert Linear(3, 4, device="meta")(torch.ones(2, 3, device="meta")).shape == (2, 4)


@torch.no_grad()
def test_copies_and_converted_layers_run_compiled(compiled_calls):
    layer, _ = layer_and_twin()
    copy.deepcopy(layer)(torch.ones(1, 24))
    layer.to(torch.bfloat16)(torch.ones(1, 24, dtype=torch.bfloat16))
    assert compiled_calls == [(1, 24)] * 2


@pytest.mark.parametrize("rows, is_compiled", [(2, True), (100, False)])
@torch.no_grad()
def test_it_compiles_into_one_graph(rows, is_compiled):
    layer, twin = layer_and_twin()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(rows, 24)
    y = torch.compile(layer, fullgraph=True, backend=keep)(x)
    torch.testing.assert_close(y, twin(x))
    (graph,) = graphs
    assert (OP in {node.target for node in graph.graph.nodes}) == is_compiled


@torch.no_grad()
def test_an_exported_layer_takes_any_number_of_rows_and_needs_no_package():
    layer, twin = layer_and_twin()
    rows = torch.export.Dim("rows")
    program = torch.export.export(layer, (torch.randn(2, 24),), dynamic_shapes=({0: rows},))
    assert OP not in {node.target for node in program.graph.nodes}
    x = torch.randn(500, 24)
    torch.testing.assert_close(program.module()(x), twin(x))


@torch.no_grad()
def test_every_product_of_a_models_token_runs_compiled(compiled_calls):
    model = tiny_model(dtype=torch.float32)
    cache = model(torch.tensor([[3, 1, 4]])).past_key_values
    compiled_calls.clear()
    model(torch.tensor([[1]]), past_key_values=cache)
    assert len(compiled_calls) == 7 * model.config.num_hidden_layers + 1  # lm_head
    compiled_calls.clear()
    with torch.enable_grad():
        model(torch.tensor([[1]]))
    assert not compiled_calls


# ---- many rows, by oneDNN ----


def onednn_arguments(shape, bias):
    generator = torch.Generator().manual_seed(0)
    sizes = [(*shape, 24), (10, 24), *([(10,)] if bias else [])]
    tensors = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    return tensors if bias else [*tensors, None]


@pytest.fixture
def onednn_calls(monkeypatch, shapes_given_to):
    """The shapes of x that oneDNN has been given, which is for all of them the faster one."""
    monkeypatch.setattr(linear, "MIN_ONEDNN_WORK", 0)
    return shapes_given_to("onednn_product")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(100,), (3, 7), (1, 1)])
def test_onednn_gives_the_values_and_gradients_of_torch(shape, bias):
    arguments = onednn_arguments(shape, bias)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in arguments]
    leaves, exact_leaves = ([x for x in some if x is not None] for some in (arguments, exact))

    def results(product, arguments, leaves):
        y = product(*arguments)
        gradients = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.cos().sum() for g in gradients), leaves)
        return [y, *gradients, *second]

    actual = results(linear.onednn_product, arguments, leaves)
    expected = results(nn.functional.linear, exact, exact_leaves)
    torch.testing.assert_close([x.double() for x in actual], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_onednn_passes_opcheck(bias):
    op = torch.ops.hf_linear_attention.onednn_linear.default
    torch.library.opcheck(op, tuple(onednn_arguments((3, 7), bias)))


def test_onednn_takes_any_strides_and_computes_only_what_is_needed():
    x, weight, bias = onednn_arguments((6, 4), True)
    x = x.detach().transpose(0, 1)
    y = linear.onednn_product(x, weight, bias)
    torch.testing.assert_close(y, nn.functional.linear(x, weight, bias))
    (gradient,) = torch.autograd.grad(y.sum(), bias)
    assert gradient.tolist() == [24] * 10


def test_training_runs_on_onednn_where_that_is_faster(onednn_calls):
    layer, twin = layer_and_twin()
    x = torch.randn(2, 50, 24)
    for model in (layer, twin):
        model(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)
    layer.double()(x.double())  # which oneDNN does not have
    with torch.autocast("cpu", torch.bfloat16):
        layer.float()(x)
    assert onednn_calls == [(2, 50, 24)]
    with pytest.raises(RuntimeError):
        layer(x[..., 1:])


def test_training_on_onednn_compiles_into_one_graph(onednn_calls):
    layer, twin = layer_and_twin()
    x = torch.randn(100, 24)
    torch.compile(layer, fullgraph=True)(x).square().sum().backward()
    twin(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    assert onednn_calls  # while it was traced
