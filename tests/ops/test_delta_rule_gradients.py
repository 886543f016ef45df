# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The gradients of the delta rule's compiled op: by finite differences, and against autograd of the
loop in float64, over sizes, layouts, dtypes, extremes and threads.
"""

from dataclasses import replace

import pytest
import torch

from attention_cases import TOLERANCE
from by_name import by_name
from delta_rule_cases import Case, in_float64, make_inputs
from hf_linear_attention.ops.compiled import delta_rule
from hf_linear_attention.ops.loops.delta_rule import reference_delta_rule

forward = by_name("delta_rule", delta_rule.forward)
reference = by_name("delta_rule", reference_delta_rule)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
every_decay = pytest.mark.parametrize("decay", (None, "head", "channel"))
with_and_without_delta = pytest.mark.parametrize("delta", [True, False], ids=["delta", "sum"])
INPUTS = ("q", "k", "v", "beta", "log_decay")
NAMED = ("erase_key", "add_along", "initial_state")  # inputs, too
RESULTS = ("y", "state")


def leaves_of(arguments, options):
    """The inputs that there are, by name."""
    named = dict(zip(INPUTS, arguments, strict=True)) | {name: options[name] for name in NAMED}
    return {name: x for name, x in named.items() if x is not None}


def run(function, leaves, options):
    inputs = [leaves.get(name) for name in INPUTS]
    return function(*inputs, **options | {name: leaves.get(name) for name in NAMED})


def upstream_of(outputs):
    """Gradients of y and of the last state: the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs
    ]


def gradients(function, leaves, options, upstream=None, of=RESULTS):
    """The gradients of all inputs by name, from upstream ones of y, the state, or both."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    outputs = run(function, leaves, options)
    chosen = [i for i, name in enumerate(RESULTS) if name in of and outputs[i].requires_grad]
    upstream = upstream_of(outputs) if upstream is None else upstream
    found = torch.autograd.grad(
        [outputs[i] for i in chosen],
        list(leaves.values()),
        [upstream[i].to(outputs[i].dtype) for i in chosen],
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def assert_all_close(actual, expected):
    """To the precision of each gradient's dtype, in proportion to the largest one of its kind."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        tolerance = dict(TOLERANCE[x.dtype])
        if x.numel() > 0:
            tolerance["atol"] *= max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(
            x.double(), expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_gradients_are_the_reference_s(arguments, options, of=RESULTS):
    """In the inputs' dtype, and in float64 of the same numbers."""
    leaves = leaves_of(arguments, options)
    with torch.no_grad():
        upstream = upstream_of(run(forward, leaves, options))
    actual = gradients(forward, leaves, options, upstream, of)
    for name, x in leaves.items():
        assert actual[name].dtype == x.dtype
    leaves = {name: in_float64(x) for name, x in leaves.items()}
    options = {name: in_float64(x) for name, x in options.items()}
    upstream = list(map(in_float64, upstream))
    expected = gradients(reference, leaves, options, upstream, of)
    assert_all_close(actual, expected)
    precise = gradients(forward, leaves, options, upstream, of)
    assert all(x.dtype == torch.float64 for x in precise.values())
    assert_all_close(precise, expected)


# ---- finite differences ----

TINY = {"B": 1, "T": 6, "K": 3, "V": 2}
CHECKED = [
    Case(**TINY),
    Case(**TINY, normalize_qk=False),
    Case(**TINY, beta=False, initial=False),
    Case(**TINY, Hq=1, Hk=1, Hv=2, mask=True),
    Case(**TINY | {"T": 7}, Hq=2, Hk=1, Hv=2, lengths=(3, 0, 4)),
    Case(**TINY, Hq=1, Hk=1, Hv=2, mask=True, erase=True),
    Case(**TINY, Hq=1, Hk=1, Hv=2, mask=True, erase=True, along=True),
]


@every_decay
@with_and_without_delta
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_finite_differences(case, delta, decay):
    arguments, options = make_inputs(replace(case, decay=decay, delta=delta), torch.float64)
    leaves = leaves_of(arguments, options)
    kept = options["key_mask"]
    for name, x in leaves.items():
        if kept is not None and name != "initial_state":
            x[~kept] = 0.0  # differences of NaN are none
        if name == "log_decay":
            x -= 0.1  # a difference must not make it positive
        x.requires_grad_()

    def function(*tensors):
        return run(forward, dict(zip(leaves, tensors, strict=True)), options)

    if kept is not None and "log_decay" in leaves:
        leaves["log_decay"].data[~kept] = -0.1
    assert torch.autograd.gradcheck(function, list(leaves.values()))


# ---- against the loop ----

CASES = [
    Case(),
    # lengths around a block, a segment, and none
    *(Case(T=T, initial=T % 2 == 0) for T in (0, 1, 2, 3, 5, 33, 64)),
    Case(B=0),
    # shared heads: of k, of q, of both
    Case(Hq=1, Hk=2, Hv=4),
    Case(Hq=6, Hk=2, Hv=6, T=70),
    Case(Hq=2, Hk=1, Hv=8, normalize_qk=False, T=70),
    Case(B=1, Hq=2, Hk=3, Hv=6),
    Case(B=1, Hq=1, Hk=1, Hv=24, K=8, V=8),
    # padding and packing
    Case(mask=True, T=70),
    Case(B=1, T=90, lengths=(0, 1, 33, 0, 40, 16, 0)),
    Case(B=1, T=90, lengths=(7, 83), mask=True, initial=False, Hk=1),
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
def test_gradients_are_the_reference_s(case, delta, decay):
    arguments, options = make_inputs(replace(case, decay=decay, delta=delta), torch.float32)
    assert_gradients_are_the_reference_s(arguments, options)


# Longer than two of the stretches of tokens that backward's sweeps with decays take turns for.
STRETCHES = [
    (1, Case(B=1, T=1100, Hq=1, mask=True, initial=False)),
    (4, Case(B=1, T=1100, Hv=4, K=40, V=64, lengths=(3, 0, 560, 513, 24))),
    (2, Case(B=1, T=1100, Hv=4, K=40, V=64, mask=True, erase=True)),
    (2, Case(B=1, T=1100, Hv=4, K=40, V=64, mask=True, erase=True, along=True)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("delta, decay", [(True, "head"), (True, "channel"), (False, "head")])
@pytest.mark.parametrize("threads, case", STRETCHES, ids=str)
def test_stretches_of_tokens(threads, case, delta, decay):
    before = torch.get_num_threads()
    arguments, options = make_inputs(replace(case, decay=decay, delta=delta), torch.float32)
    try:
        torch.set_num_threads(threads)
        assert_gradients_are_the_reference_s(arguments, options)
    finally:
        torch.set_num_threads(before)


SIZES = [(1, 1), (1, 33), (33, 1), (7, 64), (64, 7), (17, 24), (40, 40), (100, 12), (128, 128)]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("K, V", SIZES)
def test_any_size(K, V):
    for decay in ("head", "channel"):
        for dtype in (torch.float32, torch.bfloat16):
            arguments, options = make_inputs(
                Case(B=1, Hv=4, K=K, V=V, decay=decay, mask=True), dtype
            )
            assert_gradients_are_the_reference_s(arguments, options)


@pytest.mark.sample(5)
@pytest.mark.kernel_numbers
@every_dtype
@every_decay
@with_and_without_delta
def test_every_dtype_rounds_once(dtype, delta, decay):
    """Also where sums over heads, over sequences and w = dv are needed in more than the dtype."""
    for case in (Case(T=70, Hq=1, Hk=2, Hv=4), Case(B=1, T=80, lengths=(50, 30), mask=True)):
        arguments, options = make_inputs(replace(case, delta=delta, decay=decay), dtype)
        assert_gradients_are_the_reference_s(arguments, options)
    leaves = leaves_of(arguments, options)
    with torch.no_grad():
        upstream = upstream_of(run(forward, leaves, options))
    rounded = gradients(forward, leaves, options, upstream)
    precise = gradients(
        forward,
        {name: x.double() for name, x in leaves.items()},
        {name: in_float64(x) for name, x in options.items()},
        list(map(in_float64, upstream)),
    )
    exponent = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 17, torch.float64: 40}[dtype]
    for name in ("q", "k", "v"):  # half a unit in the last place, but for float32's own rounding
        largest = precise[name].abs().max()
        error = (rounded[name].double() - precise[name]).abs()
        assert (error <= 1.01 * 2.0**-exponent * precise[name].abs() + 1e-5 * largest).all(), name


@every_decay
@with_and_without_delta
@pytest.mark.parametrize("of", RESULTS)
def test_either_result_may_have_no_gradient(of, delta, decay):
    arguments, options = make_inputs(Case(decay=decay, delta=delta), torch.float64)
    assert_gradients_are_the_reference_s(arguments, options, (of,))


@every_decay
def test_upstream_gradients_of_any_layout(decay):
    arguments, options = make_inputs(Case(decay=decay, initial=False), torch.float32)
    leaves = leaves_of(arguments, options)
    with torch.no_grad():
        y, state = run(forward, leaves, options)
    (number,) = torch.randn(1)
    layouts = [
        number.expand(y.shape),
        torch.randn(y.shape[1], y.shape[0], y.shape[3], y.shape[2]).permute(1, 0, 3, 2),
        torch.randn(y.shape[-1]).expand(y.shape),
    ]
    for dy in layouts:
        assert dy.shape == y.shape
        upstream = [dy, torch.randn(()).expand(state.shape)]
        copies = [x.clone(memory_format=torch.contiguous_format) for x in upstream]
        actual = gradients(forward, leaves, options, upstream)
        expected = gradients(forward, leaves, options, copies)
        for name, x in actual.items():
            assert x.equal(expected[name]), name


@every_decay
def test_expanded_inputs_have_the_gradients_of_copies(decay):
    case = Case(B=1, Hq=1, Hk=1, Hv=1, decay=decay)
    (q, k, v, beta, log_decay), options = make_inputs(case, torch.float32)
    options["initial_state"] = None
    heads = [q, k, v.expand(-1, -1, 6, -1), beta.expand(-1, -1, 6)]
    heads.append(
        None if log_decay is None else log_decay.expand(-1, -1, 6, *[-1] * (log_decay.dim() - 3))
    )
    leaves = leaves_of(heads, options)
    copies = {name: x.contiguous() for name, x in leaves.items()}
    assert any(0 in x.stride() for x in leaves.values())
    actual = gradients(forward, leaves, options)
    for name, x in gradients(forward, copies, options).items():
        assert actual[name].equal(x), name


# ---- extremes ----


@pytest.mark.kernel_numbers
@every_decay
@with_and_without_delta
def test_extreme_decays_strengths_and_keys(delta, decay):
    arguments, options = make_inputs(Case(T=70, Hv=4, decay=decay, delta=delta), torch.float32)
    q, k, v, beta, log_decay = arguments
    beta.copy_(torch.arange(beta.numel()).view(beta.shape) % 3)  # 0, 1, 2
    k[:, 5::7] = 0
    q[:, 3::5] = 0
    if log_decay is not None:
        log_decay[:, 4::9] = -torch.inf
        log_decay[:, 6::11] = 0
        log_decay[:, 7::13] = -1e5
        log_decay[:, 2::17] = -60
        if decay == "channel":
            log_decay[:, 1::5, :, ::3] = -torch.inf
    assert_gradients_are_the_reference_s(arguments, options)
    found = gradients(forward, leaves_of(arguments, options), options)
    assert all(x.isfinite().all() for x in found.values())
    if log_decay is not None:
        assert (found["log_decay"][log_decay == -torch.inf] == 0).all()


@pytest.mark.kernel_numbers
def test_what_was_forgotten_has_no_gradient():
    """Exactly: where e^log_decay is 0, nothing of what comes later reaches what came before."""
    for decay in ("head", "channel"):
        for delta in (True, False):
            case = Case(B=1, T=50, decay=decay, delta=delta)
            arguments, options = make_inputs(case, torch.float32)
            arguments[4][:, 30] = -torch.inf
            leaves = leaves_of(arguments, options)
            with torch.no_grad():
                y, state = run(forward, leaves, options)
            dy = torch.randn(y.shape)
            dy[:, :30] = 0
            found = gradients(forward, leaves, options, [dy, torch.randn(state.shape)])
            assert (found.pop("initial_state") == 0).all()
            for name, x in found.items():
                assert (x[:, :30] == 0).all(), name
                assert (x[:, 31:] != 0).any(), name


@pytest.mark.kernel_numbers
@every_decay
@with_and_without_delta
def test_padding_has_none_whatever_it_holds(delta, decay):
    arguments, options = make_inputs(Case(T=70, mask=True, decay=decay, delta=delta), torch.float32)
    kept = options["key_mask"]
    leaves = leaves_of(arguments, options)
    assert all(leaves[name][~kept].isnan().all() for name in leaves if name != "initial_state")
    with torch.no_grad():
        upstream = upstream_of(run(forward, leaves, options))
    upstream[0][~kept] = torch.nan
    found = gradients(forward, leaves, options, upstream)
    for name, x in found.items():
        assert x.isfinite().all(), name
        assert name == "initial_state" or (x[~kept] == 0).all(), name


@pytest.mark.kernel_numbers
@every_decay
@with_and_without_delta
def test_the_gradient_of_a_token_reaches_no_later_one(delta, decay):
    arguments, options = make_inputs(Case(T=40, decay=decay, delta=delta), torch.float32)
    leaves = leaves_of(arguments, options)
    with torch.no_grad():
        y, state = run(forward, leaves, options)
    dy = torch.randn(y.shape)
    dy[1, 21, 1] = torch.nan
    found = gradients(forward, leaves, options, [dy, torch.zeros_like(state)])
    assert found["q"][1, 21, 1].isnan().all()
    assert found["k"][1, 21, 1].isnan().all()
    assert found["v"][1, :22, 1].isnan().all()
    for name in ("q", "k", "v", "beta", *(["log_decay"] if decay else [])):
        assert found[name][0].isfinite().all(), name
        assert found[name][:, :, 0].isfinite().all(), name
        assert found[name][:, 22:].isfinite().all(), name
    assert found["q"][1, :21].isfinite().all() or delta  # its state saw no error of later tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_long_sequence_keeps_the_decay_s_gradient_precise(decay):
    """It is a sum over all later tokens, most of which cancels."""
    case = Case(B=1, T=1200, Hq=1, Hk=1, Hv=1, K=8, V=8, decay=decay)
    arguments, options = make_inputs(case, torch.float32)
    assert_gradients_are_the_reference_s(arguments, options)


# ---- threads ----

DIVIDED = [
    Case(B=1, T=200, Hq=1, Hk=1, Hv=1, K=64, V=112),  # columns
    Case(B=1, T=200, Hq=1, Hk=2, Hv=4, K=64, V=64),  # heads that share others
    Case(B=1, T=150, Hq=1, Hk=1, Hv=24, K=32, V=16),
    Case(B=1, T=150, Hq=2, Hk=3, Hv=12, K=32, V=16),
    Case(B=1, T=300, lengths=(180, 20, 100), K=64, V=64),
    Case(B=1, T=300, Hq=1, Hk=1, Hv=1, mask=True, K=64, V=60),
]


@pytest.mark.sample(2)
@every_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_divide_heads_sequences_and_columns(dtype, decay):
    """The same numbers to the bit for a number of threads, and but for rounding for any."""
    before = torch.get_num_threads()
    try:
        for case in DIVIDED:
            arguments, options = make_inputs(replace(case, decay=decay), dtype)
            leaves = leaves_of(arguments, options)
            torch.set_num_threads(1)
            alone = gradients(forward, leaves, options)
            alone = {name: x.double() for name, x in alone.items()}
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                found = gradients(forward, leaves, options)
                assert_all_close(found, alone)
                again = gradients(forward, leaves, options)
                for name, x in found.items():
                    assert again[name].equal(x), name
    finally:
        torch.set_num_threads(before)
