# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The CUDA kernels without a GPU: their source, compiled for the CPU (csrc/cuda/common/emulator.h).

B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed sequences.
"""

import ctypes
import shutil
import subprocess
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint,
    c_void_p,
)
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attention_cases
from attention_cases import Case
from cuda_cases import (
    CASES,
    DTYPES,
    FEATURE_MAPS,
    HALF_CASES,
    RELATIVE_ERROR,
    SIZES,
    STEP_CASES,
    assert_all_close,
    errors_where_much_cancels,
)
from emulated_kernels import CXX, WITH_WARNINGS, compiled_kernels
from hf_linear_attention.ops.feature_maps import POINTWISE
from hf_linear_attention.ops.linear_attention import LinearAttentionState

ROOT = Path(__file__).resolve().parents[2]
if not shutil.which(CXX[0]):
    pytest.skip("there is no C++ compiler", allow_module_level=True)

# How the threads of a block are ordered: ascending, descending, two shuffles.
SCHEDULES = (0, 1, 2, 3)

# ---- csrc/kernels/common.h and linear_attention.h ----


class View(Structure):
    _fields_ = [("data", c_void_p)] + [(n, c_int64) for n in ("batch", "time", "head", "dim")]


HEAD_SIZES = [*((n, c_int64) for n in ("B", "Hq", "Hkv", "K", "V")), ("dtype", c_int32)]


class Options(Structure):
    _fields_ = [("feature_map", c_int64), ("eps", c_double), ("normalize", c_bool)]


class Problem(Structure):
    _anonymous_ = ["options"]
    _fields_ = [
        *HEAD_SIZES,
        *((n, c_int64) for n in ("T", "num_sequences")),
        *((n, c_void_p) for n in ("cu_seqlens", "key_mask")),
        ("options", Options),
        ("is_causal", c_bool),
        *((n, View) for n in ("q", "k", "v", "log_decay")),
        *((n, c_void_p) for n in ("initial_kv", "initial_z")),
    ]


class ForwardResult(Structure):
    _fields_ = [
        ("y", View),
        *((n, c_void_p) for n in ("den", "kv", "z", "piece_states")),
        ("piece_room", c_int64),
    ]


class BackwardInput(Structure):
    _fields_ = [("dy", View), ("dkv", c_void_p), ("dz", c_void_p), ("forward", ForwardResult)]


class BackwardResult(Structure):
    _fields_ = [
        *((n, View) for n in ("dq", "dk", "dv", "dlog_decay")),
        ("dinitial_kv", c_void_p),
        ("dinitial_z", c_void_p),
    ]


class Slots(Structure):
    _fields_ = [("count", c_int64), ("state_indices", c_void_p)]


class StepProblem(Structure):
    _anonymous_ = ["options"]
    _fields_ = [
        *HEAD_SIZES,
        ("options", Options),
        *((n, View) for n in ("q", "k", "v", "log_decay")),
        ("key_mask", c_void_p),
        ("slots", Slots),
        *((n, c_void_p) for n in ("kv", "z")),
        *((n, c_int64) for n in ("kv_slot", "z_slot")),
        *((n, c_void_p) for n in ("before", "z_before", "den")),
        ("y", View),
    ]


class Device(Structure):
    _fields_ = [(n, c_int64) for n in ("multiprocessors", "shared_bytes", "piece_length")]


class Place(Structure):
    _fields_ = [
        ("device", Device),
        ("workspace", c_void_p),
        ("workspace_bytes", POINTER(c_int64)),
        ("stream", c_void_p),
    ]


STRUCTURES = (Problem, ForwardResult, BackwardInput, BackwardResult, StepProblem, Device, Place)

# One of an H100's size, that gives blocks long pieces; and one that makes them as short as can be.
LARGE = Device(132, 227 << 10, 0)
SHORT_PIECES = Device(132, 227 << 10, 1)
MIDDLE_MEMORY = Device(108, 163 << 10, 0)  # an A100's, of which large tiles have one stage
LITTLE_MEMORY = Device(132, 99 << 10, 0)


def view(x: Tensor | None) -> View:
    if x is None:
        return View()
    if x.dim() < 3 or (x.dim() == 3 and x.dtype != torch.float32):
        raise ValueError("give token_view() what has no time")
    strides = (*x.stride(), 0) if x.dim() == 3 else x.stride()
    return View(x.data_ptr(), *strides)


def token_view(x: Tensor | None) -> View:
    if x is None:
        return View()
    batch, head, dim = (*x.stride(), 0)[:3]
    return View(x.data_ptr(), batch, 0, head, dim)


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# ---- the kernels as functions of tensors ----


def build(directory: Path, kernels: list[Path]) -> ctypes.CDLL:
    """The emulated kernels as a shared library."""
    library = directory / "emulated.so"
    sources = [ROOT / "tests" / "native" / "emulated.cpp", ROOT / "csrc" / "cuda" / "kernels.cpp"]
    command = [*CXX, *WITH_WARNINGS, "-shared", "-o", library, *sources, *kernels]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.emulator_error.restype = ctypes.c_char_p
    loaded.size_of_problems.restype = c_int64
    loaded.set_schedule.argtypes = [c_uint]
    loaded.set_missing_wait.argtypes = [c_int]
    loaded.feature_map_name.restype = ctypes.c_char_p
    loaded.feature_map_name.argtypes = [c_int64]
    loaded.forward.argtypes = [POINTER(s) for s in (Problem, ForwardResult, Place)]
    loaded.backward.argtypes = [POINTER(s) for s in (Problem, BackwardInput, BackwardResult, Place)]
    loaded.step.argtypes = [POINTER(StepProblem)]
    loaded.set_most_shared_bytes.argtypes = [c_int64]
    loaded.most_blocks.restype = c_int64
    loaded.accumulated.restype = c_float
    loaded.accumulated.argtypes = [c_int64, c_float, c_int64]
    assert loaded.load_kernels() == 0
    assert loaded.size_of_problems() == sum(ctypes.sizeof(s) for s in STRUCTURES)
    return loaded


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    kernels = compiled_kernels(tmp_path_factory, WITH_WARNINGS, "linear_attention")
    return build(tmp_path_factory.mktemp("emulated"), kernels)


class EmulatorError(Exception):
    """What the emulator found wrong with a kernel."""


def call(library: ctypes.CDLL, function: str, *arguments: Structure, schedule: int = 0) -> None:
    """Calls a launcher, with a workspace of NaN if it takes a device."""
    library.set_schedule(schedule)
    run = getattr(library, function)
    if not isinstance(arguments[-1], Device):
        failed = run(*map(byref, arguments))
    else:
        *arguments, device = arguments
        library.set_most_shared_bytes(device.shared_bytes)
        needed = workspace_bytes(library, function, *arguments, device)
        workspace = torch.full((needed + 1,), 0xFF, dtype=torch.uint8)
        place = Place(device, workspace.data_ptr(), ctypes.pointer(c_int64(0)))
        failed = run(*map(byref, arguments), byref(place))
    if failed:
        raise EmulatorError(library.emulator_error().decode())


def workspace_bytes(library, function: str, *arguments: Structure) -> int:
    *arguments, device = arguments
    needed = c_int64(0)
    place = Place(device, None, ctypes.pointer(needed))
    getattr(library, function)(*map(byref, arguments), byref(place))
    return needed.value


def make_problem(q, k, v, log_decay, key_mask, cu_seqlens, kv, z, options) -> Problem:
    B, T, Hq, K = q.shape
    problem = Problem(B, Hq, k.shape[2], K, v.shape[3], T=T)
    problem.num_sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    problem.dtype = DTYPES.index(q.dtype)
    problem.feature_map = FEATURE_MAPS.index(options["feature_map"] or "identity")
    for name in ("normalize", "is_causal", "eps"):
        setattr(problem, name, options[name])
    problem.q, problem.k, problem.v, problem.log_decay = map(view, (q, k, v, log_decay))
    problem.cu_seqlens, problem.key_mask = pointer(cu_seqlens), pointer(key_mask)
    problem.initial_kv, problem.initial_z = pointer(kv), pointer(z)
    return problem


class Attention(torch.autograd.Function):
    """Forward and backward; results of both start as NaN."""

    @staticmethod
    def forward(
        ctx, library, device, schedule, keeps, options, key_mask, cu_seqlens, *differentiable
    ):
        q, k, v, log_decay, kv, z = differentiable
        problem = make_problem(q, k, v, log_decay, key_mask, cu_seqlens, kv, z, options)
        rows, (Hkv, K), V = problem.num_sequences, k.shape[2:], v.shape[3]
        y = torch.empty(*q.shape[:3], V, dtype=q.dtype)
        den = torch.empty(q.shape[:3])
        final_kv, final_z = torch.empty(rows, Hkv, K, V), torch.empty(rows, Hkv, K)
        if not problem.normalize:
            den = final_z = None
        ctx.room = q.shape[0] * (q.shape[1] // 32 + 1) + rows if keeps else 0
        piece_states = torch.full((ctx.room * Hkv * (K * V + K),), torch.nan)
        tensors = y, den, final_kv, final_z, piece_states
        result = ForwardResult(view(y), *map(pointer, tensors[1:]), ctx.room)
        call(library, "forward", problem, result, device, schedule=schedule)
        ctx.library, ctx.device, ctx.schedule, ctx.options = library, device, schedule, options
        ctx.save_for_backward(*differentiable, key_mask, cu_seqlens, *tensors)
        ctx.set_materialize_grads(False)
        return y, final_kv, final_z

    @staticmethod
    def backward(ctx, dy, dkv, dz):
        *differentiable, key_mask, cu_seqlens, y, den, kv, z, piece_states = ctx.saved_tensors
        forward = ForwardResult(view(y), *map(pointer, (den, kv, z, piece_states)), ctx.room)
        q, k, v, log_decay, kv, z = differentiable
        problem = make_problem(q, k, v, log_decay, key_mask, cu_seqlens, kv, z, ctx.options)
        dkv, dz = (None if x is None else x.contiguous() for x in (dkv, dz))
        upstream = BackwardInput(view(dy), pointer(dkv), pointer(dz), forward)
        gradients = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in differentiable
        ]
        *views, dinitial_kv, dinitial_z = gradients
        result = BackwardResult(*map(view, views), pointer(dinitial_kv), pointer(dinitial_z))
        call(ctx.library, "backward", problem, upstream, result, ctx.device, schedule=ctx.schedule)
        return (*[None] * 7, *gradients)


def emulated(library: ctypes.CDLL, device: Device = LARGE, schedule: int = 0, keeps: bool = True):
    """linear_attention on the emulated kernels, returning (y, state); forward has room for states
    of pieces, or not.
    """

    def attend(
        q, k, v, log_decay=None, *, key_mask=None, cu_seqlens=None, initial_state=None, **options
    ):
        kv, z = initial_state or (None, None)
        y, kv, z = Attention.apply(
            *(library, device, schedule, keeps, options, key_mask, cu_seqlens),
            *(q, k, v, log_decay, kv, z),
        )
        return y, LinearAttentionState(kv, z)

    return attend


def check(library, case: Case, dtype=torch.float32, device=LARGE, schedule=0) -> None:
    inputs = attention_cases.make_inputs(case, dtype)
    wanted = attention_cases.expected(inputs)
    got = attention_cases.run_with_gradients(emulated(library, device, schedule), inputs)
    assert_all_close(got, wanted, dtype)


# ---- forward and backward ----


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("device", [LARGE, SHORT_PIECES], ids=["long_pieces", "short_pieces"])
def test_results_and_gradients_are_the_references(library, case, device):
    check(library, case, device=device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("K,V", SIZES)
@pytest.mark.parametrize("device", [LARGE, LITTLE_MEMORY], ids=["wide", "narrow"])
def test_heads_of_any_size(library, K, V, device):
    check(
        library, Case(B=1, T=70, Hq=1, Hkv=1, K=K, V=V, decay="mild", initial=True), device=device
    )


# Wide tiles and one row more than they have, which fits into tall ones where the device has these.
LARGE_HEADS = Case(B=1, T=140, Hq=1, Hkv=1, K=64, V=128, decay="mild", initial=True)


@pytest.mark.parametrize(
    "device", [LARGE, MIDDLE_MEMORY, LITTLE_MEMORY], ids=["large", "middle", "little_memory"]
)
def test_large_heads_in_bfloat16(library, device):
    check(library, LARGE_HEADS, torch.bfloat16, device=device)


# What kernels of their own know: heads of 64 or 128 features in rows that are aligned, two feature
# maps, no mask and no decays.
FIXED_SIZE = dict(B=1, T=90, Hq=1, Hkv=1, K=64, V=64)
FIXED_SIZE_CASES = [
    Case(**FIXED_SIZE, initial=True),
    Case(**FIXED_SIZE, feature_map=None, normalize=False),
    Case(**FIXED_SIZE, feature_map=None, initial=True),
    Case(**FIXED_SIZE, feature_map=None, normalize=False, initial=True),
    Case(**FIXED_SIZE | dict(Hq=3, T=130), initial=True),
    Case(**FIXED_SIZE | dict(T=1)),
    Case(**FIXED_SIZE | dict(T=160), lengths=(0, 33, 1, 0, 126), initial=True),
    Case(**FIXED_SIZE, is_causal=False, initial=True),
    Case(**FIXED_SIZE | dict(K=128, V=128, T=140), initial=True),
    Case(**FIXED_SIZE | dict(K=128, V=128, Hq=2), feature_map=None, normalize=False),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", FIXED_SIZE_CASES, ids=str)
@pytest.mark.parametrize(
    "device",
    [LARGE, SHORT_PIECES, LITTLE_MEMORY],
    ids=["long_pieces", "short_pieces", "little_memory"],
)
def test_kernels_that_know_the_walk(library, case, device):
    inputs = attention_cases.make_inputs(case, torch.bfloat16)
    if not case.normalize or case.feature_map is None:
        # Sums of many products of either sign would be off by more than the small ones among them.
        inputs["q"], inputs["k"] = inputs["q"].abs() / case.K, inputs["k"].abs() / 8
    wanted = attention_cases.expected(inputs)
    got = attention_cases.run_with_gradients(emulated(library, device), inputs)
    assert_all_close(got, wanted, torch.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("D", [64, 80, 128, 160])
@pytest.mark.parametrize("device", [LARGE, LITTLE_MEMORY], ids=["large", "little_memory"])
def test_gradients_of_which_much_cancels(library, D, device, dtype):
    """With the normaliser's row behind the others', and in another walk than some of them, or than
    all. A GPU has time for larger heads.
    """
    attend = emulated(library, device)
    for name, error in errors_where_much_cancels(attend, D, dtype, "cpu").items():
        assert error < RELATIVE_ERROR[dtype], name


# ---- the states that forward keeps for backward, where sequences are cut ----

PIECES_CASES = [
    (Case(**FIXED_SIZE | dict(T=150), initial=True), torch.bfloat16),
    (Case(**FIXED_SIZE | dict(T=150, Hq=2), lengths=(40, 0, 110)), torch.bfloat16),
    (Case(T=100, decay="mild", mask="middle", initial=True, Hq=4), torch.float32),
    # Larger heads: several walks of a block; and backward in larger chunks, which cuts anew.
    *(
        (Case(**FIXED_SIZE | dict(K=70, V=130), decay="mild"), x)
        for x in (torch.float32, torch.bfloat16)
    ),
]
in_pieces = pytest.mark.parametrize("case, dtype", PIECES_CASES, ids=str)


def run_in_pieces(library, case: Case, dtype, keeps=True, changed=None, strided=None) -> dict:
    """Results and gradients. `changed` is what becomes of states of pieces between forward and
    backward; tokens are `strided` in one of these, and contiguous in the other.
    """
    attend = emulated(library, SHORT_PIECES, keeps=keeps)

    def strided_from(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0]

    def unpack(x: Tensor) -> Tensor:
        if x.dim() == 1 and x.dtype == torch.float32 and changed:
            return changed(x)
        if x.dim() == 4 and x.shape[1] == case.T and strided:
            return strided_from(x) if strided == "backward" else x.contiguous()
        return x

    inputs = attention_cases.make_inputs(case, dtype)
    if strided == "forward":
        inputs |= {name: strided_from(inputs[name]) for name in "qkv"}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        return attention_cases.run_with_gradients(attend, inputs)


@pytest.mark.sample(3)
@in_pieces
@pytest.mark.parametrize("strided", [None, "forward", "backward"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not_kept"])
def test_backward_has_states_of_pieces_from_forward_or_sums_up_again(
    library, case, dtype, keeps, strided
):
    """However rows lie by then, which other kernels read."""
    wanted = attention_cases.expected(attention_cases.make_inputs(case, dtype))
    got = run_in_pieces(library, case, dtype, keeps=keeps, strided=strided)
    assert_all_close(got, wanted, dtype)


@pytest.mark.sample(1)
@in_pieces
def test_states_of_pieces_that_are_wrong_show_where_they_are_read(library, case, dtype):
    right = run_in_pieces(library, case, dtype)
    wrong = run_in_pieces(library, case, dtype, changed=torch.neg)
    different = {name for name, x in right.items() if not x.equal(wrong[name])}
    if case.V == 130 and dtype == torch.bfloat16:
        assert not different  # they are not read
        return
    assert different == {"d q"} | ({"d log_decay"} if case.decay else set())
    wanted = attention_cases.expected(attention_cases.make_inputs(case, dtype))
    with pytest.raises(AssertionError, match="d q"):
        assert_all_close(wrong, wanted, dtype)
    unread = run_in_pieces(library, case, dtype, keeps=False, changed=torch.zeros_like)
    assert_all_close(unread, wanted, dtype)


def test_a_kernel_that_asks_for_more_shared_memory_than_there_is_is_found(library):
    with pytest.raises(EmulatorError, match="more shared memory than the device has"):
        check(library, Case(), device=Device(132, 4 << 10, 0))


def test_the_walks_of_backward_take_turns_in_one_workspace(library):
    """Heads of 256 features need 0.6 GB for each walk's partial sums."""
    B, T, H, D = 8, 2048, 32, 256
    problem = Problem(B, H, H, D, D, DTYPES.index(torch.bfloat16), T, B)
    problem.normalize = problem.is_causal = True
    # Nothing is launched, so that nobody looks behind a pointer that is not null.
    dy, den = View(1), 1
    upstream = BackwardInput(dy, None, None, ForwardResult(dy, den, None, None))
    result = BackwardResult(dlog_decay=View(1))
    forward = workspace_bytes(library, "forward", problem, ForwardResult(), LARGE)
    backward = workspace_bytes(library, "backward", problem, upstream, result, LARGE)
    assert 0.5e9 < forward < 0.7e9
    assert forward < backward < 1.2 * forward


LONG_CASES = [
    Case(B=1, T=600, Hq=4, K=4, V=4, decay="resets", initial=True),
    Case(B=1, T=600, lengths=(0, 299, 1, 300), K=4, V=4, decay="mild", mask="middle", initial=True),
]


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_the_decay_s_gradient_is_summed_from_piece_to_piece(library, case):
    check(library, case)


@pytest.mark.parametrize("multiprocessors", [1, 3, 5])
def test_a_sequence_is_cut_into_as_many_pieces_as_there_are_places(library, multiprocessors):
    places = 4 * multiprocessors  # for blocks with narrow tiles
    inputs = attention_cases.make_inputs(Case(B=1, T=3000, K=4, V=4), torch.float32)
    library.most_blocks()
    emulated(library, Device(multiprocessors, 227 << 10, 0))(**inputs)
    assert 0.8 * places <= library.most_blocks() <= places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_a_long_sequence_are_not_truncated(library, dtype):
    """Tensor cores cut off what they add to, always to the same side; states are not kept there."""
    T = 4096
    case = Case(B=1, T=T, Hq=1, Hkv=1, K=4, V=4, feature_map=None)
    inputs = attention_cases.make_inputs(case, dtype)
    inputs["k"], inputs["v"] = inputs["k"].abs(), inputs["v"].abs()
    _, wanted = attention_cases.reference(**attention_cases.to_float64(inputs))
    _, state = emulated(library, Device(1, 227 << 10, T))(**inputs)
    for got, of in zip(state, wanted, strict=True):
        assert (got / of - 1).mean().abs() < 2e-6


def test_a_sum_that_stays_in_a_tensor_core_is_noticed(library):
    x, count = torch.tensor(0.7).item(), 32768
    kept = library.accumulated(count, x, count)
    fresh = library.accumulated(count, x, 64)
    assert kept / (x * count) - 1 < -1e-4
    assert abs(fresh / (x * count) - 1) < 5e-6


def test_whatever_is_launched_was_loaded_by_the_first_call(library):
    """So that a graph can be captured after it: loading is not allowed then."""
    library.unload_kernels()
    try:
        with pytest.raises(EmulatorError, match="a kernel that was not loaded"):
            check(library, Case())
    finally:
        library.load_kernels()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_half_precision_is_as_good_as_its_inputs(library, case, dtype):
    check(library, case, dtype, SHORT_PIECES)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_the_order_of_threads_does_not_matter(library, schedule):
    check(library, Case(T=40, decay="mild", initial=True, Hq=4), torch.float32, LARGE, schedule)
    check(library, Case(T=70, K=33, V=40, B=1, Hq=1, Hkv=1), torch.bfloat16, SHORT_PIECES, schedule)


def test_masked_nan_reaches_nothing(library):
    case = Case(mask="middle", decay="mild")
    clean = attention_cases.make_inputs(case, torch.float32)
    dirty = attention_cases.make_inputs(case, torch.float32)
    for name in ("q", "k", "v", "log_decay"):
        dirty[name][~dirty["key_mask"]] = torch.nan
    attend = emulated(library)
    wanted = attention_cases.run_with_gradients(attend, clean)
    for name in ("q", "k", "v", "log_decay"):
        dirty[name].requires_grad_()
    y, state = attend(**dirty)
    assert y.equal(wanted["y"]) and state.kv.equal(wanted["final kv"])
    gradients = torch.autograd.grad(y.sum(), [dirty[n] for n in ("q", "k", "v", "log_decay")])
    assert all(x[~dirty["key_mask"]].eq(0).all() and x.isfinite().all() for x in gradients)


def test_wrong_cu_seqlens_stay_within_the_tensors(library):
    """Nobody checks them on CUDA; that this ends, without an error of the emulator, is the test."""
    inputs = attention_cases.make_inputs(Case(B=1, T=75, lengths=(40, 35)), torch.float32)
    for bounds in ([0, 200, 75], [-9, 40, 75], [70, 40, 9], [75, 75, 2**31 - 1]):
        inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        for device in (LARGE, SHORT_PIECES):
            attention_cases.run_with_gradients(emulated(library, device), inputs)


# ---- the step ----


def run_step(library, inputs, t: int, state, schedule: int, state_indices=None) -> Tensor:
    """One token of linear_attention's inputs; the state is updated in place."""
    token = {
        n: None if x is None else x[:, t]
        for n in ("q", "k", "v", "log_decay")
        for x in [inputs.get(n)]
    }
    q, k, v = token["q"], token["k"], token["v"]
    mask = inputs.get("key_mask")
    mask = None if mask is None else mask[:, t].contiguous()
    y = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
    step = StepProblem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    step.dtype = DTYPES.index(q.dtype)
    step.feature_map = FEATURE_MAPS.index(inputs["feature_map"] or "identity")
    step.normalize, step.eps = inputs["normalize"], inputs["eps"]
    step.q, step.k, step.v, step.log_decay = map(token_view, token.values())
    step.key_mask, step.kv, step.z = pointer(mask), pointer(state.kv), pointer(state.z)
    step.slots = Slots(len(state.kv), pointer(state_indices))
    step.kv_slot, step.z_slot = (0 if x is None else x.stride(0) for x in state)
    step.y = token_view(y)
    call(library, "step", step, schedule=schedule)
    return y


def check_steps(library, case: Case, dtype=torch.float32, schedule=0) -> None:
    inputs = attention_cases.make_inputs(case, dtype)
    y, (final_kv, final_z) = attention_cases.reference(**attention_cases.to_float64(inputs))
    kv, z = inputs["initial_state"]
    updated = LinearAttentionState(kv.clone(), None if z is None else z.clone())
    outputs = [run_step(library, inputs, t, updated, schedule) for t in range(case.T)]
    wanted = {"y": y, "kv": final_kv} | ({} if z is None else {"z": final_z})
    got = {"y": torch.stack(outputs, 1), "kv": updated.kv} | ({} if z is None else {"z": updated.z})
    attention_cases.assert_all_close(got, wanted, dtype)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_steps_are_the_reference_token_by_token(library, case, dtype, schedule):
    check_steps(library, case, dtype, schedule)


def in_slots(x: Tensor, at: list[int], gap: int) -> Tensor:
    """A buffer of 6 slots, numbers of NaN between them, with row i of x in slot at[i]."""
    pages = torch.full((6, x[0].numel() + gap), torch.nan)
    slots = pages[:, : x[0].numel()].view(6, *x.shape[1:])
    slots[at] = x
    return slots


@pytest.mark.parametrize("gap", [0, 3, 8])
@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_steps_by_slot_are_those_of_rows_in_order(library, case, gap):
    inputs = attention_cases.make_inputs(case, torch.float32)
    state, at = inputs["initial_state"], [4, 1][: case.B]
    slots = LinearAttentionState(*(None if x is None else in_slots(x, at, gap) for x in state))
    rows = LinearAttentionState(*(None if x is None else x.clone() for x in state))
    indices = torch.tensor(at, dtype=torch.int32)
    # Slots that are not aligned as the first one is are read by narrow loads, and added up in
    # another order; all others are the same to the bit.
    within = dict(rtol=1e-4, atol=1e-5) if gap == 3 else dict(rtol=0, atol=0)
    for t in range(case.T):
        wanted = run_step(library, inputs, t, rows, 0)
        y = run_step(library, inputs, t, slots, 0, indices)
        torch.testing.assert_close(y, wanted, **within)
    for x, row in zip(slots, rows, strict=True):
        if x is not None:
            torch.testing.assert_close(x[at], row, **within)
            assert x[[slot for slot in range(6) if slot not in at]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_of_no_slot_touches_nothing_and_shows(library, dtype):
    """Nobody checks indices on CUDA: -1 is no slot, and any other that is none gives NaN."""
    inputs = attention_cases.make_inputs(Case(B=5, T=1, Hq=4, initial=True), dtype)
    slots = LinearAttentionState(*(x[:3].clone() for x in inputs["initial_state"]))
    rows = LinearAttentionState(*(x[:3].clone() for x in inputs["initial_state"]))
    indices = torch.tensor([0, -1, 2, 3, -(2**31)], dtype=torch.int32)
    y = run_step(library, inputs, 0, slots, 0, indices)
    token = {n: x[[0, 0, 2]] if isinstance(x, Tensor) else x for n, x in inputs.items()}
    token["key_mask"] = torch.tensor([True, False, True])[:, None]
    assert y[:3].equal(run_step(library, token, 0, rows, 0)[:3])
    assert y[3:].isnan().all()
    assert slots.kv.equal(rows.kv) and slots.z.equal(rows.z)


# ---- the emulator itself ----


def test_feature_maps_are_in_the_order_of_the_kernels(library):
    names = [library.feature_map_name(i).decode() for i in range(len(FEATURE_MAPS))]
    assert names == list(FEATURE_MAPS)
    assert set(FEATURE_MAPS) == set(POINTWISE)


def lines_with(text: str, path: str) -> list[int]:
    """The lines of a kernel that have it."""
    directory = ROOT / "csrc" / "cuda" / "linear_attention"
    lines = (directory / path).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line]


def barriers(path: str) -> list[int]:
    return lines_with("sync_block();", path)


def test_every_barrier_is_left_out_once_below():
    kernels = (ROOT / "csrc" / "cuda" / "linear_attention").glob("*.cuh")
    assert {path.name for path in kernels if barriers(path.name)} == {"walker.cuh", "step.cuh"}


@pytest.fixture
def leave_out(library):
    """Makes the emulator leave out a barrier: leave_out(line, warp), where warp -1 means all."""
    yield library.set_missing_barrier
    library.set_missing_barrier(0, -1)


def schedules_that_fail(run) -> int:
    failed = 0
    for schedule in SCHEDULES:
        try:
            run(schedule)
        except (AssertionError, EmulatorError):
            failed += 1
    return failed


# Two walks, one after the other, since the state has more rows than a tile; in two stages, or one.
WALKS = [
    (LITTLE_MEMORY, Case(B=1, T=40, Hq=4, K=60, decay="mild", mask="middle", initial=True)),
    (MIDDLE_MEMORY, Case(B=1, T=70, Hq=1, Hkv=1, K=150, decay="mild", initial=True)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("line", barriers("walker.cuh"))
def test_every_missing_barrier_of_a_walk_is_found(library, leave_out, line):
    def fails(walk) -> bool:
        device, case = walk
        return schedules_that_fail(lambda x: check(library, case, device=device, schedule=x)) > 0

    leave_out(line, -1)
    assert any(map(fails, WALKS))
    leave_out(0, -1)
    assert not fails(WALKS[0])


@pytest.mark.parametrize("line", lines_with("wait<", "walker.cuh"))
@pytest.mark.parametrize("walk", WALKS, ids=["two_stages", "one_stage"])
def test_a_missing_wait_for_copies_is_found(library, line, walk):
    device, case = walk
    library.set_missing_wait(line)
    try:
        with pytest.raises(AssertionError):
            check(library, case, device=device)
    finally:
        library.set_missing_wait(0)
    check(library, case, device=device)


@pytest.mark.parametrize("line", barriers("step.cuh"))
def test_every_missing_barrier_of_a_step_is_found(library, leave_out, line):
    case = Case(T=1, initial=True, Hq=10, K=64, V=600)
    leave_out(line, -1)
    assert schedules_that_fail(lambda schedule: check_steps(library, case, schedule=schedule)) > 0
    leave_out(0, -1)
    check_steps(library, case)


def test_threads_that_part_at_a_barrier_are_found(library, leave_out):
    leave_out(barriers("walker.cuh")[-1], 0)
    with pytest.raises(EmulatorError, match="part at a barrier"):
        check(library, Case())
