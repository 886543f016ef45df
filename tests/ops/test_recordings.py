# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Operations that the compiled library calls one after another: torch's answers to the last bit,
and an error for whatever is no recording.
"""

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from hf_linear_attention.ops.compiled.library import delete_recording, ops
from hf_linear_attention.ops.compiled.recordings import can_record, recording

aten = torch.ops.aten
UNARY = (aten.silu.default, aten.sigmoid.default, aten.exp.default, aten.neg.default)
PAIRS = (aten.add.Tensor, aten.mul.Tensor)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_team", [False, True])
def test_torchs_operations_are_torchs(dtype, in_team):
    a, b = torch.randn(3, 40, dtype=dtype), torch.randn(2, 1, 40, dtype=dtype)
    operations = [(op, ["a"], [str(op)]) for op in UNARY]
    operations += [(op, ["a", "b"], [str(op)]) for op in PAIRS]
    view = aten.as_strided.default
    operations.append((view, ["a", [5, 3, 8], [24, 8, 1], 0], ["view"]))
    operations.append((view, ["view", [120], [1], 0], ["flat"]))
    operations.append((view, ["part", [8, 5], [10, 2], 1], ["of a part"]))
    operations.append((view, ["turned", [40, 2, 5], [1, 40, 0], 40], ["of strides"]))
    given = {"a": a, "b": b, "part": a[1:].flatten(), "turned": a.T}
    wanted = [name for _, _, (name,) in operations]
    results = recording(operations, [*given], wanted, in_team)([*given.values()])
    expected = [*(op(a) for op in UNARY), *(op(a, b) for op in PAIRS)]
    expected += [a.view(5, 3, 8), a.view(120), a[1:].view(8, 5, 2)[:, :, 1]]
    expected += [a.T[:, 1:, None].expand(40, 2, 5)]
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
    assert results[-3].data_ptr() == results[-4].data_ptr() == a.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 7), (2, 3, 40), (129, 128)])
def test_sums_and_products_of_one_shape_are_torchs(dtype, shape):
    a, b = torch.randn(2, *shape, dtype=dtype)
    many_digits = torch.rand(2, *shape, dtype=dtype).mul_(torch.finfo(dtype).max)  # and too large
    special = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    pairs = [(a, b), (*many_digits,), (special.repeat(6), special.repeat_interleave(6))]
    if a.dim() > 1:
        pairs.append((a.mT, b.mT.contiguous()))
    for pair in pairs:
        operations = [(op, ["a", "b"], [str(op)]) for op in PAIRS]
        results = recording(operations, ["a", "b"], [*map(str, PAIRS)], False)([*pair])
        for result, op in zip(results, PAIRS, strict=True):
            torch.testing.assert_close(result, op(*pair), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize(
    "shapes",
    [((2, 1, 40), (40,)), ((3, 1, 5), (1, 4, 1)), ((5,), (2, 0, 5)), ((7,), ()), ((), (2, 3))],
)
def test_sums_and_products_of_two_shapes_are_torchs(dtypes, shapes):
    a, b = (torch.randn(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    number = torch.tensor(0.1, dtype=torch.float64)
    for x, y in [(a, b), (b, a), (a, number), (a.movedim(0, -1) if a.dim() > 1 else a, number)]:
        operations = [(op, ["a", "b"], [str(op)]) for op in PAIRS]
        results = recording(operations, ["a", "b"], [*map(str, PAIRS)], False)([x, y])
        for result, op in zip(results, PAIRS, strict=True):
            assert result.dtype == op(x, y).dtype and torch.equal(result, op(x, y))


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("after", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_copies_in_another_dtype_are_torchs(before, after):
    special = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan, 3e38, 1.00390625])
    copy = aten._to_copy.default
    run = recording([(copy, ["x", after], ["y"])], ["x"], ["y"], False)
    for x in (torch.randn(2, 40, dtype=before), special.to(before), torch.randn(3, 4).to(before).T):
        (y,) = run([x])
        torch.testing.assert_close(y, x.to(after), rtol=0, atol=0, equal_nan=True)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_are_found(dtype):
    table = torch.randn(7, 5, dtype=dtype)
    embedding = aten.embedding.default
    run = recording([(embedding, ["table", "i", 3], ["y"])], ["table", "i"], ["y"], False)
    for indices in (torch.tensor([[6], [0]]), torch.tensor(2), torch.tensor([]).long()):
        for i, rows in ((indices, table), (indices.int(), table), (indices, table.T)):
            (y,) = run([rows, i.clamp(max=4)])
            assert torch.equal(y, embedding(rows, i.clamp(max=4)))
    for index in (7, -1):
        with pytest.raises(RuntimeError, match="aten::embedding"):
            run([table, torch.tensor([index])])


def layers_of_products(number, dtype):
    """Named tensors, and operations in a row: two products and a norm in each of `number`."""
    shapes = {"up": (300, 256), "down": (256, 300), "norm": (256,)}
    tensors = {
        f"{k}{i}": torch.randn(s, dtype=dtype) for i in range(number) for k, s in shapes.items()
    }
    operations, x = [], "x"
    for i in range(number):
        operations += [
            (ops.rms_norm.default, [x, f"norm{i}", 1e-6], [f"a{i}"]),
            (ops.linear.default, [f"a{i}", f"up{i}", None], [f"b{i}"]),
            (aten.silu.default, [f"b{i}"], [f"c{i}"]),
            (ops.linear.default, [f"c{i}", f"down{i}", None], [f"d{i}"]),
            (aten.add.Tensor, [x, f"d{i}"], [f"y{i}"]),
        ]
        x = f"y{i}"
    return tensors, operations, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_team_of_threads_gives_the_answers_of_one(dtype, threads):
    tensors, operations, y = layers_of_products(20, dtype)
    run = recording(operations, ["x", *tensors], [y], in_team=True)
    inputs = torch.randn(30, 2, 256, dtype=dtype)
    got = [run([x, *tensors.values()])[0] for x in inputs]
    torch.set_num_threads(1)
    for x, y in zip(inputs, got, strict=True):
        for i in range(20):
            a = ops.rms_norm(x, tensors[f"norm{i}"], 1e-6)
            x = x + ops.linear(
                aten.silu(ops.linear(a, tensors[f"up{i}"], None)), tensors[f"down{i}"], None
            )
        assert torch.equal(x, y)


def test_callers_of_several_threads_do_not_meet(threads):
    tensors, operations, y = layers_of_products(4, torch.float32)
    run = recording(operations, ["x", *tensors], [y], in_team=True)
    inputs = torch.randn(40, 1, 256)
    expected = [run([x, *tensors.values()])[0] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: run([x, *tensors.values()])[0], inputs))
    assert all(map(torch.equal, got, expected))


def test_what_is_written_in_place_is_written():
    q, k, v = torch.randn(3, 2, 4, 8)
    kv, z = torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 8)
    arguments = ["q", "k", "v", None, None, "kv", "z", 0, True, 1e-6]
    step = ops.linear_attention_step_.default
    run = recording([(step, arguments, ["y"])], ["q", "k", "v", "kv", "z"], [], False)
    assert run([q, k, v, kv, z]) == []
    other = torch.zeros_like(kv), torch.zeros_like(z)
    step(q, k, v, None, None, *other, 0, True, 1e-6)
    assert torch.equal(kv, other[0]) and torch.equal(z, other[1]) and kv.any()


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (aten.add.Tensor, ["a", "b"], True),
        (aten.add.Tensor, ["a", 2.0], False),  # a number where the library takes tensors
        (aten.as_strided.default, ["a", ["b"], [1], 0], False),
        (aten.view.default, ["a", [4]], False),  # all views are by strides
        (aten.sinh.default, ["a"], False),
        (ops.linear.default, ["a", "b", None], True),
        (ops.linear.default, ["a", None, None], False),
        (ops.int8_linear.default, ["a", "b", "c", None, None], True),  # rounds_x has a default
    ],
)
def test_what_can_be_recorded(function, arguments, expected):
    assert can_record(function, arguments) == expected


def run_code(code, given, constants=()):
    number = ops.make_recording(torch.tensor(code).long(), [*constants])
    try:
        return ops.run_recording(number, given)
    finally:
        delete_recording(number.item())


@pytest.mark.parametrize("in_team", [0, 1])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([], "must not end within"),
        ([1], "must not end within"),
        ([-1, 0], "a number of given tensors from 0"),
        ([2**40, 0], "a number of given tensors from 0"),
        ([1, 1], "must not end within"),
        ([1, -1], "must not end within"),
        ([1, 0, 999], r"an operation from 0 to \d+, got 999"),
        ([1, 0, -1], r"an operation from 0 to \d+, got -1"),
        ([1, 0, 1, 0], "must not end within"),  # an addition of one tensor
        ([1, 0, 1, 0, 7], "a tensor from 0 to 0, got 7"),
        ([1, 0, 1, 0, -1], "a tensor from 0 to 0, got -1"),
        ([1, 0, 0, 0, -3], "must not end within"),  # a view of so many dimensions
        ([1, 0, 0, 0, 1, 5, 1, 1, 0], "aten::as_strided: a view must be within its tensor"),
        ([1, 0, 0, 0, 1, 4, 1, 1, -1], "aten::as_strided: a view must be within its tensor"),
        (
            [1, 0, 0, 0, 1, 4, 2, 1, 1, 0],
            "aten::as_strided: a view must have as many strides as sizes",
        ),
        ([1, 1, 3], r"results below 1, got 3"),
        ([1, 1, -3], r"results below 1, got -3"),
        ([2, 0], "tensors must be 2, got 1"),
    ],
)
def test_what_is_no_recording_is_refused(code, message, in_team):
    with pytest.raises(RuntimeError, match=message):
        run_code([in_team, *code], [torch.ones(4)])
    (x,) = run_code([in_team, 1, 1, 0], [torch.ones(4)])  # and this still runs
    assert torch.equal(x, torch.ones(4))


@pytest.mark.parametrize("number", [0, -1, 2**60])
def test_what_nobody_made_is_not_run(number):
    with pytest.raises(RuntimeError, match=f"one that make_recording gave, got {number}"):
        ops.run_recording(torch.tensor(number), [torch.ones(4)])
    with pytest.raises(RuntimeError, match="recording must be int64"):
        ops.run_recording(torch.tensor(1.0), [torch.ones(4)])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([1, 0, 1, 0, 7], "got 7"),  # an addition, whose second tensor there is not
        ([1, 2, 0, 7], "got 7"),  # two results, of which the second is none
        ([2, 1, 0], "tensors must be 2, got [01]"),
    ],
)
@pytest.mark.parametrize("is_constant", [False, True])
def test_what_is_refused_keeps_no_tensor(code, message, is_constant):
    array = numpy.ones(4, dtype=numpy.float32)
    is_kept = weakref.ref(array)
    x = torch.from_numpy(array)
    with pytest.raises(RuntimeError, match=message):
        run_code([0, *code], [] if is_constant else [x], [x] if is_constant else [])
    del x, array
    assert is_kept() is None


@pytest.mark.parametrize(
    "code", [torch.zeros(3), torch.zeros(1, 3).long(), torch.zeros(6).long()[::2]]
)
def test_code_of_another_kind_is_refused(code):
    with pytest.raises(RuntimeError, match="code must be contiguous int64"):
        ops.make_recording(code, [])


def test_constants_are_kept_as_long_as_the_recording():
    array = numpy.ones(4, dtype=numpy.float32)
    is_kept = weakref.ref(array)
    constants = {"c": torch.from_numpy(array)}
    run = recording([(aten.add.Tensor, ["x", "c"], ["y"])], ["x"], ["y"], False, constants)
    del constants
    array[:] = 2  # is seen
    del array
    assert torch.equal(run([torch.ones(4)])[0], torch.full((4,), 3.0))
    del run
    assert is_kept() is None


def test_a_constant_that_gets_other_numbers_is_read_where_they_are():
    c = torch.zeros(4)
    run = recording([(aten.add.Tensor, ["x", "c"], ["y"])], ["x"], ["y"], False, {"c": c})
    c.data = torch.ones(2, 1)
    assert torch.equal(run([torch.ones(2)])[0], torch.full((2, 2), 2.0))


@pytest.mark.parametrize("in_team", [False, True])
def test_results_that_share_numbers_share_them(in_team):
    """What leaves a recording is torch's, views of it and of what is written to, too."""
    operations = [
        (aten.add.Tensor, ["x", "x"], ["sum"]),
        (aten.as_strided.default, ["sum", [2, 2], [2, 1], 0], ["rows"]),
        (aten.as_strided.default, ["rows", [2], [1], 2], ["row"]),
        (aten.copy_.default, ["row", "z", False], ["written"]),
        (aten.mul.Tensor, ["sum", "sum"], ["square"]),  # of what was written to
        (aten.as_strided.default, ["square", [3], [1], 1], ["part"]),
        (aten.exp.default, ["part"], ["of torch"]),  # whose own tensor is local memory
    ]
    wanted = ["rows", "written", "of torch", "square"]
    run = recording(operations, ["x", "z"], wanted, in_team)
    x, z = torch.arange(4.0), torch.tensor([7.0, 8.0])
    rows, written, exp, square = run([x, z])
    assert torch.equal(rows, torch.tensor([[0.0, 2.0], [7.0, 8.0]]))
    assert torch.equal(square, rows.flatten() ** 2) and torch.equal(exp, square[1:].exp())
    written.zero_()
    assert torch.equal(rows, torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    assert torch.equal(x, torch.arange(4.0))


@pytest.mark.parametrize("numbers", [0, 1, 100, 300_000])  # the last are torch's at once
def test_what_stays_within_is_as_good_as_torchs(numbers):
    """A long chain, of memory that is used again and again, and of calls that go to torch."""
    operations, x = [], "x"
    for i in range(40):
        operations += [
            (aten.mul.Tensor, [x, "c"], [f"a{i}"]),
            (aten.tanh.default, [f"a{i}"], [f"b{i}"]),
            (aten.cat.default, [[f"b{i}", x], 0], [f"c{i}"]),
            (aten.as_strided.default, [f"c{i}", [numbers], [1], numbers], [f"d{i}"]),  # x again
            (aten.add.Tensor, [f"b{i}", f"d{i}"], [f"y{i}"]),
        ]
        x = f"y{i}"
    c = torch.rand(())
    run = recording(operations, ["x"], [x], False, {"c": c})
    expected = first = torch.randn(numbers)
    for _ in range(40):
        expected = torch.tanh(expected * c) + expected
    for _ in range(3):
        assert torch.equal(run([first])[0], expected)


def test_an_error_says_which_operation_and_argument():
    operations = [(ops.linear.default, ["x", "w", None], ["y"])]
    run = recording(operations, ["x", "w"], ["y"], in_team=True)
    with pytest.raises(RuntimeError, match="hf_linear_attention::linear: weight must have shape"):
        run([torch.ones(1, 4), torch.ones(3, 5)])
    assert torch.equal(run([torch.ones(1, 4), torch.ones(3, 4)])[0], torch.full((1, 3), 4.0))
