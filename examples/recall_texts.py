# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that ask for what stood far above: names with numbers, in comments between lines of source.

    # timeout 41 path 17
    def main():
        ...
    # path 17

A name is drawn anew with a number for every text, so only who remembers the first comment knows how
the last one ends. A model learns from texts of this kind what it is then tested on by generation:
one pair in a long text ("needle"), and several that are all asked for (as in MQAR, arXiv
2312.04927). Some texts that it learns from only repeat a line.

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

from text_blocks import InputError, iterate_text, pack

NAMES = (
    "action amount angle array base board bytes cache cell child class color count date delay "
    "depth edge error event field file flag group height index item label length level line mode "
    "order"
).split()
NUMBERS = [str(number) for number in range(10, 42)]
NUM_PAIRS = (1, 2, 3, 4, 6, 8)  # of a text to train on
ROUNDS = (2, 2, 3, 4)  # how often all pairs of a text are said
GAPS = (*[0] * 10, 4, 16)  # lines of source between rounds, on average; 0: comments alone
PAIRS_PER_LINE = 4  # at most
ECHO_SHARE = 0.4  # of texts that say the same line again
ECHO_WORDS = range(6, 41)  # of such a line
ECHO_ROUNDS = (2, 2, 3)  # how often it is said
TEXTS_PER_SOURCE = 20  # that take lines of one document
CHARACTERS_PER_TOKEN = 6  # more than there are, so that there are texts enough
TOKENIZER_CHARACTERS = 10**6  # of texts to train a tokenizer on, for which names are one token each

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


def recall_text(rng: random.Random, lines: Iterator[str]) -> str:
    """The same pairs, said several times, between lines of source."""
    pairs = draw_pairs(rng, rng.choice(NUM_PAIRS), NAMES, NUMBERS)
    gap = rng.choice(GAPS)
    parts: list[str] = []
    for _ in range(rng.choice(ROUNDS)):
        parts += islice(lines, rng.randint(0, 2 * gap))
        parts.append(comments(rng, pairs))
    return "".join(parts)


def echo_text(rng: random.Random) -> str:
    """Names and numbers in no order, in a line that is said again: each of its words then follows
    from what stood behind the one before. This is what is learned first, and recall builds on it.
    """
    words = rng.choices([*NAMES, *NUMBERS], k=rng.choice(ECHO_WORDS))
    return f"# {' '.join(words)}\n" * rng.choice(ECHO_ROUNDS)


def recall_documents(sources: Dataset, length: int, seed: int) -> Dataset:
    """Texts of at least `length` characters together, with lines of these documents.

    Most are short: a batch has to hold many, for each has one set of pairs to learn from.
    """
    rng = random.Random(seed)
    texts: list[str] = []
    lines: list[str] = []
    while length > 0:
        if len(texts) % TEXTS_PER_SOURCE == 0:
            lines = sources[rng.randrange(len(sources))]["text"].splitlines(keepends=True)
        if rng.random() < ECHO_SHARE:
            texts.append(echo_text(rng))
        else:
            start = rng.randrange(len(lines))
            texts.append(recall_text(rng, islice(cycle(lines), start, None)))
        length -= len(texts[-1])
    return Dataset.from_dict({"text": texts})


def with_recall_texts(documents: Dataset, seed: int) -> Dataset:
    """The documents and some recall texts: what to train a tokenizer on."""
    texts = recall_documents(documents, TOKENIZER_CHARACTERS, seed)
    return concatenate_datasets([documents, texts])


def mix_recall_blocks(
    blocks: Dataset,
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    share: float,
    seed: int,
) -> Dataset:
    """Blocks of text as `pack` makes them, and so many blocks of recall texts that these are
    `share` of all.
    """
    block_size = len(blocks[0]["input_ids"])
    count = round(len(blocks) * share / (1 - share))
    if count == 0:
        return blocks
    length = (count + 1) * block_size * CHARACTERS_PER_TOKEN
    recall = pack(recall_documents(documents, length, seed), tokenizer, block_size)
    return concatenate_datasets([blocks, recall.select(range(count))])


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
    line_breaks = {i for i, token in enumerate(source) if tokenizer.decode(token)[:1] == "\n"}
    contexts, asked, answers = [], [], []
    for _ in range(rows):
        pairs = draw_pairs(rng, num_pairs, names, numbers)
        asked.append([encode(f"\n# {name}") for name, _ in pairs])
        answers.append([encode(f" {number}") for _, number in pairs])
        hidden = encode("\n" + comments(rng, pairs).rstrip("\n"))
        n = length - len(hidden) - sum(map(len, chain(asked[-1], answers[-1])))
        if n < 2 or n >= len(source):
            raise InputError(
                f"{num_pairs} pairs in {length} tokens need {n} tokens of text, and there are "
                f"{len(source)}: give more text, or longer blocks"
            )
        start = rng.randrange(len(source) - n)
        place = start + rng.randint(n // 8, n // 2)
        while place < start + n and place not in line_breaks:
            place += 1
        contexts.append(source[start:place] + hidden + source[place : start + n])
    return Questions(torch.tensor(contexts), torch.tensor(asked), torch.tensor(answers))


def _of_equal_length(words: Iterable[str], length_of) -> list[str]:
    """Those words that have the most frequent number of tokens, so that rows are of one length."""
    lengths = {word: length_of(word) for word in words}
    [(usual, _)] = Counter(lengths.values()).most_common(1)
    return [word for word, length in lengths.items() if length == usual]
