# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Arguments of the products with weights of 8 and 4 bits, and what they are to give."""

import torch
from torch.nn import functional as F

OP = torch.ops.hf_linear_attention

NUMBERS = {8: (torch.int8, torch.float32), 4: (torch.bfloat16,)}  # what zero points may be of


def op_arguments(
    bits,
    shape=(3,),
    inputs=64,
    outputs=7,
    group=32,
    dtype=torch.float32,
    scale_dtype=torch.float32,
    zero_dtype=None,
    bias=True,
):
    """Arguments of int8_linear and int4_linear, by name and in their order."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    values = torch.randint(-128, 128, (outputs, inputs * bits // 8), generator=generator)
    groups = inputs // group if group else 0
    sizes = (outputs, groups) if bits == 8 else (groups, outputs)
    return dict(
        x=normal(*shape, inputs).to(dtype),
        weight=values.to(torch.int8),
        scale=normal(*sizes).to(scale_dtype),
        zero_point=None if zero_dtype is None else (10 * normal(*sizes)).to(zero_dtype),
        bias=normal(outputs).to(dtype) if bias else None,
    )


def arguments_of(bits, sizes, rows, dtype):
    """Of each size (inputs, outputs, inputs of a group), with all kinds of zero points."""
    for inputs, outputs, group in sizes:
        for zero_dtype in (None, *NUMBERS[bits]):
            shape = dict(shape=(rows,), inputs=inputs, outputs=outputs, group=group, dtype=dtype)
            scale_dtype = torch.bfloat16 if rows % 2 else torch.float32
            numbers = dict(zero_dtype=zero_dtype, scale_dtype=scale_dtype, bias=outputs % 2 == 1)
            yield op_arguments(bits, **shape, **numbers)


def random_arguments(rng, most_rows):
    """Bits, and arguments of their op, with up to three times as many rows."""
    bits = rng.choice((8, 4))
    group = rng.randint(1, 80) * (8 // bits)
    return bits, op_arguments(
        bits,
        shape=(rng.randint(1, 3), rng.randint(1, most_rows)),
        inputs=group * rng.randint(1, 6),
        outputs=rng.randint(1, 300),
        group=group,
        dtype=rng.choice(list(ROUNDING)),
        scale_dtype=rng.choice(list(ROUNDING)),
        zero_dtype=rng.choice((None, *NUMBERS[bits], *ROUNDING)),
        bias=rng.random() < 0.5,
    )


def expected_of(bits, x, weight, scale, zero_point, bias):
    """In float64."""
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    scale, zero_point = scale.double(), zero_point.double()
    if bits == 4:
        weight = torch.stack(((weight << 4) >> 4, weight >> 4), dim=-1).flatten(-2)
        scale, zero_point = scale.t(), zero_point.t()
    size = weight.shape[1] // scale.shape[1]
    scale, zero_point = (x.repeat_interleave(size, dim=1) for x in (scale, zero_point))
    weight = weight.double()
    weight = (weight - zero_point) * scale if bits == 8 else weight * scale + zero_point
    return F.linear(x.double(), weight, None if bias is None else bias.double()), weight


OPS = {8: OP.int8_linear.default, 4: OP.int4_linear.default}
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_matches_float64(bits, args, rounds_x=False):
    y = OPS[bits](**args, rounds_x=rounds_x)
    assert y.dtype == args["x"].dtype
    if rounds_x:
        args = args | {"x": rounded(args["x"], group_of(bits, args))}
    expected, weight = expected_of(bits, **args)
    # Sums of floats, which zero points may make larger than their results, rounded once.
    sums = args["x"].double().abs().sum(-1, keepdim=True) * weight.abs().max()
    bound = ROUNDING[y.dtype] * expected.abs() + 1e-6 * sums
    assert ((y.double() - expected).abs() <= bound).all()


def assert_threads_change_no_bit(bits, args, rounds_x=False):
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(OPS[bits](**args, rounds_x=rounds_x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def group_of(bits, args):
    """Inputs in one."""
    groups = args["scale"].shape[1 if bits == 8 else 0]
    return args["x"].shape[-1] // max(groups, 1)


def rounded(x, group):
    """x (..., in) as products of integers take it, in float32: in each block of inputs, a group's
    or 256 of them where it has more, the largest magnitude becomes an integer of 15 bits.
    """
    blocks = [block for part in x.float().split(group, -1) for block in part.split(256, -1)]
    return torch.cat([rounded_block(block) for block in blocks], -1)


def rounded_block(x):
    largest = x.abs().amax(-1, keepdim=True).double()
    exponent = torch.frexp(largest)[1] - 15  # of what an integer stands for
    step = torch.ldexp(torch.ones_like(largest), exponent)
    is_too_large = (largest / step).round() == 2**15
    step = torch.where(is_too_large, 2 * step, step)
    integers = torch.where(step < 2.0**-126, 0, (x.double() / step).round())
    assert (integers.abs() < 2**15).all()
    return (integers * step).float()
