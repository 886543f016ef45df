# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule's compiled ops against the loop in float64: sizes, layouts, dtypes, extremes."""

from dataclasses import replace

import pytest
import torch

from attention_cases import TOLERANCE
from by_name import by_name
from delta_rule_cases import Case, in_float64, make_inputs
from hf_linear_attention.ops.arguments import DeltaArguments
from hf_linear_attention.ops.compiled import delta_rule
from hf_linear_attention.ops.loops.delta_rule import reference_delta_rule
from hf_linear_attention.ops.numerics import accumulation_dtype

forward = by_name("delta_rule", delta_rule.forward)
reference = by_name("delta_rule", reference_delta_rule)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
DECAYS = (None, "head", "channel")
every_decay = pytest.mark.parametrize("decay", DECAYS)
with_and_without_delta = pytest.mark.parametrize("delta", [True, False], ids=["delta", "sum"])


def expected(arguments, options):
    return reference(
        *map(in_float64, arguments), **{name: in_float64(x) for name, x in options.items()}
    )


def assert_close(actual, target, dtype):
    torch.testing.assert_close(actual.double(), target, **TOLERANCE[dtype])


def assert_forward_is_the_reference_s(case, dtype):
    arguments, options = make_inputs(case, dtype)
    y, state = forward(*arguments, **options)
    wanted, wanted_state = expected(arguments, options)
    assert y.dtype == dtype and state.dtype == accumulation_dtype(dtype)
    assert_close(y, wanted, dtype)
    assert_close(state, wanted_state, state.dtype)  # it has seen no rounding but the inputs'


# ---- forward ----

CASES = [
    Case(),
    # lengths around a block, a segment, and none
    *(Case(T=T, initial=T % 2 == 0) for T in (0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 65)),
    Case(B=0),
    # shared heads
    Case(Hq=1, Hk=2, Hv=4),
    Case(Hq=6, Hk=2, Hv=6, T=70),
    Case(Hq=2, Hk=1, Hv=8, normalize_qk=False, T=70),
    # padding and packing
    Case(mask=True, T=70),
    Case(B=1, T=90, lengths=(0, 1, 33, 0, 40, 16, 0)),
    Case(B=1, T=90, lengths=(7, 83), mask=True, initial=False),
    Case(B=1, T=0, lengths=(0, 0)),
    Case(B=1, T=0, lengths=()),
    # layouts
    Case(layout="strided"),
    Case(layout="strided", mask=True, K=20, V=7, Hq=1),
    Case(layout="expanded"),
    # what may be absent
    Case(beta=False, initial=False),
    Case(normalize_qk=False, T=70),
    # erase keys
    Case(erase=True, T=70),
    Case(erase=True, Hq=2, Hk=1, Hv=4, T=33, mask=True),
    Case(erase=True, B=1, T=90, lengths=(7, 0, 83), layout="strided", K=20, V=7),
    # and what they find is added along another direction
    Case(erase=True, along=True, T=70),
    Case(erase=True, along=True, Hq=2, Hk=1, Hv=4, T=33, mask=True),
    Case(erase=True, along=True, B=1, T=90, lengths=(7, 0, 83), layout="strided", K=20, V=7),
]


@pytest.mark.kernel_numbers
@every_decay
@with_and_without_delta
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_the_reference_s(case, delta, decay):
    for dtype in (torch.float32, torch.float64):
        assert_forward_is_the_reference_s(replace(case, decay=decay, delta=delta), dtype)


SIZES = [(1, 1), (7, 20), (20, 7), (16, 64), (64, 16), (96, 17), (128, 128), (200, 1), (256, 48)]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("K, V", SIZES)
def test_any_size(K, V):
    for decay in DECAYS:
        for dtype in (torch.float32, torch.bfloat16):
            assert_forward_is_the_reference_s(Case(B=1, K=K, V=V, decay=decay, mask=True), dtype)


@pytest.mark.kernel_numbers
@every_dtype
@every_decay
@pytest.mark.parametrize("layout", ["plain", "strided"])
def test_every_dtype_and_layout(dtype, decay, layout):
    assert_forward_is_the_reference_s(Case(decay=decay, layout=layout, T=70, Hk=1), dtype)


@pytest.mark.kernel_numbers
def test_errors_are_what_the_tokens_found_missing():
    for layout in ("plain", "strided"):
        for mask in (False, True):
            (q, k, v, beta, log_decay), options = make_inputs(
                Case(mask=mask, layout=layout, V=20), torch.float32
            )
            _, errors, _ = torch.ops.hf_linear_attention.delta_rule(
                q, k, v, beta, log_decay, *options.values(), True
            )
            # A write strength of 1 at the last token writes the error itself.
            for t in (0, 5, 36):
                until = {**options, "key_mask": None}
                if mask:
                    until["key_mask"] = options["key_mask"][:, : t + 1]
                strength = beta[:, : t + 1].clone()
                states = []
                for last in (0, 1):
                    strength[:, t] = last
                    cut = [x[:, : t + 1] for x in (q, k, v, strength, log_decay)]
                    states.append(expected(cut, until)[1])
                key = in_float64(k[:, t]).nan_to_num()
                key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                written = (states[1] - states[0]) / key.square().sum(-1)[..., None, None]
                found = (key[..., None] * written.nan_to_num()).sum(2)
                assert_close(errors[:, t], found, torch.float32)


@pytest.mark.kernel_numbers
@with_and_without_delta
@every_decay
def test_extreme_decays_strengths_and_keys(decay, delta):
    case = Case(T=70, decay=decay, delta=delta)
    (q, k, v, beta, log_decay), options = make_inputs(case, torch.float32)
    k[:, 3::7] = 0
    beta[:, ::5] = 0
    beta[:, 1::5] = 1
    beta[:, 2::5] = 2
    if log_decay is not None:
        log_decay[:, ::4] = 0
        log_decay[:, 5::11] = -torch.inf
        log_decay[:, 6::13, 0] = -1e5
        log_decay[:, 7::13, 1] = -1e30
    y, state = forward(q, k, v, beta, log_decay, **options)
    wanted, wanted_state = expected((q, k, v, beta, log_decay), options)
    assert_close(y, wanted, torch.float32)
    assert_close(state, wanted_state, torch.float32)


@pytest.mark.kernel_numbers
@every_decay
def test_a_nan_reaches_nothing_before_it(decay):
    arguments, options = make_inputs(Case(decay=decay, T=40), torch.float32)
    clean, _ = forward(*arguments, **options)
    for x in arguments:
        if x is None:
            continue
        broken = [torch.clone(y) if y is not None else None for y in arguments]
        next(y for y, z in zip(broken, arguments, strict=True) if z is x)[0, 21, 1] = torch.nan
        y, _ = forward(*broken, **options)
        assert y[0, :21].equal(clean[0, :21])
        assert y[0, :, 0].equal(clean[0, :, 0]) and y[1].equal(clean[1])
        assert y[0, 21, 1].isnan().any()


def test_a_positive_log_decay_is_refused_but_under_padding():
    for decay in ("head", "channel"):
        (q, k, v, beta, log_decay), options = make_inputs(Case(decay=decay), torch.float32)
        log_decay[1, 20, 1] = 1e-3
        for Hk in (2, 1):  # keys that are staged for each head, or once
            with pytest.raises(RuntimeError, match="log_decay must be <= 0"):
                forward(q[:, :, :1], k[:, :, :Hk], v, beta, log_decay, **options)
        key_mask = torch.ones(2, 37, dtype=torch.bool)
        key_mask[1, 20] = False
        forward(q, k, v, beta, log_decay, **options | {"key_mask": key_mask})


@pytest.mark.sample(5)
@every_decay
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_divide_heads_sequences_and_columns(decay, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for case in (
            Case(B=1, T=200, Hq=1, Hk=1, Hv=1, K=64, V=112, decay=decay),
            Case(B=1, T=200, Hq=1, Hk=2, Hv=4, K=64, V=64, decay=decay),
            Case(B=1, T=300, lengths=(180, 20, 100), K=64, V=64, decay=decay),
        ):
            assert_forward_is_the_reference_s(case, torch.float32)
            arguments, options = make_inputs(case, torch.float32)
            y, state = forward(*arguments, **options)
            for _ in range(3):
                again, again_state = forward(*arguments, **options)
                assert again.equal(y) and again_state.equal(state)
    finally:
        torch.set_num_threads(before)


# ---- a step ----


def erase_of(options):
    """Of the first token, by name."""
    found = {name: options[name] for name in ("erase_key", "add_along")}
    return {name: None if x is None else x[:, 0] for name, x in found.items()}


def step(*token, **erase):
    """The token's arguments are in the order of the op's."""
    *tensors, state, scale, normalize_qk, delta = token
    arguments = DeltaArguments(*tensors, scale, normalize_qk, delta, **erase)
    return delta_rule.step_(arguments, state)


def step_arguments(case, dtype):
    """The arguments of step for the case's first token, and what forward is given instead."""
    arguments, options = make_inputs(replace(case, T=1), dtype)
    token = [None if x is None else x[:, 0] for x in arguments]
    key_mask = options["key_mask"]
    token += [None if key_mask is None else key_mask[:, 0], options["initial_state"].clone()]
    return (*token, 0.3, case.normalize_qk, case.delta), arguments, options


@pytest.mark.kernel_numbers
@every_dtype
@every_decay
@with_and_without_delta
def test_a_step_is_one_token(dtype, decay, delta):
    for case in (
        Case(),
        Case(B=5, Hq=2, Hk=1, Hv=4, mask=True),
        Case(K=20, V=7, layout="strided"),
        Case(K=64, V=128, Hk=1, normalize_qk=False, beta=False),
        Case(K=1, V=1),
        Case(B=0),
        Case(layout="expanded", V=72),
        Case(erase=True, K=20, V=7, Hk=1, mask=True),
        Case(erase=True, along=True, K=20, V=7, Hk=1, mask=True),
        Case(erase=True, along=True, K=64, V=128),
    ):
        case = replace(case, decay=decay, delta=delta)
        token, arguments, options = step_arguments(case, dtype)
        y = step(*token, **erase_of(options))
        wanted, wanted_state = expected(arguments, options)
        assert_close(y, wanted[:, 0], dtype)
        assert_close(token[6], wanted_state, token[6].dtype)


@pytest.mark.kernel_numbers
def test_a_step_with_extremes():
    for extreme in (-torch.inf, -1e30, 0):
        for decay in ("head", "channel"):
            token, arguments, options = step_arguments(Case(decay=decay), torch.float32)
            arguments[4].fill_(extreme)
            arguments[1][0] = 0
            y = step(*token)
            wanted, wanted_state = expected(arguments, options)
            assert_close(y, wanted[:, 0], torch.float32)
            assert_close(token[6], wanted_state, torch.float32)


def test_steps_are_forward_whatever_the_threads():
    before = torch.get_num_threads()
    (q, k, v, beta, log_decay), options = make_inputs(Case(T=9, Hv=8, K=96, V=96), torch.float32)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y, last = forward(q, k, v, beta, log_decay, **options)
            state = options["initial_state"].clone()
            tokens = [
                step(*(x[:, t] for x in (q, k, v, beta, log_decay)), None, state, 0.3, True, True)
                for t in range(9)
            ]
            assert_close(torch.stack(tokens, 1), y.double(), torch.float32)
            assert_close(state, last.double(), torch.float32)
    finally:
        torch.set_num_threads(before)


def test_a_step_refuses_a_positive_log_decay_but_under_padding():
    for decay in ("head", "channel"):
        token, *_ = step_arguments(Case(decay=decay), torch.float32)
        token[4][1, 1] = 1e-3
        with pytest.raises(RuntimeError, match="log_decay must be <= 0"):
            step(*token)
        token, *_ = step_arguments(Case(decay=decay), torch.float32)
        token[4][1, 1] = 1e-3
        step(*token[:5], torch.tensor([True, False]), *token[6:])


# ---- arguments ----

WRONG = {
    "v_heads": ("v", lambda x: x[:, :, :3], "v must have a multiple of k's 2 heads, got 3"),
    "q_heads": ("q", lambda x: x[:, :, :3], "v must have a multiple of q's 3 heads, got 4"),
    "k_dim": ("k", lambda x: x[..., :-1], r"k must have shape \(2, 37, 2, 16\)"),
    "v_dtype": ("v", lambda x: x.double(), "v must be float32 here, got float64"),
    "beta_shape": ("beta", lambda x: x[..., :1], r"beta must have shape \(2, 37, 4\)"),
    "beta_dtype": ("beta", lambda x: x.int(), "beta must be float32 here, got int32"),
    "decay_head": ("log_decay", lambda x: x[..., :1], r"log_decay must have shape \(2, 37, 4\)"),
    "decay_channel": (
        "log_decay",
        lambda x: x[..., None].expand(2, 37, 4, 5),
        r"log_decay must have shape \(2, 37, 4, 16\)",
    ),
    "mask": ("key_mask", lambda _: torch.ones(2, 36).bool(), r"key_mask must have shape \(2, 37\)"),
    "state": (
        "initial_state",
        lambda x: x[..., :-1].contiguous(),
        r"initial_state must have shape \(2, 4, 16, 32\)",
    ),
    "packing": ("cu_seqlens", lambda _: torch.tensor([0, 37]).int(), "needs a batch of 1, got 2"),
}


@pytest.mark.parametrize("name, change, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(name, change, message):
    arguments, options = make_inputs(Case(Hq=4, Hv=4), torch.float32)
    named = dict(zip(("q", "k", "v", "beta", "log_decay"), arguments, strict=True)) | options
    forward(**named)
    with pytest.raises(RuntimeError, match=f"hf_linear_attention::delta_rule: .*{message}"):
        forward(**named | {name: change(named[name])})


def test_errors_are_kept_for_gradients_only():
    (q, k, v, beta, log_decay), options = make_inputs(Case(), torch.float32)
    op = torch.ops.hf_linear_attention.delta_rule
    for delta in (True, False):
        options["delta"] = delta
        for keep in (True, False):
            _, errors, _ = op(q, k, v, beta, log_decay, *options.values(), keep)
            assert errors.shape == (v.shape if delta and keep else (0,))
    q.requires_grad_()
    kept = []

    class Saved(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            super().__init__(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x)

    with Saved():
        forward(q, k, v, beta, log_decay, **options | {"delta": False})
        without = kept.count(tuple(v.shape))
        forward(q, k, v, beta, log_decay, **options | {"delta": True})
    assert kept.count(tuple(v.shape)) - without == without + 1


@with_and_without_delta
@every_decay
def test_the_op_passes_opcheck(decay, delta):
    (q, k, v, beta, log_decay), options = make_inputs(
        Case(T=5, K=4, V=3, decay=decay, delta=delta, erase=True, along=True), torch.float64
    )
    checks = ("test_schema", "test_faketensor")
    for keep in (True, False):
        arguments = (q, k, v, beta, log_decay, *options.values(), keep)
        torch.library.opcheck(
            torch.ops.hf_linear_attention.delta_rule.default, arguments, test_utils=checks
        )
    (*token, mask, state, scale, normalize, _), _, options = step_arguments(
        Case(decay=decay, delta=delta, erase=True, along=True), torch.float32
    )
    torch.library.opcheck(
        torch.ops.hf_linear_attention.delta_rule_step_.default,
        (*token, *erase_of(options).values(), mask, state, scale, normalize, delta),
        test_utils=checks,
    )
