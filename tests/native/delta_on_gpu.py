# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule's CUDA kernels, as on_gpu.py has those of linear attention: on a GPU, run by
scripts/gpu_check.py; and the small ones in the emulator, run by test_cuda_ops.py.

Shapes: B batch, T time, H heads, K key dim, V value dim.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import hf_linear_attention
from attention_cases import TOLERANCE
from by_name import by_name
from cuda_cases import DEVICE, DTYPES, RELATIVE_ERROR, SEED, needs_a_gpu
from hf_linear_attention import delta_rule, delta_rule_, delta_rule_step_, linear_attention
from hf_linear_attention.ops.chunked.delta_rule import chunked_delta_rule
from rule_cases import (
    CASES,
    RuleCase,
    make_inputs,
    on_device,
    run_with_gradients,
    tensors_of,
    to_float64,
)


def check(case: RuleCase, dtype: torch.dtype) -> None:
    """Results and gradients are those of the loop in float64, within what the dtype has of the
    largest number in each; and the same the second time.
    """
    inputs = make_inputs(case, dtype, SEED)
    wanted = run_with_gradients(case.function, to_float64(inputs), "reference")
    inputs = on_device(inputs, DEVICE)
    got = run_with_gradients(case.function, inputs, DEVICE)
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        tolerance = dict(TOLERANCE[dtype])
        if x.numel() > 0:
            tolerance["atol"] *= max(1.0, wanted[name].abs().max().item())
        torch.testing.assert_close(
            x.double().cpu(),
            wanted[name],
            **tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    if DEVICE != "cuda":
        return  # the emulator has no time to do it twice
    again = run_with_gradients(case.function, inputs, DEVICE)
    assert all(x.equal(again[name]) for name, x in got.items()), "another result the second time"


# ---- few blocks, small enough for the emulator and the sanitizers ----

TINY = dict(B=1, Hq=1, Hk=1, Hv=2)
SMALL_CASES = [
    RuleCase(**TINY, T=70, K=20, V=18, decay="channel", resets=True, mask="middle", initial=True),
    RuleCase(**TINY, T=35, lengths=(0, 33, 2), initial=True, strength="ends"),
    RuleCase(**TINY, T=20, decay=None, strided=True, normalize_qk=False, strength="one"),
    RuleCase(op="linear_attention", **TINY, T=34, K=34, V=36, decay="channel", resets=True),
]
SMALL_CASES += [
    replace(SMALL_CASES[0], erase="values"),
    replace(SMALL_CASES[1], erase="keys"),
    replace(SMALL_CASES[2], erase="values"),
]
SMALL_CASES += [replace(case, op="dplr_delta_rule", Hq=2, Hk=2) for case in SMALL_CASES[:3]]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_small_cases(case, dtype):
    check(case, dtype)


def test_small_cases_in_float16():
    for case in (RuleCase(), RuleCase(erase="values"), RuleCase(op="dplr_delta_rule")):
        check(replace(case, B=1, T=20, K=20, V=18, decay="channel", mask="middle"), torch.float16)


def test_small_cases_of_no_tokens():
    for case in (RuleCase(**TINY, T=0, initial=True), RuleCase(B=0)):
        check(case, torch.float32)
    check(RuleCase(**TINY, T=0, lengths=()), torch.float32)


def test_small_cases_of_many_channels():
    case = RuleCase(B=1, Hq=1, Hk=1, Hv=1, T=20, K=150, V=20, decay="channel")
    for more in ({}, {"erase": "values"}, {"op": "dplr_delta_rule"}):
        check(replace(case, **more), torch.float32)


# What kernels of their own know: heads of 64 or 128 key features, a decay for each head or none, in
# rows that are contiguous.
FIXED_SIZE = dict(B=1, Hq=1, Hk=1, Hv=2, K=64, V=80)
FIXED_SIZE_CASES = [
    RuleCase(**FIXED_SIZE, T=150, initial=True, resets=True),
    RuleCase(**FIXED_SIZE, T=150, lengths=(0, 1, 64, 0, 65, 20, 0), strength="two", initial=True),
    RuleCase(**FIXED_SIZE | dict(B=2, Hk=2, V=16), T=30, decay=None, normalize_qk=False),
    RuleCase(**FIXED_SIZE | dict(K=128, V=64), T=90, strength="ends", scale=0.3),
    RuleCase(
        **FIXED_SIZE | dict(Hq=2, Hk=2, V=48), T=70, strength="ends", initial=True, resets=True
    ),
]


@pytest.mark.parametrize("case", FIXED_SIZE_CASES, ids=str)
def test_small_cases_of_fixed_sizes(case):
    check(case, torch.bfloat16)


@pytest.mark.parametrize(
    "more",
    [{}, {"erase": "values"}, {"op": "dplr_delta_rule", "Hq": 2, "Hk": 2}],
    ids=["delta_rule", "erase_key", "dplr"],
)
def test_masked_nan_reaches_nothing(more):
    case = RuleCase(**TINY | more, T=20, decay="channel", mask="middle")
    inputs = make_inputs(case, torch.float32, SEED, DEVICE)
    clean = case.function(**inputs, backend=DEVICE)
    names = tensors_of(inputs).keys()
    for name in names:
        inputs[name][~inputs["key_mask"]] = torch.nan
        inputs[name].requires_grad_()
    y = case.function(**inputs, backend=DEVICE)
    assert y.equal(clean)
    for x in torch.autograd.grad(y.sum(), [inputs[name] for name in names]):
        assert x.isfinite().all() and x[~inputs["key_mask"]].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_long_keys_that_are_normed_have_finite_gradients(dtype):
    """They meet gradients as large, of a state that is."""
    inputs = make_inputs(RuleCase(**TINY, T=5, K=20, V=18, decay=None), dtype, SEED)
    scales = {"q": 1e17, "k": 1e17, "v": 1e6}
    inputs |= {name: inputs[name] * scale for name, scale in scales.items()}
    found = []
    for given, backend in (
        (to_float64(inputs), "reference"),
        (on_device(inputs, DEVICE), DEVICE),
    ):
        leaves = [given[name].requires_grad_() for name in scales]
        y = delta_rule(**given, backend=backend)
        dy = torch.full_like(y, 1e17)
        found.append([x.double().cpu() for x in torch.autograd.grad(y, leaves, dy)])
    for exact, actual in zip(*found, strict=True):
        assert exact.isfinite().all()
        tolerance = RELATIVE_ERROR[dtype] * exact.abs().max()
        torch.testing.assert_close(actual, exact, rtol=0, atol=tolerance.item())


# ---- the step ----


def token(inputs: dict, t: int) -> dict:
    """The arguments of a step for one token of a sequence's."""
    over_time = {"q", "k", "v", "beta", "log_decay", "key_mask", "erase_key", "a", "b"}
    arguments = {name: x[:, t] for name, x in inputs.items() if name in over_time}
    return arguments | {name: inputs[name] for name in inputs.keys() & {"scale", "normalize_qk"}}


STEP_CASES = [
    RuleCase(B=3, T=2, Hv=4, Hk=2, Hq=1, decay="channel", mask="middle", initial=True, resets=True),
    RuleCase(B=2, T=2, K=150, V=40, initial=True, normalize_qk=False, strided=True),
    RuleCase(B=2, T=2, K=1, V=1, initial=True, decay=None),
]
STEP_CASES += [
    *(replace(case, erase="values") for case in STEP_CASES),
    *(replace(case, op="dplr_delta_rule", Hq=2, Hk=2, Hv=2) for case in STEP_CASES),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [*STEP_CASES, RuleCase(B=64, T=2, Hq=16, Hk=16, Hv=32, K=128, V=128, initial=True)],
    ids=lambda case: f"{case.op},erase={case.erase},{case.B}x{case.K}x{case.V}",
)
@torch.no_grad()
def test_steps_are_the_reference_token_by_token(case, dtype):
    inputs = make_inputs(case, dtype, SEED)
    wanted, wanted_state = case.function(
        **to_float64(inputs), return_state=True, backend="reference"
    )
    inputs = on_device(inputs, DEVICE)
    state = inputs["initial_state"].clone()
    step_ = getattr(hf_linear_attention, f"{case.op}_step_")
    y = torch.stack(
        [step_(**token(inputs, t), state=state, backend=DEVICE) for t in range(case.T)], 1
    )
    torch.testing.assert_close(y.double().cpu(), wanted, **TOLERANCE[dtype])
    torch.testing.assert_close(state.double().cpu(), wanted_state, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("gap", [0, 3])
@torch.no_grad()
def test_steps_by_slot_are_those_of_rows_in_order(gap):
    """And an index of no slot touches nothing: -1 gives 0."""
    case = RuleCase(B=3, T=1, K=20, V=36, decay="channel", initial=True)
    inputs = make_inputs(case, torch.float32, SEED, DEVICE)
    states, at = inputs["initial_state"], [4, 1]
    pages = torch.full((6, states[0].numel() + gap), torch.nan, device=DEVICE)
    slots = pages[:, : states[0].numel()].view(6, *states.shape[1:])
    slots[at] = states[:2]
    before = pages.clone()
    indices = torch.tensor([*at, -1], dtype=torch.int32, device=DEVICE)
    arguments = token(inputs, 0) | {"backend": DEVICE}
    y = delta_rule_step_(**arguments, state=slots, state_indices=indices)
    wanted = delta_rule_step_(**arguments, state=states)
    # Slots that are not aligned as the first one is are read by narrow loads.
    within = dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[:2], wanted[:2], **within)
    torch.testing.assert_close(slots[at], states[:2], **within)
    assert y[2].eq(0).all()
    others = [0, 2, 3, 5]
    assert pages[others].isnan().all() and before[others].isnan().all()
    assert pages[:, states[0].numel() :].isnan().all()


# ---- only on a GPU ----


@needs_a_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_the_references(case):
    check(case, torch.float32)


SIZES = [(16, 16), (64, 64), (128, 128), (127, 129), (128, 32), (256, 256), (7, 20)]


@needs_a_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K,V", SIZES)
def test_heads_of_any_size(K, V, dtype):
    for decay in ("head", "channel"):
        check(replace(SMALL_CASES[0], T=150, K=K, V=V, decay=decay, resets=False), dtype)


@needs_a_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [None, "head", "channel"])
@pytest.mark.parametrize("B,T,H,D", [(1, 20000, 2, 64), (2, 3000, 16, 128)])
def test_long_sequences_are_those_of_the_chunked_form_in_float64(B, T, H, D, decay, dtype):
    case = RuleCase(B=B, T=T, Hq=H, Hk=H, Hv=H, K=D, V=D, decay=decay)
    inputs = make_inputs(case, dtype, SEED, DEVICE)

    def chunked(q, k, v, beta, log_decay=None, *, scale, backend, return_state, **options):
        scale = D**-0.5 if scale is None else scale
        return by_name("delta_rule", chunked_delta_rule)(
            q, k, v, beta, log_decay, scale=scale, **options
        )

    wanted = run_with_gradients(chunked, to_float64(inputs), None)
    for name, x in run_with_gradients(delta_rule, inputs, DEVICE).items():
        error = (x.double() - wanted[name]).norm() / wanted[name].norm()
        assert error < RELATIVE_ERROR[dtype], name


@needs_a_gpu
@torch.no_grad()
def test_a_cuda_graph_records_steps_and_sequences():
    case = RuleCase(B=3, T=300, Hq=4, Hk=4, Hv=8, K=64, V=64, decay="channel", initial=True)
    inputs = make_inputs(case, torch.bfloat16, SEED, DEVICE)
    states = inputs["initial_state"]
    arguments = token(inputs, 0) | {"backend": DEVICE}
    rows = states.clone()
    wanted = [delta_rule_step_(**arguments, state=rows) for _ in range(3)][-1]
    sequence = delta_rule(**inputs, backend=DEVICE)
    slots = torch.zeros(6, *states.shape[1:], device=DEVICE)
    slots[[4, 0, 2]] = states
    indices = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = delta_rule_step_(**arguments, state=slots, state_indices=indices)
        captured = delta_rule(**inputs, backend=DEVICE)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert y.equal(wanted) and slots[[4, 0, 2]].equal(rows) and captured.equal(sequence)


@needs_a_gpu
def test_nothing_waits_for_the_device():
    case = RuleCase(B=1, T=75, lengths=(40, 35), mask="middle", initial=True)
    inputs = make_inputs(case, torch.float32, SEED, DEVICE)
    slots = torch.zeros(4, *inputs["initial_state"].shape[1:], device=DEVICE)
    indices = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    sequences = {name: x for name, x in inputs.items() if name not in ("initial_state", "key_mask")}
    sequences |= {"state": slots, "state_indices": indices, "is_new": indices == 2}

    def call_all() -> Tensor:
        delta_rule(**inputs, backend=DEVICE)
        linear = {name: inputs[name] for name in ("q", "k", "v", "key_mask")}
        linear_attention(**linear, write_strength=inputs["beta"], backend=DEVICE)
        return delta_rule_(**sequences, backend=DEVICE)

    call_all()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = call_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.isfinite().all()
