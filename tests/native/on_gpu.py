# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The CUDA kernels on a GPU, on numbers that are new every time; run by scripts/gpu_check.py.

Not among the tests that pytest finds by itself. ON_GPU_DEVICE=cpu runs them with the CPU's kernels,
which is how they are tested themselves. In deterministic mode (conftest.py) results and workspaces
start as NaN, so that what a kernel forgets to write is noticed.
"""

import pytest
import torch
from torch import Tensor

import attention_cases
from attention_cases import Case
from by_name import by_name
from cuda_cases import (
    CASES,
    DEVICE,
    DTYPES,
    FEATURE_MAPS,
    HALF_CASES,
    RELATIVE_ERROR,
    SEED,
    SIZES,
    STEP_CASES,
    assert_all_close,
    errors_where_much_cancels,
    needs_a_gpu,
)
from hf_linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_,
    linear_attention_step_,
)
from hf_linear_attention.ops.chunked.linear_attention import chunked_linear_attention


def attend(**inputs) -> tuple[Tensor, LinearAttentionState]:
    return linear_attention(**inputs, return_state=True, backend=DEVICE)


def check(case: Case, dtype: torch.dtype) -> None:
    inputs = attention_cases.make_inputs(case, dtype, DEVICE, SEED)
    wanted = attention_cases.expected(inputs)
    got = attention_cases.run_with_gradients(attend, inputs)
    assert_all_close(got, wanted, dtype)
    again = attention_cases.run_with_gradients(attend, inputs)
    assert all(x.equal(again[name]) for name, x in got.items()), "another result the second time"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_small_cases(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_the_references(case):
    check(case, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K,V", [*SIZES, (16, 16), (64, 64), (128, 128), (127, 129), (256, 256)])
def test_heads_of_any_size(K, V, dtype):
    check(Case(B=1, T=150, Hq=2, Hkv=1, K=K, V=V, decay="mild", initial=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=500, Hq=2, Hkv=1, K=64, V=64),
        Case(B=1, T=500, K=64, V=64, decay="mild", mask="middle", initial=True),
        Case(B=1, T=500, lengths=(1, 200, 0, 129, 170), K=64, V=64, decay="resets", initial=True),
        Case(B=1, T=500, K=64, V=64, is_causal=False, mask="left"),
    ],
    ids=str,
)
def test_sequences_of_many_pieces(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=1100, Hq=2, Hkv=1, K=64, V=64),
        Case(B=1, T=1100, Hq=1, Hkv=1, K=64, V=64, lengths=(3, 1097), initial=True),
    ],
    ids=str,
)
def test_backward_goes_on_from_what_forward_kept(case):
    """Of sequences that are cut, and for whose pieces there is room."""
    check(case, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,T,H,D", [(1, 20000, 2, 64), (2, 3000, 16, 128), (1, 2000, 4, 256)])
def test_long_sequences_are_those_of_the_chunked_form_in_float64(B, T, H, D, dtype):
    case = Case(B=B, T=T, Hq=H, Hkv=H, K=D, V=D)
    inputs = attention_cases.make_inputs(case, dtype, DEVICE, SEED)
    exact = {
        name: x.double() if isinstance(x, Tensor) else x  # stays where it is
        for name, x in inputs.items()
    }
    wanted = attention_cases.run_with_gradients(
        by_name("linear_attention", chunked_linear_attention), exact
    )
    for name, x in attention_cases.run_with_gradients(attend, inputs).items():
        error = (x.double() - wanted[name]).norm() / wanted[name].norm()
        assert error < RELATIVE_ERROR[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_gradients_of_which_much_cancels(D, dtype):
    for name, error in errors_where_much_cancels(attend, D, dtype, DEVICE).items():
        assert error < RELATIVE_ERROR[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_feature_maps(name, dtype):
    check(Case(B=1, T=70, K=16, V=16, feature_map=name, normalize=name == "elu+1"), dtype)


def test_masked_nan_reaches_nothing():
    inputs = attention_cases.make_inputs(Case(mask="middle", decay="mild"), torch.float32, DEVICE)
    clean, _ = attend(**inputs)
    names = ("q", "k", "v", "log_decay")
    for name in names:
        inputs[name][~inputs["key_mask"]] = torch.nan
        inputs[name].requires_grad_()
    y, _ = attend(**inputs)
    assert y.equal(clean)
    for x in torch.autograd.grad(y.sum(), [inputs[name] for name in names]):
        assert x.isfinite().all() and x[~inputs["key_mask"]].eq(0).all()


# ---- the step ----


def token(inputs: dict, t: int) -> dict:
    """The arguments of linear_attention_step_ for one token of linear_attention's inputs."""
    over_time = {"q", "k", "v", "log_decay", "key_mask"}
    arguments = {name: x[:, t] for name, x in inputs.items() if name in over_time}
    options = {name: inputs[name] for name in ("feature_map", "normalize", "eps")}
    return arguments | options | {"backend": DEVICE}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [*STEP_CASES, Case(B=64, T=2, Hq=8, Hkv=8, K=128, V=128, initial=True)], ids=str
)
@torch.no_grad()
def test_steps_are_the_reference_token_by_token(case, dtype):
    inputs = attention_cases.make_inputs(case, dtype, DEVICE, SEED)
    y, (kv, z) = attention_cases.reference(**attention_cases.to_float64(inputs))
    updated = LinearAttentionState(
        *(x if x is None else x.clone() for x in inputs["initial_state"])
    )
    outputs = [linear_attention_step_(**token(inputs, t), state=updated) for t in range(case.T)]
    wanted = {"y": y, "final kv": kv}
    got = {"y": torch.stack(outputs, 1).cpu(), "final kv": updated.kv.cpu()}
    if z is not None:
        wanted["final z"], got["final z"] = z, updated.z.cpu()
    assert_all_close(got, wanted, dtype)


def decoding() -> tuple[dict, LinearAttentionState]:
    case = Case(B=3, T=1, Hq=4, K=64, V=64, initial=True, decay="mild")
    inputs = attention_cases.make_inputs(case, torch.bfloat16, DEVICE, SEED)
    return token(inputs, 0), inputs["initial_state"]


@torch.no_grad()
def test_a_compiled_step_has_no_graph_break():
    arguments, state = decoding()
    copy = LinearAttentionState(*(x.clone() for x in state))
    wanted = linear_attention_step_(**arguments, state=copy)
    compiled = torch.compile(linear_attention_step_, fullgraph=True, backend="aot_eager")
    assert compiled(**arguments, state=state).equal(wanted)
    assert state.kv.equal(copy.kv) and state.z.equal(copy.z)


# ---- what only CUDA has ----


@needs_a_gpu
@torch.no_grad()
def test_a_cuda_graph_records_steps_and_sequences():
    arguments, state = decoding()
    inputs = attention_cases.make_inputs(Case(T=300, K=64, V=64), torch.bfloat16, DEVICE, SEED)
    copy = LinearAttentionState(*(x.clone() for x in state))
    wanted = [linear_attention_step_(**arguments, state=copy) for _ in range(3)][-1]
    sequence, _ = attend(**inputs)
    slots = LinearAttentionState(*(torch.cat([x, x])[::2] for x in state))
    indices = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    for x, its_rows in zip(slots, state, strict=True):
        x[[2, 0, 1]] = its_rows

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_attention_step_(**arguments, state=slots, state_indices=indices)
        captured, _ = attend(**inputs)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert y.equal(wanted) and slots.kv[[2, 0, 1]].equal(copy.kv) and captured.equal(sequence)


@needs_a_gpu
def test_kernels_run_on_the_current_stream():
    inputs = attention_cases.make_inputs(Case(T=300, K=64, V=64), torch.float32, DEVICE, SEED)
    wanted, _ = attend(**inputs)
    stream = torch.cuda.Stream()
    late = {name: torch.zeros_like(inputs[name]) for name in ("q", "k", "v")}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what follows has to wait for it
        for name, x in late.items():
            x.copy_(inputs[name])
        y, _ = attend(**inputs | late)
    stream.synchronize()
    assert y.equal(wanted)


@needs_a_gpu
def test_nothing_waits_for_the_device():
    inputs = attention_cases.make_inputs(
        Case(B=1, T=75, lengths=(40, 35), decay="mild", mask="middle"), torch.float32, DEVICE, SEED
    )
    case = Case(B=4, T=1, initial=True)
    slots = attention_cases.make_inputs(case, torch.float32, DEVICE, SEED)["initial_state"]
    indices = torch.tensor([2, -1], dtype=torch.int32, device=DEVICE)
    in_place = inputs | {"cu_seqlens": torch.tensor([0, 40, 70], device=DEVICE), "state": slots}
    in_place |= {"state_indices": indices, "is_new": indices == 2, "backend": DEVICE}
    del in_place["is_causal"]

    def call_all():
        attend(**inputs)
        return linear_attention_(**in_place)

    call_all()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = call_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y[:, :40].isfinite().all() and not y[:, 40:].any()
