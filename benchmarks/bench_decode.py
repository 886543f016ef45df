# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Generation: time per token after contexts of different lengths, and the time to read a prompt.

    python benchmarks/bench_decode.py           # in two minutes
    python benchmarks/bench_decode.py --full    # more contexts, 32 rows, longer prompts; in ten

Contenders, all of 12 layers x 768 and with random weights:
- ours, and the same model where attention is its projections alone and returns v: the floor that
  the rest of the model sets;
- ours where nn.Linear multiplies: how much of the gain is that of the compiled product;
- Transformers' Llama (SDPA), with the cache that generate() makes and with StaticCache;
- Transformers' GPT-2 (SDPA) and Mamba2 (in PyTorch, for its kernels need CUDA);
- ours in bfloat16 with torchao's weights of 8 and 4 bits, whose few rows are products of integers,
  and with torchao's own product of the former, where torchao is installed;
- beside those, the same Llama in llama.cpp, with its weights of 32, 16, 8 and 4 bits, where --llama
  names the Python of an environment that has it (`pip install llama-cpp-python gguf safetensors`).

"generate()" is the time between two tokens inside generate(), "forward" that of model(...) alone.
A long context is not read, but made up: after eight real tokens, keys and values in softmax caches
are filled up with random numbers, and our cache is told a number of tokens, because its size and
the work on it never change. Mamba2's cache counts nothing, and it generates from eight tokens.

PyTorch's models have their weights in large pages where Linux has such (docs/generation.md).
Shares of the bandwidth count the weights, and what the cache holds, read once.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    StaticCache,
    StaticLayer,
)

from harness import Report, Work, check_close, parser, within
from hf_linear_attention import LinearAttentionCache, use_large_pages
from identity import without_attention
from llama_cpp_models import STEPS, LlamaCpp, name_of
from models import (
    SIZE,
    SMALLEST,
    Size,
    count_weights,
    lengthen,
    make_model,
    make_quantised,
    random_tokens,
    torch_products,
    torchao_products,
    weight_bytes,
)

REAL_TOKENS = 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
IDENTITY = "ours, attention = v"
NN_LINEAR = "ours, nn.Linear"
STATIC = "Llama, StaticCache"
BITS = {"ours, 8 bits": 8, "ours, 4 bits": 4}
TORCHAO = "ours, 8 bits, torchao's product"
QUANTISED = ("ours", "ours, bfloat16", *BITS, TORCHAO)


class StepClock(StoppingCriteria):
    """Stops nothing: notes when generate() has each token."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@dataclass
class Decoder:
    """A model whose cache has read, or pretends to have read, `context` tokens in each row."""

    model: PreTrainedModel
    size: Size
    rows: int
    context: int
    is_static: bool = False

    def __post_init__(self):
        # Per sample. The first few find in no cache what they need, for the others had their turn;
        # fewer where softmax attention takes seconds for each.
        self.steps = STEPS if self.rows * self.context <= 8192 else 3
        self.is_mamba = self.model.config.model_type == "mamba2"
        self.cache = self._new_cache()
        self.tokens = random_tokens(self.size, self.rows, self.context + 1)
        self.forward(self.tokens[:, :REAL_TOKENS])
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                layer.keys[:, :, REAL_TOKENS : self.context].normal_()
                layer.values[:, :, REAL_TOKENS : self.context].normal_()
            elif isinstance(layer, DynamicLayer):
                lengthen(layer, self.context - REAL_TOKENS)
        self.rewind()

    def _new_cache(self) -> Cache:
        config = self.model.config
        if self.is_static:
            return StaticCache(config=config, max_cache_len=self.context + self.steps + 1)
        if config.model_type == "linear_attention":
            return LinearAttentionCache(config)
        return DynamicCache(config=config)

    def rewind(self) -> None:
        """Back to `context` tokens. What a recurrent state holds is all the same to its cost."""
        for layer in self.cache.layers:
            if is_recurrent(layer):
                layer.num_tokens = self.context
            elif isinstance(layer, StaticLayer):
                layer.cumulative_length.fill_(self.context)
            elif isinstance(layer, DynamicLayer):
                layer.keys = layer.keys[:, :, : self.context]
                layer.values = layer.values[:, :, : self.context]

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        name = "cache_params" if self.is_mamba else "past_key_values"
        return self.model(tokens, use_cache=True, logits_to_keep=1, **{name: self.cache}).logits

    def sample_forward(self) -> float:
        """Seconds per token, without generate() around it."""
        token = self.tokens[:, -1:]
        start = time.perf_counter()
        for _ in range(self.steps):
            self.forward(token)
        seconds = time.perf_counter() - start
        self.rewind()
        return seconds / self.steps

    def sample_generate(self) -> float:
        """Seconds from one token of generate() to the next."""
        clock = StepClock()
        # Mamba2's generate() does not continue from a cache
        cache = {} if self.is_mamba else {"past_key_values": self.cache}
        tokens = self.tokens[:, :REAL_TOKENS] if self.is_mamba else self.tokens
        self.model.generate(
            tokens,
            max_new_tokens=self.steps + 1,
            do_sample=False,
            stopping_criteria=[clock],
            attention_mask=torch.ones_like(tokens),
            **cache,
        )
        assert len(clock.times) == self.steps + 1
        self.rewind()
        return (clock.times[-1] - clock.times[0]) / self.steps

    def least_work(self) -> Work:
        cache = 0
        for layer in self.cache.layers:
            if is_recurrent(layer):
                cache += 2 * sum(x.nbytes for x in layer.tensors.values())  # and written
            elif isinstance(layer, (DynamicLayer, StaticLayer)):
                cache += layer.keys.nbytes + layer.values.nbytes
        weights = weight_bytes(self.model)
        flops = 2 * count_weights(self.model) * self.rows
        return Work(flops, weights + cache, bandwidth="read")


def ways_to_time(and_forward: bool) -> dict[str, Callable[[Decoder], float]]:
    """How a sample is taken, by what it is of."""
    ways = {"generate()": Decoder.sample_generate}
    return ways | {"forward": Decoder.sample_forward} if and_forward else ways


def is_recurrent(layer: CacheLayerMixin) -> bool:
    """Whether a layer of a cache is one of ours: known by what it holds."""
    return hasattr(layer, "tensors") and hasattr(layer, "num_tokens")


def verify(model: PreTrainedModel, size: Size, is_static: bool = False) -> float:
    """Tokens one by one give the logits of all at once."""
    context = 32
    decoder = Decoder(model, size, rows=2, context=context, is_static=is_static)
    decoder.cache = decoder._new_cache()
    tokens = random_tokens(size, 2, context + 4)
    decoder.forward(tokens[:, :context])
    for token in tokens[:, context:].split(1, dim=1):
        actual = decoder.forward(token)
    with torch.no_grad():
        expected = model(tokens, use_cache=False, logits_to_keep=1).logits
    return check_close(model.config.model_type, actual, expected, TOLERANCE[model.dtype])


class Setting(NamedTuple):
    """What is measured: the lists are of tokens of context, or of rows and such."""

    size: Size
    names: tuple[str, ...]
    contexts: tuple[int, ...]
    longest_forward: int  # context at which model(...) is timed by itself, too
    flat: tuple[int, ...]  # of ours by itself
    batches: tuple[tuple[int, int], ...]
    quantised: tuple[tuple[int, int], ...]  # of ours, in float32, bfloat16, 8 and 4 bits
    half: tuple[int, ...]  # in bfloat16
    prompts_of_all: tuple[int, ...]
    prompts: tuple[int, ...]
    budget: float  # seconds for the rounds of a case


ALL = ("ours", "Llama", "GPT-2", "Mamba2")
PAIR = ("ours", "Llama")
SETTINGS = {
    "smallest": Setting(
        SMALLEST,
        ALL,
        contexts=(16,),
        longest_forward=16,
        flat=(16, 32),
        batches=((2, 16),),
        quantised=((1, 16), (5, 16)),
        half=(16,),
        prompts_of_all=(),
        prompts=(16,),
        budget=0,
    ),
    "short": Setting(
        SIZE,
        PAIR,
        contexts=(128, 16384),
        longest_forward=0,
        flat=(128, 100_000),
        batches=((8, 1024),),
        quantised=((1, 128), (1, 4096)),
        half=(128,),
        prompts_of_all=(),
        prompts=(4096,),
        budget=4,
    ),
    "full": Setting(
        SIZE,
        ALL,
        contexts=(128, 1024, 4096, 16384),
        longest_forward=1024,
        flat=(128, 1024, 4096, 16384, 100_000),
        batches=((8, 1024), (8, 4096), (32, 128), (32, 1024)),
        quantised=((1, 128), (1, 4096), (8, 128), (32, 128)),
        half=(128, 4096),
        prompts_of_all=(1024,),
        prompts=(4096, 16384),
        budget=8,
    ),
}


def in_large_pages(models: dict[str, PreTrainedModel]) -> dict[str, PreTrainedModel]:
    for model in models.values():
        use_large_pages(model)
    return models


class Bench:
    """The cases of a setting, each added to the report."""

    def __init__(self, report: Report, setting: Setting):
        self.report = report
        self.setting = setting
        models = {name: make_model(name, size=setting.size) for name in setting.names}
        self.models = in_large_pages(models)
        self.pair = {name: self.models[name] for name in PAIR}
        self.llama: LlamaCpp | None = None
        if report.flags.llama is None:
            report.notes.append("without llama.cpp: --llama was not given")
        else:
            self.llama = LlamaCpp(report.flags.llama, self.models["Llama"])
            report.notes.append(f"llama-cpp-python {self.llama.version}, its cache in float16")

    def verify(self) -> None:
        size, errors = self.setting.size, self.report.errors
        for name, model in self.models.items():
            errors[name] = verify(model, size)
        errors[STATIC] = verify(self.models["Llama"], size, is_static=True)
        with torch_products():
            errors[NN_LINEAR] = verify(self.models["ours"], size)
        if self.llama is not None:
            of_kinds = self.llama.verify()
            errors |= {name_of(kind): error for kind, error in of_kinds.items()}

    def halves(self) -> dict[str, PreTrainedModel]:
        """The pair in bfloat16, verified, beside ours in float32."""
        models = {name: make_model(name, torch.bfloat16, self.setting.size) for name in PAIR}
        for name, model in in_large_pages(models).items():
            self.report.errors[f"{name}, bfloat16"] = verify(model, self.setting.size)
        return models | {"ours, float32": self.models["ours"]}

    def time_per_token(
        self, models: dict[str, PreTrainedModel], suffix: str, rows: int, context: int
    ) -> None:
        """`suffix` ends the panels' names."""
        make = partial(Decoder, size=self.setting.size, rows=rows, context=context)
        decoders = {name: make(model) for name, model in models.items()}
        decoders[STATIC] = make(models["Llama"], is_static=True)
        decoders[IDENTITY] = make(without_attention(models["ours"]))
        decoders[NN_LINEAR] = decoders["ours"]
        work = {name: decoder.least_work() for name, decoder in decoders.items()}
        and_forward = models is self.models and context <= self.setting.longest_forward
        for what, sample in ways_to_time(and_forward).items():
            samples = {name: partial(sample, decoder) for name, decoder in decoders.items()}
            samples[NN_LINEAR] = within(torch_products, samples[NN_LINEAR])
            timings = self.report.time(samples, self.setting.budget)
            case = f"{rows} x {context} tokens"
            self.report.add(f"{what}, {suffix}", case, context, timings, work)

    def quantised(self) -> dict[str, PreTrainedModel]:
        """Ours in fewer and fewer bits, verified; nothing where torchao is not installed."""
        if find_spec("torchao") is None:
            self.report.notes.append("without weights of 8 and 4 bits: torchao is not installed")
            return {}
        size = self.setting.size
        models = {name: make_quantised(bits, size) for name, bits in BITS.items()}
        models = {"ours, bfloat16": make_model("ours", torch.bfloat16, size), **models}
        for name, model in in_large_pages(models).items():
            self.report.errors[name] = verify(model, size)
        return {"ours": self.models["ours"], **models, TORCHAO: models["ours, 8 bits"]}

    def time_quantised(self, models: dict[str, PreTrainedModel], rows: int, context: int) -> None:
        make = partial(Decoder, size=self.setting.size, rows=rows, context=context)
        decoders = {name: make(model) for name, model in models.items()}
        work = {name: decoder.least_work() for name, decoder in decoders.items()}
        case, of_rows = f"{rows} x {context} tokens", "1 row" if rows == 1 else f"{rows} rows"
        with nullcontext(({}, {})) if self.llama is None else self.llama.at(rows, context) as peers:
            # Many rows hide what generate() does between two tokens.
            for what, sample in ways_to_time(and_forward=rows == 1).items():
                samples = {name: partial(sample, decoder) for name, decoder in decoders.items()}
                samples[TORCHAO] = within(torchao_products, samples[TORCHAO])
                timings = self.report.time(samples | peers[0], self.setting.budget)
                panel = f"{what}, bits of weights, {of_rows}"
                self.report.add(panel, case, context, timings, work | peers[1])

    def time_flatness(self) -> None:
        """Ours at all contexts in turn; ratios are to the shortest."""
        contexts = self.setting.flat
        decoders = {c: Decoder(self.models["ours"], self.setting.size, 1, c) for c in contexts}
        samples = {str(context): d.sample_generate for context, d in decoders.items()}
        timings = self.report.time(samples, self.setting.budget)
        for context, decoder in decoders.items():
            self.report.add(
                "generate(), ours by context",
                f"1 x {context} tokens",
                context,
                {"ours": timings[str(context)]},
                {"ours": decoder.least_work()},
                reference=timings[str(contexts[0])],
            )

    def time_prompt(self, models: dict[str, PreTrainedModel], T: int) -> None:
        tokens = random_tokens(self.setting.size, 1, T)

        def sample_of_prompt(model: PreTrainedModel) -> Callable[[], float]:
            @torch.no_grad()
            def sample() -> float:
                start = time.perf_counter()
                model(tokens, use_cache=True, logits_to_keep=1)
                return time.perf_counter() - start

            return sample

        samples = {name: sample_of_prompt(model) for name, model in models.items()}
        timings = self.report.time(samples, self.setting.budget)
        work = {name: Work(2 * T * count_weights(model), None) for name, model in models.items()}
        self.report.add("prompt, float32", f"1 x {T} tokens", T, timings, work)


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--llama", type=Path, help="a Python with llama-cpp-python, a contender")
    flags = arguments.parse_args()
    report = Report("decode", "tokens of context", "ours", flags)
    report.notes.append(
        "softmax caches are filled with random numbers, and ours is told how long its context is: "
        "the time per token depends on sizes only"
    )
    report.notes.append("weights of PyTorch's models are in large pages, where Linux has such")
    setting = SETTINGS[flags.setting]
    bench = Bench(report, setting)
    bench.verify()
    for context in setting.contexts:
        bench.time_per_token(bench.models, "1 row, float32", 1, context)
    bench.time_flatness()
    for rows, context in setting.batches:
        bench.time_per_token(bench.pair, f"{rows} rows, float32", rows, context)
    halves = bench.halves()
    for context in setting.half:
        bench.time_per_token(halves, "1 row, bfloat16", 1, context)
    if quantised := bench.quantised():
        for rows, context in setting.quantised:
            bench.time_quantised(quantised, rows, context)
    for T in setting.prompts_of_all:
        bench.time_prompt(bench.models, T)
    for T in setting.prompts:
        bench.time_prompt(bench.pair, T)
    report.save()


if __name__ == "__main__":
    main()
