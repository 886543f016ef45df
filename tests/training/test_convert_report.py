# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that ask for what stood far above, and the report of what converting a model cost."""

import copy
import itertools
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    SinkCache,
    TOVACache,
    convert,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import chat_measures  # noqa: E402
import convert_report  # noqa: E402
import recall_texts  # noqa: E402
import text_blocks  # noqa: E402
from convert_report import ReportArguments, write_report  # noqa: E402
from model_measures import Contender, nats_per_token, recall, speed_and_memory  # noqa: E402
from train_causal_lm import DataArguments  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK_SIZE = 96


@pytest.fixture(scope="module")
def documents() -> Dataset:
    files = (json, random, re, Path(recall_texts.__file__))
    paths = [Path(file if isinstance(file, Path) else file.__file__) for file in files]
    return Dataset.from_dict({"text": [path.read_text()[:20_000] for path in paths]})


@pytest.fixture(scope="module")
def tokenizer(documents):
    return text_blocks.train_tokenizer(recall_texts.with_recall_texts(documents, seed=0), 600)


@pytest.fixture(scope="module")
def original(tokenizer) -> LinearAttentionForCausalLM:
    torch.manual_seed(0)
    config = LinearAttentionConfig.from_preset(
        "softmax",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    return LinearAttentionForCausalLM(config).eval()


# ---- texts ----


def known_words(text: recall_texts.RecallText) -> list[bool]:
    """Whether each word of a text can be known."""
    spans = [match.span() for match in re.finditer(r"\S+", text.text)]
    assert all(len(set(text.known[start:end])) == 1 for start, end in spans)
    return [text.known[start] for start, _ in spans]


def test_a_name_has_one_number_throughout_a_text_and_another_in_the_next():
    lines = itertools.cycle(["x = 1\n", "y = 2\n"])
    tables = []
    for seed in range(20):
        text = recall_texts.recall_text(random.Random(seed), 256, lines).text
        said = re.findall(r"(\w+) (\d\d)(?= |\n)", "\n".join(re.findall("^# .*\n", text, re.M)))
        tables.append(dict(said))
        assert len(said) >= min(recall_texts.ROUNDS) * len(tables[-1])  # all are asked for
        assert set(said) == set(tables[-1].items())
        assert len(set(tables[-1].values())) == len(tables[-1]) <= recall_texts.MOST_PAIRS
    assert tables[0] != tables[1]
    assert max(map(len, tables)) > 8


def test_a_number_can_be_known_from_the_second_time_on_and_source_always():
    lines = itertools.cycle(["x = y\n"])
    for seed in range(20):
        text = recall_texts.recall_text(random.Random(seed), 256, lines)
        said: set[str] = set()
        words = text.text.split()
        for i, is_known in enumerate(known_words(text)):
            if words[i].isdigit():
                assert is_known == (words[i] in said)
                said.add(words[i])
            else:
                assert is_known == (words[i] in "x=y")


def test_short_blocks_have_few_pairs_and_no_source():
    for seed in range(20):
        text = recall_texts.recall_text(random.Random(seed), 32, itertools.cycle(["x\n"])).text
        assert len(set(re.findall(r"\d\d", text))) <= 32 // recall_texts.TOKENS_PER_PAIR
        assert "x\n" not in text


def test_an_echo_says_one_line_again():
    texts = [recall_texts.echo_text(random.Random(seed), 256) for seed in range(20)]
    for text in texts:
        line, *others = text.text.splitlines()
        assert set(others) == {line} and len(others) + 1 in recall_texts.ECHO_ROUNDS
        words = len(line.split())
        assert recall_texts.LEAST_ECHO < words <= recall_texts.MOST_ECHO + 1
        again = [False, False, *[True] * (words - 2)]  # nothing says how a line begins
        assert known_words(text) == [False] * words + again * len(others)
    assert len({text.text for text in texts}) == len(texts)


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_the_share_of_recall_blocks_is_as_asked_for(share, documents, tokenizer):
    blocks = text_blocks.pack(documents, tokenizer, BLOCK_SIZE)
    mixed = recall_texts.mix_recall_blocks(blocks, documents, tokenizer, share, seed=0)
    if share < 1:
        assert mixed[: len(blocks)] == blocks[:]
        assert 1 - len(blocks) / len(mixed) == pytest.approx(share, abs=1 / len(mixed))
    else:
        assert len(mixed) == len(blocks)
    for row in list(mixed)[0 if share == 1 else len(blocks) :]:
        assert len(row["input_ids"]) == len(row["labels"]) == BLOCK_SIZE
        labels = torch.tensor(row["labels"])
        has_label = labels != recall_texts.NO_LABEL
        assert torch.equal(labels[has_label], torch.tensor(row["input_ids"])[has_label])
        assert has_label.any() and not has_label.all()


def test_source_has_no_label_where_recall_alone_is_asked_for():
    for seed in range(40):
        text, asked = (
            recall_texts.recall_text(random.Random(seed), 256, iter(["x=y\n"] * 999), labels_source)
            for labels_source in (True, False)
        )
        assert asked.text == text.text
        source = [word in "x=y" for word in text.text.split()]
        kept = [a and not b for a, b in zip(known_words(text), source, strict=True)]
        assert known_words(asked) == kept


def test_tokens_have_a_label_where_all_their_characters_can_be_known(tokenizer):
    text = recall_texts.RecallText()
    for part, is_known in (("# path", False), (" 17", False), ("\n# path", False), (" 17", True)):
        text.add(part, is_known)
    ids, labels = recall_texts.encode(text, tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text.text
    (known,) = (i for i, label in enumerate(labels) if label != recall_texts.NO_LABEL)
    assert known == len(ids) - 2
    assert tokenizer.decode(labels[known : known + 1]) == " 17"


@pytest.mark.parametrize("pairs", [1, 4])
def test_what_is_asked_for_stands_once_and_early(pairs, documents, tokenizer):
    length = 400
    questions = recall_texts.ask(documents, tokenizer, length, pairs, rows=6)
    contexts, asked, answers = questions
    assert asked.shape[:2] == answers.shape[:2] == (6, pairs)
    assert contexts.shape[1] + asked[0].numel() + answers[0].numel() == length
    for i in range(6):
        text, half = (tokenizer.decode(contexts[i, :n]) for n in (None, length * 2 // 3))
        for question, answer in zip(asked[i], answers[i], strict=True):
            name, number = tokenizer.decode(question), tokenizer.decode(answer)
            assert re.fullmatch(r"\n# \w+", name)
            assert f"{name[3:]}{number}" in half
            assert text.count(f"{name[3:]}{number}") == 1


def test_pairs_alone_are_said_once_and_all_asked_for(tokenizer):
    contexts, asked, answers = recall_texts.ask_alone(tokenizer, 10, rows=5)
    orders = set()
    for i in range(5):
        said = re.findall(r" (\w+) (\d\d)", tokenizer.decode(contexts[i]))
        assert len(dict(said)) == len(said) == 10
        names = [tokenizer.decode(question)[3:] for question in asked[i]]
        assert [(f"\n# {n}", f" {dict(said)[n]}") for n in names] == [
            (tokenizer.decode(question), tokenizer.decode(answer))
            for question, answer in zip(asked[i], answers[i], strict=True)
        ]
        assert set(names) == set(dict(said))
        orders.add(tuple(list(dict(said)).index(name) for name in names))
    assert len(orders) == 5


def test_names_and_numbers_are_single_tokens_of_a_tokenizer_trained_with_them(tokenizer):
    words = [*recall_texts.NAMES, *recall_texts.NUMBERS]
    assert len(set(words)) == len(words)
    assert all(len(tokenizer(f" {word}")["input_ids"]) == 1 for word in words)


def test_too_little_text_for_questions_is_named(documents, tokenizer):
    with pytest.raises(text_blocks.InputError, match="16 pairs in 40 tokens need -"):
        recall_texts.ask(documents, tokenizer, 40, 16, rows=1)


# ---- measures ----


def test_a_bounded_cache_as_large_as_the_text_measures_what_the_models_own_does(original):
    blocks = torch.randint(100, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = nats_per_token(Contender(original), blocks)
    assert expected.shape == (3, 19)
    for make in (lambda: SinkCache(20, 1), lambda: TOVACache(20)):
        torch.testing.assert_close(nats_per_token(Contender(original, make), blocks), expected)
    small = nats_per_token(Contender(original, lambda: SinkCache(4, 1)), blocks)
    torch.testing.assert_close(small[:, :4], expected[:, :4])
    assert not torch.allclose(small[:, 6:], expected[:, 6:], atol=1e-3)


class Parrot:
    """Answers by its cache, the tokens read so far: the number that followed the last token."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, numbers: list[int], remembers: int):
        self.vocab_size, self.numbers, self.remembers = vocab_size, numbers, remembers

    def __call__(self, tokens, past_key_values, use_cache, logits_to_keep):
        past_key_values.extend(tokens.T.tolist())
        logits = torch.zeros(len(tokens), 1, self.vocab_size)
        for i, row in enumerate(zip(*past_key_values, strict=True)):
            for name, number in itertools.pairwise(row[-self.remembers :]):
                if name == row[-1] and number in self.numbers:
                    logits[i, 0, number] = 1
        return SimpleNamespace(logits=logits)


def test_recall_is_the_share_of_answers_that_greedy_decoding_gives(documents, tokenizer):
    questions = recall_texts.ask(documents, tokenizer, BLOCK_SIZE, 3, rows=10)
    numbers = questions.answers.flatten().tolist()
    for remembers, expected in ((BLOCK_SIZE, 1), (10, 0)):
        parrot = Parrot(len(tokenizer), numbers, remembers)
        assert recall(Contender(parrot, new_cache=list), questions) == expected


def test_memory_of_a_longer_context_is_as_if_it_had_been_read(original, monkeypatch):
    monkeypatch.setattr("model_measures.PROMPT", 10)
    hybrid = convert(original, softmax_layers=[1], window_size=4).model.eval()
    with torch.no_grad():
        tokens = torch.zeros(1, 30, dtype=torch.long)
        expected = {
            model: model(tokens, use_cache=True).past_key_values.nbytes
            for model in (original, hybrid)
        }
    for model, num_bytes in expected.items():
        measured = speed_and_memory(Contender(model), 30)
        assert measured["cache_bytes"] == num_bytes
        assert measured["tokens_per_second"] > 0
    bounded = Contender(original, lambda: SinkCache(6, 1))
    sizes = [speed_and_memory(bounded, n)["cache_bytes"] for n in (10, 30)]
    assert sizes[0] == sizes[1]


# ---- chats ----


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_codes_stand_in_the_user_s_text_and_are_asked_for_behind_it(documents, chat_tokenizer):
    asked = chat_measures.hide_codes(documents, chat_tokenizer, 256, rows=5)
    assert sum(x.shape[-1] for x in asked) == 256
    for context, [question], [answer] in zip(*asked, strict=True):
        text, end, code = map(chat_tokenizer.decode, (context, question, answer))
        animal, number = re.search(r"The secret code of the (\w+) is (\d+)\.", text).groups()
        assert text.startswith("[user]") and code == f" {number}"
        assert end == (
            f"\n\nWhat is the secret code of the {animal}?[end]\n"
            f"[assistant]The secret code of the {animal} is"
        )
    with pytest.raises(text_blocks.InputError, match="a code in 9 tokens needs"):
        chat_measures.hide_codes(documents, chat_tokenizer, 9, rows=1)


def test_a_chat_goes_on_as_if_it_were_read_at_once(original, chat_tokenizer):
    chat = chat_measures.Chat(Contender(original), chat_tokenizer)
    ids, text = torch.empty(1, 0, dtype=torch.long), ""
    for content in ("one", "and two"):
        answer = chat.say(content, 5)
        whole = chat_tokenizer.apply_chat_template(
            chat.messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert whole.startswith(text)
        new = chat_tokenizer(whole.removeprefix(text), add_special_tokens=False)["input_ids"]
        ids = torch.cat([ids, torch.tensor([new])], 1)
        length = ids.shape[1]
        ids = original.generate(ids, max_new_tokens=5, do_sample=False)
        assert answer == chat_tokenizer.decode(ids[0, length:])
        text = whole + answer


def test_answers_are_right_by_whole_words(monkeypatch):
    says = {"What is 2 + 2?": "It is 4.", "What is 5 times 5?": "That makes 125", "Who": "?"}
    monkeypatch.setattr(
        chat_measures,
        "Chat",
        lambda *args: SimpleNamespace(
            say=lambda question, most: says.get(question, "I don't know")
        ),
    )
    right = chat_measures.known_answers(None, None)
    assert len(right) == 40 and [q for q, is_right in right.items() if is_right] == [*says][:1]


# ---- the report ----


@pytest.fixture
def report(original, documents, tokenizer, tmp_path):
    """Arguments for a report of an original, and of what became of it."""
    original.save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    convert(original, softmax_layers="all").model.save_pretrained(tmp_path / "same")
    convert(original, window_size=8).model.save_pretrained(tmp_path / "linear")
    texts = []
    for i, row in enumerate(documents):
        texts.append(str(tmp_path / f"{i}.txt"))
        Path(texts[-1]).write_text(row["text"])
    args = ReportArguments(
        original=str(tmp_path / "original"),
        models=[f"same={tmp_path / 'same'}", f"linear={tmp_path / 'linear'}"],
        output_dir=str(tmp_path / "report"),
        window_size=8,
        window_sinks=2,
        questions=8,
        contexts=[20, 50],
    )
    return args, DataArguments(
        text_file=texts, block_size=BLOCK_SIZE, max_eval_bytes=2000, held_out_fraction=0.25
    )


@pytest.mark.thorough
def test_the_report_compares_what_became_of_a_model_and_measures_nothing_twice(report, monkeypatch):
    args, data_args = report
    rows = write_report(args, data_args)
    names = [convert_report.ORIGINAL, convert_report.SINKS, convert_report.TOVA, "same", "linear"]
    assert list(rows) == names
    bits = [rows[name]["bits_per_byte"] for name in names]
    assert bits[3] == pytest.approx(bits[0])
    assert len(set(bits)) >= 4
    folder = Path(args.output_dir)
    lines = (folder / "report.md").read_text().splitlines()
    assert lines[2:9] == convert_report.table(rows)
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:9]] == names
    assert " | +0.0% | " in lines[7]
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(convert_report, "measure", None)
    assert write_report(args, data_args) == rows
    Path(args.folders()["same"], "model.safetensors").touch()
    with pytest.raises(TypeError):  # it was saved again
        write_report(args, data_args)


@pytest.mark.thorough
def test_the_report_has_what_chat_models_say(report, chat_tokenizer, monkeypatch):
    args, data_args = report
    chat_tokenizer.save_pretrained(args.original)
    args.code_lengths, args.codes, args.contexts = [128], 2, [20]
    monkeypatch.setattr(chat_measures, "TALK", chat_measures.TALK[:2])
    monkeypatch.setattr(chat_measures, "SUMMARY_CHARACTERS", 200)
    rows = write_report(args, data_args)
    assert rows["same"]["talk"] == rows[convert_report.ORIGINAL]["talk"]
    text = Path(args.output_dir, "report.md").read_text()
    assert " | code in 128 tokens | of 40 answers | " in text
    said = Path(args.output_dir, "talks.md").read_text()
    assert said.count("- *linear*: ") == 3 and f"**{chat_measures.TALK[1]}**" in said
    assert write_report(args, data_args) == rows


@pytest.mark.thorough
def test_models_without_a_name_or_a_folder_are_explained(report):
    args, data_args = report
    args.models = ["linear"]
    with pytest.raises(text_blocks.InputError, match="must be NAME=FOLDER each, got .'linear'"):
        write_report(args, data_args)
    args.models = [f"none={args.original}/none"]
    with pytest.raises(text_blocks.InputError, match="no model can be loaded from .*/none"):
        write_report(args, data_args)
