# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""llama.cpp as a contender: a model of Transformers, computed by llama.cpp."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness import Work, check_close
from models import count_weights
from processes import Worker

# Kinds of weights: bits of one, with its share of a scale; how far logits may be from float32's.
KINDS = {"F32": (32, 5e-3), "BF16": (16, 3e-2), "Q8_0": (8.5, 0.1), "Q4_0": (4.5, 0.6)}
REAL_TOKENS = 8
STEPS = 32  # tokens of a sample, for all contenders
CACHE_BYTES = 2  # of a number in the cache of softmax layers
VERIFIED = 32  # tokens in a row
ONE_BY_ONE = 4  # of these, the last, read after the others
SEVERAL = 2  # rows


def name_of(kind: str) -> str:
    return f"llama.cpp's Llama, {kind}"


def verified_tokens(model: PreTrainedModel, rows: int) -> tuple[Tensor, Tensor]:
    """Those that are read at once, and those that are read one by one after them."""
    tokens = random_tokens(model, rows, VERIFIED)
    return tokens[:, :-ONE_BY_ONE], tokens[:, -ONE_BY_ONE:]


@torch.no_grad()
def expected_logits(model: PreTrainedModel, rows: int) -> Tensor:
    """After all `verified_tokens`, read at once."""
    tokens = torch.cat(verified_tokens(model, rows), dim=1)
    return model(tokens, use_cache=False, logits_to_keep=1).logits[:, 0]


def random_tokens(model: PreTrainedModel, rows: int, n: int) -> Tensor:
    """The same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (rows, n), generator=generator)


class LlamaCpp:
    """A process of llama.cpp that holds a model in several of KINDS."""

    def __init__(
        self,
        python: Path,
        model: PreTrainedModel,
        kinds: Sequence[str] = tuple(KINDS),
        save: Callable[[str], Any] | None = None,
    ):
        """python: of an environment with llama-cpp-python, gguf and safetensors. model: of an
        architecture that llama_cpp_files.py has, in float32. save: into a folder, where the model
        saves itself under other names.
        """
        self.model, self.kinds = model, kinds
        script = Path(__file__).with_name("llama_cpp_worker.py")
        self.worker = Worker([python, script, torch.get_num_threads()])
        with tempfile.TemporaryDirectory() as folder:
            (save or model.save_pretrained)(folder)
            for kind in kinds:
                self.version = self.worker.ask("load", folder=folder, kind=kind)["version"]

    def verify(self, rows: int = SEVERAL) -> dict[str, float]:
        """The errors of logits by kind, beside those of Transformers. Ends the program where one is
        too large.
        """
        return {kind: self.error(kind, rows, KINDS[kind][1]) for kind in self.kinds}

    def error(self, kind: str, rows: int, tolerance: float = math.inf) -> float:
        """That of the worst row."""
        context, rest = verified_tokens(self.model, rows)
        with self.prepared(kind, context, context.shape[1]):
            answer = self.worker.ask("follow", kind=kind, tokens=rest.tolist())
        name = f"llama.cpp's {self.model.config.model_type}, {kind}"
        logits, expected = torch.tensor(answer["logits"]), expected_logits(self.model, rows)
        return max(check_close(name, *row, tolerance) for row in zip(logits, expected, strict=True))

    @contextmanager
    def prepared(self, kind: str, tokens: Tensor, context: int) -> Iterator[None]:
        """Meanwhile, rows have read so many tokens: these, again and again."""
        self.worker.ask("prepare", kind=kind, tokens=tokens.tolist(), context=context)
        yield
        self.worker.ask("release", kind=kind)

    @contextmanager
    def at(
        self, rows: int, context: int
    ) -> Iterator[tuple[dict[str, Callable[[], float]], dict[str, Work]]]:
        """Samples of a token of Llama, and its least work, by contender, after a context in each
        row.
        """
        tokens = random_tokens(self.model, rows, min(REAL_TOKENS, context))
        config: Any = self.model.config
        numbers = 2 * rows * context * config.num_hidden_layers * config.hidden_size
        with ExitStack() as stack:
            for kind in self.kinds:
                stack.enter_context(self.prepared(kind, tokens, context))
            yield (
                {name_of(kind): partial(self.sample, kind) for kind in self.kinds},
                {
                    name_of(kind): self.least_work(kind, rows, CACHE_BYTES * numbers)
                    for kind in self.kinds
                },
            )

    def sample(self, kind: str, untimed: int = 0) -> float:
        """Seconds per token of all rows. untimed: tokens that are read before."""
        return self.worker.ask("sample", kind=kind, steps=STEPS, untimed=untimed)["seconds"]

    def sample_prompt(self, kind: str) -> float:
        """Seconds to read the context in all rows."""
        return self.worker.ask("sample_prompt", kind=kind)["seconds"]

    def least_work(self, kind: str, rows: int, cache_bytes: float) -> Work:
        """Of a token. cache_bytes: read and written in the cache."""
        bits, _ = KINDS[kind]
        weights = count_weights(self.model)
        return Work(2 * weights * rows, weights * bits / 8 + cache_bytes, bandwidth="read")

    def close(self) -> None:
        self.worker.close()
