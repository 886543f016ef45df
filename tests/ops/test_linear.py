# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""nn.Linear's product: when it is left to the compiled op, and what the layer is to others."""

import copy
import gc
import math
import pickle
import random
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

from hf_linear_attention.__main__ import print_report
from hf_linear_attention.fast import linear, quantized
from hf_linear_attention.fast.linear import MAX_ROWS, hasten, project, restore
from hf_linear_attention.ops import backends
from hf_linear_attention.ops.backends import Missing
from hf_linear_attention.ops.compiled.linear import CODE_OF
from seeds import over_seeds
from tiny import VARIANTS, OtherTensor, random_ids, tiny_model

OP = torch.ops.hf_linear_attention.linear.default


@pytest.fixture
def compiled_calls(shapes_given_to):
    """The shapes of x that the compiled op has been given."""
    return shapes_given_to("few_rows_product")


def layer_and_twin(inputs=24, outputs=10, bias=True, dtype=torch.float32):
    """A layer whose forward runs the fastest product, and one as it is, of the same weights."""
    layer = hasten(nn.Linear(inputs, outputs, bias=bias))
    twin = nn.Linear(inputs, outputs, bias=bias)
    twin.load_state_dict(layer.state_dict())
    return layer.to(dtype), twin.to(dtype)


@pytest.mark.parametrize("dtype", MAX_ROWS)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_few_rows_run_compiled_and_many_do_not(bias, dtype, compiled_calls):
    layer, twin = layer_and_twin(bias=bias, dtype=dtype)
    few, many = (torch.randn(MAX_ROWS[dtype] + more, 1, 24, dtype=dtype) for more in (0, 1))
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
    assert type(layer) is nn.Linear
    assert list(layer.state_dict()) == list(twin.state_dict())
    assert repr(layer) == repr(twin)
    assert hasten(nn.Linear(3, 4, device="meta"))(torch.ones(2, 3, device="meta")).shape == (2, 4)
    restore(layer)
    assert vars(layer).keys() == vars(twin).keys()


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@torch.no_grad()
def test_copies_and_converted_layers_run_compiled_on_their_own_weights(copied, compiled_calls):
    layer, _ = layer_and_twin()
    x = torch.ones(1, 24)
    other = copied(layer)
    torch.testing.assert_close(other(x), layer(x))
    other.weight.zero_()
    assert torch.equal(other(x)[0], other.bias)
    layer.to(torch.bfloat16)(x.bfloat16())
    assert compiled_calls == [(1, 24)] * 4


def test_a_deleted_layer_is_freed_at_once():
    layer, _ = layer_and_twin()
    reference = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert reference() is None
    finally:
        gc.enable()


# What a model calls in the place of its layers, `project(layer, x)`.


def as_it_is(layer):
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda module, args, y: y + 1)
    return layer


def hooked_by_accelerate(layer):
    add_hook_to_module(layer, ModelHook())
    return layer


def hooked_by_accelerate_once(layer):
    remove_hook_from_module(hooked_by_accelerate(layer))
    return layer


def adapted(layer):
    return LoraLinear(layer, "default", LoraConfig(), r=2)


@pytest.mark.parametrize(
    "prepare", [as_it_is, hooked, hooked_by_accelerate, hooked_by_accelerate_once, adapted]
)
@torch.no_grad()
def test_a_model_has_the_fastest_product_whatever_is_around_its_layer(prepare, compiled_calls):
    _, layer = layer_and_twin()
    x = torch.ones(3, 24)
    module = prepare(layer)
    expected = module(x)
    assert not compiled_calls
    torch.testing.assert_close(project(module, x), expected)
    assert compiled_calls == [(3, 24)]
    assert type(layer) is nn.Linear


@torch.no_grad()
def test_a_replica_multiplies_by_its_own_weight(compiled_calls):
    layer, _ = layer_and_twin()
    replica = layer._replicate_for_data_parallel()  # as nn.DataParallel makes it
    replica.weight, replica.bias = torch.zeros(10, 24), torch.ones(10)
    assert torch.equal(project(replica, torch.ones(3, 24)), torch.ones(3, 10))
    other = copy.copy(layer)
    other._parameters = {name: nn.Parameter(0 * x) for name, x in layer.named_parameters()}
    assert torch.equal(project(other, torch.ones(3, 24)), torch.zeros(3, 10))
    assert compiled_calls == [(3, 24)]


@torch.no_grad()
def test_what_listens_to_all_modules_leaves_a_layer_bare():
    _, layer = layer_and_twin()
    heard = []
    handle = register_module_forward_hook(lambda module, args, y: heard.append(module))
    try:
        project(layer, torch.ones(3, 24))
    finally:
        handle.remove()
    assert heard == [layer]
    assert linear.is_bare(layer)


def with_a_forward_of_its_own(layer):
    layer.forward = lambda x: x
    return layer


class OfAnotherClass(nn.Linear):
    def forward(self, input):
        return input


def of_another_class(layer):
    layer.__class__ = OfAnotherClass
    return layer


def of_another_class_later(layer):
    return of_another_class(hasten(layer))


@pytest.mark.parametrize(
    "prepare", [with_a_forward_of_its_own, of_another_class, of_another_class_later]
)
@torch.no_grad()
def test_a_layer_that_computes_something_else_still_does(prepare, compiled_calls):
    _, layer = layer_and_twin()
    x = torch.ones(3, 24)
    assert project(prepare(layer), x) is x
    assert not compiled_calls


@pytest.mark.parametrize("rows, is_compiled", [(2, True), (200, False)])
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
def test_a_traced_layer_is_a_product_that_everybody_knows():
    layer, twin = layer_and_twin()
    traced = torch.jit.trace(layer, torch.randn(2, 24))
    assert "aten::linear" in str(traced.inlined_graph)
    assert "hf_linear_attention::" not in str(traced.inlined_graph)
    x = torch.randn(3, 24)
    torch.testing.assert_close(traced(x), twin(x))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_product_of_a_models_token_runs_compiled(variant, compiled_calls):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    cache = model(torch.tensor([[3, 1, 4]])).past_key_values
    compiled_calls.clear()
    model(torch.tensor([[1]]), past_key_values=cache)
    assert len(compiled_calls) == sum(isinstance(x, nn.Linear) for x in model.modules())
    compiled_calls.clear()
    with torch.enable_grad():
        model(torch.tensor([[1]]))
    assert not compiled_calls


@pytest.mark.sample(19)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_who_looks_for_linear_layers_by_type_finds_all_of_a_model(variant):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    memory = {}
    if model.config.add_cross_attention:
        memory["encoder_hidden_states"] = torch.zeros(1, 2, model.config.hidden_size)
    expected = model(random_ids(1, 12), **memory).logits
    matrices = {x for x in model.modules() if isinstance(x, nn.Linear)}
    assert {type(x) for x in matrices} == {nn.Linear}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantisation will go
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert not any(type(x) is nn.Linear for x in quantised.modules())
    found = [x for x in quantised.modules() if isinstance(x, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(found) == len(matrices)
    y = quantised(random_ids(1, 12), **memory).logits
    assert not torch.equal(y, expected)
    assert (y - expected).norm() < 0.5 * expected.norm()  # of other weights: 1.4


# Rows and inputs that fill tiles and blocks, and that do not; outputs that are few and many.
FEW_ROWS_SHAPES = [
    (0, 5, 3),
    (3, 0, 7),
    (2, 3, 0),
    (1, 1, 1),
    (1, 40, 6),
    (2, 33, 29),
    (3, 64, 13),
    (4, 1100, 12),
    (5, 31, 100),
    (7, 1025, 25),
    (8, 768, 40),
    (33, 1537, 8),
    (16, 96, 47),
    (50, 64, 16),
    (16, 0, 3),
    (31, 513, 5),
    (48, 256, 31),
    (65, 40, 300),
    (130, 100, 37),
]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", MAX_ROWS)
@pytest.mark.parametrize("rows, inputs, outputs", FEW_ROWS_SHAPES)
@torch.no_grad()
def test_few_rows_of_every_shape_and_dtype(rows, inputs, outputs, dtype):
    x, weight, bias = (y.detach() for y in arguments_of((rows,), inputs, outputs, dtype=dtype))
    for b in (bias, None):
        y = linear.few_rows_product(x, weight, b)
        exact = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        assert y.dtype == dtype
        assert_close([y], [exact], dtype)


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", MAX_ROWS)
@torch.no_grad()
def test_no_number_depends_on_other_rows_on_the_outputs_beside_it_or_on_threads(dtype):
    x, weight, bias = (y.detach() for y in arguments_of((130,), 1300, 331, dtype=dtype))
    first_rows = []
    for rows in (1, 2, 5, 8, 13, 16, 31, 32, 51, 64, 70, 127):
        y = linear.few_rows_product(x[:rows], weight, bias)
        assert torch.equal(linear.few_rows_product(x[3 : 3 + rows], weight, bias)[:-3], y[3:])
        part = slice(17, 100)
        assert torch.equal(linear.few_rows_product(x[:rows], weight[part], bias[part]), y[:, part])
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 2)
        try:
            assert torch.equal(linear.few_rows_product(x[:rows], weight, bias), y)
        finally:
            torch.set_num_threads(threads)
        if not any(torch.equal(y[0], first_row) for first_row in first_rows):
            first_rows.append(y[0])
    # Vectors have inputs of a row, or an input of many rows.
    has_two_ways = backends.instruction_set() not in ("", "base") and dtype != torch.float64
    assert len(first_rows) <= (2 if has_two_ways else 1)


def among_nan(x, rng):
    """x, contiguous, in memory that has NaN before and behind it."""
    before, behind = rng.randint(1, 40), rng.randint(1, 40)
    memory = torch.full((before + x.numel() + behind,), torch.nan, dtype=x.dtype)
    place = memory[before : before + x.numel()].view(x.shape)
    place.copy_(x)
    return place


@pytest.mark.kernel_numbers
@over_seeds(80)
@torch.no_grad()
def test_random_products_are_those_of_float64(seed):
    rng = random.Random(seed)
    dtype = rng.choice(list(OF_EVERY_DTYPE))
    rows = rng.choice((rng.randint(1, 9), rng.randint(1, 140)))
    inputs = rng.choice((rng.randint(1, 100), rng.randint(1, 3000)))
    arguments = arguments_of((rows,), inputs, rng.randint(1, 400), rng.random() < 0.5, dtype)
    arguments = [None if x is None else among_nan(x, rng) for x in arguments]
    exact = nn.functional.linear(*[None if x is None else x.double() for x in arguments])
    assert_close([linear.few_rows_product(*arguments)], [exact], dtype)
    if dtype != torch.float64:
        assert_close([linear.many_rows_product(*arguments)], [exact], dtype)


# ---- many rows ----

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
OF_EVERY_DTYPE = TOLERANCE | {torch.float64: 1e-12}


@pytest.fixture
def calls(monkeypatch, shapes_given_to):
    """The shapes of x that the product has been given, which is the faster one for all of them."""
    shapes = shapes_given_to("many_rows_product")
    monkeypatch.setattr(linear, "MANY", {torch.float32: 0})
    return shapes


def leaves_of(arguments):
    return [x for x in arguments if x is not None]


def arguments_of(rows, inputs, outputs, bias=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = [(*rows, inputs), (outputs, inputs), (outputs,)]
    x, weight, b = (
        torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes
    )
    return [x, weight, b if bias else None]


def assert_close(actual, exact, dtype):
    """Within a tolerance of the largest number."""
    for one, other in zip(actual, exact, strict=True):
        largest = other.abs().max().item() if other.numel() else 0
        torch.testing.assert_close(
            one.double(), other, rtol=0, atol=OF_EVERY_DTYPE[dtype] * largest
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(100,), (3, 7), (1, 1)])
def test_values_and_first_and_second_gradients_are_torchs(rows, bias):
    arguments = arguments_of(rows, 24, 10, bias)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in arguments]

    def results(product, arguments):
        y = product(*arguments)
        leaves = leaves_of(arguments)
        gradients = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.cos().sum() for g in gradients), leaves)
        return [y, *gradients, *second]

    actual = results(linear.many_rows_product, arguments)
    torch.testing.assert_close(
        [x.double() for x in actual], results(nn.functional.linear, exact), rtol=1e-4, atol=1e-3
    )


# Tiles, blocks and copies that are full, that are not, and of which there are several.
SHAPES = [
    ((0,), 5, 3),
    ((5,), 0, 3),
    ((5,), 3, 0),
    ((1,), 1, 1),
    ((7,), 9, 17),
    ((12,), 256, 32),
    ((2, 13), 257, 33),
    ((97,), 520, 50),
    ((300,), 12000, 9),
]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, inputs, outputs", SHAPES)
def test_many_rows_of_every_shape_and_dtype(rows, inputs, outputs, dtype):
    arguments = arguments_of(rows, inputs, outputs, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in arguments]
    y, exact_y = linear.many_rows_product(*arguments), nn.functional.linear(*exact)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_close(
        [y, *torch.autograd.grad(y, arguments, dy)],
        [exact_y, *torch.autograd.grad(exact_y, exact, dy.double())],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@torch.no_grad()
def test_many_rows_of_any_strides(dtype):
    x, weight, _ = arguments_of((40,), 70, 21, dtype=dtype)
    y = linear.many_rows_product(x, weight, None)
    # what lies between the elements must not be read as one of them
    spread_x, spread_weight = (
        torch.full((3 * n, 2 * m), math.nan, dtype=dtype) for n, m in (x.shape, weight.shape)
    )
    spread_x[::3, ::2], spread_weight[::3, ::2] = x, weight
    for one in (x, x.t().contiguous().t(), spread_x[::3, ::2], x[:1].expand(40, 70)):
        for other in (weight, weight.t().contiguous().t(), spread_weight[::3, ::2]):
            expected = y if one.stride(0) else y[:1].expand_as(y)
            assert torch.equal(linear.many_rows_product(one, other, None), expected)


@pytest.mark.parametrize("outputs", [40, 4130])
@torch.no_grad()
def test_long_rows_are_added_up_in_parts_as_others_are(outputs):
    x, weight, bias = arguments_of((1300,), 1300, outputs)
    y = linear.many_rows_product(x, weight, bias)
    assert_close([y], [nn.functional.linear(x.double(), weight.double(), bias.double())], x.dtype)
    few = slice(700, 900)  # of which all numbers are one part
    assert torch.equal(linear.many_rows_product(x[few], weight, bias), y[few])


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_x_float32", [True, False])
@pytest.mark.parametrize("is_weight_float32", [True, False])
def test_float32_is_rounded_while_it_is_read(is_x_float32, is_weight_float32, dtype):
    x, weight, bias = (a.detach() for a in arguments_of((2, 13), 257, 33))
    half = [a.to(dtype) for a in (x, weight, bias)]
    mixed = [x if is_x_float32 else half[0], *((weight, bias) if is_weight_float32 else half[1:])]
    mixed = [a.clone().requires_grad_() for a in mixed]
    y = linear.many_rows_product_in(*mixed, dtype)
    assert y.dtype == dtype
    assert torch.equal(y, linear.many_rows_product(*half))

    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(y, mixed, dy)
    assert [g.dtype for g in gradients] == [a.dtype for a in mixed]
    exact = [a.double().requires_grad_() for a in half]
    wanted = torch.autograd.grad(nn.functional.linear(*exact), exact, dy.double())
    for gradient, other in zip(gradients, wanted, strict=True):
        assert_close([gradient], [other], gradient.dtype)


@torch.no_grad()
def test_a_row_is_the_same_alone_and_on_any_number_of_threads():
    x, weight, bias = arguments_of((100,), 700, 300)
    y = linear.many_rows_product(x, weight, bias)
    assert torch.equal(linear.many_rows_product(x[37:38], weight, bias), y[37:38])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert torch.equal(linear.many_rows_product(x, weight, bias), y)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_what_many_rows_does_not_take_is_an_error():
    x, weight, bias = arguments_of((4,), 24, 10)
    with pytest.raises(RuntimeError, match=r"weight must have shape \(10, 23\), got \(10, 24\)"):
        linear.many_rows_product(x[:, 1:], weight, bias)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16, got torch.float64"):
        linear.many_rows_product(x.double(), weight.double(), None)
    with pytest.raises(RuntimeError, match="weight must be float32 here, got bfloat16"):
        linear.many_rows_product(x, weight.bfloat16(), None)
    with pytest.raises(RuntimeError, match=r"bias must have shape \(10,\), got \(9,\)"):
        linear.many_rows_product(x, weight, bias[1:])
    with pytest.raises(RuntimeError, match="x must be bfloat16 here, got float16"):
        linear.many_rows_product_in(x.half(), weight, bias, torch.bfloat16)
    with pytest.raises(RuntimeError, match="bias must be float32 here, got bfloat16"):
        linear.many_rows_product_in(x, weight, bias.bfloat16(), torch.bfloat16)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16, got torch.int64"):
        linear.many_rows_product_in(x, weight, bias, torch.int64)


# Of products and of what they give, as the op is told.
CODES = [
    (CODE_OF[dtype], CODE_OF[result]) for dtype in TOLERANCE for result in {torch.float32, dtype}
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [True, False])
def test_it_passes_opcheck(bias):
    op = torch.ops.hf_linear_attention.many_rows_linear.default
    for dtype in CODES:
        torch.library.opcheck(op, (*arguments_of((21,), 24, 10, bias), *dtype))


def test_only_what_is_needed_is_computed():
    x, weight, bias = arguments_of((6, 4), 24, 10)
    x = x.detach().transpose(0, 1)
    y = linear.many_rows_product(x, weight, bias)
    torch.testing.assert_close(y, nn.functional.linear(x, weight, bias))
    (gradient,) = torch.autograd.grad(y.sum(), bias)
    assert gradient.tolist() == [24] * 10


def test_training_runs_on_the_faster_product(calls):
    layer, twin = layer_and_twin()
    x = torch.randn(2, 50, 24)
    for model in (layer, twin):
        model(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)
    layer.double()(x.double())  # for which there is none
    with torch.autocast("cpu", torch.bfloat16):
        layer.float()(x)
    assert calls == [(2, 50, 24)]
    with pytest.raises(RuntimeError):
        layer(x[..., 1:])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_has_its_own_dtype_multiplied_by_the_faster_product(
    bias, dtype, shapes_given_to, monkeypatch
):
    calls = shapes_given_to("many_rows_product_in")
    monkeypatch.setattr(linear, "MANY", {torch.bfloat16: 10 * 24 * 4})
    layer, twin = layer_and_twin(bias=bias)
    results = []
    for model in (layer, twin):
        x = torch.randn(2, 50, 24, generator=torch.Generator().manual_seed(0))
        x = x.to(dtype).requires_grad_()
        if dtype == torch.float64:  # which autocast leaves alone
            model.double()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            few = model(x[0, :3])
        y.float().square().sum().backward()
        results.append([y, few, x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())
    assert calls == ([] if dtype == torch.float64 else [(2, 50, 24)])


@pytest.mark.thorough
def test_autocast_compiles_into_one_graph(shapes_given_to, monkeypatch):
    calls = shapes_given_to("many_rows_product_in")
    monkeypatch.setattr(linear, "MANY", {torch.bfloat16: 0})
    layer, twin = layer_and_twin()
    x = torch.randn(100, 24)
    for model in (torch.compile(layer, fullgraph=True), twin):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=2e-2, atol=0.5)
    assert calls


def test_training_on_it_compiles_into_one_graph(calls):
    layer, twin = layer_and_twin()
    x = torch.randn(100, 24)
    torch.compile(layer, fullgraph=True)(x).square().sum().backward()
    twin(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    assert calls  # while it was traced


HALVES = {torch.bfloat16, torch.float16}
# By vendor and flags: the dtypes that have a product faster than torch's.
PROCESSORS = {
    "GenuineIntel avx2": HALVES,
    "GenuineIntel avx2 avx512f": HALVES,
    "GenuineIntel avx2 avx512f avx512_bf16": HALVES,
    "GenuineIntel avx2 avx512f avx512_bf16 avx512_fp16": {torch.bfloat16},
    "GenuineIntel avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16": set(),
    "AuthenticAMD avx2": HALVES,
    "AuthenticAMD avx2 avx512f": HALVES | {torch.float32},
    "AuthenticAMD avx2 avx512f avx512_bf16": {torch.float16, torch.float32},
    "AuthenticAMD sse2": set(),
    "": set(),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_products_of_a_processor(processor, monkeypatch):
    vendor, _, flags = processor.partition(" ")
    text = f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags} ht\n" if processor else ""
    monkeypatch.setattr(linear.Path, "read_text", lambda path: text)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert set(linear.multiplications_that_are_many()) == PROCESSORS[processor]


@pytest.mark.parametrize("name", ["base", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"])
def test_the_rows_that_are_few_go_by_the_instruction_set(name, monkeypatch):
    monkeypatch.setattr(backends, "cpu_instruction_set", lambda: name)
    rows = linear.rows_that_are_few()
    assert rows[torch.bfloat16] == {"base": 8, "avx2": 64, "avx512_bf16": 96}.get(name, 128)
    assert rows[torch.float32] == {"base": 32, "avx2": 64}.get(name, 128)
    monkeypatch.setattr(backends, "cpu_instruction_set", Missing("there is none"))
    assert linear.rows_that_are_few() is linear.ROWS_ELSEWHERE


def test_the_report_says_which_product_runs_and_why(monkeypatch, capsys):
    monkeypatch.setattr(linear, "MAX_ROWS", {torch.float32: 12, torch.bfloat16: 34})
    monkeypatch.setattr(linear, "MANY", {torch.float32: 5678})
    print_report()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "up to 12 rows without gradients the compiled product" in lines["float32"]
    assert "from 5,678 multiplications on the compiled product for many rows" in lines["float32"]
    assert "up to 34 rows" in lines["bfloat16"] and "multiplications" not in lines["bfloat16"]
    for name, by in {"avx512_vnni": None, "avx512_bf16": "AVX512-BF16", "amx": "AMX"}.items():
        monkeypatch.setattr(backends, "cpu_instruction_set", lambda name=name: name)
        assert ("as they are" in linear.product_report()["bfloat16"]) == (by is not None)
        assert by is None or f"by {by}" in linear.product_report()["bfloat16"]
    assert f"up to {quantized.FEW_ROWS} rows" in lines["8"] and "torchao's" in lines["8"]
    for module in (linear, quantized):
        monkeypatch.setattr(module, "IS_COMPILED", False)
        monkeypatch.setattr(module, "FORCED_BACKEND", "chunked")
    print_report()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    for weights in ("float32", "bfloat16", "8", "4"):
        assert "compiled" not in lines[weights]
        assert lines[weights].endswith("(HF_LINEAR_ATTENTION_BACKEND=chunked)")
    monkeypatch.setattr(linear, "few_rows_product", Missing("it was not built"))
    print_report()
    assert "torch's product (it was not built)" in capsys.readouterr().out
