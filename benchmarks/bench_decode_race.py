# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A token by its trace, against compilers over the same ops, and what each part of traces gains.

    python benchmarks/bench_decode_race.py           # models of 4 x 256, in ten minutes
    python benchmarks/bench_decode_race.py --full    # and one of 12 x 1,024; in half an hour

A forward of one token in each row, with a cache that has read CONTEXT tokens; a sample is the
fastest of TOKENS. Contenders, which share all weights:
- traces: the model as it is, whose traces (docs/generation.md) repeat a token's operations;
- modules: the same without traces, by which all others are verified, traces to the last bit;
- without threads, guards, calls: traces whose operations don't share a team of threads, that are
  not compared with the modules, and that call each operation from Python;
- torch.compile: the forward with a static cache, in one graph; "C++ wrapper" where Inductor calls
  operations from C++;
- AOTInductor: the forward and the static cache, exported, compiled, and loaded again.

Compilers get linear layers that call the package's products as plain operations: in its own, those
of torchao's weights make way for torchao while torch compiles, and all do for an export.

Notes say how long each was about its first TOKENS tokens beyond what as many took later (traces are
made within these), compiling included, and after how many tokens a compiler has caught up with
traces. torch's caches of compiled code are off, and a small graph was compiled before.
"""

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import Cache, DynamicLayer

from harness import Report, Timing, Work, check_close, parser
from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionConfig,
    StaticLinearAttentionCache,
    use_kernels,
)
from hf_linear_attention.decode import conditions, layers, trace
from hf_linear_attention.extras import speedup
from hf_linear_attention.fast import linear as linears
from hf_linear_attention.fast import quantized
from models import NO_SPECIAL_TOKENS, count_weights, quantise, weight_bytes

CONTEXT = 64
TOKENS = 32  # of a sample, and before the first
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
BITS = {"float32": None, "4 bits": 4}  # of weights; None: as they are
TRACES, MODULES = "traces", "modules"

AOT_SETTINGS = {
    "aot_inductor.package_constants_in_so": False,  # weights are the model's own
    # Or a static cache's number of tokens, a buffer of one number, stays what it was at the export.
    "joint_graph_constant_folding": False,
}

Step = Callable[[Tensor], Tensor]  # tokens (B, 1) -> logits (B, 1, vocabulary)


# ---- the models ----


class Size(NamedTuple):
    layers: int
    hidden_size: int
    vocab_size: int


def own_config(size: Size) -> LinearAttentionConfig:
    return LinearAttentionConfig.from_preset(
        "gated_deltanet",
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=max(size.hidden_size // 128, 2),
    )


def upstream_config(size: Size) -> Any:
    heads = max(size.hidden_size // 128, 2)
    head_dim = size.hidden_size // heads
    return AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        **NO_SPECIAL_TOKENS,
    )


CONFIGS = {"gated_deltanet": own_config, "Qwen3.5": upstream_config}


def make_model(name: str, size: Size, bits: int | None) -> PreTrainedModel:
    """With random weights, the same every time; on the package's kernels."""
    torch.manual_seed(0)
    dtype = torch.float32 if bits is None else torch.bfloat16
    model = AutoModelForCausalLM.from_config(CONFIGS[name](size), dtype=dtype).eval()
    if bits is not None:
        quantise(model, bits, size.hidden_size)
    if name != "gated_deltanet":
        use_kernels(model)
    return model


class Product(nn.Linear):
    """A linear layer by the package's product of few rows, for compilers."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, None
        self.product: Callable[..., Tensor] = linears.few_rows_product
        names: tuple[str, ...] = ()
        if type(linear.weight) is not nn.Parameter:
            self.product, names = quantized.int4_product, ("qdata", "scale", "zero_point")
            del self.weight
        for name in names:
            self.register_buffer(name, getattr(linear.weight, name))
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        if self.names:
            return self.product(
                x, self.qdata, self.scale, self.zero_point, None, quantized.is_rounded(x)
            )
        return self.product(x, self.weight, None)


class ModelAndCache(nn.Module):
    """A model and its static cache, of which a token is exported."""

    def __init__(self, model: PreTrainedModel, cache: Cache):
        super().__init__()
        self.model, self.cache = model, cache
        for index, layer in enumerate(cache.layers):
            for name, x in tensors_of(layer):
                self.register_buffer(f"cache_{index}_{name}", x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, past_key_values=self.cache).logits


def tensors_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """All that a layer of a cache has, by name."""
    for name, value in vars(layer).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        yield from ((f"{name}{part}", x) for part, x in parts if isinstance(x, Tensor))


def for_compilers(model: PreTrainedModel) -> PreTrainedModel:
    """A twin whose linear layers are `Product`s."""
    model = speedup.twin(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(module, name, Product(child))
    return model


# ---- contenders ----


@contextlib.contextmanager
def without_traces() -> Iterator[None]:
    with mock.patch.object(conditions, "ARE_TOKENS_RECORDED", False):
        yield


def by_model(model: PreTrainedModel, cache: Cache) -> Step:
    return lambda tokens: model(tokens, past_key_values=cache).logits


def by_torch_compile(model: PreTrainedModel, cache: Cache, **options: Any) -> Step:
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, options=options)
    return lambda tokens: forward(tokens, past_key_values=cache).logits


def by_aot_inductor(model: PreTrainedModel, cache: Cache) -> Step:
    rows = next(x for layer in cache.layers for _, x in tensors_of(layer) if x.dim() > 1).shape[0]
    step = ModelAndCache(model, cache)
    program = torch.export.export(step, (torch.zeros(rows, 1, dtype=torch.long),), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=f"{folder}/step.pt2",
            inductor_configs=AOT_SETTINGS,
        )
        run = torch._inductor.aoti_load_package(path)
    tensors = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    wanted = run.get_constant_fqns()
    constants = {name: x.detach() for name, x in tensors.items() if name in wanted}
    run.load_constants(constants, check_full_update=False, user_managed=True)
    return lambda tokens, _constants=constants: run(tokens)


class Contender(NamedTuple):
    prepare: Callable[[PreTrainedModel, Cache], Step]
    within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    is_compiler: bool = False


def patched(*args: Any) -> Callable[[], contextlib.AbstractContextManager]:
    return partial(mock.patch.object, *args)


CONTENDERS = {
    TRACES: Contender(by_model),
    MODULES: Contender(by_model, without_traces),
    "without threads": Contender(by_model, patched(trace, "LARGE_WEIGHT", 2**62)),
    "without guards": Contender(by_model, patched(layers.Recording, "is_current", lambda _: True)),
    "without calls": Contender(by_model, patched(trace, "IS_COMPILED", False)),
    "torch.compile": Contender(by_torch_compile, is_compiler=True),
    "torch.compile, C++ wrapper": Contender(
        partial(by_torch_compile, cpp_wrapper=True), is_compiler=True
    ),
    "AOTInductor": Contender(by_aot_inductor, is_compiler=True),
}


def clock() -> float:
    """Seconds. Of one thread those of the processor, in which other programs have no part."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Runner:
    """A contender that has read CONTEXT tokens in each row, and gives logits of the next."""

    def __init__(self, name: str, model: PreTrainedModel, rows: int):
        self.contender = CONTENDERS[name]
        is_compiler = self.contender.is_compiler
        self.model = for_compilers(model) if is_compiler else speedup.twin(model)
        self.cache = new_cache(self.model, is_static=is_compiler)
        config = self.model.config
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (rows, CONTEXT + TOKENS), generator=generator)
        self.tokens = ids[:, CONTEXT:].t().contiguous().unsqueeze(-1)  # (TOKENS, rows, 1)
        with torch.no_grad(), without_traces():
            self.model(ids[:, :CONTEXT], past_key_values=self.cache)
        self.first, self.logits = self._first_tokens()

    @torch.no_grad()
    def _first_tokens(self) -> tuple[float, Tensor]:
        """How long TOKENS took with all that is made for them, and the last one's logits."""
        with self.contender.within():
            start = time.perf_counter()
            self.step = self.contender.prepare(self.model, self.cache)
            for tokens in self.tokens:
                logits = self.step(tokens)
            seconds = time.perf_counter() - start
        self._rewind()
        return seconds, logits

    @torch.no_grad()
    def sample(self) -> float:
        """Seconds of the fastest of TOKENS tokens: others may have begun with cold caches."""
        times = []
        with self.contender.within():
            for tokens in self.tokens:
                start = clock()
                self.step(tokens)
                times.append(clock() - start)
        self._rewind()
        return min(times)

    def _rewind(self) -> None:
        """Back to CONTEXT tokens of softmax layers; all else costs the same."""
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer):
                layer.keys = layer.keys[:, :, :CONTEXT]
                layer.values = layer.values[:, :, :CONTEXT]
            elif isinstance(length := getattr(layer, "cumulative_length", None), Tensor):
                length.fill_(CONTEXT)


def new_cache(model: PreTrainedModel, is_static: bool) -> Cache:
    config = model.config
    is_own = isinstance(config, LinearAttentionConfig)
    if is_static:
        make = StaticLinearAttentionCache if is_own else StaticCache
        return make(config=config, max_cache_len=CONTEXT + TOKENS)
    return LinearAttentionCache(config) if is_own else DynamicCache(config=config)


# ---- cases ----


class Case(NamedTuple):
    model: str
    size: Size
    bits: str
    rows: int

    @property
    def panel(self) -> str:
        return f"{self.model}, {self.size.layers} x {self.size.hidden_size}, {self.bits}"

    @property
    def of_rows(self) -> str:
        return "1 row" if self.rows == 1 else f"{self.rows} rows"


SMALL, LARGE = Size(4, 256, 1000), Size(12, 1024, 32000)
SHORT = [Case(name, SMALL, bits, rows) for rows in (1, 32) for name in CONFIGS for bits in BITS]
LONG = [Case("gated_deltanet", LARGE, "4 bits", 1)]
SETTINGS = {
    "smallest": [Case("gated_deltanet", Size(1, 256, 100), "4 bits", 2)],
    "short": SHORT,
    "full": SHORT + LONG,
}
BUDGET = 10  # seconds for the rounds of a case


def run_case(report: Report, case: Case) -> None:
    torch.compiler.reset()
    model = make_model(case.model, case.size, BITS[case.bits])
    runners = {name: Runner(name, model, case.rows) for name in CONTENDERS}
    expected = runners[MODULES].logits
    for name, runner in runners.items():
        label = f"{name}, {case.panel}, {case.rows} rows"
        error = check_close(label, runner.logits, expected, TOLERANCE[model.dtype])
        if CONTENDERS[name].prepare is by_model and error > 0:
            raise SystemExit(f"{label}: not the bits of the modules")
        report.errors[label] = error
    samples = {name: runner.sample for name, runner in runners.items()}
    timings = report.time(samples, BUDGET)
    least = Work(2 * count_weights(model) * case.rows, weight_bytes(model), bandwidth="read")
    first = {name: runner.first for name, runner in runners.items()}
    report.notes.append(f"{case.panel}, {case.of_rows}: {note_of(first, timings)}")
    report.add(case.panel, case.of_rows, case.rows, timings, dict.fromkeys(timings, least))


def note_of(first: dict[str, float], timings: dict[str, Timing]) -> str:
    """What was done before and within the first tokens, and when it has paid."""
    seconds = {name: max(first[name] - TOKENS * timings[name].median, 0.0) for name in first}
    told = []
    for name in (TRACES, *(name for name in first if CONTENDERS[name].is_compiler)):
        text = f"{name} {seconds[name]:.2f} s"
        if name != TRACES:
            gain = timings[TRACES].median - timings[name].median
            tokens = (seconds[name] - seconds[TRACES]) / gain if gain > 0 else None
            text += f" (has caught up after {tokens:,.0f} tokens)" if tokens else " (never pays)"
        told.append(text)
    return "; ".join(told)


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--resume", action="store_true", help="what an interrupted run has left")
    flags = arguments.parse_args()
    report = Report("decode_race", "rows", TRACES, flags, is_resumed=flags.resume)
    if flags.threads == 1 and not flags.resume:
        report.notes.append("times for a token are the processor's")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="(?s).*side effects|.*force disabled")
    with mock.patch.object(torch.compiler.config, "force_disable_caches", True):
        torch.compile(torch.neg)(torch.ones(4))
        for case in SETTINGS[flags.setting]:
            if not report.has(case.panel, case.of_rows):
                run_case(report, case)
    report.save()


if __name__ == "__main__":
    main()
