# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Memory of large results on the CPU, kept for the next ones: nobody notices but by the time.

Such tensors are made from a pointer, so what PyTorch does with tensors is tested with them, too.
"""

import copy
import ctypes
import gc
import io
import multiprocessing
import resource
import threading
import time

import pytest
import torch
from torch.profiler import profile

from hf_linear_attention.ops.arguments import LinearArguments
from hf_linear_attention.ops.compiled import library, rms_norm
from hf_linear_attention.ops.compiled.linear_attention import forward as linear_attention
from hf_linear_attention.ops.compiled.linear_attention import step_
from new_python import run_python

MB = 1 << 20
ROWS = MB // 4 // 64  # of x (ROWS, 64) float32, which is the least that is kept


@pytest.fixture(autouse=True)
def nothing_kept_and_nothing_filled():
    """As a user has it: without deterministic mode, in which PyTorch makes all tensors."""
    torch.use_deterministic_algorithms(False)
    gc.collect()
    library.free_kept_memory()
    yield
    gc.collect()
    library.free_kept_memory()


def result(megabytes: int = 1, value: float = 1.0) -> torch.Tensor:
    """(megabytes * ROWS, 64) float32 full of `value`, by the smallest of the ops."""
    x = torch.ones(megabytes * ROWS, 64)
    return rms_norm.rms_norm(x, torch.full((64,), value), 0.0)


def attention(q, k, v, log_decay=None):
    return linear_attention(LinearArguments(q, k, v, log_decay, feature_map="elu+1"))[0]


def qkv(T: int = 1024, **options) -> list[torch.Tensor]:
    return [torch.randn(1, T, 4, 64, **options) for _ in range(3)]


def run(program: str, **environment: str) -> str:
    done = run_python("-c", PROGRAM + program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_next_result_of_nearly_this_size_takes_the_memory():
    y = result(8)
    address = y.data_ptr()
    assert library.kept_bytes() == 0  # the tensor has it
    del y
    assert library.kept_bytes() == 8 * MB
    x = torch.ones(8 * ROWS - 1, 64)
    y = rms_norm.rms_norm(x, torch.ones(64), 0.0)
    assert y.data_ptr() == address and library.kept_bytes() == 0
    assert result(4).data_ptr() != address


def test_small_results_are_pytorchs():
    y = rms_norm.rms_norm(torch.ones(ROWS - 1, 64), torch.ones(64), 0.0)
    del y
    assert library.kept_bytes() == 0


def test_views_keep_the_memory():
    y = result()
    view = y[3:5].detach()
    del y
    assert library.kept_bytes() == 0
    others = [result(value=2.0) for _ in range(3)]
    assert (view == 1).all() and all((other == 2).all() for other in others)
    del view
    assert library.kept_bytes() == MB


def test_a_kept_result_has_the_same_bits_and_gradients():
    inputs = qkv(requires_grad=True)

    def bits():
        y = attention(*inputs)
        return y.detach().clone(), *torch.autograd.grad(y, inputs, torch.ones_like(y))

    first = [x.clone() for x in bits()]
    gc.collect()
    assert library.kept_bytes() >= 4 * MB
    assert all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True))


def test_gradients_that_a_leaf_keeps_are_not_taken():
    inputs = qkv(requires_grad=True)
    attention(*inputs).sum().backward()
    kept = [x.grad.clone() for x in inputs]
    for _ in range(3):
        other = qkv(requires_grad=True)
        attention(*other).sum().backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(inputs, kept, strict=True))


def test_threads_never_share_memory():
    """Each holds some results at a time, checks what it wrote into them, and lets them go."""
    wrong = []

    def work(number: int) -> None:
        held: list[tuple[torch.Tensor, float]] = []
        for i in range(60):
            value = float(1000 * number + i)
            held.append((result(1 + i % 3, value), value))
            if len(held) == 4:
                y, expected = held.pop(i % 4)
                if not (y == expected).all():
                    wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < library.kept_bytes() <= 256 * MB


PROGRAM = """
import os, torch
from hf_linear_attention.ops.compiled import library, rms_norm
def results(count):
    return [rms_norm.rms_norm(torch.ones(4096, 64), torch.ones(64), 0.0) for _ in range(count)]
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("setting", "kept"), [("3", 3), ("0", 0), ("", 10)])
def test_the_setting_bounds_what_is_kept(setting, kept):
    program = "ys = results(10)\ndel ys\nprint(library.kept_bytes())"
    assert run(program, HF_LINEAR_ATTENTION_KEPT_MB=setting) == str(kept * MB)


def test_what_is_longest_idle_makes_room():
    program = (
        "ys = results(4)\n"
        "addresses = [y.data_ptr() for y in ys]\n"
        "for i in (2, 0, 3, 1): ys[i] = None\n"
        "ys = results(2)\n"
        "print(*(addresses.index(y.data_ptr()) for y in ys))"
    )
    assert run(program, HF_LINEAR_ATTENTION_KEPT_MB="2") == "1 3"  # the latest is taken first


def test_a_wrong_setting_is_an_error():
    program = (
        "for setting in ('-1', 'many', '1.5', '99999999'):\n"
        "  os.environ['HF_LINEAR_ATTENTION_KEPT_MB'] = setting\n"
        "  try: results(1)\n"
        "  except RuntimeError as error: print(error, library.kept_bytes())\n"
    )
    message = (
        "hf_linear_attention::rms_norm: HF_LINEAR_ATTENTION_KEPT_MB must be a number of megabytes "
        "from 0 to 1048576, got {} 0"
    )
    lines = [message.format(setting) for setting in ("-1", "many", "1.5", "99999999")]
    assert run(program).split("\n") == lines


def _stay_idle(connection) -> None:
    torch.use_deterministic_algorithms(False)
    library.free_kept_memory()
    y = result()
    del y
    time.sleep(11)
    before = library.kept_bytes()
    rms_norm.rms_norm(torch.ones(1, 64), torch.ones(64), 0.0)
    connection.send((before, library.kept_bytes()))


@pytest.fixture(scope="module", autouse=True)
def idle_child():
    """Its end of a pipe, on which a child answers that stays idle while other tests go on."""
    theirs, ours = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_stay_idle, args=(ours,))
    child.start()
    yield theirs
    child.terminate()  # where nobody waited for the answer
    child.join()


@pytest.mark.thorough
def test_what_stays_idle_is_freed_by_the_next_call(idle_child):
    assert idle_child.poll(60) and idle_child.recv() == (MB, 0)


def test_freed_memory_leaves_the_process():
    """A new one: where much was freed before, malloc finds room in its heap, and keeps that."""
    program = (
        "def resident():\n"
        "    with open('/proc/self/statm') as file:\n"
        "        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "y = rms_norm.rms_norm(torch.ones(64 * 4096, 64), torch.ones(64), 0.0)\n"
        "del y\n"
        "before = resident()\n"
        "library.free_kept_memory()\n"
        "print(before - resident())"
    )
    assert int(run(program)) > 60 * MB


def test_repeated_calls_cost_no_page_faults():
    inputs = qkv(2048, requires_grad=True)

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            y = attention(*inputs)
            torch.autograd.grad(y, inputs, y.detach())
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < 10 * 4 * 2 * MB / resource.getpagesize() / 10  # a tenth of the results' pages


def test_an_error_of_the_kernel_gives_the_memory_back():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="log_decay must be <= 0"):
        attention(q, k, v, torch.ones(1, 1024, 4))
    assert library.kept_bytes() == MB


def test_a_result_larger_than_any_memory_is_an_error():
    """Its bytes, 2^64 + 2^20 of them, must not pass for the 2^20 that are left of an int64."""
    x = torch.ones(1).expand(2**44 + 1, 2**18, 1, 1)
    with pytest.raises(RuntimeError, match="empty_strided.* failed"):
        attention(x, x, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_deterministic_mode_fills_the_memory_with_nan(dtype):
    """Seen by its address, after an op that stops before it writes to its result."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    q, v = torch.ones(2 * ROWS, 1, 1, dtype=dtype), torch.ones(2 * ROWS, 1, 64, dtype=dtype)
    kv, z = torch.zeros(2 * ROWS, 1, 1, 64, dtype=acc), torch.zeros(2 * ROWS, 1, 1, dtype=acc)
    y = step_(LinearArguments(q, q, v, feature_map="elu+1"), (kv, z))
    address, shape = y.data_ptr(), y.shape
    del y

    def is_filled() -> bool:
        bytes_ = (ctypes.c_char * (shape.numel() * dtype.itemsize)).from_address(address)
        memory = torch.frombuffer(bytes_, dtype=dtype).fill_(1)
        with pytest.raises(RuntimeError, match="feature_map must be an index"):
            library.ops.linear_attention_step_(q, q, v, None, None, kv, z, 99, True, 1e-6)
        assert memory.isnan().all() or (memory == 1).all()
        return bool(memory.isnan().any())

    # By chance a few are, where the memory that tells holds a NaN of somebody else.
    assert not all(is_filled() for _ in range(100))
    torch.use_deterministic_algorithms(True)
    assert all(is_filled() for _ in range(100))


def _in_a_child(connection) -> None:
    before = library.kept_bytes()
    y = result(value=3.0)
    connection.send((before, library.kept_bytes(), bool((y == 3).all())))


def test_a_forked_child_has_a_copy():
    y = result()
    del y
    theirs, ours = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(ours,))
    child.start()
    assert theirs.poll(60) and theirs.recv() == (MB, 0, True)
    child.join()
    assert library.kept_bytes() == MB


def _send_shared(connection) -> None:
    y = result(value=5.0).share_memory_()
    connection.send(y)
    connection.recv()


def test_results_can_be_shared_with_processes():
    theirs, ours = torch.multiprocessing.get_context("fork").Pipe()
    child = torch.multiprocessing.get_context("fork").Process(target=_send_shared, args=(ours,))
    child.start()
    assert theirs.poll(120)
    y = theirs.recv()
    theirs.send("seen")
    assert (y == 5).all()
    child.join()


def test_what_users_do_with_tensors():
    y = result()
    assert torch.equal(copy.deepcopy(y), y)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file), y)
    array = y.numpy()
    y.add_(1)
    assert (array == 2).all()
    del y
    assert library.kept_bytes() == 0 and (array == 2).all()
    y = torch.from_numpy(array)
    assert torch.mul(y, 2, out=y) is y and (array == 4).all()
    y = result()
    assert y.resize_(3, 5).shape == (3, 5)
    y.set_(torch.ones(2))  # lets go of the memory
    assert library.kept_bytes() == MB


def test_growing_a_result_in_place_is_an_error():
    """As with all tensors whose memory is not PyTorch's alone, those from NumPy, say."""
    with pytest.raises(RuntimeError, match="not resizable"):
        result().resize_(2 * ROWS, 64)


def test_the_profiler_counts_what_is_allocated():
    with profile(profile_memory=True) as allocating:
        y = result(16)
        del y
    with profile(profile_memory=True) as reusing:
        y = result(16)
    grown, again = (
        sum(event.self_cpu_memory_usage for event in run.key_averages() if "rms" in event.key)
        for run in (allocating, reusing)
    )
    assert grown >= 16 * MB and again < MB
    assert (y == 1).all()


@pytest.mark.thorough
def test_inference_and_compiled_code_take_kept_memory():
    inputs = qkv()

    def twice(q, k, v):
        return attention(q, k, attention(q, k, v)) + 1

    expected = twice(*inputs)
    compiled = torch.compile(twice, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(attention(*inputs), attention(*inputs))
    for _ in range(3):
        torch.testing.assert_close(compiled(*inputs), expected)
    assert library.kept_bytes() >= MB
