# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products with weights of 8 and 4 bits that round x to 16 bits, and when layers take them."""

import random
import sys

import pytest
import torch

from hf_linear_attention.__main__ import print_report
from hf_linear_attention.fast import quantized
from hf_linear_attention.ops import backends
from new_python import run_python
from quantized_cases import (
    OPS,
    ROUNDING,
    arguments_of,
    assert_matches_float64,
    assert_threads_change_no_bit,
    expected_of,
    op_arguments,
    random_arguments,
    rounded,
)
from seeds import over_seeds

SIZES = {  # inputs, outputs, inputs of a group
    8: [(1, 1, 1), (20, 64, 5), (129, 50, 43), (768, 101, 768), (600, 37, 300), (256, 13, 32)],
    4: [
        (32, 1, 32),
        (192, 150, 64),
        (768, 101, 32),
        (12, 9, 2),
        (1040, 5, 520),
        (224, 30, 112),
        (640, 75, 320),
        (160, 70, 32),
        (96, 33, 96),
        (1024, 64, 512),
    ],
}


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 23, 64, 300])
@pytest.mark.parametrize("bits", OPS)
def test_products_match_float64_with_the_rounded_x(bits, rows, dtype):
    for args in arguments_of(bits, SIZES[bits], rows, dtype):
        assert_matches_float64(bits, args, rounds_x=True)


@pytest.mark.kernel_numbers
@over_seeds(60)
def test_random_calls_match_float64_with_the_rounded_x(seed):
    rng = random.Random(seed)
    bits, args = random_arguments(rng, most_rows=rng.choice((4, 100)))
    if args["x"].dtype != torch.float16:
        args["x"] *= 10.0 ** rng.randint(-25, 25)
    assert_matches_float64(bits, args, rounds_x=True)


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("rows", [3, 32])
@pytest.mark.parametrize("bits", OPS)
def test_sums_of_integers_are_exact(bits, rows):
    args = op_arguments(bits, inputs=256, outputs=50, group=256, bias=False)
    generator = torch.Generator().manual_seed(0)
    args["x"] = torch.randint(-400, 400, (rows, 256), generator=generator).float()
    args["scale"] = torch.full_like(args["scale"], 0.5)
    assert torch.equal(OPS[bits](**args, rounds_x=True), expected_of(bits, **args)[0].float())


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("rows", [3, 32])
@pytest.mark.parametrize("bits", OPS)
def test_the_largest_numbers_overflow_nothing(bits, rows):
    args = op_arguments(bits, inputs=1024, outputs=13, group=1024, bias=False)
    args["x"] = torch.full((rows, 1024), 2.0 - 2**-23)  # which becomes 2^14, not 2^15
    args["weight"].fill_(-128 if bits == 8 else -120)  # two of -8
    args["scale"].fill_(1)
    assert_matches_float64(bits, args, rounds_x=True)
    args["x"].fill_(2.0 - 2**-14)  # 2^15 - 1
    assert_matches_float64(bits, args, rounds_x=True)
    args["x"].fill_(torch.finfo(torch.float32).max / 2**20)
    assert_matches_float64(bits, args, rounds_x=True)


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("bits", OPS)
@pytest.mark.parametrize("rows", [6, 30])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(bits, rows, value):
    args = op_arguments(bits, shape=(rows,), inputs=320, outputs=13)
    expected = OPS[bits](**args, rounds_x=True)
    args["x"][2, 77] = value
    args["x"][4, 319] = value
    y = OPS[bits](**args, rounds_x=True)
    assert y[[2, 4]].isnan().all()
    others = [0, 1, 3, *range(5, rows)]
    assert torch.equal(y[others], expected[others])


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("bits", OPS)
def test_rows_of_zeros_and_of_next_to_nothing_give_the_bias(bits):
    args = op_arguments(bits, shape=(2,), zero_dtype=torch.bfloat16)
    args["x"][0] = 0
    args["x"][1] *= 1e-36
    assert torch.equal(OPS[bits](**args, rounds_x=True), args["bias"].expand(2, 7))


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("group", [32, 320])
@pytest.mark.parametrize("bits", OPS)
def test_a_row_is_answered_alike_among_any_others(bits, group):
    shape = dict(shape=(310,), inputs=320, outputs=70, group=group)
    args = op_arguments(bits, **shape, zero_dtype=torch.bfloat16)
    first_rows = []
    for rows in (1, 4, 9, 10, 16, 17, 31, 40, 300):
        y = OPS[bits](**args | {"x": args["x"][:rows]}, rounds_x=True)
        elsewhere = OPS[bits](**args | {"x": args["x"][3 : 3 + rows]}, rounds_x=True)
        assert torch.equal(elsewhere[:-3], y[3:])
        if not any(torch.equal(y[0], first_row) for first_row in first_rows):
            first_rows.append(y[0])
    # With AVX512-VNNI there are two ways, by the number of rows. Those of 4 bits add up in the same
    # order, but not all compilers fuse the same products and sums.
    has_two_ways = backends.instruction_set() in ("avx512_vnni", "avx512_bf16", "amx")
    assert len(first_rows) <= (2 if has_two_ways else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_half_precision_stay_what_they_are_where_none_is_much_larger(dtype):
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = torch.where(x.abs() < (2**-4 if dtype == torch.bfloat16 else 2**-1), 1, x).float()
    assert torch.equal(rounded(x, 256), x)


def test_rounding_is_of_the_last_of_16_bits():
    x = torch.randn(50, 512, generator=torch.Generator().manual_seed(0))
    error = (rounded(x, 512) - x).abs().unflatten(-1, (2, 256)).amax(-1)
    largest = x.abs().unflatten(-1, (2, 256)).amax(-1)
    assert (error <= 2.0**-15 * largest).all()


@pytest.mark.parametrize("rows", [1, 3, 7, 40])
@pytest.mark.parametrize("bits", OPS)
def test_threads_change_no_bit(bits, rows):
    args = op_arguments(bits, shape=(rows,), inputs=256, outputs=1001, zero_dtype=torch.bfloat16)
    assert_threads_change_no_bit(bits, args, rounds_x=True)


@pytest.mark.parametrize("bits", OPS)
def test_any_shape_and_order_of_numbers(bits):
    for shape in [(), (1,), (2, 3), (0,), (2, 0, 3)]:
        assert_matches_float64(bits, op_arguments(bits, shape=shape), rounds_x=True)
    assert OPS[bits](**op_arguments(bits, outputs=0), rounds_x=True).shape == (3, 0)
    for shape, outputs in [((3,), 7), ((1,), 100), ((9,), 100), ((32,), 20)]:
        args = op_arguments(bits, shape=shape, inputs=0, outputs=outputs)
        expected = args["bias"].expand(*shape, outputs)
        assert torch.equal(OPS[bits](**args, rounds_x=True), expected)
    args = op_arguments(bits, inputs=96, zero_dtype=torch.bfloat16)
    for name in ("scale", "zero_point"):
        args[name] = torch.stack([args[name].t().contiguous().t()] * 2, dim=-1)[..., 0]
    assert_matches_float64(bits, args, rounds_x=True)


@pytest.mark.parametrize("bits", OPS)
def test_they_pass_opcheck(bits):
    args = op_arguments(bits, shape=(2, 1), zero_dtype=torch.bfloat16)
    torch.library.opcheck(OPS[bits], tuple(args.values()), dict(rounds_x=True))


# ---- when ----

REPORTED = (
    "up to 64 rows without gradients the compiled product, which reads the values as they are, of "
    "bfloat16 or float16 as integers, with x rounded to 16 bits; "
    + {"amx": "up to 256 rows of bfloat16 or float16, too; "}.get(
        backends.instruction_set(),
        "any number of rows of bfloat16 or float16, too; "
        * (backends.instruction_set() in quantized.MOST_ROUNDED_ROWS),
    )
    + "else "
)


def test_by_default_half_precision_is_rounded(capsys):
    for dtype in ROUNDING:
        assert quantized.is_rounded(torch.ones(2, 64, dtype=dtype)) == (dtype != torch.float32)
    print_report()
    assert capsys.readouterr().out.count(REPORTED) == 2


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            "never",
            "8 bits     up to 64 rows without gradients the compiled product, which reads "
            "the values as they are; else torchao's",
        ),
        ("always", "of float32 or bfloat16 or float16 as integers"),
        ("", REPORTED),
    ],
)
def test_the_environment_says_what_is_rounded(choice, said):
    result = run_python("-m", "hf_linear_attention", **{quantized.ROUNDING_SETTING: choice})
    assert said in result.stdout, result.stderr


def test_where_torch_is_slow_in_half_precision_more_of_its_rows_are_ours(monkeypatch):
    everything = "any number of rows of bfloat16 or float16, too"
    for name, (most, said) in {
        "avx2": (sys.maxsize, everything),
        "avx512_vnni": (sys.maxsize, everything),
        "amx": (256, "up to 256 rows of bfloat16 or float16, too"),
        "base": (quantized.FEW_ROWS, None),
    }.items():
        monkeypatch.setattr(backends, "cpu_instruction_set", lambda name=name: name)
        rows = quantized.rows_that_are_ours()
        assert rows[torch.float32] == quantized.FEW_ROWS
        assert rows[torch.bfloat16] == rows[torch.float16] == most
        monkeypatch.setattr(quantized, "MAX_ROWS", rows)
        report = quantized.quantized_report()["8 bits"]
        assert said in report if said else ", too" not in report


def test_another_choice_is_refused():
    setting = {quantized.ROUNDING_SETTING: "sometimes"}
    result = run_python("-c", "import hf_linear_attention", **setting)
    expected = f"{quantized.ROUNDING_SETTING} must be one of 'half', 'always', 'never', got 'someti"
    assert expected in result.stderr
