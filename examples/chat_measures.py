# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What convert_report.py asks a model that has a chat template: short questions with known answers,
a code that stood far above, and a talk of twenty turns, by greedy decoding.
"""

import random
from collections.abc import Iterator

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from model_measures import Contender
from recall_texts import Questions, of_equal_length
from text_blocks import InputError, iterate_text

ANSWER_TOKENS, TURN_TOKENS = 24, 64  # at most
# Any of the words makes an answer right.
KNOWN = {
    "What is the capital of France?": ("paris",),
    "What is the capital of Italy?": ("rome",),
    "What is the capital of Japan?": ("tokyo",),
    "What is the capital of Germany?": ("berlin",),
    "What is the capital of Spain?": ("madrid",),
    "What is the capital of England?": ("london",),
    "What is the capital of Russia?": ("moscow",),
    "What is the capital of Egypt?": ("cairo",),
    "What is the capital of China?": ("beijing",),
    "What is the capital of Greece?": ("athens",),
    "On which continent is Brazil?": ("south america",),
    "On which continent is Kenya?": ("africa",),
    "On which continent is India?": ("asia",),
    "Which planet is the largest in the solar system?": ("jupiter",),
    "Which planet is closest to the Sun?": ("mercury",),
    "Which planet is known as the red planet?": ("mars",),
    "What does the Earth orbit?": ("sun",),
    "What is the chemical formula of water?": ("h2o", "h₂o"),
    "What is the chemical symbol of gold?": ("au",),
    "What is the chemical symbol of oxygen?": ("o", "o2"),
    "What gas do plants take in from the air?": ("carbon dioxide", "co2"),
    "At what temperature in degrees Celsius does water boil?": ("100",),
    "How many days are in a week?": ("7", "seven"),
    "How many months are in a year?": ("12", "twelve"),
    "How many hours are in a day?": ("24", "twenty-four"),
    "How many legs does a spider have?": ("8", "eight"),
    "How many sides does a triangle have?": ("3", "three"),
    "How many minutes are in an hour?": ("60", "sixty"),
    "How many continents are there?": ("7", "seven"),
    "What is 2 + 2?": ("4", "four"),
    "What is 10 minus 3?": ("7", "seven"),
    "What is 5 times 5?": ("25", "twenty-five"),
    "Who wrote Romeo and Juliet?": ("shakespeare",),
    "Who painted the Mona Lisa?": ("leonardo", "vinci"),
    "Who developed the theory of relativity?": ("einstein",),
    "Who was the first president of the United States?": ("washington",),
    "What is the largest ocean on Earth?": ("pacific",),
    "What is the tallest mountain on Earth?": ("everest",),
    "What is the opposite of hot?": ("cold",),
    "What color is the sky on a clear day?": ("blue",),
}
ANIMALS = "fox bear wolf lion tiger horse eagle whale snake mouse duck goat frog deer crow".split()
CODES = [str(number) for number in range(100, 1000)]
TALK = (
    "Hello! My name is Anna and I live in Vienna.",
    "I have a dog called Bruno. Can you suggest a walk for us?",
    "What should I take along?",
    "It may rain. What then?",
    "Tell me a fact about dogs.",
    "What is my dog called?",
    "How often should a dog eat?",
    "Can dogs eat chocolate?",
    "Thank you. Now tell me about the Moon.",
    "How far away is it?",
    "Who was the first to walk on it?",
    "In which city do I live?",
    "What is that city known for?",
    "Give me a recipe for pancakes.",
    "How long does that take?",
    "What goes well with them?",
    "What is my name?",
    "Write one sentence about autumn.",
    "Now one about winter.",
    "Thank you, goodbye!",
)
SUMMARY = "Summarize this text in two sentences:\n\n{}"
SUMMARY_CHARACTERS = 3000


class Chat:
    """A model's, turn by turn: what was read stays in its cache."""

    def __init__(self, contender: Contender, tokenizer: PreTrainedTokenizerBase):
        self.contender, self.tokenizer = contender, tokenizer
        self.cache: Cache = contender.cache()
        self.text = ""  # so far, as the template has it
        self.unread: list[int] = []  # of it
        self.messages: list[dict[str, str]] = []

    @torch.no_grad()
    def say(self, content: str, most: int) -> str:
        """-> the answer, of at most so many tokens."""
        self.messages.append({"role": "user", "content": content})
        text = self.tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=True
        )
        new, self.text = text.removeprefix(self.text), text
        self.unread += self.tokenizer(new, add_special_tokens=False)["input_ids"]
        given: list[int] = []
        while len(given) < most:
            token = self.contender.read(torch.tensor([self.unread]), self.cache).argmax().item()
            self.unread = []
            if token == self.tokenizer.eos_token_id:
                break
            given.append(token)
            self.unread = [token]
        answer = self.tokenizer.decode(given)
        self.messages.append({"role": "assistant", "content": answer})
        self.text += answer
        return answer


def known_answers(contender: Contender, tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Whether each question of KNOWN is answered right."""
    right = {}
    for question, words in KNOWN.items():
        answer = Chat(contender, tokenizer).say(question, ANSWER_TOKENS).lower()
        letters = "".join(c if c.isalnum() or c == "-" else " " for c in answer)
        right[question] = any(f" {word} " in f" {letters} " for word in words)
    return right


def hide_codes(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, rows: int, seed: int = 0
) -> Questions:
    """Rows of about `length` tokens: a user gives a text, in which the code of an animal stands,
    and asks for that code. The answer's first words are given.

    Raises:
        InputError: the documents are too short.
    """
    rng = random.Random(seed)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    animals = of_equal_length(ANIMALS, lambda animal: len(encode(f" {animal}")))
    codes = of_equal_length(CODES, lambda code: len(encode(f" {code}")))
    source = encode("\n\n".join(iterate_text(documents)))
    before, after = in_a_turn(tokenizer)
    contexts, asked, answers = [], [], []
    for _ in range(rows):
        animal, code = rng.choice(animals), rng.choice(codes)
        hidden = encode(f"\nThe secret code of the {animal} is {code}.\n")
        asked.append([encode(f"\n\nWhat is the secret code of the {animal}?") + encode(after)])
        asked[-1][0] += encode(f"The secret code of the {animal} is")
        answers.append([encode(f" {code}")])
        n = length - sum(map(len, (encode(before), hidden, asked[-1][0], answers[-1][0])))
        if n < 2 or n >= len(source):
            raise InputError(
                f"a code in {length} tokens needs {n} of text, and there are {len(source)}: give "
                "more text, or shorter texts with codes"
            )
        start = rng.randrange(len(source) - n)
        place = start + rng.randint(n // 8, n // 2)
        text = source[start:place] + hidden + source[place : start + n]
        contexts.append(encode(before) + text)
    return Questions(torch.tensor(contexts), torch.tensor(asked), torch.tensor(answers))


def in_a_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes before a user's words, and behind them up to the answer's."""
    mark = "\N{WHITE SQUARE}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(mark)
    return before, after


def talk(
    contender: Contender, tokenizer: PreTrainedTokenizerBase, documents: Dataset
) -> Iterator[tuple[str, str]]:
    """Words of a user and of the model: a summary, then TALK."""
    text = max(iterate_text(documents), key=len)
    asked = SUMMARY.format(text[:SUMMARY_CHARACTERS])
    yield asked, Chat(contender, tokenizer).say(asked, 2 * TURN_TOKENS)
    chat = Chat(contender, tokenizer)
    for content in TALK:
        yield content, chat.say(content, TURN_TOKENS)
