# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""States by slot: every backend against the float64 loop on states that were gathered before.

B batch, T time, K key dim, V value dim.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_cases import assert_all_close
from hf_linear_attention import (
    LinearAttentionState,
    delta_rule,
    delta_rule_,
    delta_rule_step_,
    linear_attention,
    linear_attention_,
    linear_attention_step_,
    short_convolution,
    short_convolution_,
    short_convolution_step_,
)
from hf_linear_attention.ops import delta_rule as op_delta
from hf_linear_attention.ops import linear_attention as op_linear
from hf_linear_attention.ops.compiled.library import ops

BACKENDS = ["cpu", "chunked", "reference"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Sizes(NamedTuple):
    """Of an op with heads, and which of its optional arguments there are."""

    Hq: int = 2
    Hk: int = 2
    Hv: int = 2
    K: int = 7
    V: int = 5
    decay: str | None = "head"  # "channel"
    strength: bool = False  # write strengths
    erase: bool = False  # an erase key


# By the name of a case: the step, and what it is called with beside tensors.
LINEAR = linear_attention_step_
CASES: dict[str, tuple[Any, Sizes, dict[str, Any]]] = {
    "linear": (LINEAR, Sizes(Hq=4), {"feature_map": "elu+1"}),
    "linear, wide": (LINEAR, Sizes(K=33, V=64, decay=None), {"feature_map": "relu"}),
    "linear, sums": (LINEAR, Sizes(V=1), {"normalize": False}),
    "linear, general": (LINEAR, Sizes(Hk=1, decay="channel"), {"feature_map": "exp"}),
    "linear, more queries": (LINEAR, Sizes(Hq=4, strength=True), {"feature_map": "elu+1"}),
    "mamba": (LINEAR, Sizes(Hq=1, Hk=1, V=40, strength=True), {"normalize": False}),
    "delta": (delta_rule_step_, Sizes(Hq=1, Hk=1), {"normalize_qk": True}),
    "delta, wide": (delta_rule_step_, Sizes(K=40, V=33, decay="channel"), {"normalize_qk": True}),
    "delta, erase": (delta_rule_step_, Sizes(Hv=4, decay="channel", erase=True), {}),
    "delta, more queries": (delta_rule_step_, Sizes(Hq=4, decay=None), {"normalize_qk": True}),
    "convolution": (short_convolution_step_, Sizes(K=5, V=70), {}),
}
every_case = pytest.mark.parametrize("case", CASES)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make_token(case: str, B: int, dtype: torch.dtype) -> dict[str, Any]:
    """One token for B rows: all arguments of the case's step but states."""
    step_, s, options = CASES[case]
    acc = torch.promote_types(dtype, torch.float32)
    if step_ is short_convolution_step_:
        of_channels = {"weight": normal(s.V, 4).to(dtype), "bias": normal(s.V).to(dtype)}
        return {"x": normal(B, s.V).to(dtype)} | of_channels | options
    token: dict[str, Any] = {
        name: normal(B, H, D).to(dtype)
        for name, H, D in (("q", s.Hq, s.K), ("k", s.Hk, s.K), ("v", s.Hv, s.V))
    }
    if s.decay is not None:
        channels = [s.K] if s.decay == "channel" else []
        token["log_decay"] = -normal(B, s.Hv, *channels).abs().to(acc)
    if step_ is delta_rule_step_:
        token["beta"] = normal(B, s.Hv).sigmoid().to(acc)
        if s.erase:
            token["erase_key"] = (normal(B, s.Hv, s.K) / s.K).to(dtype)
    elif s.strength:
        token["write_strength"] = normal(B, s.Hv).sigmoid().to(acc)
    return token | options


def make_states(case: str, slots: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of the case's states, of so many slots."""
    step_, s, options = CASES[case]
    if step_ is short_convolution_step_:
        return [normal(slots, s.K, s.V).to(dtype)]
    acc = torch.promote_types(dtype, torch.float32)
    kv = normal(slots, s.Hv, s.K, s.V).to(acc)
    if step_ is LINEAR and options.get("normalize", True):
        return [kv, normal(slots, s.Hv, s.K).abs().to(acc)]
    return [kv]


def take_step(case: str, token: dict[str, Any], states: list[Tensor], **more: Any) -> Tensor:
    step_ = CASES[case][0]
    state = LinearAttentionState(*states, *[None] * (2 - len(states)))
    return step_(**token, state=state if step_ is LINEAR else states[0], **more)


def int32(indices: list[int]) -> Tensor:
    return torch.tensor(indices, dtype=torch.int32)


class Buffer:
    """Slots apart from each other, with NaN in between and in those that hold none of the rows."""

    def __init__(self, rows: Tensor, at: list[int], slots: int):
        self.shape = (slots, *rows.shape[1:])
        pages = torch.full((slots, rows.shape[1:].numel() + 8), torch.nan, dtype=rows.dtype)
        self.pages = self.with_rows(pages, at, rows)
        self.slots = self.slots_of(self.pages)

    def slots_of(self, pages: Tensor) -> Tensor:
        return pages[:, 4:-4].view(self.shape)

    def with_rows(self, pages: Tensor, at: list[int], rows: Tensor) -> Tensor:
        pages = pages.clone()
        self.slots_of(pages)[at] = rows
        return pages

    def assert_changed_only(self, before: Tensor, at: list[int], rows: Tensor) -> None:
        """That slots at[i] hold row i, bit by bit, and all else is what it was."""
        wanted = self.with_rows(before, at, rows)
        assert torch.equal(self.pages.view(torch.uint8), wanted.view(torch.uint8))


def as_float64(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: as_float64(x) for name, x in values.items()}
    if isinstance(values, list):
        return [as_float64(x) for x in values]
    return values.double() if isinstance(values, Tensor) else values


# ---- the step ----


@every_backend
@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.kernel_numbers
def test_a_step_by_slot_is_the_step_on_gathered_states(case, dtype, backend):
    at = [3, 6, 0, 4]
    token, states = make_token(case, 4, dtype), make_states(case, 4, dtype)
    buffers = [Buffer(x, at, slots=7) for x in states]
    before = [buffer.pages.clone() for buffer in buffers]
    slots = [buffer.slots for buffer in buffers]
    y = take_step(case, token, slots, state_indices=int32(at), backend=backend)

    gathered = [x.clone() for x in states]
    assert torch.equal(y, take_step(case, token, gathered, backend=backend))
    exact = as_float64(states)
    wanted = take_step(case, as_float64(token), exact, backend="reference")
    assert_all_close({"y": y}, {"y": wanted}, dtype)
    for buffer, pages, rows, target in zip(buffers, before, gathered, exact, strict=True):
        buffer.assert_changed_only(pages, at, rows)
        assert_all_close({"state": rows}, {"state": target}, rows.dtype)


@every_backend
@every_case
@pytest.mark.parametrize("indices", [[5, -1, 0], [-1, 2, -1], [-1, -1, -1]], ids=str)
def test_a_row_without_a_slot_answers_zero_and_changes_nothing(case, indices, backend):
    token, states = make_token(case, 3, torch.float32), make_states(case, 3, torch.float32)
    has_slot = int32(indices) >= 0
    for name, x in token.items():
        if isinstance(x, Tensor) and name not in ("weight", "bias"):
            x[~has_slot] = torch.nan
    at = [index for index in indices if index >= 0]
    buffers = [Buffer(x[has_slot], at, slots=6) for x in states]
    before = [buffer.pages.clone() for buffer in buffers]
    slots = [buffer.slots for buffer in buffers]
    y = take_step(case, token, slots, state_indices=int32(indices), backend=backend)

    assert (y[~has_slot] == 0).all()
    assert torch.equal(y, take_step(case, token, states, key_mask=has_slot, backend=backend))
    for buffer, pages, rows in zip(buffers, before, states, strict=True):
        buffer.assert_changed_only(pages, at, rows[has_slot])


@every_backend
@every_case
def test_a_masked_row_by_slot_changes_nothing(case, backend):
    token, states = make_token(case, 3, torch.float32), make_states(case, 3, torch.float32)
    key_mask = torch.tensor([True, False, True])
    masked = {"key_mask": key_mask, "backend": backend}
    slots = [torch.cat([x[:1], x, x[:1]]) for x in states]
    y = take_step(case, token, slots, state_indices=int32([1, 2, -1]), **masked)
    key_mask = torch.tensor([True, False, False])
    wanted = take_step(case, token, states, key_mask=key_mask, backend=backend)
    assert torch.equal(y, wanted)
    assert all(torch.equal(x[1:4], row) for x, row in zip(slots, states, strict=True))


@every_backend
@every_case
@pytest.mark.parametrize("B, slots", [(0, 3), (0, 0), (2, 0)])
def test_a_step_of_no_rows_or_no_slots(case, B, slots, backend):
    token, states = make_token(case, B, torch.float32), make_states(case, slots, torch.float32)
    y = take_step(case, token, states, state_indices=int32([-1] * B), backend=backend)
    assert len(y) == B and not y.any()


@every_backend
def test_a_convolution_steps_in_slots_of_any_layout(backend):
    token, (state,) = (make("convolution", 3, torch.float32) for make in (make_token, make_states))
    slots = [state.transpose(1, 2).contiguous().transpose(1, 2)]  # (slots, C, S), as Transformers'
    y = take_step("convolution", token, slots, state_indices=int32([2, 0, 1]), backend=backend)
    gathered = state[[2, 0, 1]]
    assert torch.equal(y, take_step("convolution", token, [gathered], backend=backend))
    assert torch.equal(slots[0][[2, 0, 1]], gathered)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ["linear", "linear, more queries", "delta", "convolution"])
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_a_compiled_step_by_slot(case, backend):
    torch.compiler.reset()
    token, states = make_token(case, 3, torch.float32), make_states(case, 5, torch.float32)
    indices = int32([4, -1, 0])
    eager = [x.clone() for x in states]
    y = take_step(case, token, eager, state_indices=indices, backend=backend)
    compiled = torch.compile(take_step, fullgraph=True, backend="aot_eager")
    actual = compiled(case, token, states, state_indices=indices, backend=backend)
    torch.testing.assert_close(actual, y)
    torch.testing.assert_close(states, eager)


def on_meta(values: Any) -> Any:
    """Without values that one could look at."""
    if isinstance(values, dict):
        return {name: on_meta(x) for name, x in values.items()}
    if isinstance(values, list):
        return [on_meta(x) for x in values]
    return values.to("meta") if isinstance(values, Tensor) else values


@every_case
def test_a_step_by_slot_waits_for_no_device(case):
    token, slots = make_token(case, 3, torch.float32), make_states(case, 5, torch.float32)
    indices = on_meta(int32([4, -1, 0]))
    y = take_step(case, on_meta(token), on_meta(slots), state_indices=indices, backend="chunked")
    assert len(y) == 3 and y.is_meta


# Of a case: its compiled op, the arguments before key_mask, and those behind the state.
OPS = {
    "linear": (ops.linear_attention_step_, ("q", "k", "v", "log_decay"), (1, True, 1e-6)),
    "delta": (
        ops.delta_rule_step_,
        ("q", "k", "v", "beta", "log_decay", "erase_key", "add_along"),
        (1.0, True, True),
    ),
    "convolution": (ops.short_convolution_step_, ("x", "weight", "bias"), (True,)),
}


def arguments_of_op(case: str, slots: int) -> tuple[Any, ...]:
    """For 3 rows: all but state_indices."""
    _, tensors, options = OPS[case]
    token, states = make_token(case, 3, torch.float32), make_states(case, slots, torch.float32)
    return (*(token.get(name) for name in tensors), None, *states, *options)


@pytest.mark.parametrize("case", OPS)
def test_the_compiled_steps_pass_opcheck(case):
    op = OPS[case][0].default
    torch.library.opcheck(op, arguments_of_op(case, slots=3))
    torch.library.opcheck(op, (*arguments_of_op(case, slots=5), int32([4, -1, 0])))


@pytest.mark.parametrize("case", OPS)
def test_the_compiled_steps_themselves_refuse_what_would_write_out_of_bounds(case):
    arguments = arguments_of_op(case, slots=5)
    for indices, message in (
        (int32([0, 5, 1]), "state_indices must be from -1 to 4, got 5"),
        (int32([0, -2, 1]), "state_indices must be from -1 to 4, got -2"),
        (int32([3, 0, 3]), "state_indices must differ from each other, got 3 twice"),
        (int32([0, 1]), r"state_indices must have shape \(3,\), got \(2,\)"),
        (torch.tensor([0, 1, 2]), "state_indices must be int32 here, got int64"),
        (int32([0, 1, 2, 3, 4])[::2], "state_indices must be contiguous"),
        (None, r"must have shape \(3, .* got \(5, "),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS[case][0](*arguments, indices)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("case", OPS)
def test_the_compiled_steps_themselves_refuse_slots_that_overlap(case, shift):
    arguments = [*arguments_of_op(case, slots=3)]
    place = len(OPS[case][1]) + 1  # of the state
    state = arguments[place]
    arguments[place] = state.as_strided(state.shape, (shift, *state.stride()[1:]))
    with pytest.raises(RuntimeError, match="the slots of .* must not overlap"):
        OPS[case][0](*arguments)


def overlapping(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def with_gaps(x: Tensor) -> Tensor:
    """Within each slot."""
    return torch.stack([x, x], -1)[..., 0]


# By name: what is wrong of indices or slots, and what the error says.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too large": ({"indices": int32([0, 5, 1])}, "state_indices must be from -1 to 4, got 5"),
    "too small": ({"indices": int32([0, -2, 1])}, "state_indices must be from -1 to 4, got -2"),
    "twice": ({"indices": int32([3, 0, 3])}, "state_indices must differ from each other, got 3 tw"),
    "too few": ({"indices": int32([0, 1])}, r"state_indices must have shape \(3,\), got \(2,\)"),
    "dims": ({"indices": int32([[0, 1, 2]])}, r"state_indices must have shape \(3,\)"),
    "dtype": ({"indices": torch.tensor([0, 1, 2])}, "state_indices must be torch.int32, got"),
    "overlap": ({"slots": overlapping}, "the slots of state.* must not overlap, got strides"),
    "gaps": ({"slots": with_gaps}, "each slot of state.* must be contiguous, got strides"),
    "no dims": ({"slots": lambda x: x.sum()}, "state.* must have shape"),
    "shape": ({"slots": lambda x: x[..., :-1]}, "state.* must have shape"),
    "rows": ({"indices": None}, r"state.* must have shape \(3, .*got \(5, "),
}


@every_backend
@pytest.mark.parametrize(
    "name, case",
    [
        (name, case)
        for name in WRONG
        for case in ("linear", "linear, general", "mamba", "delta", "convolution")
        if case != "convolution" or name not in ("overlap", "gaps")  # which takes any strides
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_changed(name, case, backend):
    wrong, message = WRONG[name]
    token, states = make_token(case, 3, torch.float32), make_states(case, 5, torch.float32)
    slots = [wrong.get("slots", torch.clone)(x) for x in states]
    before = [x.clone() for x in slots]
    indices = wrong.get("indices", int32([0, 1, 2]))
    with pytest.raises(ValueError, match=message):
        take_step(case, token, slots, state_indices=indices, backend=backend)
    assert all(map(torch.equal, slots, before))


@every_backend
@pytest.mark.parametrize("case", ["linear", "linear, general", "delta", "delta, wide"])
def test_a_decay_that_would_grow_is_refused_before_any_state_changes(case, backend):
    token, states = make_token(case, 3, torch.float32), make_states(case, 5, torch.float32)
    token["log_decay"][2].view(-1)[-1] = 0.5  # of the last state that is changed
    before = [x.clone() for x in states]
    by_slot = {"state_indices": int32([4, -1, 0]), "backend": backend}
    with pytest.raises(ValueError, match="log_decay must be at most 0, got 0.5"):
        take_step(case, token, states, **by_slot)
    assert all(map(torch.equal, states, before))
    take_step(case, token, states, key_mask=torch.tensor([1, 1, 0]), **by_slot)  # whose is padding
    assert not any(map(torch.equal, states, before))


# ---- sequences ----

# Of a step: the op on states as values, and in place.
OF_SEQUENCES = {
    LINEAR: (linear_attention, linear_attention_),
    delta_rule_step_: (delta_rule, delta_rule_),
    short_convolution_step_: (short_convolution, short_convolution_),
}
OF_TOKENS = ("q", "k", "v", "x", "log_decay", "beta", "write_strength", "erase_key")


def make_sequences(case: str, B: int, T: int, dtype: torch.dtype) -> dict[str, Any]:
    inputs = make_token(case, B * T, dtype)
    return {n: x.unflatten(0, (B, T)) if n in OF_TOKENS else x for n, x in inputs.items()}


def run_in_place(case: str, inputs: dict[str, Any], states: list[Tensor], **more: Any) -> Tensor:
    step_ = CASES[case][0]
    state = LinearAttentionState(*states, *[None] * (2 - len(states)))
    return OF_SEQUENCES[step_][1](**inputs, state=state if step_ is LINEAR else states[0], **more)


def run_as_value(
    case: str, inputs: dict[str, Any], states: list[Tensor], **more: Any
) -> tuple[Tensor, list[Tensor]]:
    step_ = CASES[case][0]
    before = LinearAttentionState(*states, *[None] * (2 - len(states)))
    y, after = OF_SEQUENCES[step_][0](
        **inputs, initial_state=before if step_ is LINEAR else before.kv, return_state=True, **more
    )
    return y, [x for x in (after if step_ is LINEAR else [after]) if x is not None]


def one_by_one(case, inputs, states, bounds, indices, is_new) -> tuple[Tensor, list[Tensor]]:
    """By the loop in float64: outputs, 0 where there is no state, and the states (N, ...)."""
    inputs, states, outputs, after = as_float64(inputs), as_float64(states), [], []
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        own = {name: x[:, start:end] if name in OF_TOKENS else x for name, x in inputs.items()}
        before = [torch.zeros_like(x[n : n + 1]) if is_new[n] else x[n : n + 1] for x in states]
        y, ends = run_as_value(case, own, before, backend="reference")
        outputs.append(y if indices[n] >= 0 else torch.zeros_like(y))
        after.append(ends)
    return torch.cat(outputs, 1), [torch.cat(rows) for rows in zip(*after, strict=True)]


# Two sequences are empty, one of them new; one has no slot; the last five tokens are no one's.
BOUNDS = [0, 4, 4, 71, 72, 80, 80, 81]
INDICES = [3, 6, 0, 5, -1, 8, 1]
IS_NEW = [False, True, True, False, False, False, True]
PACKED = {
    "cu_seqlens": torch.tensor(BOUNDS),
    "state_indices": int32(INDICES),
    "is_new": torch.tensor(IS_NEW),
}


def packed_call(case: str, dtype: torch.dtype):
    """Inputs, states and their buffers for PACKED, with NaN wherever nobody may look."""
    inputs = make_sequences(case, 1, BOUNDS[-1] + 5, dtype)
    states = make_states(case, len(INDICES), dtype)
    no_one = [*range(72, 80), *range(81, 86)]
    for name, x in inputs.items():
        if name in OF_TOKENS:
            x[:, no_one] = torch.nan
    has_slot = int32(INDICES) >= 0
    at = [index for index in INDICES if index >= 0]
    buffers = [Buffer(x[has_slot], at, slots=10) for x in states]
    for buffer in buffers:
        buffer.slots[[i for i, new in zip(INDICES, IS_NEW, strict=True) if new]] = torch.nan
    return inputs, states, buffers


@every_backend
@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_packed_sequences_go_on_from_their_slots(case, dtype, backend):
    inputs, states, buffers = packed_call(case, dtype)
    before = [buffer.pages.clone() for buffer in buffers]
    slots = [buffer.slots for buffer in buffers]
    y = run_in_place(case, inputs, slots, **PACKED, backend=backend)
    of_all, after = one_by_one(case, inputs, states, BOUNDS, INDICES, IS_NEW)
    assert_all_close({"y": y[:, :-5]}, {"y": of_all}, dtype)
    assert not y[:, -5:].any() and not y[:, 72:80].any()
    at = torch.tensor([index for index in INDICES if index >= 0])
    has_slot = int32(INDICES) >= 0
    for buffer, pages, rows in zip(buffers, before, after, strict=True):
        assert_all_close({"state": buffer.slots[at]}, {"state": rows[has_slot]}, buffer.slots.dtype)
        assert not buffer.slots[6].any()  # empty and new
        assert torch.equal(buffer.slots[8], buffer.slots_of(pages)[8])  # empty
        buffer.assert_changed_only(pages, at.tolist(), buffer.slots[at])


@every_backend
@every_case
def test_sequences_of_all_slots_are_those_on_states_as_values(case, backend):
    """In rows and packed, where no sequence is without a slot, and none ends early."""
    padding = {"key_mask": torch.rand(3, 9) < 0.7, "backend": backend}
    bounds = {"cu_seqlens": torch.tensor([0, 4, 4, 9], dtype=torch.int32), "backend": backend}
    for B, options in ((3, padding), (1, bounds)):
        inputs = make_sequences(case, B, 9, torch.float32)
        slots, order = make_states(case, 3, torch.float32), [2, 0, 1]
        for indices in (None, int32(order)):
            rows = slots if indices is None else [x[order] for x in slots]
            y, after = run_as_value(case, inputs, rows, **options)
            assert torch.equal(
                run_in_place(case, inputs, slots, state_indices=indices, **options), y
            )
            named = slots if indices is None else [x[order] for x in slots]
            assert all(map(torch.equal, named, after))


@every_backend
@every_case
def test_a_prompt_in_pieces_and_a_token_are_the_whole(case, backend):
    inputs = make_sequences(case, 1, 9, torch.float64)
    slots = [x.fill_(torch.nan) for x in make_states(case, 4, torch.float64)]
    options = {"state_indices": int32([2]), "backend": backend}
    outputs = []
    for start, end in ((0, 5), (5, 8)):
        piece = {n: x[:, start:end] if n in OF_TOKENS else x for n, x in inputs.items()}
        bounds = {"cu_seqlens": torch.tensor([0, end - start]), "is_new": torch.tensor([not start])}
        outputs.append(run_in_place(case, piece, slots, **bounds, **options))
    token = {n: x[:, 8] if n in OF_TOKENS else x for n, x in inputs.items()}
    outputs.append(take_step(case, token, slots, **options)[:, None])
    zeros = [torch.zeros_like(x[:1]) for x in slots]
    wanted, after = run_as_value(case, inputs, zeros, backend="reference")
    torch.testing.assert_close(torch.cat(outputs, 1), wanted)
    torch.testing.assert_close([x[2:3] for x in slots], after)


# Of the compiled ops over sequences in place, and what they are called with beside states.
IN_PLACE_OPS = {
    "linear": (ops.linear_attention_, ("q", "k", "v", "log_decay"), (1, True, 1e-6)),
    "linear, sums": (ops.linear_attention_, ("q", "k", "v", "log_decay"), (0, False, 1e-6)),
    "delta": (
        ops.delta_rule_,
        ("q", "k", "v", "beta", "log_decay", "erase_key", "add_along"),
        (0.5, True, True),
    ),
}


def arguments_in_place(case: str, **changed: Any) -> list[Any]:
    """For PACKED, or what is changed of it."""
    _, tensors, options = IN_PLACE_OPS[case]
    inputs, _, buffers = packed_call(case, torch.float32)
    of_sequences = PACKED | {"cu_seqlens": int32(BOUNDS)} | changed
    states = [buffer.slots for buffer in buffers] + [None] * (2 - len(buffers))
    return [
        *(inputs.get(name) for name in tensors),
        None,
        of_sequences["cu_seqlens"],
        *(states if case != "delta" else states[:1]),
        of_sequences["state_indices"],
        of_sequences["is_new"],
        *options,
    ]


@pytest.mark.parametrize("case", IN_PLACE_OPS)
def test_the_compiled_ops_over_sequences_pass_opcheck(case):
    for changed in ({}, {"is_new": None}):
        arguments = arguments_in_place(case, **changed)
        arguments = [x.nan_to_num() if isinstance(x, Tensor) else x for x in arguments]
        torch.library.opcheck(IN_PLACE_OPS[case][0].default, tuple(arguments))


@pytest.mark.parametrize("case", IN_PLACE_OPS)
def test_the_compiled_ops_over_sequences_leave_out_what_has_no_slot(case):
    """Without a mask, whatever tokens there hold, in the dtype of any number of bytes."""
    arguments = arguments_in_place(case)
    y = IN_PLACE_OPS[case][0](*arguments)
    assert y.isfinite().all() and y[:, 71].any()
    assert not y[:, 72:80].any() and not y[:, 81:].any()


@pytest.mark.parametrize("case", IN_PLACE_OPS)
def test_the_compiled_ops_over_sequences_refuse_a_decay_that_would_grow_before_any_changes(case):
    """Compiled by torch, say, nobody has looked at the values before."""
    op, tensors, _ = IN_PLACE_OPS[case]
    arguments = arguments_in_place(case)
    log_decay = arguments[tensors.index("log_decay")]
    states = [x for x in arguments[len(tensors) + 2 :][:2] if x is not None and x.dim() > 2]
    before = [x.clone() for x in states]
    log_decay[0, 80] = 0.5  # of the last sequence
    with pytest.raises(RuntimeError, match="log_decay must be <= 0"):
        op(*arguments)
    torch.testing.assert_close(states, before, equal_nan=True, rtol=0, atol=0)
    log_decay[0, 80], log_decay[0, 75] = -0.5, 0.5  # of one that has no slot
    op(*arguments)


@pytest.mark.parametrize("case", IN_PLACE_OPS)
def test_the_compiled_ops_over_sequences_themselves_refuse_what_would_be_out_of_bounds(case):
    for changed, message in (
        ({"state_indices": int32([10, *INDICES[1:]])}, "state_indices must be from -1 to 9, got"),
        ({"state_indices": int32([5, *INDICES[1:]])}, "must differ from each other, got 5 twice"),
        ({"state_indices": int32(INDICES[1:])}, r"state_indices must have shape \(7,\), got"),
        ({"is_new": torch.ones(6, dtype=torch.bool)}, r"is_new must have shape \(7,\), got"),
        ({"is_new": int32(IS_NEW)}, "is_new must be bool here, got int32"),
        ({"cu_seqlens": int32([*BOUNDS[:-1], 87])}, "must end at T = 86 or before, got 87"),
        ({"cu_seqlens": int32([0, 5, *BOUNDS[2:]])}, "must never decrease, got 5 before 4"),
    ):
        with pytest.raises(RuntimeError, match=message):
            IN_PLACE_OPS[case][0](*arguments_in_place(case, **changed))


@pytest.mark.parametrize("case", ["linear", "linear, general", "delta"])
def test_without_a_kernel_that_finds_them_states_are_copied_out_of_their_slots(case, monkeypatch):
    inputs, _, buffers = packed_call(case, torch.float32)
    slots, copies = [b.slots.clone() for b in buffers], [b.slots.clone() for b in buffers]
    y = run_in_place(case, inputs, slots, **PACKED, backend="cpu")
    tables = (op_linear, "IMPLEMENTATIONS"), (op_linear, "SUMS"), (op_delta, "IMPLEMENTATIONS")
    for module, name in tables:
        table = {**getattr(module, name)}
        table["cpu"] = table["cpu"]._replace(run_in_slots=None)
        monkeypatch.setattr(module, name, table)
    assert torch.equal(run_in_place(case, inputs, copies, **PACKED, backend="cpu"), y)
    assert all(x.equal(z) for x, z in zip(map(bits, slots), map(bits, copies), strict=True))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("T", [3, 700])
@pytest.mark.parametrize("case", ["linear, wide", "delta, wide"])
def test_on_several_threads_columns_and_pieces_of_one_slot_are_the_whole(case, T):
    """One sequence, so that its columns are divided, and time where that is not enough."""
    inputs, slots = make_sequences(case, 1, T, torch.float64), make_states(case, 3, torch.float64)
    rows = [x[1:2].clone() for x in slots]
    bounds = {"cu_seqlens": torch.tensor([0, T])}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        y = run_in_place(case, inputs, slots, **bounds, state_indices=int32([1]), backend="cpu")
    finally:
        torch.set_num_threads(before)
    wanted, after = run_as_value(case, inputs, rows, **bounds, backend="cpu")
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close([x[1:2] for x in slots], after)


@every_case
def test_sequences_by_slot_wait_for_no_device(case):
    inputs, slots = make_sequences(case, 3, 9, torch.float32), make_states(case, 5, torch.float32)
    rows = {"state_indices": int32([4, -1, 0]), "is_new": torch.tensor([True, False, False])}
    y = run_in_place(case, on_meta(inputs), on_meta(slots), **on_meta(rows), backend="chunked")
    assert y.shape[:2] == (3, 9) and y.is_meta


@pytest.mark.parametrize("case", ["linear", "delta", "convolution"])
def test_compiled_sequences_by_slot(case):
    """Compiled code may not look at values, either: it does what is done on a device."""
    torch.compiler.reset()
    inputs, _, buffers = packed_call(case, torch.float32)
    slots, eager = [b.slots.clone() for b in buffers], [b.slots.clone() for b in buffers]
    y = run_in_place(case, inputs, eager, **PACKED, backend="cpu")
    compiled = torch.compile(run_in_place, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case, inputs, slots, **PACKED, backend="cpu"), y)
    torch.testing.assert_close(slots, eager, equal_nan=True)


# By name: B, T, slots, indices, bounds.
NOTHING = {
    "no rows": (0, 3, 4, [], None),
    "no tokens": (2, 0, 4, [3, 0], None),
    "no sequences": (1, 3, 4, [], [0]),
    "no slots": (2, 3, 0, [-1, -1], None),
}


@every_backend
@every_case
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_do_is_done(name, case, backend):
    B, T, num_slots, indices, bounds = NOTHING[name]
    inputs = make_sequences(case, B, T, torch.float32)
    slots = make_states(case, num_slots, torch.float32)
    before = [x.clone() for x in slots]
    sequences = {"state_indices": int32(indices)}
    if bounds is not None:
        sequences["cu_seqlens"] = torch.tensor(bounds)
    y = run_in_place(case, inputs, slots, **sequences, backend=backend)
    assert y.shape[:2] == (B, T) and not y.any()
    assert all(map(torch.equal, slots, before))


# By name: what is wrong of the call for PACKED, and what the error says.
WRONG_SEQUENCES: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"state_indices": int32(INDICES[1:])}, r"state_indices must have shape \(7,\)"),
    "too large": ({"state_indices": int32([10, *INDICES[1:]])}, "state_indices must be from -1 to"),
    "twice": ({"state_indices": int32([5, *INDICES[1:]])}, "must differ from each other, got 5 tw"),
    "no indices": ({"state_indices": None}, r"state.* must have shape \(7, .*, got \(10, "),
    "new shape": (
        {"is_new": torch.ones(6, dtype=torch.bool)},
        r"is_new must have shape \(7,\), got",
    ),
    "new dtype": ({"is_new": torch.ones(7)}, "is_new must be torch.bool, got torch.float32"),
    "new device": ({"is_new": PACKED["is_new"].to("meta")}, "is_new must be on .* cpu, got meta"),
    "bounds": (
        {"cu_seqlens": torch.tensor([*BOUNDS[:-1], 87])},
        "cu_seqlens must rise from 0 to at most T = 86 without falling, got",
    ),
    "falling": ({"cu_seqlens": torch.tensor([0, 5, 4, 71, 72, 80, 80, 81])}, "without falling"),
    "mask": ({"key_mask": torch.ones(1, 80)}, r"key_mask must have shape \(1, 86\), got"),
}


@pytest.mark.parametrize("case", ["linear", "mamba", "delta", "convolution"])
@pytest.mark.parametrize("name", WRONG_SEQUENCES)
def test_a_wrong_argument_of_sequences_is_named_and_nothing_is_changed(name, case):
    wrong, message = WRONG_SEQUENCES[name]
    inputs, _, buffers = packed_call(case, torch.float32)
    before = [buffer.pages.clone() for buffer in buffers]
    slots = [buffer.slots for buffer in buffers]
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=message):
            run_in_place(case, inputs, slots, **PACKED | wrong, backend=backend)
    for buffer, pages in zip(buffers, before, strict=True):
        buffer.assert_changed_only(pages, [], pages[:0, 4:-4].view(0, *buffer.shape[1:]))


@every_case
def test_sequences_in_place_refuse_to_drop_a_gradient(case):
    inputs, _, buffers = packed_call(case, torch.float32)
    slots = [buffer.slots for buffer in buffers]
    inputs["x" if "x" in inputs else "v"].requires_grad_()
    with pytest.raises(RuntimeError, match="updates its state in place and has no gradient: call"):
        run_in_place(case, inputs, slots, **PACKED)
    with torch.no_grad():
        run_in_place(case, inputs, slots, **PACKED)
