# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Long sequences to be given a label, after Tay et al., "Long Range Arena", arXiv 2011.04006.

All are made on the spot. A row is FIRST, symbols from SYMBOLS on, LAST, then PAD up to the task's
length, a multiple of 64 (tokens of contenders.py).
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from contenders import FIRST, LAST, PAD, SYMBOLS
from text_blocks import library_files, read_utf8
from train_digits import read_digits

MULTIPLE = 64  # of which lengths are


class Rows(NamedTuple):
    tokens: Tensor  # (n, length)
    labels: Tensor  # (n,)


class Task(Protocol):
    num_labels: int

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int: ...

    def split(self, train: int, test: int) -> tuple[Rows, Rows]:
        """So many rows to train on and to test on, always the same."""


def framed_length(symbols: int) -> int:
    return math.ceil((symbols + 2) / MULTIPLE) * MULTIPLE


def make_rows(rows: Sequence[tuple[Any, int]], length: int) -> Rows:
    """Of pairs of symbols, from 0 on, and a label."""
    tokens = torch.full((len(rows), length), PAD)
    tokens[:, 0] = FIRST
    for row, (symbols, _) in zip(tokens, rows, strict=True):
        row[1 : len(symbols) + 1] = torch.as_tensor(symbols, dtype=torch.long) + SYMBOLS
        row[len(symbols) + 1] = LAST
    return Rows(tokens, torch.tensor([label for _, label in rows]))


# ---- ListOps ----


def _middle(values: list[int]) -> int:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


OPERATORS = {"MIN": min, "MAX": max, "MED": _middle, "SM": lambda values: sum(values) % 10}
END = 10 + len(OPERATORS)  # symbols: digits, operators, the bracket that ends one
SHARE_OF_DIGITS, MOST_ARGUMENTS, DEEPEST = 0.75, 10, 10


@dataclass(frozen=True)
class ListOps:
    """The value of an expression such as [MAX 2 9 [MIN 4 7] 0].

    A part is a digit with a probability of 0.75, and always at depth 10, otherwise one of MIN, MAX,
    MED (whose half is cut off) and SM (the last digit of the sum) with 2 to 10 parts. Of these
    expressions those are kept with more than `shortest` and fewer than `longest` symbols, no two
    alike. The paper's are 500 and 2,000.
    """

    shortest: int = 500
    longest: int = 2000

    num_labels = 10
    vocab_size = SYMBOLS + END + 1

    @property
    def length(self) -> int:
        return framed_length(self.longest - 1)

    def split(self, train: int, test: int) -> tuple[Rows, Rows]:
        source, found = random.Random(0), dict[tuple[int, ...], int]()
        while len(found) < train + test:
            symbols: list[int] = []
            value = self._part(source, symbols, 1)
            if value is not None and len(symbols) > self.shortest:
                found[tuple(symbols)] = value
        rows = make_rows(list(found.items()), self.length)
        return _cut(rows, train)

    def _part(self, source: random.Random, symbols: list[int], depth: int) -> int | None:
        """Adds its symbols, and gives its value; None where there are too many."""
        if depth == DEEPEST or source.random() < SHARE_OF_DIGITS:
            symbols.append(source.randrange(10))
            return symbols[-1]
        number = source.randrange(len(OPERATORS))
        symbols.append(10 + number)
        values = []
        for _ in range(source.randint(2, MOST_ARGUMENTS)):
            value = self._part(source, symbols, depth + 1)
            if value is None or len(symbols) >= self.longest:
                return None
            values.append(value)
        symbols.append(END)
        return [*OPERATORS.values()][number](values) if len(symbols) < self.longest else None


def _cut(rows: Rows, train: int) -> tuple[Rows, Rows]:
    return Rows(*(x[:train] for x in rows)), Rows(*(x[train:] for x in rows))


# ---- text ----


@dataclass(frozen=True)
class Passages:
    """Which package of Python's standard library some bytes of source are from.

    The packages are the ten with the most source of those with five files or more. Whole files are
    for testing, one in five. A row is a random place of a random file of a random package. The
    paper has reviews of films, whose opinion is asked for.
    """

    bytes: int = 4094

    num_labels = 10
    vocab_size = SYMBOLS + 256

    @property
    def length(self) -> int:
        return framed_length(self.bytes)

    def split(self, train: int, test: int) -> tuple[Rows, Rows]:
        packages = list(self._packages())[: self.num_labels]
        source = random.Random(0)
        parts: tuple[list, list] = ([], [])
        for files in packages:
            source.shuffle(files)
            tested = max(len(files) // 5, 1)
            parts[0].append(files[tested:])
            parts[1].append(files[:tested])
        made = []
        for part, count in zip(parts, (train, test), strict=True):
            rows = []
            for _ in range(count):
                label = source.randrange(len(packages))
                (text,) = source.choices(part[label], [len(text) for text in part[label]])
                start = source.randrange(max(len(text) - self.bytes, 0) + 1)
                rows.append((list(text[start : start + self.bytes]), label))
            made.append(make_rows(rows, self.length))
        return made[0], made[1]

    def _packages(self) -> Iterator[list[bytes]]:
        """The files of each that has enough, those with most source first."""
        packages: dict[str, list[bytes]] = {}
        for place, path in library_files():
            text = read_utf8(path)
            if text and len(place.parts) > 1:
                packages.setdefault(place.parts[0], []).append(text.encode())
        for files in sorted(packages.values(), key=lambda files: -sum(map(len, files))):
            if len(files) >= 5:
                yield files


# ---- images, pixel by pixel ----


@dataclass(frozen=True)
class Digits:
    """MNIST's digits, a token for each of 256 greys. The paper has CIFAR-10's images in grey."""

    side: int = 28

    num_labels = 10
    vocab_size = SYMBOLS + 256

    @property
    def length(self) -> int:
        return framed_length(self.side**2)

    def split(self, train: int, test: int) -> tuple[Rows, Rows]:
        """At most as many as there are."""
        pixels, labels = read_digits(self.side)
        rows = make_rows(list(zip(pixels, labels.tolist(), strict=True)), self.length)
        rest, tested = _cut(rows, len(labels) - test)
        return _cut(rest, train)[0], tested


@dataclass(frozen=True)
class Pathfinder:
    """Whether two dots are the ends of one dashed line.

    An image of `side` by `side` pixels has two long dashed lines that bend at random, and some
    shorter ones; between two lines there are two free pixels, between dashes one. One dot is on an
    end of the first long line, the other on its other end, or on one of the second line. A pixel is
    nothing, line or dot. After Linsley et al.,
    "Learning long-range spatial dependencies with horizontal gated recurrent units", arXiv
    1805.08315, by a generator of our own.
    """

    side: int = 32
    distractors: int = 4

    num_labels = 2
    vocab_size = SYMBOLS + 3

    @property
    def length(self) -> int:
        return framed_length(self.side**2)

    def split(self, train: int, test: int) -> tuple[Rows, Rows]:
        source = random.Random(0)
        rows = []
        while len(rows) < train + test:
            image = self._draw(source, label := len(rows) % 2)
            if image is not None:
                rows.append((image.ravel(), label))
        return _cut(make_rows(rows, self.length), train)

    def _draw(self, source: random.Random, label: int) -> numpy.ndarray | None:
        """None where a long line found no place."""
        image = numpy.zeros((self.side, self.side), dtype=numpy.int64)
        taken = numpy.zeros((self.side + 4, self.side + 4), dtype=bool)  # two pixels on all sides
        ends = []
        lengths = [3 * self.side // 4] * 2 + [self.side // 3] * self.distractors
        for number, length in enumerate(lengths):
            for _ in range(20):
                line = self._line(source, length, taken)
                if line is not None:
                    break
            else:
                if number < 2:
                    return None
                continue
            for step, (y, x) in enumerate(line):
                taken[y : y + 5, x : x + 5] = True
                if step % 3 != 2:  # dashes of two pixels
                    image[y, x] = 1
            ends.append((line[0], line[-1]))
        first, other = ends[0][0], ends[0][1] if label else ends[1][0]
        image[first] = image[other] = 2
        return image

    def _line(
        self, source: random.Random, length: int, taken: numpy.ndarray
    ) -> list[tuple[int, int]] | None:
        """Pixels from one end to the other, none of them taken or seen twice."""
        y, x = source.uniform(1, self.side - 1), source.uniform(1, self.side - 1)
        heading = source.uniform(0, 2 * math.pi)
        line: list[tuple[int, int]] = []
        while len(line) < length:
            pixel = int(y), int(x)
            is_inside = 0 <= pixel[0] < self.side and 0 <= pixel[1] < self.side
            if not is_inside or taken[pixel[0] + 2, pixel[1] + 2] or pixel in line[:-1]:
                return None
            if pixel not in line:
                line.append(pixel)
            heading += source.gauss(0, 0.25)
            y, x = y + math.sin(heading), x + math.cos(heading)
        return line
