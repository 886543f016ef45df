# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ops on their way to CUDA kernels, without a GPU: on CPU tensors, with kernels emulated."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import hf_linear_attention
from emulated_kernels import CSRC, CXX, WITH_WARNINGS, compiled_kernels
from new_python import run_python

ROOT = Path(__file__).resolve().parents[2]
if not shutil.which(CXX[0]):
    pytest.skip("there is no C++ compiler", allow_module_level=True)
pytestmark = pytest.mark.thorough  # the kernels' own tests are in test_cuda_kernels.py


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """For processes in which the package's library calls emulated CUDA kernels."""
    directory = tmp_path_factory.mktemp("emulated")
    package = directory / "hf_linear_attention"
    untouched = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(hf_linear_attention.__file__).parent, package, ignore=untouched)
    torch_libraries = Path(torch.__file__).parent / "lib"
    flags = [  # not optimised, as the kernels are: to compile takes longer than what runs
        *("-std=c++17", "-O0", "-shared", "-fPIC", f"-I{CSRC}"),
        '-DHFLA_WITH_CUDA="emulated"',
        "-Daoti_torch_device_type_cuda=aoti_torch_device_type_cpu",
    ]
    sources = [*CSRC.glob("torch/*.cpp"), CSRC / "cpu" / "expert_linear.cpp"]
    sources += [CSRC / "cuda" / "kernels.cpp", ROOT / "tests" / "native" / "emulated_ops.cpp"]
    sources += compiled_kernels(tmp_path_factory, WITH_WARNINGS)
    linked = [f"-L{torch_libraries}", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}"]
    command = [*CXX, *flags, *sources, *linked, "-o", package / "_C.so"]
    subprocess.run(command, check=True)
    # A library without kernels for this processor is loaded only where the variable names a set.
    return {"PYTHONPATH": str(directory), "HF_LINEAR_ATTENTION_CPU_ISA": "none"}


def test_ops_pass_their_tests_on_emulated_kernels(environment):
    """Those in float32, and not about what only the CPU checks."""
    chosen = (
        "(matches_the_float64_reference and dtype1) or fakes_agree or step_is_one_token or "
        "step_passes_opcheck or "
        "(refuses and not sign and not cu_seqlens and not packing and not dz and not rms_norm)"
    )
    tests = [ROOT / "tests" / "ops" / "test_ops.py", "-k", chosen]
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, **environment)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\b\d{2} passed", result.stdout), result.stdout


def test_ops_are_as_users_and_torch_call_them_on_emulated_kernels(environment):
    """But for what is in place, of which the CPU has ops of its own."""
    tests = [ROOT / "tests" / "native" / name for name in ("ops_on_gpu.py", "on_gpu.py")]
    chosen = "by_slot or forward_kept or (compiled_op and fixed)"
    arguments = ["-q", "-p", "no:cacheprovider", *tests, "-k", chosen]
    result = run_python("-m", "pytest", *arguments, **environment | {"ON_GPU_DEVICE": "cpu"})
    assert result.returncode == 0, result.stdout
    assert re.search(r"\b\d{2} passed", result.stdout), result.stdout


# For each shape: whether the fifth result has the room that Python works out for a fake of it.
ROOM = """
import torch
from hf_linear_attention.ops.compiled import linear_attention as native
options = 1, True, 1e-6, True  # elu+1, normalised, causal
shapes = [(B, T, Hq, Hkv, 4, V, None) for B, T, Hq, Hkv, V in (
    (1, 511, 1, 1, 4), (1, 512, 1, 1, 4), (1, 1300, 2, 1, 4), (2, 600, 1, 1, 65),
    (36, 768, 4, 4, 4), (0, 600, 1, 1, 4), (1, 0, 1, 1, 4),
)]
shapes += [(1, 800, 1, 1, 4, 4, bounds) for bounds in ([0, 800], [0, 9, 800], [*range(8), 800])]
for B, T, Hq, Hkv, K, V, bounds in shapes:
    q, k, v = torch.ones(B, T, Hq, K), torch.ones(B, T, Hkv, K), torch.ones(B, T, Hkv, V)
    bounds = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    *_, states = native._forward(q, k, v, None, None, bounds, None, None, *options)
    room = native._room_for_pieces(q, v, bounds, True)
    print(states.numel() == room * Hkv * K * (V + 1), room)
"""


def test_python_knows_the_room_that_forward_has_for_pieces(environment):
    result = run_python("-c", ROOM, **environment | {"EMULATED_LAUNCHES": "none"})
    rooms = [0, 2, 5, 4, 72, 0, 0, 4, 5, 6]
    assert result.stdout.splitlines() == [f"True {room}" for room in rooms], result.stderr


DELTA_RULE = ROOT / "tests" / "native" / "delta_on_gpu.py"


@pytest.mark.parametrize(
    "chosen, variables",
    [
        ("small_cases or masked_nan or long_keys or (steps and not 128)", {}),
        # blocks of many columns, and threads in two other orders
        (
            "small_cases and bfloat16 and middle",
            {"EMULATED_MULTIPROCESSORS": "1", "EMULATED_SCHEDULE": "1"},
        ),
        ("small_cases and float32 and lengths", {"EMULATED_SCHEDULE": "3"}),
    ],
    ids=["few columns", "many columns, backwards", "shuffled"],
)
def test_the_delta_rule_passes_its_tests_on_emulated_kernels(environment, chosen, variables):
    arguments = ["-q", "-p", "no:cacheprovider", DELTA_RULE, "-k", chosen]
    variables = environment | variables | {"ON_GPU_DEVICE": "cpu"}
    result = run_python("-m", "pytest", *arguments, **variables)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\b[1-9]\d* passed", result.stdout), result.stdout


def lines_with(text: str, path: Path) -> list[int]:
    lines = path.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line]


@pytest.mark.parametrize(
    "name",
    [
        "fixed_size_prepare.cuh",
        "fixed_size_loader.cuh",
        "fixed_size_state_walk.cuh",
        "fixed_size_back_walk.cuh",
        "fixed_size_token_gradients.cuh",
    ],
)
def test_a_missing_wait_for_copies_is_found(environment, name):
    [line] = lines_with("wait<", CSRC / "cuda" / "delta_rule" / name)
    # Two cases: one of each size of heads that kernels of their own know.
    chosen = "of_fixed_sizes and not initial"
    arguments = ["-q", "-p", "no:cacheprovider", DELTA_RULE, "-k", chosen]
    variables = environment | {"EMULATED_MISSING_WAIT": str(line), "ON_GPU_DEVICE": "cpu"}
    result = run_python("-m", "pytest", *arguments, **variables)
    assert re.search(r"^2 failed", result.stdout.splitlines()[-1]), result.stdout


# Nobody checks cu_seqlens on CUDA: that this ends, without an error of the emulator, is the test.
WRONG_BOUNDS = """
import torch
from hf_linear_attention.ops.arguments import DeltaArguments
from hf_linear_attention.ops.compiled.delta_rule import forward
q, k, v, g = (torch.rand(1, 40, 1, D, requires_grad=True) for D in (3, 3, 5, 3))
for bounds in ([0, 200, 40], [-9, 20, 40], [35, 20, 9], [40, 40, 2**31 - 1]):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    y, state = forward(DeltaArguments(q, k, v, None, -g, normalize_qk=True), cu_seqlens)
    torch.autograd.grad(y.sum() + state.sum(), [q, k, v, g])
print("done")
"""


def test_wrong_cu_seqlens_stay_within_the_tensors(environment):
    result = run_python("-c", WRONG_BOUNDS, **environment)
    assert result.stdout == "done\n", result.stderr


NO_SEQUENCES = """
import torch
from hf_linear_attention.ops.arguments import DeltaArguments, LinearArguments
from hf_linear_attention.ops.compiled import delta_rule, linear_attention
x = torch.ones(1, 40, 1, 4)
cu_seqlens = torch.zeros(1, dtype=torch.int32)
for forward, arguments in (
    (delta_rule.forward, DeltaArguments(x, x, x)),
    (linear_attention.forward, LinearArguments(x, x, x)),
):
    try:
        print(forward(arguments, cu_seqlens))
    except RuntimeError as error:
        print(error)
"""


def test_tokens_of_no_sequence_are_refused(environment):
    """Which is seen from shapes, without a look at the device."""
    result = run_python("-c", NO_SEQUENCES, **environment)
    reason = "cu_seqlens must have a sequence or more for T = 40 tokens, got shape (1,)"
    assert result.stdout.splitlines() == [
        f"hf_linear_attention::{op}: {reason}" for op in ("delta_rule", "linear_attention")
    ], result.stderr


LARGE_KEYS = """
import torch
op = torch.ops.hf_linear_attention
import hf_linear_attention
options = 1.0, True, True
for K in (256, 257):
    q = k = torch.ones(1, 2, 1, K)
    v, state = torch.ones(1, 2, 1, 3), torch.ones(1, 1, K, 3)
    inputs = q, k, v, *[None] * 7
    for call in (
        lambda: op.delta_rule(*inputs, *options, True),
        lambda: op.delta_rule_backward(v, None, *inputs, torch.ones(1, 2, 1, 3), state, *options),
    ):
        try:
            print(all(x.isfinite().all() for x in call()))
        except RuntimeError as error:
            print(error)
"""


def test_keys_that_are_too_large_for_the_delta_rule_s_kernels_are_refused(environment):
    result = run_python("-c", LARGE_KEYS, **environment)
    reason = "q must have a last dimension of up to 256 on CUDA, got (1, 2, 1, 257)"
    assert result.stdout.splitlines() == [
        "True",
        "True",
        *(f"hf_linear_attention::{op}: {reason}" for op in ("delta_rule", "delta_rule_backward")),
    ], result.stderr


# Prints the sizes of what forward and backward make of nothing, then what float64 makes of them.
NOTHING_AND_FLOAT64 = """
import torch
from hf_linear_attention.ops.arguments import LinearArguments
from hf_linear_attention.ops.compiled.linear_attention import forward
for B, T, bounds in ((0, 3, None), (2, 0, None), (1, 0, [0])):
    q, k, v = (torch.ones(B, T, H, D, requires_grad=True) for H, D in ((4, 3), (2, 3), (2, 5)))
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    y, (kv, z) = forward(LinearArguments(q, k, v, feature_map="elu+1"), cu_seqlens)
    dq = torch.autograd.grad(y.sum() + kv.sum() + z.sum(), q)[0]
    print(list(y.shape), list(kv.shape), kv.sum().item(), list(dq.shape))
try:
    forward(LinearArguments(q.double(), k.double(), v.double()))
except RuntimeError as error:
    print(error)
"""


def test_nothing_to_do_is_done_and_float64_refused(environment):
    result = run_python("-c", NOTHING_AND_FLOAT64, **environment)
    assert result.stdout.splitlines() == [
        "[0, 3, 4, 5] [0, 2, 3, 5] 0.0 [0, 3, 4, 3]",
        "[2, 0, 4, 5] [2, 2, 3, 5] 0.0 [2, 0, 4, 3]",
        "[1, 0, 4, 5] [0, 2, 3, 5] 0.0 [1, 0, 4, 3]",
        "hf_linear_attention::linear_attention: q must be float32, bfloat16 or float16 on CUDA, "
        "got float64",
    ], result.stderr


TRY_A_CALL = """
import torch
from hf_linear_attention.ops.compiled.cuda import _why_a_call_fails
print(_why_a_call_fails(torch.device("cpu")))
"""


def test_one_call_shows_whether_a_driver_takes_the_kernels(environment):
    assert run_python("-c", TRY_A_CALL, **environment).stdout == "None\n"
    error = "CUDA driver version is insufficient for CUDA runtime version"
    reason = run_python("-c", TRY_A_CALL, **environment, EMULATED_DRIVER_ERROR=error).stdout
    assert reason.startswith("its kernels fail on cpu: ") and error in reason
