# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A softmax model, and the model that `convert` made of it: a user's token by context, and its
memory; llama.cpp with the softmax model's weights beside them.

    python benchmarks/bench_converted.py --llama PYTHON           # 1,024 and 8,192 tokens; minutes
    python benchmarks/bench_converted.py --llama PYTHON --full    # to 131,072, and sixteen users
    python benchmarks/bench_converted.py --model SmolLM2.gguf     # weights of a file, or a folder

--llama names the Python of an environment that has llama.cpp, as for bench_peers.py.

The model has the shape of SmolLM2-135M and, without --model, random weights: times don't depend on
them. Formats of weights are those of bench_peers.py. Contenders:
- the converted model: in every layer a window of 512 tokens, 4 first ones, sums over the others;
- Transformers' model as it is, in float32 and bfloat16, its cache filled with random keys;
- llama.cpp, keys and values in float16, up to the context that it reads in minutes.

A token is the mean of several that follow the context, as in bench_peers.py. Before, logits of a
text within the window are compared with those of Transformers' model. Notes say how many bytes a
user's cache has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from bench_peers import FORMATS, LLAMA, UNTIMED, Decoder, Format, verify
from harness import Report, Work, parser
from hf_linear_attention import convert, use_large_pages
from hf_linear_attention.conversion.model_files import read
from llama_cpp_models import CACHE_BYTES, KINDS, LlamaCpp, expected_logits, random_tokens
from models import LONGEST, lengthen, quantise

CONVERTED, BEFORE = "converted", "Transformers"
STEPS_BEFORE = 4  # tokens of a sample of Transformers' model
REAL_TOKENS = 8  # that it has read; the keys of all others are random
LONGEST_READ = 32_768  # tokens of all rows that llama.cpp reads


class Setting(NamedTuple):
    layers: int
    window: int
    tokens: tuple[tuple[int, int], ...]  # rows and tokens of context
    budget: float  # seconds for the rounds of a case


SETTINGS = {
    "smallest": Setting(layers=2, window=40, tokens=((1, 64), (2, 64)), budget=0),
    "short": Setting(layers=30, window=512, tokens=((1, 1024), (1, 8192)), budget=8),
    "full": Setting(
        layers=30,
        window=512,
        tokens=((1, 1024), (1, 8192), (1, 32_768), (1, LONGEST), (16, 8192)),
        budget=20,
    ),
}


def original(layers: int) -> LlamaForCausalLM:
    """Of SmolLM2-135M's shape, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def converted(model: PreTrainedModel, form: Format, window: int) -> PreTrainedModel:
    """In a format of weights."""
    made: Any = convert(model, "window", window_size=window, window_sinks=4).model.eval()
    made.to(form.dtype)
    if form.bits is not None:
        quantise(made, form.bits, made.config.hidden_size)
    use_large_pages(made)
    return made


class Filled(Decoder):
    """Transformers' model, which pretends to have read a context."""

    def __init__(self, model: PreTrainedModel, rows: int, context: int):
        super().__init__(model, random_tokens(model, rows, REAL_TOKENS), STEPS_BEFORE)
        self.context = context
        for layer in self.cache.layers:
            assert isinstance(layer, DynamicLayer)
            lengthen(layer, context - REAL_TOKENS)


class Bench:
    """The cases, each added to the report."""

    def __init__(self, report: Report, setting: Setting, before: PreTrainedModel):
        self.report, self.setting, self.before = report, setting, before
        self.expected = expected_logits(before, rows=1)
        self.llama: LlamaCpp | None = None
        if report.flags.llama is not None:
            self.llama = LlamaCpp(report.flags.llama, before)
            for kind, error in self.llama.verify(rows=1).items():
                report.errors[f"{LLAMA}, {kind}"] = error

    def run(self) -> None:
        for name, form in FORMATS.items():
            if form.bits is not None and find_spec("torchao") is None:
                continue
            made = converted(self.before, form, self.setting.window)
            error = verify(f"{CONVERTED}, {name}", made, self.expected, form.tolerance)
            self.report.errors[f"{CONVERTED}, {name}"] = error
            before = None if form.bits is not None else self.before.to(form.dtype)
            for rows, context in self.setting.tokens:
                self.time_token(name, made, before, rows, context)
            self.before.float()

    def time_token(
        self,
        name: str,
        made: PreTrainedModel,
        before: PreTrainedModel | None,
        rows: int,
        context: int,
    ) -> None:
        # of more than the window a token costs the same whatever was read
        read_tokens = min(context, 2 * self.setting.window)
        decoders = {CONVERTED: Decoder(made, random_tokens(made, rows, read_tokens))}
        if before is not None:
            decoders[BEFORE] = Filled(before, rows, context)
        samples = {each: decoder.sample for each, decoder in decoders.items()}
        work = dict.fromkeys([*decoders, LLAMA], Work(None, None))
        with self.llama_at(FORMATS[name].kind, rows, context) as sample:
            if sample is not None:
                samples[LLAMA] = sample
            timings = self.report.time(samples, self.setting.budget)
            of_rows = "1 user" if rows == 1 else f"{rows} users"
            panel = f"{name}, a token, {of_rows}"
            self.report.add(panel, f"after {context}", context, timings, work)
        caches = {each: bytes_of(decoder.cache) // rows for each, decoder in decoders.items()}
        if BEFORE in caches:  # as many numbers
            caches[LLAMA] = caches[BEFORE] * CACHE_BYTES // FORMATS[name].dtype.itemsize
        sizes = ", ".join(f"{each} {size / 1e6:.1f} MB" for each, size in caches.items())
        self.report.notes.append(f"{name}, cache of a user after {context}: {sizes}")

    @contextmanager
    def llama_at(self, kind: str, rows: int, context: int) -> Iterator[Callable[[], float] | None]:
        """A sample of llama.cpp's token, if it takes part."""
        if self.llama is None or rows * context > LONGEST_READ:
            yield None
            return
        with self.llama.prepared(kind, random_tokens(self.before, rows, context), context):
            yield partial(self.llama.sample, kind, UNTIMED)


def bytes_of(cache: Any) -> int:
    if hasattr(cache, "nbytes"):  # ours
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--llama", type=Path, help="a Python with llama-cpp-python, a contender")
    arguments.add_argument(
        "--model", help="a softmax model's folder, or GGUF file, for its weights"
    )
    report = Report("converted", "tokens", CONVERTED, arguments.parse_args())
    flags, setting = report.flags, SETTINGS[report.flags.setting]
    if flags.llama is None:
        report.notes.append("without llama.cpp: --llama was not given")
    if find_spec("torchao") is None:
        report.notes.append("without weights of 8 and 4 bits: torchao is not installed")
    before: Any = original(setting.layers)
    if flags.model is not None:
        before = read(AutoModelForCausalLM, flags.model, dtype="float32").eval()
    bench = Bench(report, setting, before)
    bench.run()
    if bench.llama is not None:
        bench.llama.close()
        report.notes.append(f"llama-cpp-python {bench.llama.version}; kinds {', '.join(KINDS)}")
    report.save()


if __name__ == "__main__":
    main()
