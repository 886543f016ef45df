# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A training step of the whole model: loss, gradients, AdamW. Time and peak memory.

    python benchmarks/bench_training.py              # 2 layers, T = 1024
    python benchmarks/bench_training.py --full       # 12 layers, T = 1024, 4096; 3 at 16384
    python benchmarks/bench_training.py --full --no-compile

Contenders: ours, and Transformers' Llama with SDPA; at T = 1024 each also under torch.compile, and
up to 4096 ours also "plain": with Llama's loss and matrix products.
One row of T tokens in float32. Peak memory is that of a step, beyond weights and optimizer states,
which are the same for all.

Shares of the peak count 6 flops per weight and token, and nothing for attention.
"""

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from harness import Report, Work, check_close, parser, sample_of
from hf_linear_attention.fast import linear
from models import (
    SIZE,
    SMALLEST,
    Size,
    make_model,
    plain_loop,
    random_tokens,
    weight_bytes,
)

ALWAYS = ("ours", "Llama")
PLAIN = (*ALWAYS, "ours, plain")
COMPILED = ("ours, compiled", "Llama, compiled")  # takes minutes each


class Case(NamedTuple):
    T: int
    size: Size
    names: tuple[str, ...]


SETTINGS = {
    "smallest": [Case(16, SMALLEST, PLAIN)],
    "short": [Case(1024, SIZE._replace(layers=2), ALWAYS)],
    "full": [
        Case(1024, SIZE, PLAIN + COMPILED),
        Case(4096, SIZE, PLAIN),
        Case(16384, SIZE._replace(layers=3), ALWAYS),  # 12 take more memory than 24 GB
    ],
}
TOLERANCE = 1e-4


def prepare(name: str, T: int, size: Size) -> Callable[[], object]:
    """One training step of the contender of that name, ready to run."""
    model = make_model(name.split(",")[0], size=size).train()
    run = torch.compile(model) if name.endswith("compiled") else model
    if name.endswith("plain"):
        model.loss_function = ForCausalLMLoss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(T: int = T) -> None:
        tokens = random_tokens(size, 1, T)
        many = {} if name.endswith("plain") else linear.MANY
        with mock.patch.object(linear, "MANY", many):
            run(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(T if run is not model else 8)  # makes the optimizer's states, and compiles
    return step


def loss_and_gradients(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([g.flatten() for g in gradients])


def verify(size: Size) -> float:
    """The error of our loss and gradients against float64 and the plain loop, in two layers."""
    size = size._replace(layers=2)
    tokens = random_tokens(size, 2, 100)
    actual = loss_and_gradients(make_model("ours", size=size), tokens)
    exact = make_model("ours", size=size).double()
    with plain_loop():
        expected = loss_and_gradients(exact, tokens)
    return max(
        check_close(label, a, e, TOLERANCE)
        for label, a, e in zip(("loss", "gradients"), actual, expected, strict=True)
    )


def measure(report: Report, case: Case) -> None:
    T, size, names = case
    peak_mib = report.peak_memory(prepare, names, T, size)
    steps = {name: prepare(name, T, size) for name in names}
    timings = report.time({name: sample_of(step) for name, step in steps.items()}, 30)
    flops = 6 * T * weight_bytes(make_model("ours", size=size)) / 4
    work = {name: Work(flops, None) for name in names}
    panel = f"training step, {size.layers} layers"
    report.add(panel, f"1 x {T} tokens", T, timings, work, peak_mib)


def main() -> None:
    assert __doc__ is not None
    flags = parser(__doc__)
    flags.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    flags = flags.parse_args()
    report = Report("training", "T", "ours", flags)
    cases = SETTINGS[flags.setting]
    report.errors["ours"] = verify(cases[0].size)
    for case in cases:
        if flags.no_compile:
            case = case._replace(names=tuple(n for n in case.names if n not in COMPILED))
        measure(report, case)
    report.save()


if __name__ == "__main__":
    main()
