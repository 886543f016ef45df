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

import math
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from harness import Report, Work, check_close, parser, peak_memory, sample_of
from hf_linear_attention import linear
from hf_linear_attention.mixer_linear import LinearAttention
from models import make_model, random_tokens, weight_bytes

FULL = {1024: 12, 4096: 12, 16384: 3}  # tokens: layers; 12 at 16384 take more memory than 24 GB
SHORT = {1024: 2}
LONGEST_PLAIN = 4096
LONGEST_COMPILED = 1024  # it takes minutes each
TOLERANCE = 1e-4


def prepare(name: str, T: int, layers: int) -> Callable[[], object]:
    """One training step of the contender of that name, ready to run."""
    model = make_model(name.split(",")[0], layers=layers).train()
    run = torch.compile(model) if name.endswith("compiled") else model
    if name.endswith("plain"):
        model.loss_function = ForCausalLMLoss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(T: int = T) -> None:
        tokens = random_tokens(1, T)
        work = math.inf if name.endswith("plain") else linear.MIN_ONEDNN_WORK
        with mock.patch.object(linear, "MIN_ONEDNN_WORK", work):
            run(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(T if run is not model else 8)  # makes the optimizer's states, and compiles
    return step


def loss_and_gradients(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([g.flatten() for g in gradients])


def verify() -> float:
    """The error of our loss and gradients against float64 and the plain loop."""
    tokens = random_tokens(2, 100)
    actual = loss_and_gradients(make_model("ours", layers=2), tokens)
    exact = make_model("ours", layers=2).double()
    for module in exact.modules():
        if isinstance(module, LinearAttention):
            module.options["backend"] = "reference"
    expected = loss_and_gradients(exact, tokens)
    return max(
        check_close(label, a, e, TOLERANCE)
        for label, a, e in zip(("loss", "gradients"), actual, expected, strict=True)
    )


def main() -> None:
    assert __doc__ is not None
    flags = parser(__doc__)
    flags.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    flags = flags.parse_args()
    report = Report("training", "T", "ours", flags)
    report.errors["ours"] = verify()
    for T, layers in (FULL if flags.full else SHORT).items():
        names = ["ours", "Llama"]
        if flags.full and T <= LONGEST_PLAIN:
            names += ["ours, plain"]
        if flags.full and T <= LONGEST_COMPILED and not flags.no_compile:
            names += ["ours, compiled", "Llama, compiled"]
        peak_mib = {name: peak_memory(prepare, name, T, layers) for name in names}
        steps = {name: prepare(name, T, layers) for name in names}
        timings = report.time({name: sample_of(step) for name, step in steps.items()}, 30)
        flops = 6 * T * weight_bytes(make_model("ours", layers=layers)) / 4
        work = {name: Work(flops, None) for name in names}
        panel = f"training step, {layers} layers"
        report.add(panel, f"1 x {T} tokens", T, timings, work, peak_mib)
    report.save()


if __name__ == "__main__":
    main()
