# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RecurrentGemma's recurrent layers, ours and Transformers': a prompt, and a training step.

    python benchmarks/bench_rg_lru.py           # 256 channels, in a minute
    python benchmarks/bench_rg_lru.py --full    # up to the 2B model's 2560, some minutes

Parts: the RG-LRU alone, and the block around it, with its convolution, gate and projections.
Contenders are modules of the same weights, for one row of T tokens in float32; a training step is
the outputs' sum and all gradients. "Products alone" does nothing but multiply with the part's
weights, which every implementation has to do: Transformers' time over this one's is the most that
any can gain.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Report, Work, check_close, keep_freed_memory, parser, sample_of
from hf_linear_attention import use_kernels

OURS, THEIRS, PRODUCTS = "ours", "Transformers", "products alone"
NAMES = (OURS, THEIRS, PRODUCTS)
PARTS = ("RG-LRU", "block")
TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3

Run = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    channels: int
    heads: int
    T: int


SETTINGS = {
    "smallest": [Case(16, 2, 16)],
    "short": [Case(256, 2, 1024)],
    "full": [Case(64, 1, 1024), Case(256, 2, 1024), Case(1024, 4, 1024), Case(2560, 10, 1024)],
}


def make_block(case: Case) -> nn.Module:
    """Transformers' recurrent block, with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "recurrent_gemma",
        hidden_size=case.channels,
        lru_width=case.channels,
        num_attention_heads=case.heads,
        num_key_value_heads=1,
        intermediate_size=3 * case.channels,
        num_hidden_layers=1,
        block_types=["recurrent"],
        vocab_size=8,
    )
    block = AutoModelForCausalLM.from_config(config).model.layers[0].temporal_block
    nn.init.normal_(block.rg_lru.recurrent_param)
    return block


def replaced(block: nn.Module) -> nn.Module:
    """A copy of it on our kernels."""
    ours = copy.deepcopy(block)
    assert use_kernels(ours).changed
    return ours


def run_of(part: str, block: nn.Module) -> Run:
    """The part of a block, which forgets what it was given."""

    def run(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        if part == "RG-LRU":
            y = block.rg_lru(x, positions)
        else:
            y, _ = block(x, positions, None, use_cache=False)
        block.conv1d_state = block.rg_lru.recurrent_states = None
        return y

    return run


def products_of(part: str, block: nn.Module) -> Run:
    """The products with weights of the part, of one input each, added up."""
    unit = block.rg_lru
    gates = [
        (unit.input_gate_weight, unit.input_gate_bias),
        (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
    ]
    linears = [] if part == "RG-LRU" else [block.linear_x, block.linear_y, block.linear_out]

    def run(x: Tensor) -> Tensor:
        by_heads = x.unflatten(-1, gates[0][1].shape).flatten(0, 1).transpose(0, 1)
        products = [torch.baddbmm(bias[:, None], by_heads, weight) for weight, bias in gates]
        return sum(y.sum() for y in (*products, *(linear(x) for linear in linears)))

    return run


def training_step(run: Run, x: Tensor, block: nn.Module) -> Callable[[], object]:
    leaf = x.clone().requires_grad_()

    def step() -> None:
        run(leaf).sum().backward()
        block.zero_grad(set_to_none=True)
        leaf.grad = None

    return step


def prompt(run: Run, x: Tensor, block: nn.Module) -> Callable[[], object]:
    return torch.no_grad()(lambda: run(x))


WORK = {"prompt": prompt, "training step": training_step}


def outputs_and_gradients(run: Run, block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    leaves = [x.clone().requires_grad_(), *block.parameters()]
    y = run(leaves[0])
    found = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return y.detach(), torch.cat([g.flatten() for g in found if g is not None])


def verify(part: str, ours: nn.Module, theirs: nn.Module) -> float:
    """The error of outputs, where gradients are right, too, against Transformers' in float64."""
    x = torch.randn(2, 100, ours.linear_x.in_features)
    exact = copy.deepcopy(theirs).double()
    actual = outputs_and_gradients(run_of(part, ours), ours, x)
    expected = outputs_and_gradients(run_of(part, exact), exact, x.double())
    check_close(f"the gradient of the {part}", actual[1], expected[1], GRADIENT_TOLERANCE)
    return check_close(part, actual[0], expected[0], TOLERANCE)


def measure(report: Report, case: Case) -> None:
    theirs = make_block(case)
    ours = replaced(theirs)
    x = torch.randn(1, case.T, case.channels)
    for part in PARTS:
        report.errors[f"{part}, {case.channels} channels"] = verify(part, ours, theirs)
        contenders = {
            OURS: (run_of(part, ours), ours),
            THEIRS: (run_of(part, theirs), theirs),
            PRODUCTS: (products_of(part, ours), ours),
        }
        weights = 2 * case.channels**2 // case.heads + 3 * case.channels**2 * (part == "block")
        for work, prepare in WORK.items():
            samples = {
                name: sample_of(prepare(run, x, block)) for name, (run, block) in contenders.items()
            }
            flops = (2 if work == "prompt" else 6) * case.T * weights
            title = f"{case.channels} channels, {case.heads} heads: {work} of {case.T} tokens"
            timings = report.time(samples, 20)
            report.add(part, title, case.channels, timings, dict.fromkeys(NAMES, Work(flops, None)))
            of_theirs, of_products = (timings[name].median for name in (THEIRS, PRODUCTS))
            most = of_theirs / of_products
            report.notes.append(f"{part}, {title}: no more than {most:.1f} times can be gained")


def main() -> None:
    assert __doc__ is not None
    keep_freed_memory()
    report = Report("rg_lru", "channels", OURS, parser(__doc__).parse_args())
    for case in SETTINGS[report.flags.setting]:
        measure(report, case)
    report.save()


if __name__ == "__main__":
    main()
