# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""States by slot: every backend against the float64 loop on states that were gathered before.

B batch, K key dim, V value dim.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_cases import assert_all_close
from hf_linear_attention import (
    LinearAttentionState,
    delta_rule_step_,
    linear_attention_step_,
    short_convolution_step_,
)
from hf_linear_attention.native.library import ops

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


@every_case
def test_nothing_waits_for_a_device(case):
    """A meta tensor has no values that one could look at."""

    def on_meta(values):
        if isinstance(values, list):
            return [on_meta(x) for x in values]
        return values.to("meta") if isinstance(values, Tensor) else values

    token = {name: on_meta(x) for name, x in make_token(case, 3, torch.float32).items()}
    slots = on_meta(make_states(case, 5, torch.float32))
    indices = on_meta(int32([4, -1, 0]))
    y = take_step(case, token, slots, state_indices=indices, backend="chunked")
    assert len(y) == 3 and y.is_meta


# Of a case: its compiled op, the arguments before key_mask, and those behind the state.
OPS = {
    "linear": (ops.linear_attention_step_, ("q", "k", "v", "log_decay"), (1, True, 1e-6)),
    "delta": (ops.delta_rule_step_, ("q", "k", "v", "beta", "log_decay"), (1.0, True, True)),
    "convolution": (ops.short_convolution_step_, ("x", "weight", "bias"), (True,)),
}


# Of a case: its compiled op, the arguments before key_mask, and those behind the state.
OPS = {
    "linear": (ops.linear_attention_step_, ("q", "k", "v", "log_decay"), (1, True, 1e-6)),
    "delta": (ops.delta_rule_step_, ("q", "k", "v", "beta", "log_decay"), (1.0, True, True)),
    "convolution": (ops.short_convolution_step_, ("x", "weight", "bias"), (True,)),
}


@pytest.mark.parametrize("indices", [None, [4, -1, 0]])
@pytest.mark.parametrize("case", OPS)
def test_the_compiled_steps_pass_opcheck(case, indices):
    op, tensors, options = OPS[case]
    slots = 3 if indices is None else 5
    token, states = make_token(case, 3, torch.float32), make_states(case, slots, torch.float32)
    arguments = (*(token[name] for name in tensors), None, *states, *options)
    indices = None if indices is None else int32(indices)
    torch.library.opcheck(op.default, (*arguments, indices))


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
