# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The compiled CPU kernels where they are cut differently: by instruction set, by awkward sizes, by
threads; and what they make of subnormals, infinities and NaN.
"""

import functools
import itertools
import math
import platform

import pytest
import torch

from attention_cases import (
    TOLERANCE,
    Case,
    assert_all_close,
    expected,
    make_inputs,
    run_with_gradients,
)
from hf_linear_attention import (
    delta_rule,
    delta_rule_step_,
    linear_attention,
    linear_attention_step_,
)

kernel = functools.partial(linear_attention, backend="cpu")
reference = functools.partial(linear_attention, backend="reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- awkward sizes ----

SIZES = [1, 7, 20, 64, 96, 128, 200]
LENGTHS = [1, 15, 16, 17, 31, 32, 33]  # around the vectors' lanes and the rows staged at once
# Each size as K or V beside each other one, and every length several times.
SHAPES = [
    (T, *(sizes if i % 2 else sizes[::-1]))
    for i, (T, sizes) in enumerate(
        zip(itertools.cycle(LENGTHS), itertools.combinations(SIZES, 2), strict=False)
    )
] + [(33, size, size) for size in SIZES]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("T, K, V", SHAPES)
def test_awkward_sizes(T, K, V):
    for dtype in (torch.float32, torch.bfloat16):
        # One feature of q cancels where normalised: dq is 0 but for the rounding of y to bfloat16.
        normalize = K > 1 or dtype == torch.float32
        sizes = {"B": 1, "T": T, "Hq": 2, "Hkv": 1, "K": K, "V": V}
        case = Case(**sizes, normalize=normalize, decay="mild", initial=True, mask="middle")
        inputs = functools.partial(make_inputs, case, dtype)
        actual = run_with_gradients(functools.partial(kernel, return_state=True), inputs())
        assert_all_close(actual, expected(inputs()), dtype)


@pytest.mark.kernel_numbers
@every_dtype
def test_a_loop_of_steps_at_awkward_sizes(dtype):
    for K, V in itertools.pairwise(SIZES):
        case = Case(T=3, Hq=4, K=K, V=V, decay="mild", initial=True, mask="middle")
        inputs = make_inputs(case, dtype)
        y, state = reference(**inputs, return_state=True)
        step_state = inputs.pop("initial_state")
        over_time = ("q", "k", "v", "log_decay", "key_mask")
        options = {name: inputs[name] for name in ("feature_map", "normalize", "eps")}
        for t in range(3):
            token = {name: inputs[name][:, t] for name in over_time}
            actual = linear_attention_step_(state=step_state, **token, **options, backend="cpu")
            torch.testing.assert_close(actual, y[:, t], **TOLERANCE[dtype])
        torch.testing.assert_close(tuple(step_state), tuple(state), **TOLERANCE[dtype])


# ---- threads ----

# Divided by head; by columns; by time.
DIVISIONS = {
    "heads": Case(B=2, T=300, Hq=4, Hkv=4, K=32, V=48, decay="mild"),
    "columns": Case(B=1, T=700, Hq=2, Hkv=1, K=64, V=64, decay="mild", initial=True),
    "time": Case(B=1, T=2000, Hq=1, Hkv=1, K=16, V=16, decay="mild", mask="middle"),
    "sequences": Case(B=1, T=2000, Hq=2, Hkv=1, K=20, V=64, lengths=(1500, 0, 1, 499)),
    "not causal": Case(B=1, T=2000, Hq=1, Hkv=1, K=20, V=64, is_causal=False),
}


def run_with_threads(count, case, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run_with_gradients(
            functools.partial(kernel, return_state=True), make_inputs(case, dtype)
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_repeat_to_the_bit_and_hardly_depend_on_threads(division, dtype):
    case = DIVISIONS[division]
    one = run_with_threads(1, case, dtype)
    for count in (1, 2, 3, 5):
        results = [run_with_threads(count, case, dtype) for _ in range(3)]
        for again in results[1:]:
            for name, x in again.items():
                assert torch.equal(x, results[0][name]), f"{name} with {count} threads"
        target = {name: x.double() for name, x in one.items()}
        assert_all_close(results[0], target, dtype)


# ---- subnormals, infinities, NaN ----


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormals_are_kept(dtype):
    """Of v, and of the gradients: all is linear in them, so they shrink all results alike."""
    case = Case(T=40, K=16, V=16)
    tiny = torch.finfo(dtype).tiny
    inputs = make_inputs(case, dtype)
    inputs["v"] = inputs["v"] * tiny / 4
    y, state = kernel(**inputs, return_state=True)
    exact, exact_state = reference(
        **{n: x.double() if torch.is_tensor(x) else x for n, x in inputs.items()},
        return_state=True,
    )
    if dtype == torch.float64:
        exact, exact_state = reference(**inputs, return_state=True)
    grain = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((y != 0) & (y.abs() < tiny)).any()
    torch.testing.assert_close(y.double(), exact.double(), rtol=0, atol=2 * grain)
    assert (state.kv.double() - exact_state.kv.double()).abs().max() <= 60 * grain

    inputs["v"] = make_inputs(case, dtype)["v"].requires_grad_()
    y = kernel(**inputs)
    upstream = torch.full_like(y, tiny / 8)
    (gradient,) = torch.autograd.grad(y, inputs["v"], upstream)
    (exact_gradient,) = torch.autograd.grad(reference(**inputs), inputs["v"], upstream)
    assert ((gradient != 0) & (gradient.abs() < tiny)).any()
    torch.testing.assert_close(gradient, exact_gradient, rtol=2e-2, atol=40 * grain)


NOTHING = torch.zeros(4, 40, 16, 16)  # B, T, H, K and V
HALVES = torch.full(NOTHING.shape, -math.log(2))
TOKEN, TOKEN_HALVES = NOTHING[:, 0], HALVES[:, 0]


def decayed_by_linear_attention(state):
    q = k = v = NOTHING
    options = {"normalize": False, "return_state": True}
    _, after = linear_attention(q, k, v, HALVES[..., 0], initial_state=(state, None), **options)
    return after.kv


def decayed_by_delta_rule(state):
    q = k = v = NOTHING
    options = {"initial_state": state, "return_state": True}
    _, after = delta_rule(q, k, v, NOTHING[..., 0], HALVES, **options)
    return after


def decayed_by_linear_attention_step(state):
    linear_attention_step_(
        TOKEN, TOKEN, TOKEN, (state, None), TOKEN_HALVES[..., 0], normalize=False
    )
    return state


def decayed_by_delta_rule_step(state):
    delta_rule_step_(TOKEN, TOKEN, TOKEN, TOKEN[..., 0], state, TOKEN_HALVES[..., 0])
    return state


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "decayed, halvings",
    [
        (decayed_by_linear_attention, 40),
        (decayed_by_delta_rule, 40),
        (decayed_by_linear_attention_step, 1),
        (decayed_by_delta_rule_step, 1),
    ],
)
def test_a_state_that_decays_ends_as_zero(decayed, halvings, threads):
    """Where it would be subnormal, which takes long on x86; and others who compute on these threads
    have such numbers.
    """
    torch.set_num_threads(threads)
    try:
        tiny = torch.finfo(torch.float32).tiny
        to_be_tiny = torch.full((4, 16, 16, 16), tiny) * 2.0**halvings
        assert (decayed(to_be_tiny * 2) >= tiny).all()
        is_zero = platform.machine() in ("x86_64", "AMD64")
        assert ((decayed(to_be_tiny / 2) == 0) == is_zero).all()
        assert (torch.full((1 << 20,), tiny) / 4 > 0).all()
    finally:
        torch.set_num_threads(1)


SPECIAL = [torch.inf, -torch.inf, torch.nan]


def same_kinds(actual, expected):
    """Numbers, infinities of either sign and NaN in the same places."""

    def kinds(x):
        return x.nan_to_num(nan=2, posinf=1, neginf=-1).where(~x.isfinite(), 0)

    return torch.equal(kinds(actual), kinds(expected))


@pytest.mark.kernel_numbers
@every_dtype
@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("feature_map", ["elu+1", "relu", "silu", None])
def test_what_is_not_finite_goes_where_the_reference_has_it(feature_map, where, value, dtype):
    case = Case(T=40, K=20, V=17, decay="mild", feature_map=feature_map, eps=1e-3)
    for normalize in (True, False):
        inputs = make_inputs(case, dtype) | {"normalize": normalize}
        inputs[where][0, 21, 1, 13] = value
        y, state = kernel(**inputs, return_state=True)
        exact, exact_state = reference(**inputs, return_state=True)
        is_harmless = value == -torch.inf and where != "v" and feature_map in ("elu+1", "relu")
        assert exact.isfinite().all() == is_harmless
        assert same_kinds(y, exact)
        assert same_kinds(state.kv, exact_state.kv)
        if normalize:
            assert same_kinds(state.z, exact_state.z)


@pytest.mark.kernel_numbers
@every_dtype
def test_gradients_are_finite_where_nothing_infinite_is_read(dtype):
    """A NaN that comes in with one token's gradient stays with what that token has seen."""
    case = Case(B=1, T=40, K=20, V=17, decay="mild")
    inputs = make_inputs(case, dtype)
    for name in ("q", "k", "v"):
        inputs[name].requires_grad_()
    y = kernel(**inputs)
    upstream = torch.ones_like(y)
    upstream[0, 21, 1, 3] = torch.nan
    dq, dk, dv = torch.autograd.grad(y, [inputs[name] for name in ("q", "k", "v")], upstream)
    assert dq[0, 21, 1].isnan().all()
    assert dk[0, :22, 1].isnan().all()
    assert dv[0, :22, 1, 3].isnan().all()
    for gradient in (dq[:, :21], dq[:, 22:], dq[:, :, 0], dk[:, 22:], dk[:, :, 0], dv[:, 22:]):
        assert gradient.isfinite().all()
    assert dv[:, :, 0].isfinite().all()
