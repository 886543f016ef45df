# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan on every backend: against the float64 loop, and by what must be equal by
construction.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from support.attention_cases import assert_all_close
from support.rule_cases import (
    run_with_gradients,
    strided,
    tensors_of,
    to_float64,
    with_tensors,
)

from hf_linear_attention import elementwise_scan, elementwise_scan_step_
from hf_linear_attention.ops.compiled import library
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.elementwise_scan import (
    ElementwiseInputs,
    ElementwiseRecurrence,
)

every_backend = pytest.mark.parametrize("backend", ["cpu", "chunked"])
PER_TOKEN = ("x", "log_decay")


@dataclass(frozen=True)
class Case:
    """One call. Dims as in elementwise_scan's docstring; lengths are of packed sequences."""

    B: int = 2
    T: int = 21
    C: int = 19
    mask: str | None = None  # "left", "right", "middle", "all"
    lengths: tuple[int, ...] | None = None
    initial: bool = False
    strong: bool = False  # decays to nothing, and none at all
    strided: bool = False  # amid NaN

    def __str__(self):
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != Case.__dataclass_fields__[name].default
        }
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


CASES = [
    Case(),
    # channels around a vector and a block, tokens around a tile and a chunk
    *(Case(T=5, C=C) for C in (1, 8, 15, 64, 65, 130, 513, 1100)),
    *(Case(T=T, initial=True) for T in (0, 1, 2, 31, 32, 33, 63, 64, 65)),
    Case(B=1, T=150, C=3),
    Case(B=0),
    *(Case(mask=mask, initial=True) for mask in ("left", "right", "middle", "all")),
    Case(B=1, T=140, lengths=(0, 1, 2, 80, 0, 57, 0)),
    Case(B=1, T=140, lengths=(70, 3, 67), initial=True, mask="middle"),
    Case(B=1, T=0, lengths=(0, 0), initial=True),
    Case(B=1, T=0, lengths=()),
    Case(strong=True, mask="middle", initial=True),
    Case(strided=True, mask="middle", initial=True, C=40),
]


def make_inputs(case, dtype=torch.float64, seed=1):
    """The keyword arguments of a case's call, the same numbers for every dtype."""
    g = torch.Generator().manual_seed(seed)
    B, T, C = case.B, case.T, case.C
    of_sums = torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    log_decay = -normal(B, T, C).abs()
    if case.strong:
        strengths = torch.tensor([0, 1, 1e4, torch.inf], dtype=torch.float64)
        which = torch.randint(len(strengths), log_decay.shape, generator=g)
        log_decay = torch.where(which == 0, 0, log_decay * strengths[which])
    inputs = {"x": normal(B, T, C).to(dtype), "log_decay": log_decay.to(of_sums)}
    if case.mask is not None:
        position, row = torch.arange(T).expand(B, T), torch.arange(B)[:, None]
        inputs["key_mask"] = {
            "left": position >= 3 + 14 * row,
            "right": position < T - 3 - 14 * row,
            "middle": torch.rand(B, T, generator=g) < 0.6,
            "all": (row > 0).expand(B, T),
        }[case.mask]
    rows = B
    if case.lengths is not None:
        inputs["cu_seqlens"] = torch.tensor((0, *case.lengths)).cumsum(0).int()
        rows = len(case.lengths)
    if case.initial:
        inputs["initial_state"] = normal(rows, C).to(of_sums)
    if case.strided:
        inputs = with_tensors(inputs, {k: strided(x) for k, x in tensors_of(inputs).items()})
    return inputs


@functools.cache
def expected_of(case, dtype):
    return run_with_gradients(elementwise_scan, to_float64(make_inputs(case, dtype)), "reference")


def pieces_of(inputs, *slices):
    """Arguments of calls for some of the tokens."""
    for tokens in slices:
        per_token = {
            name: inputs[name][:, tokens] for name in (*PER_TOKEN, "key_mask") if name in inputs
        }
        yield inputs | per_token


# ---- numbers ----


@pytest.mark.kernel_numbers
@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_reference_s(case, backend):
    for dtype in (torch.float64, torch.float32):
        actual = run_with_gradients(elementwise_scan, make_inputs(case, dtype), backend)
        assert_all_close(actual, expected_of(case, dtype), dtype)


@pytest.mark.kernel_numbers
@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_the_reference_s_rounded_once(dtype, backend):
    for case in (Case(), Case(mask="middle", initial=True, strided=True)):
        actual = run_with_gradients(elementwise_scan, make_inputs(case, dtype), backend)
        expected = expected_of(case, dtype)
        assert_all_close(actual, expected, dtype)
        exact, eps = expected["y"], torch.finfo(dtype).eps
        off = (actual["y"].double() - exact.to(dtype).double()).abs()
        assert (off <= eps * exact.abs() + 1e-5).all() and (off == 0).double().mean() > 0.98
        assert actual["y"].dtype == dtype
        assert actual["final 0"].dtype == torch.float32


@every_backend
def test_autograd_checks_the_gradients_by_finite_differences(backend):
    for case in (
        Case(B=1, T=5, C=2, mask="middle", initial=True),
        Case(B=1, T=5, C=2, lengths=(2, 0, 3), initial=True),
    ):
        inputs = make_inputs(case)
        leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}

        def function(*tensors, inputs=inputs, leaves=leaves):
            arguments = with_tensors(inputs, dict(zip(leaves, tensors, strict=True)))
            return elementwise_scan(**arguments, return_state=True, backend=backend)

        assert torch.autograd.gradcheck(function, list(leaves.values()))
        if backend == "chunked":
            assert torch.autograd.gradgradcheck(function, list(leaves.values()))


def test_the_compiled_form_refuses_a_second_derivative_and_names_the_one_that_can():
    inputs = make_inputs(Case())
    x = inputs["x"].requires_grad_()
    y = elementwise_scan(**inputs, backend="cpu")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="chunked"'):
        torch.autograd.grad(dx.sum(), x)


@pytest.mark.kernel_numbers
@every_backend
def test_decays_of_any_size(backend):
    for dtype in (torch.float32, torch.float64):
        sizes = [0.0, 1e-30, 1e-3, 1, 20, 80, 86, 88, 100, 700, 720, 1e4, 1e30, torch.inf]
        log_decay = -torch.tensor(sizes, dtype=dtype)[None, None]
        one = torch.ones(1, len(sizes), dtype=dtype)
        nothing = torch.zeros_like(log_decay)
        y = elementwise_scan(nothing, log_decay, initial_state=one, backend=backend)
        stepped = one.clone()
        elementwise_scan_step_(nothing[0], log_decay[0], stepped, backend=backend)
        for actual in (y[0], stepped):
            expected = log_decay[0].double().exp()
            tiny = torch.finfo(dtype).tiny
            torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=tiny)
            assert actual[0, -1] == 0


@every_backend
def test_long_sequences_stay_exact(backend):
    """Where little is forgotten sums are long, and where much is, none may come back."""
    for scale in (1e-4, 1.0, 60.0):
        inputs = make_inputs(Case(B=1, T=3000, C=2, initial=True))
        inputs["log_decay"] = inputs["log_decay"] * scale
        expected = elementwise_scan(**inputs, backend="reference")
        single = {name: x.float() for name, x in inputs.items()}
        actual = elementwise_scan(**single, backend=backend).double()
        bound = elementwise_scan(
            inputs["x"].abs(),
            inputs["log_decay"],
            initial_state=inputs["initial_state"].abs(),
            backend="reference",
        )
        assert ((actual - expected).abs() <= 2e-6 * bound).all()


# ---- equal by construction ----


@every_backend
@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_padded_equals_unpadded_whatever_the_padding_holds(where, backend):
    inputs = make_inputs(Case(mask=where, initial=True))
    kept = inputs.pop("key_mask")
    for name in PER_TOKEN:
        inputs[name][~kept] = torch.nan
    leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}
    function = functools.partial(elementwise_scan, return_state=True, backend=backend)
    y, state = function(**inputs, key_mask=kept)
    weights = torch.randn(y.shape, dtype=y.dtype)
    weights[~kept] = torch.nan  # nor does the gradient that comes from padding matter
    found = torch.autograd.grad([y, state], leaves.values(), [weights, torch.ones_like(state)])
    gradients = dict(zip(leaves, found, strict=True))
    assert (y[~kept] == 0).all()
    assert all((gradients[name][~kept] == 0).all() for name in PER_TOKEN)
    assert all(x.isfinite().all() for x in gradients.values())
    for b in range(2):
        row = {name: inputs[name][b : b + 1, kept[b]] for name in PER_TOKEN}
        row["initial_state"] = inputs["initial_state"][b : b + 1]
        y_b, state_b = function(**inputs | row)
        torch.testing.assert_close(y[b, kept[b]], y_b[0])
        torch.testing.assert_close(state[b], state_b[0])


@every_backend
def test_packed_equals_separate(backend):
    lengths = (3, 0, 70, 1, 68)
    inputs = make_inputs(Case(B=1, T=142, lengths=lengths, initial=True, mask="middle"))
    function = functools.partial(elementwise_scan, return_state=True, backend=backend)
    y, state = function(**inputs)
    bounds, initial = inputs.pop("cu_seqlens").tolist(), inputs.pop("initial_state")
    for n, length in enumerate(lengths):
        tokens = slice(bounds[n], bounds[n] + length)
        (piece,) = pieces_of(inputs, tokens)
        y_n, state_n = function(**piece, initial_state=initial[n : n + 1])
        torch.testing.assert_close(y[:, tokens], y_n)
        torch.testing.assert_close(state[n], state_n[0])


@every_backend
def test_no_infinity_or_nan_crosses_the_bound_of_a_packed_sequence(backend):
    inputs = make_inputs(Case(B=1, T=21, lengths=(6, 15)))
    alone = elementwise_scan(inputs["x"][:, 6:], inputs["log_decay"][:, 6:], backend=backend)
    for bad in (torch.inf, torch.nan):
        inputs["x"][:, 2] = bad
        y = elementwise_scan(**inputs, backend=backend)
        torch.testing.assert_close(y[:, 6:], alone)


@every_backend
@pytest.mark.parametrize("cut", [0, 1, 32, 70, 100])
def test_any_split_equals_the_whole(cut, backend):
    inputs = make_inputs(Case(T=100, mask="middle", initial=True))
    function = functools.partial(elementwise_scan, return_state=True, backend=backend)
    whole, end = function(**inputs)
    state, parts = inputs.pop("initial_state"), []
    for piece in pieces_of(inputs, slice(0, cut), slice(cut, 100)):
        y, state = function(**piece, initial_state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)


def test_results_are_the_same_to_the_bit_with_any_number_of_threads():
    before = torch.get_num_threads()
    cases = [Case(B=1, T=60, C=1300), Case(B=30, T=40, C=70, mask="middle", initial=True)]
    cases += [Case(B=1, T=700, C=100, lengths=(3, 570, 0, 127))]
    try:
        for case in cases:
            inputs = make_inputs(case, torch.float32)
            torch.set_num_threads(1)
            expected = run_with_gradients(elementwise_scan, inputs, "cpu")
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                actual = run_with_gradients(elementwise_scan, inputs, "cpu")
                for name, x in expected.items():
                    assert torch.equal(actual[name], x), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_masked", [False, True])
def test_pieces_of_a_sequence_combine_to_its_state(is_masked):
    """As the recurrence says it."""
    inputs = ElementwiseInputs(**make_inputs(Case(T=12, C=5)))
    recurrence = ElementwiseRecurrence(1, 5)
    key_mask = torch.rand(2, 12) < 0.6 if is_masked else None
    y, whole = recurrence.run(inputs, {}, Tokens(is_causal=True, key_mask=key_mask))
    pieces, state, outputs = [], recurrence.start(inputs), []
    for tokens in (slice(0, 5), slice(5, 5), slice(5, 11), slice(11, 12)):
        piece = ElementwiseInputs(*(x[:, tokens] for x in inputs))
        mask = None if key_mask is None else key_mask[:, tokens]
        of_piece = Tokens(is_causal=True, key_mask=mask)
        pieces.append(recurrence.piece(piece, of_piece))
        if tokens.stop == 12:
            outputs.append(recurrence.step_(piece, state, of_piece))
        else:
            y_i, state = recurrence.run(piece, state, of_piece)
            outputs.append(y_i)
    together = {name: torch.stack([p[name] for p in pieces]) for name in pieces[0]}
    torch.testing.assert_close(recurrence.combine(together), whole)
    torch.testing.assert_close(state, whole)
    torch.testing.assert_close(torch.cat(outputs, 1), y)
    assert recurrence.state_sizes()["h"].shape == whole["h"].shape[1:]


# ---- a step ----

STEP_CASES = [
    Case(T=4),
    Case(T=4, mask="middle", initial=True, strided=True, C=130),
    Case(B=30, T=3, C=70),
    Case(B=1, T=2, C=70000),
    Case(B=0, T=1),
    Case(T=4, strong=True, initial=True),
]


def random_token(dtype=torch.float64):
    """Arguments of a step."""
    inputs = make_inputs(Case(T=1, initial=True), dtype)
    token = {name: x[:, 0] if name in PER_TOKEN else x for name, x in inputs.items()}
    return token | {"state": token.pop("initial_state")}


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_a_loop_of_steps_equals_the_whole(case, backend):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = make_inputs(case, dtype)
        whole, end = elementwise_scan(**inputs, return_state=True, backend="cpu")
        state = inputs.pop("initial_state", torch.zeros_like(end)).clone()
        if case.strided:
            state = strided(state)
        address, strides = state.data_ptr(), state.stride()
        for t in range(case.T):
            token = {name: x[:, t] for name, x in inputs.items()}
            y = elementwise_scan_step_(**token, state=state, backend=backend)
            assert y.dtype == dtype and y.shape == token["x"].shape
            assert_all_close({"y": y}, {"y": whole[:, t].double()}, dtype)
        assert_all_close({"state": state}, {"state": end.double()}, state.dtype)
        assert (state.data_ptr(), state.stride()) == (address, strides)


@every_backend
def test_a_masked_step_ignores_nan(backend):
    token = random_token()
    before = token["state"].clone()
    for name in PER_TOKEN:
        token[name][0] = torch.nan
    y = elementwise_scan_step_(**token, key_mask=torch.tensor([0, 1]), backend=backend)
    assert torch.equal(token["state"][0], before[0]) and (y[0] == 0).all()
    assert not torch.equal(token["state"][1], before[1])
    assert y.isfinite().all() and token["state"].isfinite().all()


SLOTS = torch.tensor([4, -1, 0], dtype=torch.int32)


def token_by_slot(case: Case, dtype=torch.float64):
    """A token for SLOTS with five slots of any strides, NaN where nobody may look; and the rows."""
    inputs = make_inputs(Case(B=3, T=1, C=case.C, initial=True), dtype)
    token = {name: x[:, 0] if name in PER_TOKEN else x for name, x in inputs.items()}
    rows = token.pop("initial_state")
    slots = strided(torch.full((5, *rows.shape[1:]), torch.nan, dtype=rows.dtype))
    slots[4], slots[0] = rows[0], rows[2]
    for name in PER_TOKEN:
        token[name][1] = torch.nan
    return token, slots, rows


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("case", [Case(), Case(C=130)], ids=str)
def test_a_step_by_slot_is_that_of_the_rows(case, backend):
    for dtype in (torch.float64, torch.bfloat16):
        token, slots, rows = token_by_slot(case, dtype)
        before = slots.clone()
        y = elementwise_scan_step_(**token, state=slots, state_indices=SLOTS, backend=backend)
        has_slot = torch.tensor([True, False, True])
        wanted = elementwise_scan_step_(**token, state=rows, key_mask=has_slot, backend=backend)
        assert torch.equal(y, wanted) and not y[1].any() and y[0].any()
        assert torch.equal(slots[[4, 0]], rows[[0, 2]])
        assert not torch.equal(slots[4], before[4])
        assert slots[1:4].isnan().all()


@every_backend
def test_a_step_by_slot_takes_a_mask_too(backend):
    token, slots, _ = token_by_slot(Case())
    before = slots.clone()
    key_mask = torch.tensor([0, 1, 1])
    y = elementwise_scan_step_(
        **token, state=slots, state_indices=SLOTS, key_mask=key_mask, backend=backend
    )
    assert torch.equal(slots[4], before[4]) and not torch.equal(slots[0], before[0])
    assert not y[:2].any() and y[2].any()


WRONG_SLOTS = {
    "too large": ([4, -1, 5], "state_indices must be from -1 to 4, got 5"),
    "twice": ([4, -1, 4], "state_indices must differ from each other, got 4 twice"),
    "too few": ([4, -1], r"state_indices must have shape \(3,\), got \(2,\)"),
}


@every_backend
@pytest.mark.parametrize("name", WRONG_SLOTS)
def test_a_wrong_slot_of_a_step_is_named_and_nothing_is_changed(name, backend):
    indices, message = WRONG_SLOTS[name]
    token, slots, _ = token_by_slot(Case())
    before = slots.clone()
    indices = torch.tensor(indices, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        elementwise_scan_step_(**token, state=slots, state_indices=indices, backend=backend)
    torch.testing.assert_close(slots, before, equal_nan=True, rtol=0, atol=0)


@every_backend
def test_a_state_that_would_grow_is_refused_before_any_changes(backend):
    token, slots, _ = token_by_slot(Case())
    token, before = {n: x.clone() for n, x in token.items()}, slots.clone()
    token["log_decay"][-1, -1] = 0.5  # of what is computed last
    by_slot = {"state": slots, "state_indices": SLOTS, "backend": backend}
    with pytest.raises(ValueError, match="log_decay must be at most 0, got 0.5"):
        elementwise_scan_step_(**token, **by_slot)
    torch.testing.assert_close(slots, before, equal_nan=True, rtol=0, atol=0)
    # of padding it may be anything
    elementwise_scan_step_(**token, **by_slot, key_mask=torch.tensor([True, True, False]))


def test_the_compiled_op_itself_refuses_a_positive_decay():
    inputs = make_inputs(Case(T=40, C=100))
    inputs["log_decay"][1, 39, 99] = 1e-3
    with pytest.raises(RuntimeError, match="log_decay must be <= 0"):
        library.ops.elementwise_scan(*inputs.values(), None, None, None)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_compiled_step_refuses_slots_that_overlap(shift):
    token, slots, _ = token_by_slot(Case())
    slots = slots.contiguous()
    overlapping = slots.as_strided(slots.shape, (shift, 1))
    with pytest.raises(RuntimeError, match="the slots of state must not overlap"):
        elementwise_scan_step_(**token, state=overlapping, state_indices=SLOTS, backend="cpu")


@every_backend
def test_a_step_refuses_to_drop_a_gradient(backend):
    token = random_token()
    token["log_decay"].requires_grad_()
    with pytest.raises(RuntimeError, match="call it under torch.no_grad"):
        elementwise_scan_step_(**token, backend=backend)


@every_backend
def test_autograd_notices_a_state_that_a_step_changed(backend):
    token = random_token()
    y = (token["state"].requires_grad_() ** 2).sum()
    with torch.no_grad():
        elementwise_scan_step_(**token, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- torch ----


@pytest.mark.sample(1)
@every_backend
def test_compiles_as_one_graph_forward_and_backward(backend):
    inputs = make_inputs(Case(T=20, mask="middle", initial=True))
    compiled = torch.compile(elementwise_scan, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled, inputs, backend)
    expected = run_with_gradients(elementwise_scan, inputs, backend)
    assert_all_close(actual, expected, torch.float64)


@every_backend
def test_a_compiled_step_updates_the_state(backend):
    token = random_token()
    copied = token | {"state": token["state"].clone()}
    compiled = torch.compile(elementwise_scan_step_, fullgraph=True, backend="aot_eager")
    y = elementwise_scan_step_(**token, backend=backend)
    torch.testing.assert_close(compiled(**copied, backend=backend), y)
    torch.testing.assert_close(copied["state"], token["state"])


def test_the_ops_pass_opcheck():
    names = ("x", "log_decay", "key_mask", "cu_seqlens", "initial_state")
    for case in (
        Case(T=5, C=3, mask="middle", initial=True),
        Case(B=1, T=6, lengths=(2, 4)),
    ):
        inputs = dict.fromkeys(names) | make_inputs(case)
        for x in tensors_of(inputs).values():
            x.requires_grad_()
        arguments = tuple(inputs[name] for name in names)
        torch.library.opcheck(library.ops.elementwise_scan.default, arguments)
        plain = [None if x is None else x.detach() for x in arguments]
        y, state = library.ops.elementwise_scan(*plain)
        torch.library.opcheck(library.ops.elementwise_scan_backward.default, (y, state, *plain))
    token = random_token()
    step = [token["x"], token["log_decay"], torch.tensor([True, False]), token["state"]]
    torch.library.opcheck(library.ops.elementwise_scan_step_.default, step)
    step[2] = None
    by_slot = (*step, torch.tensor([-1, 1], dtype=torch.int32))
    torch.library.opcheck(library.ops.elementwise_scan_step_.default, by_slot)


@every_backend
def test_autocast_leaves_the_sums_alone(backend):
    inputs = make_inputs(Case(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = elementwise_scan(**inputs, backend=backend)
    assert_all_close({"y": y}, {"y": expected_of(Case(), torch.float32)["y"]}, torch.float32)


@every_backend
def test_decays_of_another_dtype_are_taken(backend):
    inputs = make_inputs(Case(T=3), torch.bfloat16)
    lower = inputs | {"log_decay": inputs["log_decay"].bfloat16()}
    want = elementwise_scan(inputs["x"], lower["log_decay"].float())
    torch.testing.assert_close(elementwise_scan(**lower, backend=backend), want)
    state = torch.zeros(2, 19)
    for t in range(3):
        token = {name: x[:, t] for name, x in lower.items()}
        y = elementwise_scan_step_(**token, state=state, backend=backend)
        torch.testing.assert_close(y, want[:, t])


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
        r"x must have at least one channel, got shape \(2, 21, 0\)",
    ),
    "decay shape": (
        changed("log_decay", lambda x: x[:, 1:]),
        r"log_decay must have shape \(2, 21, 19\), got \(2, 20, 19\)",
    ),
    "decay dtype": (
        changed("log_decay", lambda x: x.int()),
        "log_decay must be float32, .*got torch.int32",
    ),
    "decay device": (
        changed("log_decay", lambda x: x.to("meta")),
        "log_decay must be on x's device cpu, got meta",
    ),
    "decay sign": (changed("log_decay", lambda x: -x), "log_decay must be at most 0, got "),
    "a parameter's sign": (
        changed("log_decay", lambda x: torch.nn.Parameter(-x)),
        "log_decay must be at most 0, got ",
    ),
    "mask shape": (
        given(key_mask=torch.ones(2, 20)),
        r"key_mask must have shape \(2, 21\), got \(2, 20\)",
    ),
    "mask values": (given(key_mask=torch.full((2, 21), 2)), "key_mask must hold bool or 0 and 1"),
    "packed rows": (
        given(cu_seqlens=torch.tensor([0, 21])),
        r"cu_seqlens must come with a batch of one packed row, got x of shape \(2, 21, 19\)",
    ),
    "state shape": (
        given(initial_state=torch.zeros(2, 18)),
        r"initial_state must have shape \(2, 19\), got \(2, 18\)",
    ),
    "state dtype": (
        given(initial_state=torch.zeros(2, 19).bfloat16()),
        "initial_state must be torch.float32 for torch.float32 inputs, got torch.bfloat16",
    ),
    "backend": (given(backend="gpu"), "backend must be one of .* got 'gpu'"),
}


@every_backend
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(wrong, backend):
    change, message = WRONG[wrong]
    inputs = make_inputs(Case(), torch.float32) | {"backend": backend}
    with pytest.raises(ValueError, match=message):
        elementwise_scan(**change(inputs))


WRONG_STEPS = {
    "x": (lambda x: x[:, None], r"x must have the 2 dimensions \(B, C\), got"),
    "log_decay": (lambda x: x[:1], r"log_decay must have shape \(2, 19\), got \(1, 19\)"),
    "state": (lambda x: x[:, 1:], r"state must have shape \(2, 19\), got \(2, 18\)"),
    "key_mask": (lambda x: x[:1], r"key_mask must have shape \(2,\), got \(1,\)"),
}


@every_backend
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_argument_of_a_step_is_named(name, backend):
    token = random_token() | {"key_mask": torch.ones(2, dtype=torch.bool)}
    change, message = WRONG_STEPS[name]
    with pytest.raises(ValueError, match=message):
        elementwise_scan_step_(**token | {name: change(token[name])}, backend=backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_step_refuses_a_decay_that_is_no_float(dtype, backend):
    token = random_token()
    token["log_decay"] = torch.zeros_like(token["log_decay"], dtype=dtype)
    before = token["state"].clone()
    with pytest.raises(ValueError, match=f"log_decay must be float32, .*got {dtype}"):
        elementwise_scan_step_(**token, backend=backend)
    assert torch.equal(token["state"], before)


WRONG_FOR_THE_OP = {
    "x": (lambda x: x.int(), "x must be float32, bfloat16, float16 or float64, got int32"),
    "log_decay": (lambda x: x[1:], r"log_decay must have shape \(2, 21, 19\)"),
    "key_mask": (lambda _: torch.ones(2, 20).bool(), r"key_mask must have shape \(2, 21\)"),
    "cu_seqlens": (lambda _: torch.tensor([0, 21]).int(), "cu_seqlens .*needs a batch of 1, got 2"),
    "initial_state": (lambda _: torch.zeros(2, 5), "initial_state must have shape"),
}


@pytest.mark.parametrize("name", WRONG_FOR_THE_OP)
def test_the_compiled_op_itself_refuses_what_would_read_out_of_bounds(name):
    inputs = make_inputs(Case(), torch.float32) | dict.fromkeys(
        ("key_mask", "cu_seqlens", "initial_state")
    )
    change, message = WRONG_FOR_THE_OP[name]
    wrong = inputs | {name: change(inputs[name])}
    with pytest.raises(RuntimeError, match=f"::elementwise_scan: {message}"):
        library.ops.elementwise_scan(*wrong.values())
    with pytest.raises(RuntimeError, match=f"::elementwise_scan_backward: {message}"):
        library.ops.elementwise_scan_backward(inputs["x"], None, *wrong.values())


def test_cuda_has_no_kernels_of_it_and_says_so():
    with pytest.raises(RuntimeError, match="backend 'cuda' can't run: "):
        elementwise_scan(**make_inputs(Case()), backend="cuda")
