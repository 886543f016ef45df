# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that ask for what stood above: names with numbers, in comments between lines of source.

    # timeout 41 path 17
    def main():
        ...
    # path 17

A name is drawn anew with a number for every text, so only who remembers the first comment knows how
the last one ends. A model learns from texts of this kind what it is then tested on by generation:
one pair in a long text ("needle"), and several that are all asked for (as in MQAR, arXiv
2312.04927). Some texts that it learns from only repeat a line.

What can't be known, a name or what is said for the first time, has no label. Small models learn to
look something up where much is asked for in a short block, and then do it in long ones, too: see
docs/converting.md.

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
from transformers import PreTrainedTokenizerFast

from text_blocks import InputError, iterate_text

NAMES = (
    "action amount angle array base board bytes cache cell child class color count date delay "
    "depth edge error event field file flag group height index item label length level line mode "
    "order"
).split()
NUMBERS = [str(number) for number in range(10, 42)]
ROUNDS = (2, 3, 4, 6)  # how often all pairs of a text are said
PAIRS_PER_LINE = 4  # at most
TOKENS_PER_PAIR, MOST_PAIRS = 10, 16  # of a block: the longer, the more pairs its texts may have
GAPS = (1, 2, 4, 8)  # lines of source between rounds, on average, in texts that have any
GAP_SHARE = 0.3  # of texts with pairs that have lines of source; the others are comments alone
GAP_BLOCK = 128  # tokens of a block from which on there are any
ECHO_SHARE = 0.5  # of texts that say the same line again
ECHO_ROUNDS = (2, 2, 3)  # how often it is said
LEAST_ECHO, TOKENS_PER_ECHO, MOST_ECHO = 3, 4, 40  # words of such a line, by the block's length
TEXTS_PER_SOURCE = 20  # that take lines of one document
TOKENIZER_CHARACTERS = 10**6  # of texts to train a tokenizer on, for which names are one token each
TOKENIZER_BLOCK = 256  # the block that those are written for

Pairs = list[tuple[str, str]]
NO_LABEL = -100


class RecallText:
    """A text, and which of its characters can be known."""

    def __init__(self):
        self.text = ""
        self.known: list[bool] = []  # by character

    def add(self, text: str, is_known: bool) -> None:
        self.text += text
        self.known += [is_known] * len(text)


def draw_pairs(rng: random.Random, n: int, names: list[str], numbers: list[str]) -> Pairs:
    """Different names with different numbers."""
    return list(zip(rng.sample(names, n), rng.sample(numbers, n), strict=True))


def comments(rng: random.Random, pairs: Pairs) -> list[Pairs]:
    """All pairs in random order, by the line that they stand in."""
    pairs, lines = rng.sample(pairs, len(pairs)), []
    while pairs:
        n = rng.randint(1, PAIRS_PER_LINE)
        lines.append(pairs[:n])
        pairs = pairs[n:]
    return lines


def say(pairs: Pairs) -> str:
    return "".join(f" {name} {number}" for name, number in pairs)


def recall_text(
    rng: random.Random, block_size: int, lines: Iterator[str], labels_source: bool = True
) -> RecallText:
    """The same pairs, said several times, in some texts between lines of source."""
    most = min(max(block_size // TOKENS_PER_PAIR, 1), MOST_PAIRS)
    pairs = draw_pairs(rng, rng.randint(1, most), NAMES, NUMBERS)
    has_source = block_size >= GAP_BLOCK and rng.random() < GAP_SHARE
    gap = rng.choice(GAPS) if has_source else 0
    text = RecallText()
    for i in range(rng.choice(ROUNDS)):
        for line in islice(lines, rng.randint(0, 2 * gap)):
            text.add(line, is_known=labels_source)
        for comment in comments(rng, pairs):
            text.add("#", is_known=False)
            for name, number in comment:
                text.add(f" {name}", is_known=False)
                text.add(f" {number}", is_known=i > 0)
            text.add("\n", is_known=False)
    return text


def echo_text(rng: random.Random, block_size: int) -> RecallText:
    """Names and numbers in no order, in a line that is said again: each of its words then follows
    from what stood behind the one before. This is what is learned first, and recall builds on it.
    """
    most = min(max(block_size // TOKENS_PER_ECHO, LEAST_ECHO), MOST_ECHO)
    first, *others = rng.choices([*NAMES, *NUMBERS], k=rng.randint(LEAST_ECHO, most))
    text = RecallText()
    for i in range(rng.choice(ECHO_ROUNDS)):
        text.add(f"# {first}", is_known=False)
        for word in others:
            text.add(f" {word}", is_known=i > 0)
        text.add("\n", is_known=False)
    return text


def recall_texts(
    sources: Dataset, block_size: int, seed: int, labels_source: bool = True
) -> Iterator[RecallText]:
    """Without end, for blocks of this many tokens, with lines of these documents."""
    rng = random.Random(seed)
    while True:
        lines = sources[rng.randrange(len(sources))]["text"].splitlines(keepends=True)
        for _ in range(TEXTS_PER_SOURCE):
            if rng.random() < ECHO_SHARE:
                yield echo_text(rng, block_size)
            else:
                start = rng.randrange(len(lines)) if lines else 0
                some = islice(cycle(lines), start, None)
                yield recall_text(rng, block_size, some, labels_source)


def with_recall_texts(documents: Dataset, seed: int) -> Dataset:
    """The documents and some recall texts: what to train a tokenizer on."""
    texts, length = [], 0
    for text in recall_texts(documents, TOKENIZER_BLOCK, seed):
        texts.append(text.text)
        length += len(text.text)
        if length >= TOKENIZER_CHARACTERS:
            return concatenate_datasets([documents, Dataset.from_dict({"text": texts})])


def recall_blocks(
    sources: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    block_size: int,
    count: int,
    seed: int,
    labels_source: bool = True,
) -> Dataset:
    """So many blocks as `pack` makes them, but that each begins with a text, and that only what can
    be known has a label: without `labels_source` only what was said above.
    """
    texts = recall_texts(sources, block_size, seed, labels_source)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for _ in range(count):
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < block_size:
            more_ids, more_labels = encode(next(texts), tokenizer)
            ids += more_ids
            labels += more_labels
        rows["input_ids"].append(ids[:block_size])
        rows["labels"].append(labels[:block_size])
    return Dataset.from_dict(rows)


def encode(text: RecallText, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """A text's tokens, closed by the end-of-text token, and its labels."""
    encoded = tokenizer(text.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    labels = [
        token if all(text.known[start:end]) else NO_LABEL
        for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return [*ids, tokenizer.eos_token_id], [*labels, NO_LABEL]


def mix_recall_blocks(
    blocks: Dataset,
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    share: float,
    seed: int,
) -> Dataset:
    """Blocks of text as `pack` makes them, and so many blocks of recall texts that these are
    `share` of all; with a share of 1 as many as there were, and no others.
    """
    block_size = len(blocks[0]["input_ids"])
    count = len(blocks) if share == 1 else round(len(blocks) * share / (1 - share))
    if count == 0:
        return blocks
    recall = recall_blocks(documents, tokenizer, block_size, count, seed)
    return recall if share == 1 else concatenate_datasets([blocks, recall])


# ---- questions to be answered by generation ----


class Questions(NamedTuple):
    """Tokens. After a row's context, and after the questions and answers before it, each question
    (name) is to be followed by its answer (number).
    """

    contexts: Tensor  # (B, tokens)
    asked: Tensor  # (B, Q, tokens of a question)
    answers: Tensor  # (B, Q, tokens of an answer)


class Words:
    """A tokenizer's, of which names have as many tokens as each other, and so have numbers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.names = of_equal_length(NAMES, lambda name: len(self.encode_name(name)))
        self.numbers = of_equal_length(NUMBERS, lambda number: len(self.encode_number(number)))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_name(self, name: str) -> list[int]:
        return self.encode(f"\n# {name}")

    def encode_number(self, number: str) -> list[int]:
        return self.encode(f" {number}")


def ask(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
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
    rng, words = random.Random(seed), Words(tokenizer)
    source = words.encode("".join(iterate_text(documents)))
    line_breaks = {i for i, token in enumerate(source) if tokenizer.decode(token)[:1] == "\n"}
    contexts, asked, answers = [], [], []
    for _ in range(rows):
        pairs = draw_pairs(rng, num_pairs, words.names, words.numbers)
        asked.append([words.encode_name(name) for name, _ in pairs])
        answers.append([words.encode_number(number) for _, number in pairs])
        hidden = words.encode("".join(f"\n#{say(line)}" for line in comments(rng, pairs)))
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


def ask_alone(
    tokenizer: PreTrainedTokenizerFast, num_pairs: int, rows: int, seed: int = 0
) -> Questions:
    """Rows of pairs in comments, and nothing else, that are all asked for in another order."""
    rng, words = random.Random(seed), Words(tokenizer)
    contexts, asked, answers = [], [], []
    for _ in range(rows):
        pairs = draw_pairs(rng, num_pairs, words.names, words.numbers)
        lines = [pairs[i : i + PAIRS_PER_LINE] for i in range(0, num_pairs, PAIRS_PER_LINE)]
        contexts.append(words.encode("\n".join(f"#{say(line)}" for line in lines)))
        rng.shuffle(pairs)
        asked.append([words.encode_name(name) for name, _ in pairs])
        answers.append([words.encode_number(number) for _, number in pairs])
    return Questions(torch.tensor(contexts), torch.tensor(asked), torch.tensor(answers))


def of_equal_length(words: Iterable[str], length_of) -> list[str]:
    """Those words that have the most frequent number of tokens, so that rows are of one length."""
    lengths = {word: length_of(word) for word in words}
    [(usual, _)] = Counter(lengths.values()).most_common(1)
    return [word for word, length in lengths.items() if length == usual]
