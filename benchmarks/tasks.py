# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tasks for small language models: text, looking up (MQAR), copying and tracking a state.

Shapes: B rows, T tokens. A batch is a pair (B, T) of tokens and targets: the target at t is what
should be answered after tokens[:, :t + 1], UNASKED where nothing is asked.
"""

import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

UNASKED = -100
HELD_OUT_SEED = 2**32 - 1  # the largest that torch tells from others; no training run has it
EXAMPLES = Path(__file__).parents[1] / "examples"


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor


class Task(Protocol):
    metric: str
    lower_is_better: bool
    vocab_size: int
    length: int  # T

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        """Random rows to train on."""

    def held_out(self) -> Batch:
        """Rows to test on, always the same."""

    def score(self, nats: float, num_correct: int, targets: Tensor) -> float:
        """The metric, from the sum of -log p over all that was asked."""


class Answered:
    """What tasks have in common of which the share of right answers counts."""

    held_out_rows: int
    batch: Callable[[int, torch.Generator], Batch]

    lower_is_better = False

    def held_out(self) -> Batch:
        return self.batch(self.held_out_rows, torch.Generator().manual_seed(HELD_OUT_SEED))

    def score(self, nats: float, num_correct: int, targets: Tensor) -> float:
        return num_correct / (targets != UNASKED).sum().item()


@dataclass(frozen=True)
class Recall(Answered):
    """MQAR, looking up values by their keys: pairs first, then blanks with the keys among them.

    Keys are tokens 1 ... V/2 - 1, values V/2 ... V - 1, 0 is the blank. A row has `pairs` distinct
    keys with distinct values, and asks for each once, at even distances from the pairs that follow
    a power law: most soon, some late. Arora et al., "Zoology", arXiv 2312.04927, where blanks are
    random tokens.
    """

    vocab_size: int = 8192
    length: int = 64
    pairs: int = 4
    held_out_rows: int = 500
    power: float = 0.01  # the i-th distance has a weight of i^(power - 1)

    metric = "recall"

    def __post_init__(self):
        if self.pairs > self.vocab_size // 2 - 1:
            raise ValueError(
                f"pairs must be at most vocab_size / 2 - 1 = {self.vocab_size // 2 - 1}, "
                f"got {self.pairs}"
            )
        if 4 * self.pairs > self.length:
            raise ValueError(
                f"length must be at least 4 * pairs = {4 * self.pairs}, got {self.length}"
            )

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        half = self.vocab_size // 2
        keys = 1 + _distinct(torch.ones(rows, half - 1), self.pairs, generator)
        values = half + _distinct(torch.ones(rows, half), self.pairs, generator)
        tokens = torch.zeros(rows, self.length, dtype=torch.long)
        tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2] = keys, values
        places = torch.arange(1.0, (self.length - 2 * self.pairs) // 2 + 1)
        weights = places.pow(self.power - 1).expand(rows, -1)
        asked = 2 * self.pairs + 2 * _distinct(weights, self.pairs, generator)
        # the likelier distances are drawn first: none of the pairs may be first by its place
        order = _distinct(torch.ones(rows, self.pairs), self.pairs, generator)
        tokens.scatter_(1, asked, keys.gather(1, order))
        targets = torch.full_like(tokens, UNASKED).scatter_(1, asked, values.gather(1, order))
        return Batch(tokens, targets)


def _distinct(weights: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """For each row of weights n different indices, (rows, n), in the order drawn."""
    return torch.multinomial(weights, n, generator=generator)


@dataclass(frozen=True)
class Copy(Answered):
    """A word of 10 symbols, a separator 0, the word again, zeros up to the length.

    The word has n of U[length / 4, (length - 1) / 2) symbols; asked for is all of its second copy.
    Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, section 4.1.
    """

    length: int = 128
    held_out_rows: int = 200

    vocab_size = 11
    metric = "copied"

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        sizes = torch.randint(
            self.length // 4, (self.length - 1) // 2, (rows, 1), generator=generator
        )
        word = torch.randint(1, self.vocab_size, (rows, self.length), generator=generator)
        place = torch.arange(self.length)
        again = (place - sizes - 1).expand(rows, -1)  # the place in the word, in the second copy
        is_again = (again >= 0) & (again < sizes)
        copy = torch.where(is_again, word.gather(1, again.clamp(min=0)), 0)
        tokens = torch.where(place < sizes, word, copy)
        targets = torch.where(is_again, copy, UNASKED).roll(-1, 1)
        return Batch(tokens, targets)


@dataclass(frozen=True)
class Tracking(Answered):
    """The product of all permutations of `letters` letters so far, each token one of them.

    With 2 letters that is the parity of a row of bits, with 3 the group S3. `swaps`: all but the
    identity are swaps of two letters, which one step of a delta rule can do. Trained on rows of
    `length`; of rows of `held_out_length` it is asked only what lies beyond the length trained on.
    Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", arXiv
    2411.12537.
    """

    letters: int = 2
    length: int = 40
    held_out_length: int = 256
    swaps: bool = False
    held_out_rows: int = 100

    metric = "tracked"

    def __post_init__(self):
        if self.held_out_length <= self.length:
            raise ValueError(
                f"held_out_length must be more than length = {self.length}, "
                f"got {self.held_out_length}"
            )

    @property
    def vocab_size(self) -> int:
        return math.factorial(self.letters)

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        return self._rows(rows, self.length, generator)

    def held_out(self) -> Batch:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        tokens, targets = self._rows(self.held_out_rows, self.held_out_length, generator)
        targets[:, : self.length] = UNASKED
        return Batch(tokens, targets)

    def _rows(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        products = _products_of_permutations(self.letters)
        given = _at_most_one_swap(self.letters) if self.swaps else torch.arange(self.vocab_size)
        tokens = given[torch.randint(len(given), (rows, length), generator=generator)]
        targets = tokens.clone()
        for t in range(1, length):
            targets[:, t] = products[tokens[:, t], targets[:, t - 1]]
        return Batch(tokens, targets)


def _at_most_one_swap(letters: int) -> Tensor:
    """The numbers of the permutations that leave all letters, or all but two, in their places."""
    permutations = itertools.permutations(range(letters))
    moved = [sum(x != i for i, x in enumerate(permutation)) for permutation in permutations]
    return torch.tensor([number for number, count in enumerate(moved) if count <= 2])


@functools.cache
def _products_of_permutations(letters: int) -> Tensor:
    """[i, j] is the number of the permutation that does first j, then i."""
    permutations = list(itertools.permutations(range(letters)))
    number = {permutation: i for i, permutation in enumerate(permutations)}
    return torch.tensor(
        [
            [number[tuple(second[x] for x in first)] for first in permutations]
            for second in permutations
        ]
    )


@dataclass(frozen=True)
class Text:
    """The source of Python's standard library, or text files, in tokens of a byte-pair encoding.

    Whole files are held out, and rows of all of them tested on. Documents stand end to end, each
    closed by a token of its own.
    """

    vocab_size: int = 1024
    length: int = 256
    train_bytes: int | None = None
    held_out_rows: int = 100
    files: tuple[str, ...] = ()

    metric = "bits per byte"
    lower_is_better = True

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        train = read_text(self)[0]
        row = train[torch.randint(len(train), (rows,), generator=generator)]
        return Batch(row[:, :-1], row[:, 1:])

    def held_out(self) -> Batch:
        all_rows = read_text(self)[1]
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        row = all_rows[torch.randperm(len(all_rows), generator=generator)[: self.held_out_rows]]
        return Batch(row[:, :-1], row[:, 1:])

    def score(self, nats: float, num_correct: int, targets: Tensor) -> float:
        num_bytes = read_text(self)[2][targets].sum().item()
        return nats / math.log(2) / num_bytes

    def by_position(self, nats: Tensor, targets: Tensor) -> dict[str, float]:
        """Bits per byte of what comes after 1 token, after 2 and 3, after 4 to 7, ..., by the first
        of these numbers; nats and targets (B, T).
        """
        starts = [2**i for i in range(self.length.bit_length())]
        result = {}
        for start in starts:
            span = slice(start - 1, 2 * start - 1)  # target t comes after t + 1 tokens
            total = nats[:, span].sum(dtype=torch.float64).item()
            result[str(start)] = self.score(total, 0, targets[:, span])
        return result

    def paths(self) -> tuple[str, ...]:
        """Of the text files; none: the standard library's source."""
        return self.files


@dataclass(frozen=True)
class Source(Text):
    """The source of installed packages, of which the benchmarks need these: some 80 MB."""

    packages: tuple[str, ...] = ("torch", "sympy", "numpy")

    def paths(self) -> tuple[str, ...]:
        found = []
        for package in self.packages:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                raise ValueError(f"packages must be installed, got {package}")
            found += sorted(Path(spec.origin).parent.rglob("*.py"))
        return tuple(str(path) for path in found if _is_text(path))


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


@functools.cache
def read_text(task: Text) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (n, length + 1) to train on and to test on, and every token's number of bytes."""
    sys.path.append(str(EXAMPLES))
    from text_blocks import (
        bytes_per_token,
        hold_out,
        pack,
        standard_library,
        take_bytes,
        text_files,
        train_tokenizer,
    )

    paths = task.paths()
    documents = text_files(paths) if paths else standard_library()
    train, held_out = hold_out(documents, 0.05, seed=0)
    train = take_bytes(train, task.train_bytes)
    tokenizer = train_tokenizer(train, task.vocab_size)
    if len(tokenizer) > task.vocab_size:
        raise ValueError(f"vocab_size must be at least {len(tokenizer)}, got {task.vocab_size}")
    rows = [
        torch.tensor(pack(part, tokenizer, task.length + 1)["input_ids"][:])
        for part in (train, held_out)
    ]
    return rows[0], rows[1], torch.tensor(bytes_per_token(tokenizer))


@dataclass(frozen=True)
class Needles(Answered):
    """Keys with their values in a text, which are asked for at its end, where the keys return.

    To test, the text is cut into as many parts as there are needles, and one is anywhere in each.
    To train, keys stand all over the text, with the value that is a key's own in a row, and are
    asked for wherever they return; how much is text differs from row to row, from a fifth to all.
    Keys and values are tokens that the text does not have, of `kinds` kinds each.
    """

    text: Text = Text()
    needles: int = 8
    kinds: int = 8

    metric = "found"

    def __post_init__(self):
        if self.needles > self.kinds:
            raise ValueError(f"needles must be at most kinds = {self.kinds}, got {self.needles}")

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size + 2 * self.kinds

    @property
    def length(self) -> int:
        return self.text.length

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        pairs = self.length // 2
        keys = torch.randint(self.kinds, (rows, pairs), generator=generator)
        of_keys = torch.randint(self.kinds, (rows, self.kinds), generator=generator)
        share = 0.2 + 0.8 * torch.rand(rows, 1, generator=generator)
        is_text = torch.rand(rows, pairs, generator=generator) < share
        first = self.text.vocab_size
        text = self._passages(rows, 2 * pairs, generator, part=0).view(rows, pairs, 2)
        values = first + self.kinds + of_keys.gather(1, keys)
        return ask_again(first + keys, values, is_text, text)

    def held_out(self) -> Batch:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        return self.hidden(self.text.held_out_rows, self.length, generator)[0]

    def hidden(self, rows: int, length: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
        """Rows of so many tokens of text that is held out; and the parts (rows, needles) of the
        needles in the order in which they are asked for.
        """
        n = self.needles
        text_length = length - 2 * n
        room = text_length // n
        if room < 2:
            raise ValueError(f"length must be at least 4 * needles = {4 * n}, got {length}")
        kinds, first = torch.ones(rows, self.kinds), self.text.vocab_size
        keys = first + _distinct(kinds, n, generator)
        values = first + self.kinds + _distinct(kinds, n, generator)
        places = torch.arange(n) * room + torch.randint(room - 1, (rows, n), generator=generator)
        text = self._passages(rows, text_length, generator, part=1)
        text.scatter_(1, places, keys).scatter_(1, places + 1, values)
        order = _distinct(torch.ones(rows, n), n, generator)
        keys, values = keys.gather(1, order), values.gather(1, order)
        tokens = torch.cat([text, torch.stack([keys, values], dim=-1).flatten(1)], dim=1)
        targets = torch.full_like(tokens, UNASKED)
        targets[:, text_length::2] = values
        return Batch(tokens, targets), order

    def _passages(self, rows: int, length: int, generator: torch.Generator, part: int) -> Tensor:
        """From anywhere in the text to train on (part 0) or to test on (1), (rows, length)."""
        stream = read_text(self.text)[part][:, :-1].flatten()
        starts = torch.randint(len(stream) - length + 1, (rows, 1), generator=generator)
        return stream[starts + torch.arange(length)]


def ask_again(keys: Tensor, values: Tensor, is_other: Tensor, others: Tensor) -> Batch:
    """Pairs of keys and values, (rows, pairs): a value is asked for where its key is not the row's
    first. Where `is_other`, there are two other tokens, (rows, pairs, 2), instead.
    """
    earlier = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril(-1)
    is_same = (keys[:, :, None] == keys[:, None]) & ~is_other[:, None] & earlier
    pairs = torch.stack([keys, values], dim=-1)
    targets = torch.full_like(pairs, UNASKED)
    targets[..., 0] = torch.where(is_same.any(-1) & ~is_other, values, UNASKED)
    return Batch(torch.where(is_other[..., None], others, pairs).flatten(1), targets.flatten(1))
