# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Two language models that read and write the same, each by its own clock."""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache

import hf_linear_attention  # noqa: F401  so that Transformers knows its models

CHUNK = 512  # tokens of a context that are read at once
TURN_TOKENS, TURN_SECONDS = 16, 0.1  # a turn ends after so many tokens one by one, or so long
MARKS = 40  # places in a context where it is measured how long a token takes
MEDIAN_OF = 5  # measured speeds
SNAPSHOT_SECONDS = 0.1
WARM_UP_TOKENS = 16  # recurrent layers record their operations in the ninth
TEMPERATURE, TOP_K = 0.7, 50
LINES = "def step_{0}(state):\n    state.total += {0}\n    return state\n\n\n"


class LanguageModel(NamedTuple):
    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(name: str, where: str) -> LanguageModel:
    """A model in a folder or on the Hub, by the name that the page calls it."""
    try:
        model = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False).eval()
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"No model can be loaded from {where!r}: {first_line(error)}") from error
    loaded = LanguageModel(name, model, tokenizer)
    warm_up = Racer(loaded, [0] * CHUNK, WARM_UP_TOKENS)
    while warm_up.phase != "done":
        warm_up.turn()
    return loaded


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Point(NamedTuple):
    """What was measured after so many tokens. No speed was, where they were read in chunks."""

    context: int
    cache_bytes: int
    tokens_per_second: float | None


class Standing(NamedTuple):
    """How far a model is. phase: "reading", "writing", "done" or "stopped"; seconds: by its own
    clock; to_read, read, to_write, written: tokens; read_seconds: what reading took of the seconds.
    """

    name: str
    phase: str
    to_read: int
    read: int
    read_seconds: float
    to_write: int
    written: int
    seconds: float
    cache_bytes: int
    text: str
    points: tuple[Point, ...]

    @property
    def tokens_per_second(self) -> float | None:
        """What was measured last, the median, for other programs slow a model down at times."""
        measured = [p.tokens_per_second for p in self.points if p.tokens_per_second is not None]
        return statistics.median(measured[-MEDIAN_OF:]) if measured else None


def nothing(name: str) -> Standing:
    """Before anything is read."""
    return Standing(name, "ready", 0, 0, 0.0, 0, 0, 0.0, 0, "", ())


class Racer:
    """A model that reads tokens and writes further ones, in turns that take a fraction of a
    second.
    """

    def __init__(self, language_model: LanguageModel, tokens: Sequence[int], to_write: int):
        self.name, self.model, self.tokenizer = language_model
        self.tokens = torch.tensor([tokens], device=self.model.device)
        self.to_write = to_write
        self.read, self.written = 0, []
        self.seconds = self.read_seconds = 0.0
        self.points: list[Point] = []
        self.cache: Cache | None = None
        self.following: int | None = None  # the token to write next
        self.random = torch.Generator().manual_seed(0)  # everybody's luck is the same
        self.next_mark = self.mark = max(CHUNK, len(tokens) // MARKS)

    @property
    def phase(self) -> str:
        if self.read < self.tokens.shape[1]:
            return "reading"
        return "writing" if len(self.written) < self.to_write else "done"

    def turn(self) -> None:
        start = time.perf_counter()
        is_reading = self.phase == "reading"
        speed = None
        if not is_reading:
            speed = self._one_by_one(self.to_write - len(self.written))
        elif self.read < self.next_mark:
            self._forward(self.tokens[:, self.read : self.read + CHUNK])
        else:
            self.next_mark += self.mark
            speed = self._one_by_one(self.tokens.shape[1] - self.read)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.read_seconds += seconds if is_reading else 0.0
        self.points.append(Point(self.read + len(self.written), cache_bytes(self.cache), speed))

    def _one_by_one(self, most: int) -> float:
        """Reads or writes some tokens, none of them together; how many there are in a second."""
        start = time.perf_counter()
        count = seconds = 0
        while count < min(most, TURN_TOKENS) and seconds < TURN_SECONDS:
            if self.read < self.tokens.shape[1]:
                self._forward(self.tokens[:, self.read : self.read + 1])
            else:
                self.written.append(self.following)
                self._forward(torch.tensor([[self.following]], device=self.model.device))
            count += 1
            seconds = time.perf_counter() - start
        return count / seconds

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> None:
        output = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        self.following = draw(output.logits[0, -1], self.random)
        if self.read < self.tokens.shape[1]:
            self.read += tokens.shape[1]

    def standing(self, is_stopped: bool) -> Standing:
        text = self.tokenizer.decode(self.written, skip_special_tokens=True)
        return Standing(
            self.name,
            "stopped" if is_stopped and self.phase != "done" else self.phase,
            self.tokens.shape[1],
            self.read,
            self.read_seconds,
            self.to_write,
            len(self.written),
            self.seconds,
            self.points[-1].cache_bytes if self.points else 0,
            text.rstrip("\N{REPLACEMENT CHARACTER}"),  # of a letter that is not whole yet
            tuple(self.points),
        )


def draw(logits: Tensor, generator: torch.Generator) -> int:
    """A token, by its probability among the likeliest."""
    top = logits.float().cpu().topk(min(TOP_K, len(logits)))
    chosen = torch.multinomial((top.values / TEMPERATURE).softmax(-1), 1, generator=generator)
    return top.indices[chosen].item()


def cache_bytes(cache: Cache | None) -> int:
    """Of all tensors in it."""
    if cache is None:
        return 0
    if hasattr(cache, "nbytes"):  # this package's
        return cache.nbytes
    held = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor)]
    return sum({id(x): x.nbytes for x in held}.values())


def context_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """So many tokens of a program that does nothing of interest, however long it is."""
    tokens: list[int] = []
    number = 0
    while len(tokens) < count:
        lines = "".join(LINES.format(n) for n in range(number, number + 100))
        tokens += tokenizer(lines, add_special_tokens=False)["input_ids"]
        number += 100
    return tokens[:count]


def race(
    language_models: Sequence[LanguageModel],
    prompt: str,
    context: int,
    to_write: int,
    stop: threading.Event,
    most_seconds: float = float("inf"),
) -> Iterator[tuple[Standing, ...]]:
    """How far all are, some ten times a second, until they have read the context and the prompt
    and written what they should, or until they are stopped.

    Whose clock shows least has the next turn: so they have had the same time at every moment, but
    for a turn, and who is done first was faster.
    """
    if not prompt.strip():
        raise ValueError("Type a prompt first.")
    racers = []
    for language_model in language_models:
        tokenizer = language_model.tokenizer
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        racers.append(Racer(language_model, context_tokens(tokenizer, context) + tokens, to_write))
    start = shown = time.perf_counter()
    yield tuple(racer.standing(False) for racer in racers)
    while running := [racer for racer in racers if racer.phase != "done"]:
        now = time.perf_counter()
        if stop.is_set() or now - start > most_seconds:
            break
        min(running, key=lambda racer: racer.seconds).turn()
        if now - shown > SNAPSHOT_SECONDS:
            shown = now
            yield tuple(racer.standing(False) for racer in racers)
    yield tuple(racer.standing(True) for racer in racers)
