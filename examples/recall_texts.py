# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that ask for what stood far above: names with numbers, in comments between lines of source.

    # timeout 41 path 17
    def main():
        ...
    # path 17

A name is drawn anew with a number for every text, so only who remembers the first comment knows how
the last one ends. A model learns from texts of this kind what it is then tested on by generation:
one pair in a long text ("needle"), and several that are all asked for (as in MQAR, arXiv
2312.04927).

Shapes: B rows, Q questions in each.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import NamedTuple

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from text_blocks import InputError, iterate_text

NAMES = (
    "action amount angle array base board bytes cache cell child class color count date delay depth "
    "edge error event field file flag group height index item label length level line mode order"
).split()
NUMBERS = [str(number) for number in range(10, 42)]
NUM_PAIRS = (1, 2, 3, 4, 6, 8)  # of a text to train on; few are learned first
GAPS = (0, 0, 0, 4, 16)  # lines of source between comments, on average; 0: comments alone
PAIRS_PER_LINE = 4  # at most
CHARACTERS_PER_TOKEN = 8  # more than there are, so that a text fills its block
TOKENIZER_TEXTS = 300  # to train a tokenizer on, so that names and numbers are one token each

Pairs = list[tuple[str, str]]


def draw_pairs(rng: random.Random, n: int, names: list[str], numbers: list[str]) -> Pairs:
    """Different names with different numbers."""
    return list(zip(rng.sample(names, n), rng.sample(numbers, n), strict=True))


def comments(rng: random.Random, pairs: Pairs) -> str:
    """All pairs in random order, some in each line."""
    pairs, lines = rng.sample(pairs, len(pairs)), []
    while pairs:
        n = rng.randint(1, PAIRS_PER_LINE)
        lines.append("# " + " ".join(f"{name} {number}" for name, number in pairs[:n]) + "\n")
        pairs = pairs[n:]
    return "".join(lines)


def recall_text(rng: random.Random, lines: Iterator[str], length: int) -> str:
    """At least `length` characters: lines of source, and again and again the same pairs."""
    pairs = draw_pairs(rng, rng.choice(NUM_PAIRS), NAMES, NUMBERS)
    gap = rng.choice(GAPS)
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts += islice(lines, rng.randint(0, 2 * gap))
        parts.append(comments(rng, pairs))
    return "".join(parts)


def recall_documents(sources: Dataset, count: int, length: int, seed: int) -> Dataset:
    """Texts of at least `length` characters, with lines of these documents."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        lines = sources[rng.randrange(len(sources))]["text"].splitlines(keepends=True)
        start = rng.randrange(len(lines))
        texts.append(recall_text(rng, islice(cycle(lines), start, None), length))
    return Dataset.from_dict({"text": texts})


def with_recall_texts(documents: Dataset, seed: int) -> Dataset:
    """The documents and some recall texts: what to train a tokenizer on."""
    return concatenate_datasets(
        [documents, recall_documents(documents, TOKENIZER_TEXTS, 4000, seed)]
    )


def mix_recall_blocks(
    blocks: Dataset,
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    share: float,
    seed: int,
) -> Dataset:
    """Blocks of text as `pack` makes them, and so many blocks of recall texts that these are
    `share` of all. Each is the beginning of one text.
    """
    block_size = len(blocks[0]["input_ids"])
    count = round(len(blocks) * share / (1 - share))
    texts = recall_documents(documents, count, block_size * CHARACTERS_PER_TOKEN, seed)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        cut = [ids[:block_size] for ids in encoded]
        return {"input_ids": cut, "labels": cut}

    if count == 0:
        return blocks
    recall = texts.map(encode, batched=True, remove_columns="text")
    return concatenate_datasets([blocks, recall.cast(blocks.features)])


# ---- questions to be answered by generation ----


class Questions(NamedTuple):
    """Tokens. After a row's context, and after the questions and answers before it, each question
    (name) is to be followed by its answer (number).
    """

    contexts: Tensor  # (B, tokens)
    asked: Tensor  # (B, Q, tokens of a question)
    answers: Tensor  # (B, Q, tokens of an answer)


def ask(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    num_pairs: int,
    rows: int,
    seed: int = 0,
) -> Questions:
    """Rows of `length` tokens, questions and answers included: source of the documents in whose
    first half the pairs stand, anywhere; then all pairs are asked for.

    Raises:
        InputError: the documents or the length are too short.
    """
    rng = random.Random(seed)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    names = _of_equal_length(NAMES, lambda name: len(encode(f"\n# {name}")))
    numbers = _of_equal_length(NUMBERS, lambda number: len(encode(f" {number}")))
    source = encode("".join(iterate_text(documents)))
    line_ends = {i for i, token in enumerate(source) if tokenizer.decode(token).endswith("\n")}
    contexts, asked, answers = [], [], []
    for _ in range(rows):
        pairs = draw_pairs(rng, num_pairs, names, numbers)
        asked.append([encode(f"\n# {name}") for name, _ in pairs])
        answers.append([encode(f" {number}") for _, number in pairs])
        hidden = encode(comments(rng, pairs))
        n = length - len(hidden) - sum(map(len, chain(asked[-1], answers[-1])))
        if n < 2 or n >= len(source):
            raise InputError(
                f"{num_pairs} pairs in {length} tokens need {n} tokens of text, and there are "
                f"{len(source)}: give more text, or longer blocks"
            )
        start = rng.randrange(len(source) - n)
        place = start + rng.randint(n // 8, n // 2)
        while place < start + n and place - 1 not in line_ends:
            place += 1
        contexts.append(source[start:place] + hidden + source[place : start + n])
    return Questions(torch.tensor(contexts), torch.tensor(asked), torch.tensor(answers))


def _of_equal_length(words: Iterable[str], length_of) -> list[str]:
    """Those words that have the most frequent number of tokens, so that rows are of one length."""
    lengths = {word: length_of(word) for word in words}
    [(usual, _)] = Counter(lengths.values()).most_common(1)
    return [word for word, length in lengths.items() if length == usual]
