# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution on every backend: against the float64 loop, and by what must be equal by
construction.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from support.attention_cases import assert_all_close
from support.rule_cases import run_with_gradients, tensors_of, to_float64, with_tensors
from torch.nn import functional as F

from hf_linear_attention import short_convolution, short_convolution_step_
from hf_linear_attention.ops.compiled import library

every_backend = pytest.mark.parametrize("backend", ["cpu", "chunked"])
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call. Dims as in short_convolution's docstring; lengths are of packed sequences."""

    B: int = 2
    T: int = 37
    C: int = 19
    k: int = 4
    bias: bool = True
    activation: str | None = "silu"
    mask: str | None = None  # "left", "right", "middle", "all"
    lengths: tuple[int, ...] | None = None
    S: int | None = None  # of an initial state, if there is one
    layout: str = "plain"  # "channels_first", "strided": amid NaN, "expanded": one for all channels
    weight_dtype: torch.dtype | None = None

    def __str__(self):
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != Case.__dataclass_fields__[name].default
        }
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


CASES = [
    Case(),
    # kernel sizes, with channels and tokens around a vector, a block, a tile and a run
    *(Case(k=k, S=k - 1, C=C) for k, C in ((1, 8), (2, 300), (3, 1), (4, 33), (5, 16), (9, 7))),
    *(Case(T=T, S=3, bias=False) for T in (0, 1, 2, 3, 4, 15, 16, 17)),
    Case(B=1, T=20, C=520),
    Case(B=1, T=520, C=3, k=5),
    Case(T=20, k=30, C=4),  # fewer tokens than taps
    Case(B=0),
    Case(B=40, T=5, C=3),
    Case(activation=None, mask="left"),
    # padding and packing
    *(Case(mask=mask, S=3) for mask in ("left", "right", "middle", "all")),
    Case(B=1, T=500, mask="middle", C=5),
    Case(B=1, T=100, lengths=(0, 1, 2, 60, 0, 37, 0)),
    Case(B=1, T=100, lengths=(40, 3, 57), S=3, mask="middle"),
    Case(B=1, T=0, lengths=(0, 0), S=4),
    Case(B=1, T=0, lengths=()),
    # states that hold more than windows reach
    Case(S=6),
    Case(T=2, S=9, mask="middle"),
    Case(k=1, S=2, T=1),
    # layouts
    *(
        Case(layout=layout, mask="middle", S=3, C=40)
        for layout in ("channels_first", "strided", "expanded")
    ),
    Case(layout="channels_first", B=1, T=70, C=1024),  # rows that collide in the cache, transposed
    Case(B=1, T=70, C=1024),  # and as they are
    # weights of another dtype
    *(
        Case(weight_dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ),
]


def make_inputs(case, dtype=torch.float64, seed=1):
    """The keyword arguments of a case's call, the same numbers for every dtype."""
    g = torch.Generator().manual_seed(seed)
    B, T, C, k = case.B, case.T, case.C, case.k

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "x": laid_out(normal(B, T, C).to(dtype), case.layout),
        "weight": normal(C, k).to(case.weight_dtype or dtype),
        "activation": case.activation,
    }
    if case.layout == "strided":
        inputs["weight"] = laid_out(inputs["weight"], "strided")
    if case.bias:
        inputs["bias"] = normal(C).to(case.weight_dtype or dtype)
    if case.mask is not None:
        position, row = torch.arange(T).expand(B, T), torch.arange(B)[:, None]
        inputs["key_mask"] = {
            "left": position >= 3 + 20 * row,
            "right": position < T - 3 - 20 * row,
            "middle": torch.rand(B, T, generator=g) < 0.6,
            "all": (row > 0).expand(B, T),
        }[case.mask]
    rows = B
    if case.lengths is not None:
        inputs["cu_seqlens"] = torch.tensor((0, *case.lengths)).cumsum(0).int()
        rows = len(case.lengths)
    if case.S is not None:
        inputs["initial_state"] = normal(rows, case.S, C).to(dtype)
    return inputs


def laid_out(x, layout):
    if layout == "channels_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return x[..., :1].expand(x.shape)
    if layout == "strided":
        big = torch.full([2 * n + 2 for n in x.shape], torch.nan, dtype=x.dtype)
        return big[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)].copy_(x)
    return x


@functools.cache
def expected_of(case, dtype):
    inputs = to_float64(make_inputs(case, dtype))
    return run_with_gradients(short_convolution, inputs, "reference")


def random_windows(T=9, C=5, k=4):
    x = torch.randn(2, T, C, dtype=torch.float64)
    return x, torch.randn(C, k, dtype=torch.float64), torch.randn(C, dtype=torch.float64)


# ---- numbers ----


@pytest.mark.kernel_numbers
@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_reference_s(case, backend):
    for dtype in (torch.float64, torch.float32):
        actual = run_with_gradients(short_convolution, make_inputs(case, dtype), backend)
        least_exact = min(
            (dtype, case.weight_dtype or dtype), key=lambda dtype: -torch.finfo(dtype).eps
        )
        assert_all_close(actual, expected_of(case, dtype), least_exact)


HALF_CASES = [
    Case(),
    Case(mask="middle", S=3, layout="strided", C=40),
    Case(B=1, T=100, lengths=(64, 0, 36)),
    Case(B=1, T=300, C=24, weight_dtype=torch.float32),
    Case(layout="channels_first", C=33),
]


@pytest.mark.kernel_numbers
@every_backend
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_half_precision_is_the_reference_s_rounded_once(case, dtype, backend):
    actual = run_with_gradients(short_convolution, make_inputs(case, dtype), backend)
    expected = expected_of(case, dtype)
    assert_all_close(actual, expected, dtype)
    exact, eps = expected["y"], torch.finfo(dtype).eps
    rounded = exact.to(dtype).double()
    off = (actual["y"].double() - rounded).abs()  # where float32 decides a tie in another way
    assert (off <= eps * exact.abs() + 1e-6).all() and (off == 0).double().mean() > 0.99
    assert actual["y"].dtype == actual["final 0"].dtype == dtype


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_it_is_conv1d_and_silu(k, backend):
    x, weight, bias = random_windows(k=k)
    padded = F.pad(x.transpose(1, 2), (k - 1, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], bias, groups=5)).transpose(1, 2)
    y = short_convolution(x, weight, bias, backend=backend)
    torch.testing.assert_close(y, expected)


@every_backend
def test_autograd_checks_the_gradients_by_finite_differences(backend):
    for case in (
        Case(T=4, C=1, k=3, mask="middle", S=3),
        Case(B=1, T=4, C=1, k=2, lengths=(2, 0, 2)),
    ):
        inputs = make_inputs(case)
        leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}

        def function(*tensors, inputs=inputs, leaves=leaves):
            arguments = with_tensors(inputs, dict(zip(leaves, tensors, strict=True)))
            return short_convolution(**arguments, return_state=True, backend=backend)

        assert torch.autograd.gradcheck(function, list(leaves.values()))
        if backend == "chunked":
            assert torch.autograd.gradgradcheck(function, list(leaves.values()))


def test_the_compiled_form_refuses_a_second_derivative_and_names_the_one_that_can():
    x, weight, _ = (tensor.requires_grad_() for tensor in random_windows())
    (dx,) = torch.autograd.grad(
        short_convolution(x, weight, backend="cpu").sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match='backend="chunked"'):
        torch.autograd.grad(dx.sum(), weight)


@pytest.mark.kernel_numbers
@every_backend
def test_silu_of_any_size(backend):
    for dtype in (torch.float32, torch.float64):
        sizes = torch.tensor([0.0, 1e-30, 1e-3, 1, 20, 80, 87, 88, 89, 100, 700, 720, 1e4, 1e38])
        x = torch.cat([sizes, -sizes]).to(dtype)[None, None].requires_grad_()
        one = torch.ones(x.shape[-1], 1, dtype=dtype)
        y = short_convolution(x, one, backend=backend)
        (dx,) = torch.autograd.grad(y.sum(), x)
        exact = x.detach().double().requires_grad_()
        wanted = F.silu(exact)
        (dwanted,) = torch.autograd.grad(wanted.sum(), exact)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-30)
        torch.testing.assert_close(dx.double(), dwanted, rtol=1e-6, atol=1e-30)


# ---- equal by construction ----


@every_backend
@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_padded_equals_unpadded_whatever_the_padding_holds(where, backend):
    inputs = make_inputs(Case(mask=where, S=4))
    kept = inputs.pop("key_mask")
    inputs["x"][~kept] = torch.nan
    function = functools.partial(short_convolution, return_state=True, backend=backend)
    leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}
    y, state = function(**inputs, key_mask=kept)
    weights = torch.randn(y.shape, dtype=y.dtype)
    weights[~kept] = torch.nan  # nor does the gradient that comes from padding matter
    gradients = torch.autograd.grad([y, state], leaves.values(), [weights, torch.ones_like(state)])
    gradients = dict(zip(leaves, gradients, strict=True))
    assert (y[~kept] == 0).all() and (gradients["x"][~kept] == 0).all()
    sums = {name: torch.zeros_like(gradients[name]) for name in ("weight", "bias")}
    for b in range(2):
        alone = dict(leaves) | {
            "x": leaves["x"].detach()[b : b + 1, kept[b]].requires_grad_(),
            "initial_state": leaves["initial_state"].detach()[b : b + 1].requires_grad_(),
        }
        y_b, state_b = function(**with_tensors(inputs, alone))
        torch.testing.assert_close(y[b, kept[b]], y_b[0])
        torch.testing.assert_close(state[b], state_b[0])
        outer = [weights[b : b + 1, kept[b]], torch.ones_like(state_b)]
        found = torch.autograd.grad([y_b, state_b], list(alone.values()), outer)
        found = dict(zip(alone, found, strict=True))
        torch.testing.assert_close(gradients["x"][b, kept[b]], found["x"][0])
        torch.testing.assert_close(gradients["initial_state"][b], found["initial_state"][0])
        sums = {name: x + found[name] for name, x in sums.items()}
    torch.testing.assert_close({name: gradients[name] for name in sums}, sums)


@every_backend
def test_packed_equals_separate(backend):
    lengths = (3, 0, 40, 1, 20)
    inputs = make_inputs(Case(B=1, T=64, lengths=lengths, S=3, mask="middle"))
    function = functools.partial(short_convolution, return_state=True, backend=backend)
    y, state = function(**inputs)
    bounds = inputs.pop("cu_seqlens").tolist()
    x, key_mask, initial = (inputs.pop(name) for name in ("x", "key_mask", "initial_state"))
    for n, length in enumerate(lengths):
        piece = slice(bounds[n], bounds[n] + length)
        y_n, state_n = function(
            x[:, piece], **inputs, key_mask=key_mask[:, piece], initial_state=initial[n : n + 1]
        )
        torch.testing.assert_close(y[:, piece], y_n)
        torch.testing.assert_close(state[n], state_n[0])


@every_backend
@pytest.mark.parametrize("cut", [0, 1, 2, 16, 255, 256, 300])
def test_any_split_equals_the_whole(cut, backend):
    inputs = make_inputs(Case(T=300, mask="middle", S=3), torch.float32)
    function = functools.partial(short_convolution, return_state=True, backend=backend)
    whole, end = function(**inputs)
    x, key_mask, state = (inputs.pop(name) for name in ("x", "key_mask", "initial_state"))
    parts = []
    for piece in (slice(0, cut), slice(cut, 300)):
        y, state = function(x[:, piece], **inputs, key_mask=key_mask[:, piece], initial_state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert torch.equal(state, end)
    if backend == "cpu":  # which adds up every window in the same order
        assert torch.equal(torch.cat(parts, 1), whole)


@every_backend
def test_a_nan_reaches_its_channel_and_the_next_tokens_only(backend):
    x, weight, bias = random_windows(T=30)
    x[0, 10, 2] = torch.nan
    is_nan = short_convolution(x, weight, bias, backend=backend).isnan()
    expected = torch.zeros_like(is_nan)
    expected[0, 10:14, 2] = True
    assert torch.equal(is_nan, expected)


def test_results_are_the_same_to_the_bit_with_any_number_of_threads():
    before = torch.get_num_threads()
    cases = [Case(B=1, T=600, C=300), Case(B=70, T=40, C=40, mask="middle", S=3)]
    cases += [Case(B=1, T=700, C=100, k=5, lengths=(3, 597, 0, 100), S=4)]
    try:
        for case in cases:
            inputs = make_inputs(case, torch.float32)
            torch.set_num_threads(1)
            expected = run_with_gradients(short_convolution, inputs, "cpu")
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                actual = run_with_gradients(short_convolution, inputs, "cpu")
                for name, x in expected.items():
                    assert torch.equal(actual[name], x), name
    finally:
        torch.set_num_threads(before)


# ---- a step ----

STEP_CASES = [
    Case(T=6),
    Case(T=6, S=3, mask="middle", layout="strided", C=300),
    Case(T=6, S=5, k=3, weight_dtype=torch.float32, activation=None),
    Case(T=3, k=1, S=0, bias=False),
    Case(B=50, T=4, C=70, k=5),
    Case(B=0, T=1),
]


def state_in(state, layout):
    """A copy of a state (B, S, C) in memory of some order."""
    return laid_out(state, layout).clone(memory_format=torch.preserve_format)


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("layout", ["plain", "channels_first"])
@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_a_loop_of_steps_equals_the_whole(case, backend, layout):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = make_inputs(case, dtype)
        whole, end = short_convolution(**inputs, return_state=True, backend="cpu")
        x, key_mask = inputs.pop("x"), inputs.pop("key_mask", None)
        state = inputs.pop("initial_state", torch.zeros_like(end))
        state = state_in(state, layout)
        address, strides = state.data_ptr(), state.stride()
        arguments = {"bias": None} | inputs
        for t in range(case.T):
            mask = None if key_mask is None else key_mask[:, t]
            y = short_convolution_step_(
                x[:, t], state=state, key_mask=mask, **arguments, backend=backend
            )
            assert y.dtype == dtype and y.shape == x[:, t].shape
            assert_all_close({"y": y}, {"y": whole[:, t].double()}, dtype)
            if backend == "cpu":  # a step adds up in the same order
                assert torch.equal(y, whole[:, t])
        assert torch.equal(state, end)
        assert (state.data_ptr(), state.stride()) == (address, strides)


@every_backend
def test_a_masked_step_ignores_nan(backend):
    x, weight, bias = random_windows()
    token, state = x[:, 3], x[:, :3].clone()
    token[0] = torch.nan
    key_mask = torch.tensor([0, 1])
    y = short_convolution_step_(token, weight, bias, state, key_mask=key_mask, backend=backend)
    assert torch.equal(state[0], x[0, :3]) and (y[0] == 0).all()
    assert torch.equal(state[1], x[1, 1:4]) and y.isfinite().all()


@every_backend
def test_a_step_refuses_to_drop_a_gradient(backend):
    x, weight, bias = random_windows()
    with pytest.raises(RuntimeError, match="call it under torch.no_grad"):
        short_convolution_step_(
            x[:, 3], weight.requires_grad_(), bias, x[:, :3].clone(), backend=backend
        )


@every_backend
def test_autograd_notices_a_state_that_a_step_changed(backend):
    x, weight, bias = random_windows()
    state = x[:, :3].clone()
    y = (state.requires_grad_() ** 2).sum()
    with torch.no_grad():
        short_convolution_step_(x[:, 3], weight, bias, state, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- torch ----


@every_backend
def test_compiles_as_one_graph_forward_and_backward(backend):
    inputs = make_inputs(Case(B=1, T=40, lengths=(30, 10), mask="middle", S=3))
    compiled = torch.compile(short_convolution, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled, inputs, backend)
    expected = run_with_gradients(short_convolution, inputs, backend)
    assert_all_close(actual, expected, torch.float64)


@every_backend
def test_a_compiled_step_updates_the_state(backend):
    x, weight, bias = random_windows()
    states = [x[:, :3].clone() for _ in range(2)]
    compiled = torch.compile(short_convolution_step_, fullgraph=True, backend="aot_eager")
    y = short_convolution_step_(x[:, 3], weight, bias, states[0], backend=backend)
    torch.testing.assert_close(compiled(x[:, 3], weight, bias, states[1], backend=backend), y)
    torch.testing.assert_close(states[1], states[0])


def test_the_ops_pass_opcheck():
    for case in (
        Case(T=5, C=3, S=4, mask="middle"),
        Case(B=1, T=6, bias=False, lengths=(2, 4), weight_dtype=torch.float32),
    ):
        inputs = {"bias": None, "key_mask": None, "cu_seqlens": None, "initial_state": None}
        inputs |= make_inputs(case)
        names = ("x", "weight", "bias", "key_mask", "cu_seqlens", "initial_state")
        for name in ("x", "weight"):
            inputs[name].requires_grad_()
        arguments = tuple(inputs[name] for name in names)
        torch.library.opcheck(library.ops.short_convolution.default, (*arguments, True))
        plain = [None if x is None else x.detach() for x in arguments]
        y, state = library.ops.short_convolution(*plain, True)
        torch.library.opcheck(
            library.ops.short_convolution_backward.default, (y, state, *plain, True)
        )
    x, weight, bias = random_windows()
    step = (x[:, 3], weight, bias, torch.tensor([True, False]), x[:, :3].clone(), True)
    torch.library.opcheck(library.ops.short_convolution_step_.default, step)


@every_backend
def test_autocast_leaves_the_sums_alone(backend):
    inputs = make_inputs(Case(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = short_convolution(**inputs, backend=backend)
    assert_all_close({"y": y}, {"y": expected_of(Case(), torch.float32)["y"]}, torch.float32)


# ---- wrong arguments ----


def changed(name, change):
    return lambda inputs: inputs | {name: change(inputs[name])}


def given(**arguments):
    return lambda inputs: inputs | arguments


WRONG = {
    "x rank": (changed("x", lambda x: x[0]), r"x must have the 3 dimensions \(B, T, C\), got"),
    "x dtype": (changed("x", lambda x: x.int()), "x must be float32, .*got torch.int32"),
    "no channel": (
        changed("x", lambda x: x[..., :0]),
        r"x must have at least one channel, got shape \(2, 37, 0\)",
    ),
    "weight shape": (
        changed("weight", lambda w: w[:, None]),
        r"weight must have shape \(19, kernel size\), .*got \(19, 1, 4\)",
    ),
    "no taps": (changed("weight", lambda w: w[:, :0]), r"weight must .*got \(19, 0\)"),
    "weight device": (
        changed("weight", lambda w: w.to("meta")),
        "weight must be on x's device cpu, got meta",
    ),
    "bias shape": (changed("bias", lambda b: b[:1]), r"bias must have shape \(19,\), got \(1,\)"),
    "bias dtype": (changed("bias", lambda b: b.long()), "bias must be float32, .*int64"),
    "activation": (given(activation="gelu"), "activation must be \"silu\" or None, got 'gelu'"),
    "mask shape": (
        given(key_mask=torch.ones(2, 36)),
        r"key_mask must have shape \(2, 37\), got \(2, 36\)",
    ),
    "mask values": (given(key_mask=torch.full((2, 37), 2)), "key_mask must hold bool or 0 and 1"),
    "mask device": (
        given(key_mask=torch.ones(2, 37, device="meta")),
        "key_mask must be on x's device cpu, got meta",
    ),
    "packed rows": (
        given(cu_seqlens=torch.tensor([0, 37])),
        r"cu_seqlens must come with a batch of one packed row, got x of shape \(2, 37, 19\)",
    ),
    "state shape": (
        given(initial_state=torch.zeros(2, 2, 19)),
        r"initial_state must have shape \(2, S, 19\) with S of 3 or more, got \(2, 2, 19\)",
    ),
    "state dtype": (
        given(initial_state=torch.zeros(2, 3, 19).double()),
        "initial_state must have x's dtype torch.float32, got torch.float64",
    ),
    "backend": (given(backend="gpu"), "backend must be one of .* got 'gpu'"),
}


@every_backend
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(wrong, backend):
    change, message = WRONG[wrong]
    inputs = make_inputs(Case(), torch.float32) | {"backend": backend}
    with pytest.raises(ValueError, match=message):
        short_convolution(**change(inputs))


WRONG_STEPS = {
    "x": (lambda x: x[:, None], r"x must have the 2 dimensions \(B, C\), got"),
    "weight": (lambda x: x[:1], "weight must have shape"),
    "bias": (lambda x: x[:1], "bias must have shape"),
    "state": (lambda x: x[:, :2], r"state must have shape \(2, S, 5\) with S of 3 or more, got"),
    "key_mask": (lambda x: x[:1], r"key_mask must have shape \(2,\), got \(1,\)"),
    "activation": (lambda _: "relu", "activation must be \"silu\" or None, got 'relu'"),
}


@every_backend
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_argument_of_a_step_is_named(name, backend):
    x, weight, bias = random_windows()
    inputs = {"x": x[:, 3], "weight": weight, "bias": bias, "state": x[:, :3].clone()}
    inputs |= {"key_mask": torch.ones(2, dtype=torch.bool), "activation": "silu"}
    change, message = WRONG_STEPS[name]
    with pytest.raises(ValueError, match=message):
        short_convolution_step_(**inputs | {name: change(inputs[name])}, backend=backend)


WRONG_FOR_THE_OP = {
    "weight": (lambda _: torch.zeros(18, 4), r"weight must have shape \(19, kernel size"),
    "bias": (lambda _: torch.zeros(18), r"bias must have shape \(19,\), got \(18,\)"),
    "key_mask": (lambda _: torch.ones(2, 36).bool(), r"key_mask must have shape \(2, 37\)"),
    "cu_seqlens": (lambda _: torch.tensor([0, 37]).int(), "cu_seqlens .*needs a batch of 1, got 2"),
    "initial_state": (lambda _: torch.zeros(2, 2, 19), "initial_state must .*3 tokens or more"),
    "x": (lambda x: x.int(), "x must be float32, bfloat16, float16 or float64, got int32"),
}


@pytest.mark.parametrize("name", WRONG_FOR_THE_OP)
def test_the_compiled_op_itself_refuses_what_would_read_out_of_bounds(name):
    inputs = {"x": 0, "weight": 0, "bias": 0, "key_mask": None, "cu_seqlens": None}
    inputs |= {"initial_state": None} | make_inputs(Case(), torch.float32)
    del inputs["activation"]
    change, message = WRONG_FOR_THE_OP[name]
    wrong = inputs | {name: change(inputs[name])}
    with pytest.raises(RuntimeError, match=f"::short_convolution: {message}"):
        library.ops.short_convolution(*wrong.values(), True)
    with pytest.raises(RuntimeError, match=f"::short_convolution_backward: {message}"):
        library.ops.short_convolution_backward(inputs["x"], None, *wrong.values(), True)


def test_cuda_has_no_kernels_of_it_and_says_so():
    with pytest.raises(RuntimeError, match="backend 'cuda' can't run: "):
        short_convolution(*random_windows(), backend="cuda")
