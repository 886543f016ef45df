# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ops on a GPU: forward, forward with backward, decoding, and a model's token, in bfloat16.

    python benchmarks/bench_cuda.py --json results.json
    python benchmarks/bench_cuda.py --device cpu        # tiny shapes, to see that the script runs

Contenders, each on contiguous tensors (B, T, H, D):
- ours: `linear_attention` and `linear_attention_step_` on the compiled kernels, with elu+1 and a
  normaliser; and plain, with neither, as others' kernels are published;
- chunked: the same in PyTorch;
- fla: flash-linear-attention's chunk_linear_attn, and fused_recurrent for decoding, where the
  package can be imported. It has no elu+1 and normalises afterwards, each a pass of its own;
- SDPA: PyTorch's causal softmax attention on its FlashAttention kernel, another formula;
and for the gated delta rule ours, chunked and fla's chunk_gated_delta_rule, beside the figures that
FlashQLA has published for an H200 (cuda_delta_rule.py). Sizes are fla's, FlashQLA's and our own.

Each contender is compared with a float64 computation first: the program ends where ours is wrong,
and another that is, or that fails, is left out; so is chunked where it has no memory. Then
contenders take turns; a figure is the median over the rounds, with the fastest and the slowest, of
times between CUDA events. Inputs alternate between as many sets as exceed the cache. All but
chunked replay a CUDA graph of several calls, so that launching from Python doesn't count; one that
no graph takes is called, and marked. Shares are of the floor: the time in which the inputs are read
once and the outputs written once, or a model's weights read, at the bandwidth of a large copy,
measured in the same run. Goals (cuda_goals.py) come last.
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

import cuda_delta_rule
import cuda_goals
import cuda_linear
import cuda_token
from cuda_shapes import Inputs, Shape, num_bytes

MAX_SETS = 16
SAMPLE_SECONDS = 0.02
STEPS = 20  # in a graph
SLOW = 1.0  # seconds for one call, beyond which a contender is left out
CALLED = ("chunked",)  # whose temporary tensors would fill the memory of graphs

Run = Callable[[], object]


def input_sets(make: Callable[[], Inputs], device: str) -> list[Inputs]:
    """As many as exceed the cache several times over."""
    first = make()
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    more = min(4 * cache // num_bytes(first), MAX_SETS - 1)
    return [first, *(make() for _ in range(more))]


# ---- time ----


def clock(device: str) -> Callable[[Run, int], float]:
    """A function that gives the seconds per call of `run`, called `repeats` times."""

    def on_cuda(run: Run, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def on_cpu(run: Run, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    return on_cuda if device == "cuda" else on_cpu


def interleave(
    runs: dict[str, Run], device: str, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Median, fastest and slowest seconds by contender; those that are too slow have none."""
    seconds_of = clock(device)
    repeats = {}
    for name, run in runs.items():
        try:
            seconds_of(run, 2)  # compiles and warms up what has to be
            seconds = seconds_of(run, 1)
        except Exception as error:
            has_no_memory = name in CALLED and isinstance(error, torch.OutOfMemoryError)
            if name in cuda_linear.OWN and not has_no_memory:
                raise
            print(f"{name} fails: {type(error).__name__}: {error}")
            continue
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


def repeated(run: Callable[..., object], sets: list[Inputs], calls: int) -> Run:
    following = itertools.cycle(sets)

    def all_calls() -> None:
        for _ in range(calls):
            run(*next(following))

    return all_calls


def in_a_graph(run: Run) -> Run:
    """As one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# ---- cases ----


class Case(NamedTuple):
    """`runs` do, `calls` times, what takes at least `bytes`, on inputs of `sets` in turn."""

    name: str
    shape: Shape
    runs: dict[str, Callable[..., object]]
    sets: list[Inputs]
    bytes: int
    calls: int
    published: dict[str, float] | None = None  # milliseconds

    def prepared(self, device: str) -> tuple[dict[str, Run], set[str]]:
        """What is timed of each contender, and those that are in a graph."""
        timed, graphs = {}, set()
        for name, run in self.runs.items():
            timed[name] = repeated(run, self.sets, self.calls)
            if device != "cuda" or name in CALLED:
                continue
            try:
                timed[name] = in_a_graph(timed[name])
                graphs.add(name)
            except RuntimeError as error:
                print(f"no graph takes {name}: {str(error).splitlines()[0]}")
                torch.cuda.synchronize()
        return timed, graphs


def forward_and_backward(run: Callable[..., Tensor]) -> Callable[..., object]:
    def both(*inputs: Tensor) -> object:
        leaves = [x.requires_grad_() for x in inputs]
        with torch.enable_grad():
            y = run(*leaves)
        return torch.autograd.grad(y, leaves, inputs[2].detach())  # v has the shape of dy

    return both


class Sequences(NamedTuple):
    """An op on whole sequences: the names of forward and of both passes, and who runs them."""

    forward: str
    both: str
    contenders: dict[str, Callable[..., Tensor]]
    make: Callable[[Shape, str], Inputs]
    shapes: list[Shape]
    tiny: list[Shape]


class Tokens(NamedTuple):
    """A step of an op, and the bytes that its inputs take at least."""

    name: str
    contenders: dict[str, Callable[..., Tensor]]
    make: Callable[[Shape, str], Inputs]
    least: Callable[[Inputs], int]
    shapes: list[Shape]
    tiny: list[Shape]


linear, rule = cuda_linear, cuda_delta_rule
TOKENS = [
    Tokens(
        *("decode", linear.STEP, linear.token_and_state, linear.step_bytes),
        *(linear.TOKENS, linear.TINY_TOKENS),
    ),
    Tokens(
        *("gated delta step", rule.STEP, rule.token_and_state, rule.step_bytes),
        *(rule.TOKENS, rule.TINY_TOKENS),
    ),
]
SEQUENCES = [
    Sequences(
        *("gated delta", "gated delta + bwd", rule.FORWARD, rule.sequence),
        *(rule.SEQUENCES, rule.TINY_SEQUENCES),
    ),
    Sequences(
        *("forward", "forward + backward", linear.FORWARD, linear.sequence),
        *(linear.SEQUENCES, linear.TINY_SEQUENCES),
    ),
    Sequences(
        *("plain forward", "plain forward + bwd", linear.PLAIN_FORWARD, linear.sequence),
        *(linear.PLAIN, linear.TINY_SEQUENCES),
    ),
]


def cases(device: str) -> Iterator[Case]:
    """One after another, so that the inputs of only one are in memory; the short ones first."""
    on_cuda = device == "cuda"
    size = cuda_token.model_size(device)
    for rows in cuda_token.ROWS if on_cuda else cuda_token.ROWS[:1]:
        run, weights = cuda_token.a_token(rows, device)
        shape = Shape(rows, 1, size.layers, size.hidden_size)
        name = "token" if rows == 1 else "tokens"
        yield Case(name, shape, {"ours": run}, [()], weights, 1)
    for op in TOKENS:
        for shape in op.shapes if on_cuda else op.tiny:
            sets = input_sets(lambda op=op, shape=shape: op.make(shape, device), device)
            calls = STEPS if on_cuda else 1
            yield Case(op.name, shape, op.contenders, sets, op.least(sets[0]), calls)
    for op in SEQUENCES:
        for shape in op.shapes if on_cuda else op.tiny:
            sets = input_sets(lambda op=op, shape=shape: op.make(shape, device), device)
            inputs, y = num_bytes(sets[0]), num_bytes(sets[0][2:3])  # y is as large as v
            published = [rule.PUBLISHED.get(name, {}).get(shape) for name in (op.forward, op.both)]
            yield Case(op.forward, shape, op.contenders, sets, inputs + y, len(sets), published[0])
            both = {name: forward_and_backward(run) for name, run in op.contenders.items()}
            # And in backward inputs and dy, and the inputs' gradients.
            least = 3 * inputs + 2 * y
            yield Case(op.both, shape, both, sets, least, len(sets), published[1])


# ---- the table ----


def verify(device: str) -> dict[str, dict[str, float]]:
    """Relative errors of all contenders."""
    on_cuda = device == "cuda"

    def sizes(shapes: list[Shape], tiny: list[Shape]) -> list[int]:
        return sorted({shape.D for shape in (shapes if on_cuda else tiny)})

    of_sequences = sizes(linear.SEQUENCES, linear.TINY_SEQUENCES)
    errors = {f"D = {D}": linear.verify(D, device) for D in of_sequences}
    for D in sizes(linear.TOKENS, linear.TINY_TOKENS):
        errors[f"D = {D}, step"] = linear.verify_steps(D, device)
    for D in sizes(rule.SEQUENCES, rule.TINY_SEQUENCES):
        errors[f"D = {D}, gated delta"] = rule.verify(D, device)
    return errors


def rows_of(case: Case, device: str, rounds: int, bandwidth: float) -> list[cuda_goals.Row]:
    runs, graphs = case.prepared(device)
    timings = interleave(runs, device, rounds)
    reference = timings["ours"][0] if "ours" in timings else float("nan")
    return [
        {
            "pass": case.name,
            "shape": case.shape,
            "size": str(case.shape),
            "contender": name,
            "microseconds": [seconds / case.calls * 1e6 for seconds in timing],
            "ratio": timing[0] / reference,
            "share_of_floor": case.bytes * case.calls / bandwidth / timing[0],
            "graph": name in graphs,
            "published_milliseconds": case.published,
        }
        for name, timing in timings.items()
    ]


def show(row: cuda_goals.Row, device: str) -> None:
    called = "" if row["graph"] or device != "cuda" else "  called"
    print(
        f"{row['pass']:<20}{row['size']:<24}{row['contender']:<10}{row['microseconds'][0]:>10.1f}"
        f"{row['ratio']:>7.2f}x{row['share_of_floor']:>8.0%}{called}",
        flush=True,
    )


def measure(device: str, rounds: int, budget: float) -> dict[str, Any]:
    """Everything; cases that begin after `budget` seconds are left out."""
    end = time.monotonic() + budget
    start = time.perf_counter()
    first = linear.ours(*linear.sequence(Shape(1, 128, 2, 64), device))
    first.sum().item()  # waits
    first_call = time.perf_counter() - start
    errors = verify(device)
    bandwidth = copy_bandwidth(device)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, first call {first_call * 1e3:.0f} ms")
    if linear.WHY_NO_FLA is not None:
        print(f"without flash-linear-attention: {linear.WHY_NO_FLA}")
    print(f"{'pass':<20}{'B, T, H, D':<24}{'contender':<10}{'µs':>10}{'ratio':>8}{'floor':>8}")
    rows: list[cuda_goals.Row] = []
    with torch.no_grad():
        for case in cases(device):
            if time.monotonic() > end:
                print(f"out of time before {case.name} of {case.shape}")
                break
            found = rows_of(case, device, rounds, bandwidth)
            for row in found:
                show(row, device)
            for name, milliseconds in (case.published or {}).items():
                print(f"{'':<44}{name:<10}{milliseconds * 1e3:>10.1f}  published for an H200")
            rows += found
    goals = cuda_goals.outcomes(rows)
    print(f"\n{cuda_goals.table(goals)}")
    return {
        "copy_bytes_per_second": bandwidth,
        "first_call_seconds": first_call,
        "relative_errors": errors,
        "why_no_fla": linear.WHY_NO_FLA,
        "left_out": linear.LEFT_OUT,
        "rows": rows,
        "goals": [goal._asdict() for goal in goals],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
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
