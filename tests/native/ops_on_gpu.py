# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ops on a GPU as users and torch call them: on states in slots, in place, compiled, and with
what torch demands of an op. Run by scripts/gpu_check.py, as on_gpu.py; and, but for what is in
place, in the emulator, by test_cuda_ops.py.

B batch, T time, H heads, K key dim, V value dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attention_cases
import rule_cases
from attention_cases import Case
from cuda_cases import DEVICE, SEED, needs_a_gpu
from hf_linear_attention import (
    LinearAttentionState,
    delta_rule,
    delta_rule_,
    delta_rule_step_,
    linear_attention,
    linear_attention_,
    linear_attention_step_,
)
from rule_cases import RuleCase

WITHIN = {torch.float32: dict(rtol=1e-4, atol=1e-5), torch.bfloat16: dict(rtol=2e-2, atol=2e-2)}

OF_TOKENS = {"q", "k", "v", "log_decay", "beta", "write_strength", "key_mask"}
every_dtype = pytest.mark.parametrize("dtype", WITHIN, ids=str)


def assert_close(got: Any, wanted: Any, dtype: torch.dtype) -> None:
    """Within what the dtype has of the largest number in each tensor."""
    if isinstance(wanted, list):
        for x, y in zip(got, wanted, strict=True):
            assert_close(x, y, dtype)
        return
    tolerance = dict(WITHIN[dtype])
    tolerance["atol"] *= max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, **tolerance)


class Op(NamedTuple):
    """On values, on states in slots, and for one token, with inputs for three rows."""

    on_values: Callable[..., Any]
    in_place_: Callable[..., Tensor]
    step_: Callable[..., Tensor]
    case: Case | RuleCase

    def inputs(self, dtype: torch.dtype, **changed: Any) -> dict[str, Any]:
        """The keyword arguments of on_values."""
        case = type(self.case)(**vars(self.case) | changed)
        if isinstance(case, Case):
            return attention_cases.make_inputs(case, dtype, DEVICE, SEED)
        return rule_cases.make_inputs(case, dtype, SEED, DEVICE)

    def run(self, inputs: dict[str, Any], **more: Any) -> tuple[Tensor, list[Tensor]]:
        """y and the states after it."""
        y, state = self.on_values(**inputs, **more, return_state=True, backend=DEVICE)
        return y, rule_cases.states_of(state)


LINEAR = linear_attention, linear_attention_, linear_attention_step_
DELTA = delta_rule, delta_rule_, delta_rule_step_
ROWS = dict(B=3, T=12, initial=True)
OPS = {
    "linear": Op(*LINEAR, Case(**ROWS, Hq=4, decay="mild", mask="middle")),
    "linear, strided": Op(*LINEAR, Case(**ROWS, Hq=4, strided=True)),
    "linear, fixed size": Op(*LINEAR, Case(**ROWS, K=64, V=64)),
    "linear, sums": Op(*LINEAR, Case(**ROWS, normalize=False)),
    "general": Op(
        *LINEAR,
        RuleCase("linear_attention", **ROWS, Hv=4, decay="channel", mask="left"),
    ),
    "general, normalised": Op(
        *LINEAR,
        RuleCase("linear_attention", **ROWS, decay="channel", normalize=True, feature_map="elu+1"),
    ),
    "delta": Op(*DELTA, RuleCase(**ROWS, Hq=1, Hk=2, Hv=4, decay="channel", mask="middle")),
    "delta, strided": Op(*DELTA, RuleCase(**ROWS, strided=True, normalize_qk=False)),
    "delta, fixed size": Op(*DELTA, RuleCase(**ROWS, K=64, V=64)),
}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
NO_SLOT = 1  # of three rows
INDICES, IS_NEW = [4, -1, 1], [False, False, True]
SLOTS = 6


def state_of(op: Op, states: list[Tensor]) -> Any:
    if op.step_ is delta_rule_step_:
        return states[0]
    return LinearAttentionState(states[0], states[1] if len(states) > 1 else None)


def slots_of(states: list[Tensor]) -> list[Tensor]:
    """Larger buffers with the rows that have slots in these, and NaN in all others."""
    buffers = [x.new_full((SLOTS, *x.shape[1:]), torch.nan) for x in states]
    for buffer, x in zip(buffers, states, strict=True):
        for row, slot in enumerate(INDICES):
            if row != NO_SLOT:
                buffer[slot] = x[row]
    return buffers


def assert_slots_are(slots: list[Tensor], states: list[Tensor], dtype: torch.dtype) -> None:
    rows = [row for row in range(len(INDICES)) if row != NO_SLOT]
    at = [INDICES[row] for row in rows]
    for buffer, x in zip(slots, states, strict=True):
        assert_close(buffer[at], x[rows], dtype)
        assert buffer[[slot for slot in range(SLOTS) if slot not in at]].isnan().all()


def assert_rows_are(y: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert y[NO_SLOT].eq(0).all()
    rows = [row for row in range(len(INDICES)) if row != NO_SLOT]
    assert_close(y[rows], wanted[rows], dtype)


def on_device(values: list[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@every_op
@every_dtype
@torch.no_grad()
def test_sequences_in_place_are_those_on_states_as_values(op, dtype):
    inputs = op.inputs(dtype)
    initial = rule_cases.states_of(inputs["initial_state"])
    slots = slots_of(initial)
    for x in initial:
        x[IS_NEW.index(True)] = 0
    wanted, states = op.run(inputs)
    given = {n: x for n, x in inputs.items() if n not in ("initial_state", "is_causal")}
    y = op.in_place_(
        **given,
        state=state_of(op, slots),
        state_indices=on_device(INDICES, torch.int32),
        is_new=on_device(IS_NEW, torch.bool),
        backend=DEVICE,
    )
    assert_rows_are(y, wanted, dtype)
    assert_slots_are(slots, states, dtype)


@every_op
@every_dtype
@torch.no_grad()
def test_packed_sequences_in_place_are_those_on_states_as_values(op, dtype):
    """Whose last tokens are no one's."""
    lengths = (7, 0, 22)
    inputs = op.inputs(dtype, B=1, T=sum(lengths), lengths=lengths, mask=None)
    initial = rule_cases.states_of(inputs["initial_state"])
    slots = slots_of(initial)
    wanted, states = op.run(inputs)
    given = {n: x for n, x in inputs.items() if n not in ("initial_state", "is_causal")}
    padded = {
        n: torch.cat([x, torch.full_like(x[:, :3], torch.nan)], 1) if n in OF_TOKENS else x
        for n, x in given.items()
    }
    y = op.in_place_(
        **padded,
        state=state_of(op, slots),
        state_indices=on_device(INDICES, torch.int32),
        backend=DEVICE,
    )
    assert_close(y[:, :-3], wanted, dtype)
    assert y[:, -3:].eq(0).all()
    assert_slots_are(slots, states, dtype)


def token(inputs: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of a step for one token of a sequence's."""
    others = ("initial_state", "is_causal")
    return {n: x[:, t] if n in OF_TOKENS else x for n, x in inputs.items() if n not in others} | {
        "backend": DEVICE
    }


@every_op
@every_dtype
@torch.no_grad()
def test_steps_by_slot_are_the_sequence(op, dtype):
    inputs = op.inputs(dtype, T=3)
    slots = slots_of(rule_cases.states_of(inputs["initial_state"]))
    wanted, states = op.run(inputs)
    indices = on_device(INDICES, torch.int32)
    state = state_of(op, slots)
    outputs = [op.step_(**token(inputs, t), state=state, state_indices=indices) for t in range(3)]
    assert_rows_are(torch.stack(outputs, 1), wanted, dtype)
    rows = [row for row in range(len(INDICES)) if row != NO_SLOT]
    for buffer, x in zip(slots, states, strict=True):
        at = buffer[[INDICES[row] for row in rows]]
        assert_close(at, x[rows], dtype)


def results(op: Op, run: Callable[..., Any], inputs: dict[str, Any]) -> list[Tensor]:
    """y, states and gradients."""
    leaves = {n: x.detach().requires_grad_() for n, x in rule_cases.tensors_of(inputs).items()}
    y, state = run(**rule_cases.with_tensors(inputs, leaves), return_state=True, backend=DEVICE)
    outputs = [y, *rule_cases.states_of(state)]
    total = sum(x.float().sin().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, list(leaves.values()))]


@every_op
def test_a_compiled_op_has_no_graph_break_and_takes_any_length(op):
    compiled = torch.compile(op.on_values, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (12, 31):
        inputs = op.inputs(torch.float32, T=T)
        got, wanted = (results(op, run, inputs) for run in (compiled, op.on_values))
        assert_close(got, wanted, torch.float32)


@needs_a_gpu
@pytest.mark.parametrize("name", ["linear, fixed size", "delta, fixed size"])
def test_a_compiled_op_in_a_graph(name):
    """Of sequences that are cut, with what forward keeps for backward."""
    op = OPS[name]
    compiled = torch.compile(op.on_values, fullgraph=True, mode="reduce-overhead")
    inputs = op.inputs(torch.bfloat16, B=1, T=1100)
    wanted = results(op, op.on_values, inputs)
    for _ in range(3):  # warmed up, recorded, replayed
        got = results(op, compiled, inputs)
        assert_close(got, wanted, torch.bfloat16)


class Calls(TorchDispatchMode):
    """The native ops that are called, with what."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hf_linear_attention":
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
            self.found.append((func, tuple(copies)))
        return func(*args, **(kwargs or {}))


@every_op
def test_ops_are_what_torch_demands(op):
    """Forward, backward and step: schemas, fakes, and what autograd is told."""
    inputs = op.inputs(torch.float32, T=5)
    calls = Calls()
    with calls:
        results(op, op.on_values, inputs)
        with torch.no_grad():
            states = [x.clone() for x in rule_cases.states_of(inputs["initial_state"])]
            op.step_(**token(inputs, 0), state=state_of(op, states))
    names = {func._opname for func, _ in calls.found}
    assert any(name.endswith("_backward") for name in names)
    assert any(name.endswith("_step_") for name in names)
    for func, arguments in calls.found:
        torch.library.opcheck(func, arguments)
