# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the experiments ask is what their sources ask, and has one right answer."""

import statistics
import sys
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "examples", "experiments")]

from contenders import FIRST, LAST, PAD, SYMBOLS  # noqa: E402
from hf_linear_attention import LinearAttentionConfig, LinearAttentionModel  # noqa: E402
from mad_tasks import (  # noqa: E402
    Compression,
    FromLastToken,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    SelectiveCopy,
)
from sequences import END, Digits, ListOps, Passages, Pathfinder  # noqa: E402
from spoken_digits import MEL_FILTERS, log_mel, spoken_digits, stacked  # noqa: E402
from tasks import UNASKED, Needles, Text  # noqa: E402
from text_blocks import library_files  # noqa: E402


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Sequences to be given a label


def symbols_of(row: torch.Tensor) -> list[int]:
    """Without what frames them."""
    tokens = row.tolist()
    end = tokens.index(LAST)
    assert tokens[0] == FIRST and set(tokens[end + 1 :]) <= {PAD}
    return [token - SYMBOLS for token in tokens[1:end]]


def test_expressions_have_their_values():
    functions = {
        "MIN": min,
        "MAX": max,
        "MED": lambda *x: int(statistics.median(x)),
        "SM": lambda *x: sum(x) % 10,
    }
    task = ListOps(20, 126)
    train, test = task.split(100, 20)
    assert train.tokens.shape == (100, 128)
    rows = [*train.tokens, *test.tokens]
    for row, label in zip(rows, [*train.labels.tolist(), *test.labels.tolist()], strict=True):
        symbols = symbols_of(row)
        assert 20 < len(symbols) < 126
        words = [str(s) if s < 10 else ")" if s == END else [*functions][s - 10] for s in symbols]
        code = ", ".join(word + "(" if word in functions else word for word in words)
        code = code.replace("(,", "(").replace(", )", ")")
        assert eval(code, functions) == label
    assert len({tuple(row.tolist()) for row in rows}) == 120  # no two alike


def test_passages_are_from_the_package_and_no_file_is_trained_and_tested_on():
    files = [(place, path.read_bytes()) for place, path in library_files() if len(place.parts) > 1]
    packages: dict[int, set[str]] = {}
    of_split = []
    for part in Passages(200).split(30, 30):
        found = set()
        for row, label in zip(part.tokens, part.labels.tolist(), strict=True):
            text = bytes(symbols_of(row))
            places = [place for place, content in files if text in content]
            found |= {places[0]} if len(places) == 1 else set()
            packages.setdefault(label, {p.parts[0] for p in places})
            packages[label] &= {p.parts[0] for p in places}
        of_split.append(found)
    assert all(len(names) == 1 for names in packages.values())
    assert len(set.union(*packages.values())) == len(packages) > 5
    assert not of_split[0] & of_split[1]


@pytest.mark.thorough
def test_digits_are_their_pixels():
    train, test = Digits(7).split(50, 10)
    assert train.tokens.shape == (50, 64)
    assert all(len(symbols_of(row)) == 49 for row in [*train.tokens, *test.tokens])
    assert len({*train.labels.tolist()}) > 5


def reached(image: numpy.ndarray, start: tuple[int, int]) -> set[tuple[int, int]]:
    """The pixels of lines to which one gets by steps of at most two pixels, over gaps of one."""
    pixels, found, new = {*map(tuple, numpy.argwhere(image).tolist())}, set(), {start}
    while new:
        found |= new
        new = {
            (y, x)
            for y, x in pixels - found
            if any(max(abs(y - v), abs(x - u)) <= 2 for v, u in new)
        }
    return found


def test_dots_of_one_line_are_joined_by_it_and_others_are_not():
    train, test = Pathfinder().split(20, 4)
    assert train.labels.float().mean() == test.labels.float().mean() == 0.5
    for row, label in zip(train.tokens, train.labels.tolist(), strict=True):
        image = numpy.array(symbols_of(row)).reshape(32, 32)
        first, other = (tuple(dot) for dot in numpy.argwhere(image == 2).tolist())
        assert (other in reached(image, first)) == bool(label)


# Speech


@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_tone_is_heard_where_it_is(rate):
    tones = numpy.linspace(200, 3500, 5)
    loudest = []
    for tone in tones:
        features = log_mel(numpy.sin(2 * numpy.pi * tone * numpy.arange(rate) / rate), rate)
        assert features.shape == (pytest.approx(100, abs=1), MEL_FILTERS)
        loudest.append(features.mean(0).argmax())
    mel = 2595 * numpy.log10(1 + numpy.array([20, *tones, rate / 2]) / 700)
    expected = (mel[1:-1] - mel[0]) / (mel[-1] - mel[0]) * (MEL_FILTERS + 1) - 1
    numpy.testing.assert_allclose(loudest, expected, atol=1)


def test_clips_say_digits_and_follow_the_seed():
    clips = spoken_digits(5, 2, 4, 0)
    assert all(2 <= len(clip.text) <= 4 and clip.text.isdigit() for clip in clips)
    again, others = spoken_digits(5, 2, 4, 0), spoken_digits(5, 2, 4, 1)
    assert [clip.text for clip in again] == [clip.text for clip in clips]
    assert numpy.array_equal(again[0].features, clips[0].features)
    assert [clip.text for clip in others] != [clip.text for clip in clips]
    both = stacked(clips[0], 2).features
    assert numpy.array_equal(both.reshape(-1, MEL_FILTERS), clips[0].features[: 2 * len(both)])


# MAD, and needles

RECALLS = [InContextRecall(16, 64), InContextRecall(32, 64, 0.3)]
TASKS = [*RECALLS, FuzzyRecall(), SelectiveCopy(16, 64, 8), Compression(), Memorization()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_rows_follow_the_seed_and_fit_the_vocabulary(task):
    batch = task.batch(50, generator())
    assert batch.tokens.equal(task.batch(50, generator()).tokens)
    assert not batch.tokens.equal(task.batch(50, generator(1)).tokens)
    assert batch.tokens.shape == batch.targets.shape == (50, task.length)
    assert 0 <= batch.tokens.min() and batch.tokens.max() < task.vocab_size
    assert task.held_out().tokens.equal(task.held_out().tokens)
    asked = (batch.targets != UNASKED).sum().item()
    assert task.score(0.0, asked // 2, batch.targets) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("task", RECALLS)
def test_a_value_is_asked_for_where_its_key_returns(task):
    num_keys = 8  # of 16 tokens that are no noise
    num_noise = 0
    for row, target in zip(*map(torch.Tensor.tolist, task.batch(50, generator())), strict=True):
        values: dict[int, int] = {}
        for key, value, asked, never in zip(
            row[::2], row[1::2], target[::2], target[1::2], strict=True
        ):
            assert never == UNASKED
            assert asked == values.get(key, UNASKED)
            if key >= 16:
                num_noise += 1
                assert value >= 16
            else:
                assert key < num_keys <= value
                assert values.setdefault(key, value) == value
    assert num_noise / (50 * 32) == pytest.approx(task.noise, abs=0.05)


def test_values_of_several_tokens_are_asked_for_when_their_keys_return():
    task = FuzzyRecall()
    for row, target in zip(*map(torch.Tensor.tolist, task.batch(20, generator())), strict=True):
        values: dict[tuple, list] = {}
        t = 0
        while t < len(row) and row[t] != 15:
            key, t = tuple(row[t : t + 3]), t + 3
            value = []
            while t + len(value) < len(row) and 7 <= row[t + len(value)] < 14:
                value.append(row[t + len(value)])
            assert max(key) < 7 and 1 <= len(value) <= 3
            asked = target[t - 1 : t - 1 + len(value)]
            assert asked == (value if key in values else [UNASKED] * len(value))
            assert values.setdefault(key, value) == value
            t += len(value)
        assert set(row[t:]) <= {15} and len(values) <= task.pairs


def test_tokens_among_blanks_are_copied_in_order():
    tokens, targets = SelectiveCopy(16, 64, 8).batch(50, generator())
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert row.index(15) == 64 - 8 - 1
        assert target[-8:] == [token for token in row[:55] if token != 14]
        assert row[-8:] == [14] * 8 and set(target[:-8]) == {UNASKED}


def test_what_is_memorized_is_the_same_in_all_rows():
    task, values = Memorization(64), {}
    for seed in range(2):
        tokens, targets = task.batch(200, generator(seed))
        assert (tokens[:, 1::2] == 63).all() and (targets[:, ::2] == UNASKED).all()
        pairs = zip(tokens[:, ::2].flatten().tolist(), targets[:, 1::2].flatten().tolist())  # noqa: B905
        for key, value in pairs:
            assert key < 31 <= value < 62
            assert values.setdefault(key, value) == value
    assert len(set(values.values())) == 31


def but_for_the_last(features: torch.Tensor) -> torch.Tensor:
    """NaN, from which nothing may come."""
    return torch.cat([torch.full_like(features[:, :-1], torch.nan), features[:, -1:]], dim=1)


def test_a_compressed_row_is_told_by_its_last_token_alone():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LinearAttentionConfig(vocab_size=16, hidden_size=16, **sizes)
    model = FromLastToken(LinearAttentionModel(config), 16)
    with torch.no_grad():
        a, b = model(Compression(16, 8).batch(2, generator()).tokens).last_hidden_state
        model.backbone.norm.register_forward_hook(lambda _, args, output: but_for_the_last(output))
        same, _ = model(Compression(16, 8).batch(2, generator()).tokens).last_hidden_state
    assert a.shape == (8, 16) and not torch.allclose(a, b)
    assert same.equal(a)


@pytest.fixture(scope="module")
def needles() -> Needles:
    return Needles(Text(300, 64, 60_000), needles=4, kinds=6)


def test_a_needle_is_in_each_part_and_asked_for_at_the_end(needles):
    (tokens, targets), parts = needles.hidden(20, 128, generator())
    for row, target, order in zip(*map(torch.Tensor.tolist, (tokens, targets, parts)), strict=True):
        text, end = row[:120], row[120:]
        places = [place for place, token in enumerate(text) if 300 <= token < 306]
        assert [place // 30 for place in places] == [0, 1, 2, 3]
        values = {text[place]: text[place + 1] for place in places}
        assert all(306 <= value < 312 for value in values.values())
        assert dict(zip(end[::2], end[1::2], strict=True)) == values
        assert [text[places[part]] for part in order] == end[::2]
        assert target == [UNASKED] * 120 + [x for value in end[1::2] for x in (value, UNASKED)]
        assert sum(token >= 300 for token in text) == 8


def test_needles_are_learned_all_over_a_text(needles):
    tokens, targets = needles.batch(200, generator())
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        values: dict[int, int] = {}
        for key, value, asked in zip(row[::2], row[1::2], target[::2], strict=True):
            is_needle = 300 <= key
            assert asked == values.get(key, UNASKED)
            if is_needle:
                assert key < 306 <= value < 312 and values.setdefault(key, value) == value
    shares = (tokens < 300).float().mean(1)
    assert 0 < shares.min() < 0.3 and shares.max() > 0.9


def test_needles_that_find_no_place_are_refused(needles):
    with pytest.raises(ValueError, match=r"length must be at least 4 \* needles = 16, got 15"):
        needles.hidden(1, 15, generator())
    with pytest.raises(ValueError, match="needles must be at most kinds = 4, got 5"):
        Needles(needles=5, kinds=4)
    with pytest.raises(ValueError, match="length must be more than 2 \\* copied, got 32"):
        SelectiveCopy(16, 32, 16)
    with pytest.raises(ValueError, match="multiple of 4 and length even, got 10 and 64"):
        InContextRecall(10, 64)
