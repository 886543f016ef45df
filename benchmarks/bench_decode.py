# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Generation: time per token after contexts of different lengths, and the time to read a prompt.

    python benchmarks/bench_decode.py           # in two minutes
    python benchmarks/bench_decode.py --full    # more contexts, 32 rows, longer prompts; in ten

Contenders, all of 12 layers x 768 and with random weights:
- ours, and the same model where attention returns v: the floor that the rest of the model sets;
- ours where nn.Linear multiplies: how much of the gain is that of the compiled product;
- Transformers' Llama (SDPA), with the cache that generate() makes and with StaticCache;
- Transformers' GPT-2 (SDPA) and Mamba2 (in PyTorch, for its kernels need CUDA).

"generate()" is the time between two tokens inside generate(), "forward" that of model(...) alone.
A long context is not read, but made up: after eight real tokens, keys and values in softmax caches
are filled up with random numbers, and our cache is told a number of tokens, because its size and
the work on it never change. Mamba2's cache counts nothing, and it generates from eight tokens.

Shares of the bandwidth count the weights, and what the cache holds, read once.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    StaticCache,
    StaticLayer,
)

from harness import Report, Work, check_close, parser
from hf_linear_attention import LinearAttentionCache
from hf_linear_attention.cache_layers import RecurrentLayer
from models import (
    identity_attention,
    make_model,
    random_tokens,
    torch_products,
    weight_bytes,
)

REAL_TOKENS = 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
IDENTITY = "ours, attention = v"
NN_LINEAR = "ours, nn.Linear"
STATIC = "Llama, StaticCache"


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
    rows: int
    context: int
    is_static: bool = False

    def __post_init__(self):
        # per sample; few where softmax attention takes seconds for each
        self.steps = 8 if self.rows * self.context <= 8192 else 3
        self.is_mamba = self.model.config.model_type == "mamba2"
        self.cache = self._new_cache()
        self.tokens = random_tokens(self.rows, self.context + 1)
        self.forward(self.tokens[:, :REAL_TOKENS])
        for layer in self.cache.layers:
            shape = (self.rows, 12, self.context - REAL_TOKENS, 64)
            if isinstance(layer, StaticLayer):
                layer.keys[:, :, REAL_TOKENS : self.context].normal_()
                layer.values[:, :, REAL_TOKENS : self.context].normal_()
            elif isinstance(layer, DynamicLayer):
                layer.keys = torch.cat([layer.keys, layer.keys.new_empty(shape).normal_()], 2)
                layer.values = torch.cat([layer.values, layer.values.new_empty(shape).normal_()], 2)
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
            if isinstance(layer, RecurrentLayer):
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
            if isinstance(layer, RecurrentLayer):
                cache += 2 * sum(x.nbytes for x in layer.tensors.values())  # and written
            elif isinstance(layer, (DynamicLayer, StaticLayer)):
                cache += layer.keys.nbytes + layer.values.nbytes
        weights = weight_bytes(self.model)
        flops = 2 * weights / self.model.dtype.itemsize * self.rows
        return Work(flops, weights + cache, bandwidth="read")


def verify(model: PreTrainedModel, is_static: bool = False) -> float:
    """Tokens one by one give the logits of all at once."""
    context = 32
    decoder = Decoder(model, rows=2, context=context, is_static=is_static)
    decoder.cache = decoder._new_cache()
    tokens = random_tokens(2, context + 4)
    decoder.forward(tokens[:, :context])
    for token in tokens[:, context:].split(1, dim=1):
        actual = decoder.forward(token)
    with torch.no_grad():
        expected = model(tokens, use_cache=False, logits_to_keep=1).logits
    return check_close(model.config.model_type, actual, expected, TOLERANCE[model.dtype])


def within(
    context: Callable[[], AbstractContextManager], sample: Callable[[], float]
) -> Callable[[], float]:
    def sample_within() -> float:
        with context():
            return sample()

    return sample_within


def time_per_token(
    report: Report,
    models: dict[str, PreTrainedModel],
    suffix: str,
    rows: int,
    context: int,
    budget: float,
    also_forward: bool = False,
) -> None:
    """`suffix` ends the panels' names."""
    decoders = {name: Decoder(model, rows, context) for name, model in models.items()}
    if "Llama" in models:
        decoders[STATIC] = Decoder(models["Llama"], rows, context, is_static=True)
    decoders[IDENTITY] = decoders[NN_LINEAR] = decoders["ours"]
    work = {name: decoder.least_work() for name, decoder in decoders.items()}
    ways = {"generate()": Decoder.sample_generate}
    if also_forward:
        ways["forward"] = Decoder.sample_forward
    for what, sample in ways.items():
        samples = {name: sample.__get__(decoder) for name, decoder in decoders.items()}
        samples[IDENTITY] = within(identity_attention, samples[IDENTITY])
        samples[NN_LINEAR] = within(torch_products, samples[NN_LINEAR])
        timings = report.time(samples, budget)
        case = f"{rows} x {context} tokens"
        report.add(f"{what}, {suffix}", case, context, timings, work)


def time_flatness(report: Report, model: PreTrainedModel, contexts: list[int], budget: float):
    """One model at all contexts in turn; ratios are to the shortest."""
    decoders = {context: Decoder(model, 1, context) for context in contexts}
    samples = {str(context): decoder.sample_generate for context, decoder in decoders.items()}
    timings = report.time(samples, budget)
    for context, decoder in decoders.items():
        report.add(
            "generate(), ours by context",
            f"1 x {context} tokens",
            context,
            {"ours": timings[str(context)]},
            {"ours": decoder.least_work()},
            reference=timings[str(contexts[0])],
        )


def time_prompt(report: Report, models: dict[str, PreTrainedModel], T: int, budget: float) -> None:
    tokens = random_tokens(1, T)

    def sample_of_prompt(model: PreTrainedModel) -> Callable[[], float]:
        @torch.no_grad()
        def sample() -> float:
            start = time.perf_counter()
            model(tokens, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - start

        return sample

    timings = report.time({name: sample_of_prompt(m) for name, m in models.items()}, budget)
    work = {
        name: Work(2 * T * weight_bytes(model) / model.dtype.itemsize, None)
        for name, model in models.items()
    }
    report.add("prompt, float32", f"1 x {T} tokens", T, timings, work)


def main() -> None:
    assert __doc__ is not None
    flags = parser(__doc__).parse_args()
    report = Report("decode", "tokens of context", "ours", flags)
    report.notes.append(
        "softmax caches are filled with random numbers, and ours is told how long its context is: "
        "the time per token depends on sizes only"
    )
    budget = 8 if flags.full else 4

    names = ("ours", "Llama", "GPT-2", "Mamba2") if flags.full else ("ours", "Llama")
    models = {name: make_model(name) for name in names}
    pair = {name: models[name] for name in ("ours", "Llama")}
    for name, model in models.items():
        report.errors[name] = verify(model)
    report.errors[STATIC] = verify(models["Llama"], is_static=True)
    with torch_products():
        report.errors[NN_LINEAR] = verify(models["ours"])

    for context in [128, 1024, 4096, 16384] if flags.full else [128, 16384]:
        also_forward = flags.full and context <= 1024
        time_per_token(report, models, "1 row, float32", 1, context, budget, also_forward)
    contexts = [128, 1024, 4096, 16384, 100_000] if flags.full else [128, 100_000]
    time_flatness(report, models["ours"], contexts, budget)
    for rows, context in (
        [(8, 1024), (8, 4096), (32, 128), (32, 1024)] if flags.full else [(8, 1024)]
    ):
        time_per_token(report, pair, f"{rows} rows, float32", rows, context, budget)

    halves = {name: make_model(name, torch.bfloat16) for name in pair}
    for name, model in halves.items():
        report.errors[f"{name}, bfloat16"] = verify(model)
    halves["ours, float32"] = models["ours"]
    for context in [128, 4096] if flags.full else [128]:
        time_per_token(report, halves, "1 row, bfloat16", 1, context, budget)

    if flags.full:
        time_prompt(report, models, 1024, budget)
    for T in [4096, 16384] if flags.full else [4096]:
        time_prompt(report, pair, T, budget)
    report.save()


if __name__ == "__main__":
    main()
