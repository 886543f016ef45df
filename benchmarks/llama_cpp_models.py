# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""llama.cpp as a contender of bench_decode.py: Transformers' Llama, computed by llama.cpp."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from harness import Work, check_close
from models import Size, count_weights, random_tokens
from processes import Worker

# Kinds of weights: bits of one, with its share of a scale; how far logits may be from float32's.
KINDS = {"F32": (32, 5e-3), "BF16": (16, 3e-2), "Q8_0": (8.5, 0.1), "Q4_0": (4.5, 0.6)}
REAL_TOKENS = 8
STEPS = 32  # tokens of a sample, for all contenders
CACHE_BYTES = 2  # of a number in the cache
VERIFIED = (2, 32)  # rows and tokens


def name_of(kind: str) -> str:
    return f"llama.cpp's Llama, {kind}"


class LlamaCpp:
    """A process of llama.cpp that holds a Llama in all KINDS."""

    def __init__(self, python: Path, model: PreTrainedModel, size: Size):
        """python: of an environment with llama-cpp-python, gguf and safetensors."""
        self.model, self.size = model, size
        script = Path(__file__).with_name("llama_cpp_worker.py")
        self.worker = Worker([python, script, torch.get_num_threads()])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for kind in KINDS:
                self.version = self.worker.ask("load", folder=folder, kind=kind)["version"]

    def verify(self) -> dict[str, float]:
        """The errors of logits, beside those of Transformers."""
        tokens = random_tokens(self.size, *VERIFIED)
        with torch.no_grad():
            expected = self.model(tokens, logits_to_keep=1).logits[:, 0]
        errors = {}
        for kind, (_, tolerance) in KINDS.items():
            read = {"kind": kind, "tokens": tokens.tolist(), "context": tokens.shape[1]}
            logits = torch.tensor(self.worker.ask("prepare", **read)["logits"])
            errors[name_of(kind)] = check_close(name_of(kind), logits, expected, tolerance)
            self.worker.ask("release", kind=kind)
        return errors

    @contextmanager
    def at(
        self, rows: int, context: int
    ) -> Iterator[tuple[dict[str, Callable[[], float]], dict[str, Work]]]:
        """Samples of a token, and its least work, by contender, after a context in each row."""
        tokens = random_tokens(self.size, rows, min(REAL_TOKENS, context)).tolist()
        for kind in KINDS:
            self.worker.ask("prepare", kind=kind, tokens=tokens, context=context)
        samples = {name_of(kind): partial(self.sample, kind) for kind in KINDS}
        yield samples, {name_of(kind): self.least_work(kind, rows, context) for kind in KINDS}
        for kind in KINDS:
            self.worker.ask("release", kind=kind)

    def sample(self, kind: str) -> float:
        """Seconds per token of all rows."""
        return self.worker.ask("sample", kind=kind, steps=STEPS)["seconds"]

    def least_work(self, kind: str, rows: int, context: int) -> Work:
        bits, _ = KINDS[kind]
        weights = count_weights(self.model)
        cache = 2 * rows * context * self.size.layers * self.size.hidden_size * CACHE_BYTES
        return Work(2 * weights * rows, weights * bits / 8 + cache, bandwidth="read")
