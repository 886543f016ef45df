# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products with weights of 8 and 4 bits: the ops, and which of torchao's weights they are given."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization import (
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    PerTensor,
    quantize_,
)

from hf_linear_attention import pack_int4_weights
from hf_linear_attention.fast import quantized
from hf_linear_attention.fast.linear import hasten
from hf_linear_attention.fast.quantized import FEW_ROWS, dequantize_int4
from hf_linear_attention.ops.compiled.quantized_linear import (
    dequantize_int4 as dequantize_int4_op,
)
from quantized_cases import (
    OP,
    OPS,
    ROUNDING,
    arguments_of,
    assert_matches_float64,
    assert_threads_change_no_bit,
    expected_of,
    op_arguments,
    random_arguments,
)
from seeds import over_seeds

# ---- the ops ----

SIZES = {  # inputs, outputs, inputs of a group
    8: [
        (1, 1, 1),
        (3, 7, 3),
        (20, 64, 5),
        (129, 50, 43),
        (768, 101, 768),
        (768, 37, 32),
        (300, 29, 150),
    ],
    4: [
        (32, 1, 32),
        (96, 7, 32),
        (192, 50, 64),
        (768, 101, 32),
        (768, 37, 384),
        (12, 9, 2),
        (224, 5, 112),
        (300, 29, 150),
    ],
}


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11, 64])
@pytest.mark.parametrize("bits", OPS)
def test_the_ops_match_float64(bits, rows, dtype):
    for args in arguments_of(bits, SIZES[bits], rows, dtype):
        assert_matches_float64(bits, args)


@pytest.mark.kernel_numbers
@over_seeds(100)
def test_random_calls_match_float64(seed):
    assert_matches_float64(*random_arguments(random.Random(seed), most_rows=22))


@pytest.mark.parametrize("bits", OPS)
def test_the_ops_take_any_shape(bits):
    for shape in [(), (1,), (2, 3), (0,), (2, 0, 3)]:
        args = op_arguments(bits, shape=shape)
        y = OPS[bits](**args)
        assert y.shape == (*shape, 7)
        torch.testing.assert_close(y, expected_of(bits, **args)[0].float(), rtol=1e-4, atol=1e-3)
    args = op_arguments(bits, outputs=0)
    assert OPS[bits](**args).shape == (3, 0)
    args = op_arguments(bits, inputs=0)
    assert torch.equal(OPS[bits](**args), args["bias"].expand(3, 7))


@pytest.mark.parametrize("bits", OPS)
def test_numbers_of_groups_may_lie_in_any_order(bits):
    args = op_arguments(bits, inputs=96, zero_dtype=torch.bfloat16)
    expected = OPS[bits](**args)
    for name in ("scale", "zero_point"):
        args[name] = torch.stack([args[name].t().contiguous().t()] * 2, dim=-1)[..., 0]
    torch.testing.assert_close(OPS[bits](**args), expected)


def test_one_scale_may_be_that_of_all():
    args = op_arguments(8, group=64, zero_dtype=torch.int8)
    one = {name: args[name][:1].clone() for name in ("scale", "zero_point")}
    expected = OP.int8_linear(**args | {name: x.expand(7, 1) for name, x in one.items()})
    assert torch.equal(OP.int8_linear(**args | one), expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bits", OPS)
def test_threads_change_no_bit(bits, rows):
    args = op_arguments(bits, shape=(rows,), inputs=256, outputs=1001, zero_dtype=torch.bfloat16)
    assert_threads_change_no_bit(bits, args)


@pytest.mark.parametrize("zero_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bits", OPS)
def test_the_ops_pass_opcheck(bits, zero_dtype):
    for shape in [(), (3,), (2, 1)]:
        args = op_arguments(bits, shape=shape, zero_dtype=zero_dtype, bias=len(shape) == 1)
        torch.library.opcheck(OPS[bits], tuple(args.values()))


WRONG = {
    "x_dims": (8, "x", lambda x: x[0, 0], r"x must have 1 to 8 dimensions, got \(\)"),
    "x_dtype": (8, "x", lambda x: x.double(), "x must be float32, bfloat16 or float16, got"),
    "x_layout": (4, "x", lambda x: x.t().contiguous().t(), "x must be contiguous"),
    "x_size": (4, "x", lambda x: x[:, 2:].clone(), r"weight must have shape \(7, 31\), got"),
    "x_odd": (4, "x", lambda x: x[:, 1:].clone(), "x must have an even number of inputs"),
    "weight_dims": (8, "weight", lambda x: x[0], "weight must have two dimensions"),
    "weight_dtype": (4, "weight", lambda x: x.int(), "weight must be int8 here, got int32"),
    "weight_layout": (8, "weight", lambda x: x.t().contiguous().t(), "weight must be contiguous"),
    "scale_dims": (8, "scale", lambda x: x[0], "scale must have two dimensions"),
    "scale_dtype": (8, "scale", lambda x: x.char(), "scale must be float32, bfloat16 or float16"),
    "scale_outputs": (8, "scale", lambda x: x[1:], "scale must have 7 outputs in dimension 0"),
    "scale_groups": (8, "scale", lambda x: x.repeat(1, 2)[:, :3], "that divides 64 inputs"),
    "scale_none": (8, "scale", lambda x: x[:, :0], "that divides 64 inputs"),
    "scale_turned": (4, "scale", lambda x: x.t(), "scale must have 7 outputs in dimension 1"),
    "odd_groups": (4, "scale", lambda x: x.repeat(32, 1), "of an even number of inputs, got 1"),
    "zero_shape": (4, "zero_point", lambda x: x[:1], r"zero_point must have shape \(2, 7\)"),
    "zero_dtype": (4, "zero_point", lambda x: x.char(), "zero_point must be float32, bfloat16 or"),
    "bias_shape": (8, "bias", lambda x: x[1:], r"bias must have shape \(7,\), got \(6,\)"),
    "bias_dtype": (4, "bias", lambda x: x.half(), "bias must be float32 here, got float16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    bits, argument, spoil, message = WRONG[name]
    args = op_arguments(bits, zero_dtype=torch.float32)
    args[argument] = spoil(args[argument])
    with pytest.raises(RuntimeError, match=f"hf_linear_attention::int{bits}_linear: .*" + message):
        OPS[bits](**args)


def test_gradients_are_refused():
    args = op_arguments(8)
    args["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="have no gradient"):
        quantized.int8_product(*args.values())


# ---- torchao's weights ----

GROUPS = PerGroup(32)
CONFIGS = {
    "int8": lambda: Int8WeightOnlyConfig(),
    "int8, groups": lambda: Int8WeightOnlyConfig(granularity=GROUPS),
    "int8, one scale": lambda: Int8WeightOnlyConfig(granularity=PerTensor()),
    "a byte each": lambda: IntxWeightOnlyConfig(torch.int4, GROUPS, MappingType.ASYMMETRIC),
    "int3": lambda: IntxWeightOnlyConfig(torch.int3),
    "int4": lambda: IntxWeightOnlyConfig(torch.int4, GROUPS, MappingType.ASYMMETRIC),
}


def layer_and_twin(name="int8", dtype=torch.float32, bias=True):
    """A layer of 64 inputs and 10 outputs, and a torch.nn.Linear of the same numbers in float32."""
    layer = hasten(nn.Linear(64, 10, bias=bias, dtype=dtype)).requires_grad_(False)
    quantize_(layer, CONFIGS[name]())
    weight = dequantized(layer.weight)
    if name == "int4":
        assert pack_int4_weights(layer) == 1
    twin = nn.Linear(64, 10, bias=bias).requires_grad_(False)
    twin.weight.copy_(weight)
    if bias:
        twin.bias.copy_(layer.bias)
    return layer, twin


def dequantized(weight):
    """In float32 whatever the weight's dtype."""
    zero_point = torch.zeros(1) if weight.zero_point is None else weight.zero_point
    scale, zero = (x.float().unsqueeze(-1) for x in (weight.scale, zero_point))
    groups = weight.qdata.float().unflatten(1, (scale.shape[1], -1))
    return ((groups - zero) * scale).flatten(1)


@pytest.fixture
def compiled_calls(shapes_given_to):
    """The shapes of x that each compiled product has been given."""
    return {bits: shapes_given_to(f"int{bits}_product") for bits in (8, 4)}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_few_rows_run_compiled_and_many_do_not(name, bias, dtype, compiled_calls, monkeypatch):
    monkeypatch.setitem(quantized.MAX_ROWS, dtype, FEW_ROWS)
    layer, twin = layer_and_twin(name, dtype, bias)
    few, many = (torch.randn(rows, 1, 64, dtype=dtype) for rows in (FEW_ROWS, FEW_ROWS + 1))
    if name == "int4" and dtype != torch.float32:  # packing rounds zero points to the scales' dtype
        tolerance = 0.05
    else:  # both are sums of 64 floats, in orders of their own
        tolerance = max(4 * ROUNDING[dtype], 1e-5)
    for x in (few[0], few):
        y = layer(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), twin(x.float()), rtol=tolerance, atol=tolerance)
    assert layer(many).shape == (FEW_ROWS + 1, 1, 10)
    calls = [(1, 64), tuple(few.shape)]
    assert compiled_calls == ({8: [], 4: calls} if name == "int4" else {8: calls, 4: []})


def with_grad(layer, x):
    return torch.enable_grad(), layer, x


def with_autocast(layer, x):
    return torch.autocast("cpu", torch.bfloat16), layer, x


def with_quantised_activations(layer, x):
    layer = hasten(nn.Linear(64, 10))
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    return nullcontext(), layer, x


def with_scaled_activations(layer, x):
    layer.weight.act_pre_scale = torch.full((64,), 2.0)
    return nullcontext(), layer, x


def with_a_strided_weight(layer, x):
    layer.weight.qdata = layer.weight.qdata.t().contiguous().t()
    return nullcontext(), layer, x


@pytest.mark.parametrize(
    "prepare",
    [
        with_grad,
        with_autocast,
        with_quantised_activations,
        with_scaled_activations,
        with_a_strided_weight,
    ],
)
@torch.no_grad()
def test_whatever_the_ops_do_not_know_goes_the_way_of_torchao(prepare, compiled_calls):
    layer, _ = layer_and_twin()
    context, layer, x = prepare(layer, torch.ones(1, 64))
    with context:
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert compiled_calls == {8: [], 4: []}


def test_packed_weights_have_a_product_for_many_rows_and_gradients_of_x():
    layer, twin = layer_and_twin("int4")
    results = []
    for module in (layer, twin):
        x = torch.linspace(-1, 1, 100 * 64).view(100, 64).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    torch.testing.assert_close(*results)
    x = torch.randn(100, 64)
    before = layer(2 * x)
    layer.weight.act_pre_scale = torch.full((64,), 2.0)
    torch.testing.assert_close(layer(x), before)


@torch.no_grad()
def test_copies_and_layers_that_share_a_weight_run_compiled(compiled_calls):
    layer, _ = layer_and_twin()
    x = torch.ones(1, 64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    both = nn.ModuleList([hasten(nn.Linear(64, 10)), hasten(nn.Linear(64, 10))])
    both[1].weight = both[0].weight
    quantize_(both[0], CONFIGS["int4"]())
    both[1].weight = both[0].weight
    assert pack_int4_weights(both) == 1
    assert both[0].weight is both[1].weight
    both[1](x)
    assert compiled_calls == {8: [(1, 64)] * 2, 4: [(1, 64)]}


def test_packing_changes_no_number():
    layer = hasten(nn.Linear(64, 10))
    quantize_(layer, IntxWeightOnlyConfig(torch.int4, GROUPS))  # symmetric: no zero points
    before = layer.weight
    assert pack_int4_weights(layer) == 1
    assert isinstance(layer.weight, Int4Tensor)
    assert layer.weight.qdata.nbytes * 2 == before.qdata.nbytes
    assert torch.equal(dequantize_int4(layer.weight), before.dequantize())


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [2, 32, 96])
def test_weights_as_floats_are_what_torch_makes_of_them(dtype, group):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (7, 96), generator=generator).to(torch.int8)
    scale, zero = torch.randn(2, 192 // group, 14, generator=generator).to(torch.bfloat16)[..., ::2]
    low, high = (weight << 4) >> 4, weight >> 4
    values = torch.stack((low, high), -1).flatten(-2).double().unflatten(-1, (-1, group))
    for zero_point in (zero, None):
        x = torch.ones(3, 192, dtype=dtype, requires_grad=True)
        floats = dequantize_int4_op(x, weight, scale, zero_point)
        zeros = torch.zeros_like(scale) if zero_point is None else zero_point
        exact = values * scale.double().t()[..., None] + zeros.double().t()[..., None]
        assert floats.dtype == dtype and not floats.requires_grad
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(floats.double(), exact.flatten(-2), rtol=eps, atol=1e-6)


def test_packing_what_can_not_be_packed_is_refused():
    layer, _ = layer_and_twin("int8")
    with pytest.raises(ValueError, match=r"model must have weights of .* got none"):
        pack_int4_weights(layer)
