# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' own recurrent models on our kernels, beside llama.cpp with the same weights.

    python benchmarks/bench_peers.py --llama PYTHON           # a token, a short prompt; minutes
    python benchmarks/bench_peers.py --llama PYTHON --full    # more contexts and rows, long prompts

--llama names the Python of an environment that has llama.cpp (`pip install llama-cpp-python gguf
safetensors`); without it, only the others are timed.

The models are those of bench_upstream.py: Qwen3.5, every fourth of whose layers has softmax, and
Mamba-2. Their weights are random, and the same for all: in float32, in bfloat16, in 8 bits (ours
torchao's with a scale for each output, llama.cpp's Q8_0 with one for each 32 weights: 8.5 bits) and
in 4 (torchao's groups of 64 and Q4_0, 4.5 bits both). Contenders:
- the model of Transformers after `use_kernels`, weights in large pages (docs/generation.md);
- llama.cpp, which keeps states in float32, keys and values in float16;
- ONNX Runtime with the graph that `export_onnx` makes of the model, 8 and 4 bits in blocks of 32;
- Transformers' model as it is, in float32 and after short contexts.

A token is the mean of 32 (of 4 in Transformers) that follow a context and one token, not timed:
`model(token, cache)` for ours, `llama_decode` for llama.cpp, no sampling. Then a graph is given
the states from before, which are arrays; of the others keys and values are
cut to the context again; recurrent states, which can't be cut, go on in PyTorch, and are copied
back in llama.cpp: a token costs the same whatever they hold. A prompt is one row, of which the last
logits are asked. Shares of the bandwidth count weights, keys and values read once, states read and
written.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from bench_upstream import AFTER, make_model
from harness import Report, Timing, Work, check_close, parser, sample_of
from hf_linear_attention import use_kernels, use_large_pages
from hf_linear_attention.extras import speedup
from llama_cpp_models import (
    CACHE_BYTES,
    KINDS,
    SEVERAL,
    STEPS,
    LlamaCpp,
    expected_logits,
    random_tokens,
    verified_tokens,
)
from models import count_weights, quantise, weight_bytes

LLAMA, BEFORE, GRAPH = "llama.cpp", "Transformers", "ONNX Runtime"
UNTIMED = 1  # tokens before a sample: in PyTorch, the first after a cut copies keys and values
LONGEST_BEFORE = 1024  # context that Transformers' model reads as it is,
STEPS_BEFORE = 4  # and how many tokens then are a sample, where others have STEPS
EXACT = 1e-4  # how far ours may be from Transformers in float32
MATRIX, CONVOLUTION, NOISE = 0.02, 0.5, 0.1  # standard deviations; the first is the largest


class Format(NamedTuple):
    """Of weights."""

    dtype: torch.dtype
    bits: int | None  # torchao's
    kind: str  # llama.cpp's

    @property
    def tolerance(self) -> float:
        """How far logits may be from those of Transformers in float32."""
        return EXACT if self.dtype == torch.float32 else KINDS[self.kind][1]

    @property
    def has_graph(self) -> bool:
        """Whether ONNX Runtime takes part: on a CPU it has no bfloat16."""
        return self.bits is not None or self.dtype == torch.float32


FORMATS = {
    "float32": Format(torch.float32, None, "F32"),
    "bfloat16": Format(torch.bfloat16, None, "BF16"),
    "8 bits": Format(torch.bfloat16, 8, "Q8_0"),
    "4 bits": Format(torch.bfloat16, 4, "Q4_0"),
}


class Setting(NamedTuple):
    """What is measured."""

    layers: dict[str, int]  # by model
    tokens: tuple[tuple[int, int], ...]  # rows and tokens of context
    prompt: int
    budget: float  # seconds for the rounds of a case


WHOLE = {"Qwen3.5": 12, "Mamba-2": 24}
SETTINGS = {
    "smallest": Setting({"Qwen3.5": 4, "Mamba-2": 2}, ((1, 16), (2, 16)), prompt=16, budget=0),
    "short": Setting(WHOLE, ((1, 128),), prompt=256, budget=8),
    "full": Setting(
        WHOLE, ((1, 128), (1, 1024), (1, 8192), (4, 128), (16, 128)), prompt=1024, budget=20
    ),
}


# ---- the models ----


def original(name: str, layers: int, is_smallest: bool) -> PreTrainedModel:
    """A model in float32, as Transformers has it, with weights that show mistakes. As Transformers
    makes them, rounding errors grow from layer to layer (Mamba-2), or the recurrence gives so
    little that nobody would miss it (Qwen3.5).
    """
    model = make_model(name, layers, torch.float32, is_smallest)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # else two norms would be alike, and one taken for the other
            parameter.data += NOISE * torch.randn_like(parameter)
        elif parameter.dim() == 2:
            parameter.data *= min(MATRIX / parameter.std().item(), 1)
        else:
            parameter.data *= CONVOLUTION / parameter.std()
    embeddings = model.get_input_embeddings().weight
    embeddings.data /= embeddings.std()
    return model


def ours(before: PreTrainedModel, form: Format) -> PreTrainedModel:
    """The same on our kernels, with its weights in another format."""
    if form.dtype == before.dtype:
        model = speedup.twin(before)
    else:
        model = copy.deepcopy(before).to(form.dtype)
    if form.bits is not None:
        quantise(model, form.bits, model.config.hidden_size)
    report = use_kernels(model)
    assert not report.left, report
    use_large_pages(model)
    return model


class Decoder:
    """A model that has read a context in each row."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, steps: int = STEPS):
        """tokens: (rows, context). steps: tokens of a sample."""
        self.model, self.context, self.steps = model, tokens.shape[1], steps
        self.token = tokens[:, -1:]
        output = self._forward(tokens)
        self.cache = speedup.cache_in(output)
        self.logits = output.logits[:, -1]  # after the last token that was read
        self.argument = {speedup.cache_argument(model): self.cache}

    @torch.no_grad()
    def _forward(self, tokens: Tensor, **options: Any) -> Any:
        return self.model(tokens, use_cache=True, logits_to_keep=1, **options)

    def read(self, tokens: Tensor) -> None:
        """tokens (rows, n), one by one."""
        for token in tokens.split(1, dim=1):
            self.logits = self._forward(token, **self.argument).logits[:, -1]

    def sample(self) -> float:
        """Seconds per token of all rows."""
        self.read(self.token.repeat(1, UNTIMED))
        tokens = self.token.repeat(1, self.steps)
        start = time.perf_counter()
        self.read(tokens)
        seconds = time.perf_counter() - start
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer):
                layer.keys = layer.keys[:, :, : self.context]
                layer.values = layer.values[:, :, : self.context]
        return seconds / self.steps

    def cached(self) -> list[tuple[Tensor, bool]]:
        """What a token reads of the cache, and whether it writes it, too."""
        tensors = []
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer):
                tensors += [(layer.keys, False), (layer.values, False)]
            if isinstance(layer, LinearAttentionLayer):
                tensors += [(state, True) for state in layer.recurrent_states.values()]
        return tensors

    def least_work(self) -> Work:
        cache = sum(x.nbytes * (1 + is_written) for x, is_written in self.cached())
        flops = 2 * count_weights(self.model) * len(self.token)
        return Work(flops, weight_bytes(self.model) + cache, bandwidth="read")

    def llama_cpp_s_bytes(self) -> int:
        """As many numbers in llama.cpp's cache, read and written."""
        return sum(
            x.numel() * (2 * 4 if is_written else CACHE_BYTES) for x, is_written in self.cached()
        )


class Graph:
    """A model as a graph on ONNX Runtime, and what it has read."""

    error: float  # of its logits

    def __init__(self, model: PreTrainedModel, bits: int | None):
        from bench_onnx import make_session, nothing, read  # imports ONNX Runtime

        self.nothing, self.read_ids = nothing, read
        with tempfile.TemporaryDirectory() as folder:
            self.session = make_session(model, Path(folder), bits=bits)

    def begin(self, tokens: Tensor) -> Tensor:
        """Reads a context (rows, T): the last logits."""
        self.mask = np.zeros((len(tokens), 0), np.int64)
        self.states = self.nothing(self.session, len(tokens))
        return self.read(tokens)

    def read(self, tokens: Tensor) -> Tensor:
        """tokens (rows, n), at once: the last logits."""
        ids = tokens.numpy()
        self.mask = np.pad(self.mask, ((0, 0), (0, ids.shape[1])), constant_values=1)
        logits, self.states = self.read_ids(self.session, self.states, ids, self.mask, keep=1)
        return torch.from_numpy(logits[:, -1])

    def sample(self, token: Tensor) -> float:
        """Seconds per token of all rows."""
        kept = self.mask, self.states
        for _ in range(UNTIMED):
            self.read(token)
        start = time.perf_counter()
        for _ in range(STEPS):
            self.read(token)
        seconds = time.perf_counter() - start
        self.mask, self.states = kept
        return seconds / STEPS


def verify(name: str, model: PreTrainedModel, expected: Tensor, tolerance: float) -> float:
    """The error of logits after a context and tokens one by one."""
    context, rest = verified_tokens(model, len(expected))
    decoder = Decoder(model, context)
    decoder.read(rest)
    return check_close(name, decoder.logits, expected, tolerance)


def graph_of(name: str, model: PreTrainedModel, expected: Tensor, form: Format) -> Graph:
    """The model as a graph, when its logits have been found right."""
    graph = Graph(model, form.bits)
    context, rest = verified_tokens(model, len(expected))
    graph.begin(context)
    for token in rest.split(1, dim=1):
        logits = graph.read(token)
    graph.error = check_close(name, logits, expected, form.tolerance)
    return graph


# ---- what is measured ----


class Bench:
    """The cases of one model, each added to the report."""

    def __init__(self, report: Report, setting: Setting, name: str):
        self.report, self.setting, self.name = report, setting, name
        self.before = original(name, setting.layers[name], report.is_smallest)
        self.expected = expected_logits(self.before, SEVERAL)
        self.llama: LlamaCpp | None = None
        self.single_rows: set[str] = set()  # kinds in which llama.cpp takes one row only
        if report.flags.llama is not None:
            self.llama = LlamaCpp(report.flags.llama, self.before)
            self.verify_llama(self.llama)

    def verify_llama(self, llama: LlamaCpp) -> None:
        """With one row it has to be right. With several, llama-cpp-python 0.3.36 on a processor
        with AMX gave the first row right and all others wrong, in 8 and 4 bits, by Qwen3.5's
        product "ssm_out" alone: such a kind is timed with one row only.
        """
        for kind, error in llama.verify(rows=1).items():
            self.report.errors[f"{self.name}, {LLAMA}, {kind}"] = error
            of_several = llama.error(kind, SEVERAL)
            if not of_several <= KINDS[kind][1]:
                self.single_rows.add(kind)
                self.report.notes.append(
                    f"{self.name}: {LLAMA}'s {kind} is wrong with {SEVERAL} rows (relative error "
                    f"{of_several:.2f}) and not timed with several"
                )

    def run(self) -> None:
        for format_name, form in FORMATS.items():
            if form.bits is not None and find_spec("torchao") is None:
                continue
            model = ours(self.before, form)
            title = f"{self.name}, {AFTER}, {format_name}"
            self.report.errors[title] = verify(title, model, self.expected, form.tolerance)
            models = {AFTER: model}
            if form.dtype == torch.float32:
                models[BEFORE] = self.before
            graph = None
            if form.has_graph and find_spec("onnxruntime") is not None:
                title = f"{self.name}, {GRAPH}, {format_name}"
                graph = graph_of(title, self.before, self.expected, form)
                self.report.errors[title] = graph.error
            for rows, context in self.setting.tokens:
                self.time_token(format_name, models, graph, rows, context)
            self.time_prompt(format_name, models, graph)
        if self.llama is not None:
            self.llama.close()

    @contextmanager
    def llama_at(self, kind: str, tokens: Tensor) -> Iterator[LlamaCpp | None]:
        """llama.cpp when it has read these tokens, if it takes part."""
        if self.llama is None or (kind in self.single_rows and len(tokens) > 1):
            yield None
        else:
            with self.llama.prepared(kind, tokens, tokens.shape[1]):
                yield self.llama

    def time_token(
        self,
        format_name: str,
        models: dict[str, PreTrainedModel],
        graph: Graph | None,
        rows: int,
        context: int,
    ) -> None:
        kind = FORMATS[format_name].kind
        tokens = random_tokens(self.before, rows, context)
        decoders = {
            name: Decoder(model, tokens, STEPS_BEFORE if name == BEFORE else STEPS)
            for name, model in models.items()
            if name != BEFORE or rows * context <= LONGEST_BEFORE
        }
        samples = {name: decoder.sample for name, decoder in decoders.items()}
        work = {name: decoder.least_work() for name, decoder in decoders.items()}
        if graph is not None:
            graph.begin(tokens)
            samples[GRAPH] = partial(graph.sample, tokens[:, -1:])
        with self.llama_at(kind, tokens) as llama:
            if llama is not None:
                samples[LLAMA] = partial(llama.sample, kind, UNTIMED)
                cache = decoders[AFTER].llama_cpp_s_bytes()
                work[LLAMA] = llama.least_work(kind, rows, cache)
            of_rows = "1 row" if rows == 1 else f"{rows} rows"
            self.add(
                f"{format_name}, a token, {of_rows}",
                f"after {rows} x {context}",
                context,
                samples,
                work,
            )

    def time_prompt(
        self, format_name: str, models: dict[str, PreTrainedModel], graph: Graph | None
    ) -> None:
        form, T = FORMATS[format_name], self.setting.prompt
        tokens = random_tokens(self.before, 1, T)
        samples = {
            name: sample_of(speedup.read_prompt(model, tokens)) for name, model in models.items()
        }
        if graph is not None:
            samples[GRAPH] = sample_of(partial(graph.begin, tokens))
        # The peak is one of float32.
        flops = 2 * T * count_weights(self.before) if form.dtype == torch.float32 else None
        with self.llama_at(form.kind, tokens) as llama:
            if llama is not None:
                samples[LLAMA] = partial(llama.sample_prompt, form.kind)
            work = dict.fromkeys(samples, Work(flops, None))
            self.add(f"{format_name}, prompt", f"{T} tokens", T, samples, work)

    def add(
        self,
        panel: str,
        case: str,
        x: int,
        samples: dict[str, Callable[[], float]],
        work: dict[str, Work],
    ) -> None:
        timings: dict[str, Timing] = self.report.time(samples, self.setting.budget)
        self.report.add(f"{self.name}, {panel}", case, x, timings, work)


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--llama", type=Path, help="a Python with llama-cpp-python, a contender")
    flags = arguments.parse_args()
    report = Report("peers", "tokens", AFTER, flags)
    if find_spec("torchao") is None:
        report.notes.append("without weights of 8 and 4 bits: torchao is not installed")
    if flags.llama is None:
        report.notes.append("without llama.cpp: --llama was not given")
    setting = SETTINGS[flags.setting]
    for name in setting.layers:
        bench = Bench(report, setting, name)
        bench.run()
    if bench.llama is not None:
        report.notes.append(f"llama-cpp-python {bench.llama.version}, its cache of keys in float16")
    report.save()


if __name__ == "__main__":
    main()
