# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The op on a GPU: forward, forward with backward, and decoding, in bfloat16.

    python benchmarks/bench_cuda.py --json results.json
    python benchmarks/bench_cuda.py --device cpu        # tiny shapes, to see that the script runs

Contenders, each on contiguous tensors (B, T, H, D), feature map elu+1 included:
- ours: `linear_attention` and `linear_attention_step_` on the compiled kernels;
- chunked: the same in PyTorch;
- fla: flash-linear-attention's chunk_linear_attn(normalize=True), and fused_recurrent for decoding,
  where the package can be imported;
- SDPA: PyTorch's causal softmax attention on its FlashAttention kernel, another formula.

And the gated delta rule, with fla's chunk_gated_delta_rule (cuda_delta_rule.py).

Each contender is compared with a float64 computation first, and the program ends where one is
wrong. Then contenders take turns; a figure is the median over the rounds, with the fastest and the
slowest, of times between CUDA events. Inputs alternate between as many sets as exceed the cache.
Decoding replays a CUDA graph of several steps, so that launching from Python doesn't count. Shares
are of the floor: the time in which the inputs are read once and the outputs written once, at the
bandwidth of a large copy, measured in the same run.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuda_delta_rule
from hf_linear_attention import LinearAttentionState, linear_attention, linear_attention_step_
from hf_linear_attention.reference import reference_linear_attention

try:
    from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn

    WHY_NO_FLA = None
except ImportError as error:
    WHY_NO_FLA = str(error)


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    D: int


SEQUENCES = [
    Shape(1, 8192, 96, 128),
    Shape(2, 16384, 16, 128),
    Shape(4, 2048, 16, 128),
    Shape(4, 4096, 64, 128),
    Shape(8, 2048, 32, 256),
    Shape(8, 1024, 8, 64),
    Shape(1, 65536, 8, 64),
]
TOKENS = [Shape(32, 1, 16, 64), Shape(256, 1, 16, 128)]
TINY_SEQUENCES, TINY_TOKENS = [Shape(1, 64, 2, 16)], [Shape(2, 1, 2, 16)]
DTYPE = torch.bfloat16
EPS = 1e-6
TOLERANCE = 2e-2  # relative, of the norm
MAX_SETS = 16
SAMPLE_SECONDS = 0.02
STEPS = 20  # in a graph
SLOW = 1.0  # seconds for one call, beyond which a contender is left out

Inputs = tuple[Tensor, ...]


# ---- contenders: functions of q, k, v (B, T, H, D), or of one token and its state ----


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu+1", eps=EPS)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu+1", eps=EPS, backend="chunked")


def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kernel = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def our_step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    state = LinearAttentionState(kv, z)
    return linear_attention_step_(q, k, v, state, feature_map="elu+1", eps=EPS)


def chunked_step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    state = LinearAttentionState(kv, z)
    return linear_attention_step_(q, k, v, state, feature_map="elu+1", eps=EPS, backend="chunked")


def fla_step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    """Without the normaliser, which it has no state for."""
    q, k, v = (F.elu(q) + 1)[:, None], (F.elu(k) + 1)[:, None], v[:, None]
    y, state = fused_recurrent_linear_attn(
        q, k, v, scale=1.0, initial_state=kv, output_final_state=True, normalize=False
    )
    kv.copy_(state)
    return y[:, 0]


FORWARD = {"ours": ours, "chunked": chunked, "SDPA": sdpa}
STEP = {"ours": our_step, "chunked": chunked_step}
if WHY_NO_FLA is None:
    FORWARD["fla"] = fla
    STEP["fla"] = fla_step


# ---- inputs ----


def sequence(shape: Shape, device: str) -> Inputs:
    B, T, H, D = shape
    return tuple(torch.randn(B, T, H, D, device=device, dtype=DTYPE) for _ in range(3))


def token_and_state(shape: Shape, device: str) -> Inputs:
    B, _, H, D = shape
    q, k, v = (torch.randn(B, H, D, device=device, dtype=DTYPE) for _ in range(3))
    return q, k, v, torch.randn(B, H, D, D, device=device), torch.rand(B, H, D, device=device) + D


def num_bytes(tensors: Inputs) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def input_sets(make: Callable[[], Inputs], device: str) -> list[Inputs]:
    """As many as exceed the cache several times over."""
    first = make()
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    more = min(4 * cache // num_bytes(first), MAX_SETS - 1)
    return [first, *(make() for _ in range(more))]


# ---- right before fast ----


def check(name: str, actual: Tensor, expected: Tensor) -> float:
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:  # NaN, too
        sys.exit(f"{name} is wrong: relative error {error:.1e}, allowed {TOLERANCE:.0e}")
    return error


def verify(shape: Shape, device: str) -> dict[str, float]:
    """Relative errors of all contenders on a smaller problem with heads of this size."""
    small = Shape(1, min(shape.T, 500), 2, shape.D)
    errors = {}
    q, k, v = sequence(small, device)
    double = [x.double().requires_grad_() for x in (q, k, v)]
    plain = dict(key_mask=None, cu_seqlens=None, initial_state=None, log_decay=None)
    y, _ = reference_linear_attention(*double, feature_map="elu+1", eps=EPS, **plain)
    softmax = sdpa_in_double(*double)
    for name, run in FORWARD.items():
        wanted = softmax if name == "SDPA" else y
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        got = run(*leaves)
        errors[f"{name} forward"] = check(name, got, wanted)
        got_gradients = torch.autograd.grad(got.double().square().sum(), leaves)
        gradients = torch.autograd.grad(wanted.square().sum(), double, retain_graph=True)
        for x, got_x, wanted_x in zip("qkv", got_gradients, gradients, strict=True):
            errors[f"{name} d{x}"] = check(f"{name}'s d{x}", got_x, wanted_x)
    return errors


def sdpa_in_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@torch.no_grad()
def verify_steps(shape: Shape, device: str) -> dict[str, float]:
    q, k, v, kv, z = token_and_state(Shape(2, 1, 2, shape.D), device)
    phi_q, phi_k = F.elu(q.double()) + 1, F.elu(k.double()) + 1
    after = kv.double() + phi_k[..., None] * v.double()[..., None, :]
    numerator = torch.einsum("bhk,bhkv->bhv", phi_q, after)
    den = (phi_q * (z + phi_k)).sum(-1, keepdim=True) + EPS
    errors = {}
    for name, run in STEP.items():
        state = kv.clone()
        y = run(q, k, v, state, z.clone())
        errors[f"{name} step"] = check(name, y, numerator if name == "fla" else numerator / den)
        errors[f"{name} state"] = check(f"{name}'s state", state, after)
    return errors


def verify_delta_rule(D: int, device: str) -> dict[str, float]:
    inputs = cuda_delta_rule.sequence((1, 200, 2, D), device)
    wanted = cuda_delta_rule.exact(inputs)
    return {
        f"{name} gated delta": check(f"{name}'s gated delta", run(*inputs), wanted)
        for name, run in cuda_delta_rule.FORWARD.items()
    }


# ---- time ----


def clock(device: str) -> Callable[[Callable[[], object], int], float]:
    """A function that gives the seconds per call of `run`, called `repeats` times."""

    def on_cuda(run: Callable[[], object], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def on_cpu(run: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    return on_cuda if device == "cuda" else on_cpu


def interleave(
    runs: dict[str, Callable[[], object]], device: str, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Median, fastest and slowest seconds by contender; those that are too slow have none."""
    seconds_of = clock(device)
    repeats = {}
    for name, run in runs.items():
        seconds_of(run, 2)  # compiles and warms up what has to be
        seconds = seconds_of(run, 1)
        if seconds < SLOW:
            repeats[name] = 1 + int(SAMPLE_SECONDS / seconds)
    samples: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(rounds):
        for name, count in repeats.items():
            samples[name].append(seconds_of(runs[name], count))
    return {name: (statistics.median(s), min(s), max(s)) for name, s in samples.items()}


def copy_bandwidth(device: str) -> float:
    """Bytes per second, each counted where it is read and where it is written."""
    size = 2**30 if device == "cuda" else 2**24
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    seconds_of = clock(device)
    return 2 * size / min(seconds_of(lambda: target.copy_(source), 5) for _ in range(5))


# ---- cases ----


def over_sets(run: Callable[..., object], sets: list[Inputs]) -> Callable[[], object]:
    following = itertools.cycle(sets)
    return lambda: run(*next(following))


def in_a_graph(run: Callable[..., object], sets: list[Inputs]) -> Callable[[], object]:
    """STEPS calls as one CUDA graph."""
    one = over_sets(run, sets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            one()
    return graph.replay


def forward_and_backward(run: Callable[..., Tensor]) -> Callable[..., object]:
    def both(*inputs: Tensor) -> object:
        leaves = [x.requires_grad_() for x in inputs]
        with torch.enable_grad():
            y = run(*leaves)
        return torch.autograd.grad(y, leaves, inputs[2].detach())  # v has the shape of dy

    return both


class Case(NamedTuple):
    """`runs` all do `calls` times what takes at least `bytes`."""

    name: str
    shape: Shape
    runs: dict[str, Callable[[], object]]
    bytes: int
    calls: int = 1


def cases(device: str) -> Iterator[Case]:
    """One after another, so that the inputs of only one are in memory."""
    for shape in SEQUENCES if device == "cuda" else TINY_SEQUENCES:
        sets = input_sets(lambda shape=shape: sequence(shape, device), device)
        tensor = num_bytes(sets[0]) // 3
        runs = {name: over_sets(run, sets) for name, run in FORWARD.items()}
        yield Case("forward", shape, runs, 4 * tensor)  # q, k, v and y
        runs = {name: over_sets(forward_and_backward(r), sets) for name, r in FORWARD.items()}
        yield Case("forward + backward", shape, runs, 11 * tensor)  # also q, k, v, dy, dq, dk, dv
    for shape in TOKENS if device == "cuda" else TINY_TOKENS:
        sets = input_sets(lambda shape=shape: token_and_state(shape, device), device)
        q, k, v, kv, z = sets[0]
        least = num_bytes((q, k, v, v)) + 2 * num_bytes((kv, z))
        if device == "cuda":
            yield Case(
                *("decode", shape, {n: in_a_graph(r, sets) for n, r in STEP.items()}, least), STEPS
            )
        else:
            yield Case("decode", shape, {n: over_sets(r, sets) for n, r in STEP.items()}, least)
    yield from delta_rule_cases(device)


def delta_rule_cases(device: str) -> Iterator[Case]:
    rule, on_cuda = cuda_delta_rule, device == "cuda"
    for sizes in rule.SEQUENCES if on_cuda else rule.TINY_SEQUENCES:
        shape = Shape(*sizes)
        sets = input_sets(lambda shape=shape: rule.sequence(shape, device), device)
        tensor = num_bytes(sets[0][:1])
        runs = {name: over_sets(run, sets) for name, run in rule.FORWARD.items()}
        yield Case("gated delta", shape, runs, 4 * tensor)  # q, k, v and y
        runs = {name: over_sets(forward_and_backward(r), sets) for name, r in rule.FORWARD.items()}
        yield Case("gated delta + bwd", shape, runs, 11 * tensor)
    for sizes in rule.TOKENS if on_cuda else rule.TINY_TOKENS:
        shape = Shape(*sizes)
        sets = input_sets(lambda shape=shape: rule.token_and_state(shape, device), device)
        least = 2 * num_bytes(sets[0][-1:])
        wrap, calls = (in_a_graph, STEPS) if on_cuda else (over_sets, 1)
        runs = {name: wrap(run, sets) for name, run in rule.STEP.items()}
        yield Case("gated delta step", shape, runs, least, calls)


def measure(device: str, rounds: int, budget: float) -> dict[str, Any]:
    """Everything; cases that begin after `budget` seconds are left out."""
    end = time.monotonic() + budget
    start = time.perf_counter()
    first = ours(*sequence(Shape(1, 128, 2, 64), device))
    first.sum().item()  # waits
    first_call = time.perf_counter() - start
    sequences, tokens = (SEQUENCES, TOKENS) if device == "cuda" else (TINY_SEQUENCES, TINY_TOKENS)
    errors = {f"D = {D}": verify(Shape(1, 500, 2, D), device) for D in sizes(sequences)}
    errors |= {f"D = {D}, step": verify_steps(Shape(1, 1, 1, D), device) for D in sizes(tokens)}
    errors |= {"D = 128, gated delta": verify_delta_rule(128, device)}
    bandwidth = copy_bandwidth(device)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, first call {first_call * 1e3:.0f} ms")
    if WHY_NO_FLA is not None:
        print(f"without flash-linear-attention: {WHY_NO_FLA}")
    print(f"{'pass':<20}{'B, T, H, D':<22}{'contender':<10}{'µs':>10}{'ratio':>8}{'floor':>8}")
    rows = []
    with torch.no_grad():
        for case in cases(device):
            if time.monotonic() > end:
                print(f"out of time before {case.name} of {tuple(case.shape)}")
                break
            timings = interleave(case.runs, device, rounds)
            for name, (median, low, high) in timings.items():
                row = {
                    "pass": case.name,
                    "shape": case.shape,
                    "contender": name,
                    "microseconds": [x / case.calls * 1e6 for x in (median, low, high)],
                    "ratio": median / timings["ours"][0],
                    "share_of_floor": case.bytes * case.calls / bandwidth / median,
                }
                rows.append(row)
                print(
                    f"{case.name:<20}{', '.join(map(str, case.shape)):<22}{name:<10}"
                    f"{row['microseconds'][0]:>10.1f}{row['ratio']:>7.2f}x"
                    f"{row['share_of_floor']:>8.0%}"
                )
    return {
        "copy_bytes_per_second": bandwidth,
        "first_call_seconds": first_call,
        "relative_errors": errors,
        "why_no_fla": WHY_NO_FLA,
        "rows": rows,
    }


def sizes(shapes: list[Shape]) -> list[int]:
    return sorted({shape.D for shape in shapes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--budget", type=float, default=240, help="seconds after which no case starts"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    flags = parser.parse_args()
    if flags.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; --device cpu tries the script on tiny shapes")
    if flags.device == "cuda":
        torch.cuda.init()
    results = measure(flags.device, flags.rounds, flags.budget)
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
