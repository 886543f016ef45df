# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Matrix products alone: few rows, as when text is generated, and many, as in prompts and training.

    python benchmarks/bench_products.py            # layers of 768 inputs and 2,048 outputs
    python benchmarks/bench_products.py --full     # the other way around, too, and more weights

Few rows are multiplied by one layer after the other, as in a model: by so many that no second-level
cache holds them, in large pages. Their weights are float32, bfloat16, and torchao's of 8 bits and
of 4 (4.5 with scales), both for rows of bfloat16. Many rows are multiplied by one layer, forward,
and forward with gradients of both, in float32, under autocast to bfloat16, and in bfloat16.

Contenders:
- ours: what `Linear` takes in a model, which may be PyTorch's product (many rows of most dtypes);
- PyTorch: torch.nn.functional.linear, or torchao's product of 8 bits;
- PyTorch in float32: for many rows, what bfloat16 is to be faster than;
- reading: for few rows, PyTorch's sum over as many bytes as the weights have, now and here. Shares
  of the bandwidth are of the best that was measured at the start, by more walks at once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness import Report, Work, check_close, keep_freed_memory, parser, sample_of, within
from hf_linear_attention import use_large_pages
from hf_linear_attention.fast.linear import hasten
from hf_linear_attention.fast.quantized import dequantize_int4
from models import bytes_of, quantise, torch_products, torchao_products


class Format(NamedTuple):
    """Of weights, and of the rows that are multiplied by them."""

    dtype: torch.dtype
    bits: int | None  # torchao's
    tolerance: float
    as_floats: Callable[[Any], Tensor] = Tensor.detach  # what a weight stands for
    other_products: Callable[[], AbstractContextManager] | None = torch_products


FORMATS = {
    "float32": Format(torch.float32, None, 1e-5),
    "bfloat16": Format(torch.bfloat16, None, 1e-2),
    "8 bits": Format(torch.bfloat16, 8, 1e-2, methodcaller("dequantize"), torchao_products),
    "4 bits": Format(torch.bfloat16, 4, 1e-2, dequantize_int4, None),  # torchao has none for CPUs
}
WAYS = {  # many rows: dtype, autocast
    "float32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
IN_FLOAT32 = "PyTorch in float32"


class Setting(NamedTuple):
    shapes: list[tuple[int, int]]  # inputs, outputs
    weights: int
    few: tuple[int, ...]
    many: tuple[int, ...]
    budget: float  # seconds, of one case


FEW = (1, 2, 4, 8, 16, 32, 64)
SETTINGS = {
    "smallest": Setting([(64, 128)], 2**14, (1, 2), (16, 32), 0),
    "short": Setting([(768, 2048)], 2**26, FEW, (1024,), 1),
    "full": Setting([(768, 2048), (2048, 768)], 2**27, FEW, (128, 1024, 4096), 5),
}


def make_layers(form: Format, inputs: int, outputs: int, weights: int) -> nn.ModuleList:
    torch.manual_seed(0)
    count = -(-weights // (inputs * outputs))
    layers = nn.ModuleList(hasten(nn.Linear(inputs, outputs, bias=False)) for _ in range(count))
    layers.to(form.dtype)
    if form.bits is not None:
        quantise(layers, form.bits, inputs)
    use_large_pages(layers)
    return layers


def random_rows(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


def time_few_rows(report: Report, name: str, shape: tuple[int, int], setting: Setting) -> None:
    form, (inputs, outputs) = FORMATS[name], shape
    layers = make_layers(form, inputs, outputs, setting.weights)
    num_bytes = sum(bytes_of(layer.weight) for layer in layers)
    to_read = torch.ones(num_bytes // 4)

    @torch.no_grad()
    def multiply(x: Tensor) -> None:
        for layer in layers:
            layer(x)

    for rows in setting.few:
        x = random_rows(rows, inputs, form.dtype)
        with torch.no_grad():
            y = layers[0](x)
            exact = x.double() @ form.as_floats(layers[0].weight).double().T
        case = f"{rows} x {inputs} to {outputs}"
        report.errors[f"{name}, {case}"] = check_close(
            f"ours, {name}, {case}", y, exact, form.tolerance
        )
        samples = {"ours": sample_of(partial(multiply, x))}
        if form.other_products:
            samples["PyTorch"] = within(form.other_products, sample_of(partial(multiply, x)))
        work = dict.fromkeys(
            samples, Work(2 * rows * inputs * outputs * len(layers), num_bytes, "read")
        )
        samples["reading"] = sample_of(to_read.sum)
        work["reading"] = Work(None, num_bytes, "read")
        timings = report.time(samples, setting.budget)
        report.add(f"few rows, {name}, {inputs} to {outputs}", case, rows, timings, work)


@dataclass
class ManyRows:
    """A layer, and rows in one of the ways."""

    layer: nn.Linear
    x: Tensor
    dy: Tensor | None  # the gradient of y, where there is a backward pass
    autocast: bool

    @classmethod
    def make(cls, rows: int, shape: tuple[int, int], way: str, backward: bool) -> "ManyRows":
        dtype, autocast = WAYS[way]
        inputs, outputs = shape
        layer = hasten(nn.Linear(inputs, outputs, bias=False)).to(dtype)
        x = random_rows(rows, inputs, dtype).requires_grad_(backward)
        dy = random_rows(rows, outputs, torch.bfloat16 if autocast else dtype)
        return cls(layer, x, dy if backward else None, autocast)

    def run(self) -> list[Tensor]:
        """y, and where there is a backward pass the gradients of x and of the weight."""
        backward = self.dy is not None
        with torch.set_grad_enabled(backward), torch.autocast("cpu", enabled=self.autocast):
            y = self.layer(self.x)
        if not backward:
            return [y]
        return [y, *torch.autograd.grad(y, (self.x, self.layer.weight), self.dy)]

    def verify(self, name: str) -> float:
        """The largest relative error against float64."""
        x, weight = self.x.detach().double(), self.layer.weight.detach().double()
        exact = [x @ weight.T]
        if self.dy is not None:
            exact += [self.dy.double() @ weight, self.dy.double().T @ x]
        tolerance = 1e-2 if self.autocast or self.x.dtype == torch.bfloat16 else 1e-5
        return max(
            check_close(f"ours, {name}", actual, wanted, tolerance)
            for actual, wanted in zip(self.run(), exact, strict=True)
        )


def time_many_rows(report: Report, way: str, shape: tuple[int, int], setting: Setting) -> None:
    inputs, outputs = shape
    for what, backward in (("forward", False), ("forward + backward", True)):
        for rows in setting.many:
            case = f"{rows} x {inputs} to {outputs}"
            many = ManyRows.make(rows, shape, way, backward)
            name = f"{what}, {way}, {case}"
            report.errors[name] = many.verify(name)
            samples = {"ours": sample_of(many.run)}
            samples["PyTorch"] = within(torch_products, sample_of(many.run))
            if way != "float32":
                in_float32 = ManyRows.make(rows, shape, "float32", backward)
                samples[IN_FLOAT32] = within(torch_products, sample_of(in_float32.run))
            flops = (6 if backward else 2) * rows * inputs * outputs
            work = dict.fromkeys(samples, Work(flops, None))
            timings = report.time(samples, setting.budget)
            report.add(f"{what}, {way}, {inputs} to {outputs}", case, rows, timings, work)


def main() -> None:
    assert __doc__ is not None
    flags = parser(__doc__).parse_args()
    report = Report("products", "rows", "ours", flags)
    keep_freed_memory()
    setting = SETTINGS[flags.setting]
    names = list(FORMATS)
    if find_spec("torchao") is None:
        report.notes.append("without weights of 8 and 4 bits: torchao is not installed")
        names = [name for name in names if FORMATS[name].bits is None]
    for shape in setting.shapes:
        for name in names:
            time_few_rows(report, name, shape, setting)
        for way in WAYS:
            time_many_rows(report, way, shape, setting)
    report.save()


if __name__ == "__main__":
    main()
