# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What computes behind the page in examples/space. `make test-space` tests the page itself."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "space")]

import charts  # noqa: E402
import painting  # noqa: E402
import race  # noqa: E402
import settings  # noqa: E402
import text_blocks  # noqa: E402
import train_digits  # noqa: E402
import views  # noqa: E402
from engine import Engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, HIDDEN = 2, 32
PROMPT = "def read(self):"
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Of models by name, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    text = Path(race.__file__).read_text(encoding="utf-8")
    tokenizer = text_blocks.train_tokenizer(Dataset.from_dict({"text": [text]}), 300)
    sizes = {"vocab_size": len(tokenizer), **SIZES}
    torch.manual_seed(0)
    models = {
        "softmax": LlamaForCausalLM(LlamaConfig(**sizes)),
        "linear": LinearAttentionForCausalLM(
            LinearAttentionConfig.from_preset("gated_deltanet", **sizes)
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


@pytest.fixture(scope="module")
def language_models(folders) -> list[race.LanguageModel]:
    return [race.load(name, folders[name]) for name in ("softmax", "linear")]


@pytest.fixture
def every_turn_is_shown(monkeypatch):
    monkeypatch.setattr(race, "SNAPSHOT_SECONDS", -1.0)


def test_both_write_what_generate_writes(language_models, monkeypatch):
    """After a context that is read in chunks, and in part one by one."""
    monkeypatch.setattr(race, "TOP_K", 1)
    monkeypatch.setattr(race, "CHUNK", 16)
    *_, standings = race.race(language_models, PROMPT, 100, 40, threading.Event())
    for standing, (_, model, tokenizer) in zip(standings, language_models, strict=True):
        tokens = race.context_tokens(tokenizer, 100) + tokenizer(PROMPT)["input_ids"]
        assert (standing.phase, standing.read) == ("done", len(tokens))
        whole = model.generate(
            torch.tensor([tokens]), min_new_tokens=40, max_new_tokens=40, do_sample=False
        )
        expected = tokenizer.decode(whole[0, len(tokens) :], skip_special_tokens=True)
        assert standing.text == expected.rstrip("\N{REPLACEMENT CHARACTER}")
        assert standing.points[-1].context == len(tokens) + 40
        assert sum(point.tokens_per_second is not None for point in standing.points) > 4


def test_bytes_are_those_of_the_caches(language_models):
    *_, (softmax, linear) = race.race(language_models, PROMPT, 600, 30, threading.Event())
    for point in softmax.points:
        assert point.cache_bytes == 2 * LAYERS * HIDDEN * 4 * point.context  # keys and values
    assert len({point.cache_bytes for point in linear.points}) == 1


def test_whose_clock_shows_least_has_the_next_turn(language_models, every_turn_is_shown):
    seen = list(race.race(language_models, PROMPT, 1100, 100, threading.Event()))
    turns = 0
    for before, after in zip(seen, seen[1:], strict=False):
        moved = [new.seconds > old.seconds for old, new in zip(before, after, strict=True)]
        running = [old.seconds for old in before if old.phase != "done"]
        if any(moved):
            assert before[moved.index(True)].seconds == min(running)
            turns += 1
    assert turns == sum(len(standing.points) for standing in seen[-1])


def test_a_race_is_stopped_at_once_and_after_its_time(language_models, every_turn_is_shown):
    stop = threading.Event()
    snapshots = race.race(language_models, PROMPT, 100_000, 50, stop)
    next(snapshots), next(snapshots)
    stop.set()
    *_, standings = snapshots
    assert {standing.phase for standing in standings} == {"stopped"}
    assert sum(standing.read for standing in standings) <= 2 * race.CHUNK
    *_, standings = race.race(language_models, PROMPT, 100_000, 50, threading.Event(), 0.0)
    assert {standing.phase for standing in standings} == {"stopped"}


def test_bad_input_is_named(language_models, tmp_path, folders):
    with pytest.raises(ValueError, match="Type a prompt"):
        next(race.race(language_models, " \n", 0, 50, threading.Event()))
    for load in (painting.load, lambda where: race.load("", where)):
        with pytest.raises(ValueError, match="No model can be loaded from .*absent"):
            load(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="paints no digits"):
        painting.load(folders["linear"])
    assert race.first_line(MemoryError()) == "MemoryError"


@pytest.fixture(scope="module")
def painter(tmp_path_factory) -> painting.Painter:
    """As examples/train_digits.py leaves it, untrained."""
    folder = tmp_path_factory.mktemp("digits")
    train_digits.make_model().save_pretrained(folder)
    return painting.load(str(folder))


def test_digits_are_painted_in_shades_and_keep_what_is_given(painter):
    assert painter.side == train_digits.SIDE
    first = list(painting.paint(painter, range(3), threading.Event()))
    whole = first[-1]
    assert whole.pixels.shape == (3, train_digits.SIDE**2)
    shades = whole.pixels * (train_digits.SHADES - 1)
    torch.testing.assert_close(shades, shades.round())
    assert 0 <= whole.pixels.min() < whole.pixels.max() <= 1
    assert {painted.cache_bytes for painted in first} == {whole.cache_bytes}

    given = whole.pixels[:, :100]
    *_, again = painting.paint(painter, range(3), threading.Event(), given, seed=1)
    assert torch.equal(again.pixels[:, :100], given)
    assert not torch.equal(again.pixels, whole.pixels)
    assert again.painted == train_digits.SIDE**2 - 100


def test_a_slow_painting_can_be_stopped(painter):
    stop = threading.Event()
    images = painting.paint(painter, [7], stop, pixels_per_second=0.1)
    assert next(images).pixels.shape == (1, 1)
    stop.set()
    assert not list(images)


def test_a_painter_learns_from_digits_by_name(tmp_path, monkeypatch, capsys):
    pixels = torch.randint(256, (40, train_digits.SIDE**2))
    pixels[0, :2] = torch.tensor([0, 255])
    labels = torch.arange(40) % 10
    tokens = train_digits.as_tokens(pixels, labels)
    assert tokens[0, :3].tolist() == [0, 10, 10 + train_digits.SHADES - 1]
    monkeypatch.setattr(train_digits, "read_digits", lambda side: (pixels, labels))
    monkeypatch.setattr(sys, "argv", ["", "--steps", "1", "--output_dir", str(tmp_path)])
    train_digits.main()
    assert "bits per held-out pixel" in capsys.readouterr().out
    assert painting.load(str(tmp_path)).shades == train_digits.SHADES


def test_an_engine_shows_the_last_snapshot_and_then_the_error():
    def job(stop):
        yield from range(1000)
        raise ValueError("no more")

    seen = []
    with pytest.raises(ValueError, match="no more"):
        for snapshot in Engine().stream(job, threading.Event()):
            seen.append(snapshot)
    assert seen == sorted(seen) and seen[-1] == 999


def test_a_job_ends_when_nobody_looks_on():
    ended = threading.Event()

    def job(stop):
        yield 1
        assert stop.wait(30)
        ended.set()

    snapshots = Engine().stream(job, threading.Event())
    assert next(snapshots) == 1
    snapshots.close()
    assert ended.wait(30)


@pytest.mark.parametrize("end", [0, 1, 7, 299, 300, 100_507, 4.1e8])
def test_ticks_are_few_and_reach_the_end(end):
    found = charts.ticks(end)
    assert found[0] == 0 and found[-1] >= end and 2 <= len(found) <= 7


def test_bytes_have_three_digits_and_a_unit():
    told = {0: "0 B", 999: "999 B", 999.6: "1 kB", 286_720: "287 kB", 999_700: "1 MB"}
    assert {count: charts.byte_text(count) for count in told} == told


def test_what_a_model_writes_is_no_html(language_models):
    *_, (standing, _) = race.race(language_models, PROMPT, 0, 5, threading.Event())
    card = views.card(standing._replace(text="<script>"), "softmax")
    assert "&lt;script&gt;" in card and "<script>" not in card


def test_settings_are_flags_and_variables(monkeypatch, capsys):
    monkeypatch.setenv("SPACE_MAX_CONTEXT", "2000")
    assert settings.parse_arguments([]).max_context == 2000
    assert settings.parse_arguments(["--max_context", "30"]).max_context == 30
    with pytest.raises(SystemExit):
        settings.parse_arguments(["--max_seconds", "0"])
    assert "--max_seconds must be 1 at least, got 0" in capsys.readouterr().err
