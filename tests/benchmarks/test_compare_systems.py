# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The comparison of systems: its tasks, that it is fair, and that a killed run loses nothing."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hf_linear_attention import LinearAttentionForCausalLM
from hf_linear_attention.model.presets import PRESETS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare_systems  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402
from compare_systems import (  # noqa: E402
    Log,
    Run,
    add_earlier,
    all_runs,
    compare,
    fitted,
    make_optimizer,
    num_runs,
    summary,
    train,
    training_step,
)
from systems import (  # noqa: E402
    ALL_SYSTEMS,
    BASELINE,
    POSITIONS,
    SETTINGS,
    SYSTEMS,
    TOO_DEEP,
    Setting,
    Size,
    System,
    Trial,
    fit,
    num_weights,
)
from tasks import UNASKED, Copy, Recall, Source, Text, Tracking, read_text  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = Size(32, 160, 4, 2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The tasks


@pytest.mark.parametrize("task", [Recall(64, 32, 4), Recall(8192, 64, 16), Recall(10, 16, 4)])
def test_the_context_alone_decides_what_is_recalled(task):
    tokens, targets = task.batch(200, generator())
    half = task.vocab_size // 2
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        keys, values = row[0 : 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2]
        assert len(set(keys)) == len(set(values)) == task.pairs
        assert all(0 < key < half for key in keys)
        assert all(half <= value < task.vocab_size for value in values)
        pairs = dict(zip(keys, values, strict=True))
        asked = [t for t, answer in enumerate(target) if answer != UNASKED]
        assert sorted(row[t] for t in asked) == sorted(keys)  # each once
        assert all(t >= 2 * task.pairs and t % 2 == 0 for t in asked)
        assert all(target[t] == pairs[row[t]] for t in asked)
        # no answer stands anywhere else: all other tokens behind the pairs are blank
        assert sum(token != 0 for token in row[2 * task.pairs :]) == task.pairs


def test_what_is_recalled_is_not_told_by_the_key_or_the_place():
    """Of 4 values in the row each is the answer as often at the first place asked, and a key has
    every value: whoever does not look up is right at chance level, 1 in 4 at best.
    """
    task = Recall(64, 32, 4)
    tokens, targets = task.batch(4000, generator())
    first = (targets != UNASKED).int().argmax(1, keepdim=True)
    order = (tokens[:, 1:8:2] == targets.gather(1, first)).float().mean(0)
    torch.testing.assert_close(order, torch.full((4,), 0.25), atol=0.03, rtol=0)
    answers = targets[(tokens == 5) & (targets != UNASKED)]
    shares = torch.bincount(answers, minlength=64)[32:] / len(answers)
    assert shares.max() < 0.1  # 1 / 32, and chance


def test_most_is_asked_soon_and_some_late():
    task = Recall(64, 64, 4)
    asked = (task.batch(4000, generator()).targets != UNASKED).float().mean(0)
    assert asked[8] > 2 * asked[16] > 0
    assert asked[62] > 0


@pytest.mark.parametrize("length", [16, 33, 128])
def test_what_is_copied_is_the_word(length):
    task = Copy(length)
    tokens, targets = task.batch(200, generator())
    sizes = set()
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        n = row.index(0)
        sizes.add(n)
        word = row[:n]
        assert all(1 <= symbol <= 10 for symbol in word)
        assert row == word + [0] + word + [0] * (length - 2 * n - 1)
        assert target[n : 2 * n] == word
        assert all(answer == UNASKED for answer in target[:n] + target[2 * n :])
    assert sizes == set(range(length // 4, (length - 1) // 2))


def test_symbols_are_drawn_evenly():
    targets = Copy(128).batch(500, generator()).targets
    shares = torch.bincount(targets[targets != UNASKED], minlength=11)[1:].float()
    torch.testing.assert_close(shares / shares.sum(), torch.full((10,), 0.1), atol=0.01, rtol=0)


def test_parity_is_that_of_all_bits_so_far():
    tokens, targets = Tracking(2, length=20).batch(50, generator())
    assert torch.equal(targets, tokens.cumsum(1) % 2)


def test_swaps_alone_leave_all_letters_but_two_in_place():
    task = Tracking(4, swaps=True)
    permutations = list(itertools.permutations(range(4)))
    given = {permutations[token] for token in task.batch(100, generator()).tokens.unique()}
    assert len(given) == 1 + 6
    assert all(sum(x != i for i, x in enumerate(swap)) in (0, 2) for swap in given)


@pytest.mark.parametrize("letters", [2, 3, 4])
def test_what_is_tracked_is_where_the_letters_are(letters):
    task = Tracking(letters, length=10, held_out_length=30)
    permutations = list(itertools.permutations(range(letters)))
    assert task.vocab_size == len(permutations)
    tokens, targets = task.held_out()
    assert (targets[:, :10] == UNASKED).all() and (targets[:, 10:] != UNASKED).all()
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        place = list(range(letters))
        for t, token in enumerate(row):
            place = [permutations[token][x] for x in place]
            assert target[t] in (UNASKED, permutations.index(tuple(place)))


def test_tracking_is_tested_beyond_what_it_is_trained_on():
    with pytest.raises(ValueError, match="held_out_length must be more than length = 40, got 40"):
        Tracking(2, 40, 40)


@pytest.mark.parametrize("task", [Recall(64, 32, 4), Copy(32), Tracking(3, 20)])
def test_rows_follow_the_seed_and_none_that_is_tested_is_trained_on(task):
    assert torch.equal(task.batch(50, generator()).tokens, task.batch(50, generator()).tokens)
    trained = {tuple(row) for row in task.batch(5000, generator()).tokens.tolist()}
    assert len(trained) == 5000
    assert torch.equal(task.held_out().tokens, task.held_out().tokens)
    assert not trained & {tuple(row) for row in task.held_out().tokens.tolist()}


def test_impossible_recall_is_refused():
    with pytest.raises(ValueError, match="pairs must be at most .* = 7, got 8"):
        Recall(16, 64, 8)
    with pytest.raises(ValueError, match=r"length must be at least 4 \* pairs = 32, got 31"):
        Recall(64, 31, 8)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    files = []
    for module in (subprocess, json, pytest):
        files.append(tmp_path_factory.mktemp("text") / "source.txt")
        files[-1].write_text(Path(module.__file__).read_text()[:30_000])
    return Text(300, 32, files=tuple(map(str, files)))


def test_text_asks_for_the_next_token(text):
    tokens, targets = text.batch(3, generator())
    assert tokens.shape == targets.shape == (3, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_bit_for_every_byte_is_one_bit_per_byte(text):
    targets, num_bytes = text.held_out().targets, read_text(text)[2]
    assert num_bytes.max() > 1
    nats = num_bytes[targets].sum().item() * math.log(2)
    assert text.score(nats, 0, targets) == pytest.approx(1)
    assert text.score(nats, 0, targets[:1]) > 1


def test_bits_per_byte_by_position_are_of_what_comes_after_so_many_tokens(text):
    targets, num_bytes = text.held_out().targets, read_text(text)[2]
    nats = num_bytes[targets] * math.log(2)
    nats[:, 3:7] *= 2  # what comes after 4 to 7 tokens
    bits = text.by_position(nats, targets)
    assert bits == pytest.approx({"1": 1, "2": 1, "4": 2, "8": 1, "16": 1, "32": 1})
    whole = text.score(nats.sum().item(), 0, targets)
    share = num_bytes[targets[:, 3:7]].sum() / num_bytes[targets].sum()
    assert whole == pytest.approx(1 + share.item())


def test_held_out_text_is_not_trained_on(text):
    train, held_out, _ = read_text(text)
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in held_out.tolist()}


# Equal weights, equal training

FOR_THE_BEST = ("medium", "large")  # settings of a few systems


@pytest.mark.sample(17)
@pytest.mark.parametrize("name", ALL_SYSTEMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_have_the_same_number_of_weights_in_every_setting(name, setting):
    trials = [trial for trial in SETTINGS[setting].trials.values() if name in trial.systems]
    assert trials or setting in FOR_THE_BEST
    for trial in trials:
        config = fitted(name, trial)
        expected = num_weights(fitted(BASELINE, trial))
        assert num_weights(config) == pytest.approx(expected, rel=0.01)
        assert config.hidden_size == trial.size.hidden_size
        assert config.num_hidden_layers == trial.size.num_hidden_layers


def test_the_baseline_is_as_the_setting_says_and_others_make_up_in_the_mlp():
    trial = SETTINGS["full"].trials["text"]
    assert fitted(BASELINE, trial).intermediate_size == trial.size.intermediate_size
    assert fitted("gla", trial).intermediate_size < trial.size.intermediate_size  # it has a gate
    assert fitted("aaren", trial).intermediate_size > trial.size.intermediate_size  # it has no q


def test_what_cannot_be_equal_is_refused():
    trial = replace(SETTINGS["full"].trials["copy"], size=Size(32, 4, 4, 2))
    with pytest.raises(ValueError, match="retnet cannot have .* its intermediate_size would be -"):
        fit(System("retnet"), trial)


@pytest.mark.thorough
def test_all_presets_are_compared_and_positions_with_embeddings_of_one_size():
    for title, setting in SETTINGS.items():
        if title in FOR_THE_BEST:
            continue
        trial = setting.trials["text"]
        layers = trial.size.num_hidden_layers
        deep = {name for name, preset in PRESETS.items() if len(preset.layer_pattern) > layers}
        assert deep <= set(TOO_DEEP)
        assert set(PRESETS) == set(SYSTEMS) | set(TOO_DEEP)
        assert trial.systems == (*SYSTEMS, *POSITIONS)
        scaled = [name for name in trial.systems if "rwkv" not in name]  # which norms embeddings
        assert all(fitted(name, trial).scale_embeddings for name in scaled)


def test_every_system_trains_on_the_same_tokens(text, monkeypatch):
    seen = []

    def step(model, batch, optimizer, autocast):
        seen.append(batch.tokens)
        optimizer.step()
        return torch.tensor(1.0)

    monkeypatch.setattr(compare_systems, "training_step", step)
    trial = Trial(text, SIZE, 2, 3, (1e-3,), 1)
    for name in ("katharopoulos", "performer"):
        train(Run(name, "text", 1e-3, 7, fitted(name, trial), trial, "cpu"))
    assert len(seen) == 6
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


def test_autocast_trains_in_bfloat16_and_is_another_run(text):
    trial = Trial(text, SIZE, 2, 3, (1e-3,), 1)
    run = Run("katharopoulos", "text", 1e-3, 0, fitted("katharopoulos", trial), trial, "cpu")
    rounded = replace(run, autocast=True)
    assert run.key()["setup"] != rounded.key()["setup"]
    model = LinearAttentionForCausalLM(run.config)
    batch = text.batch(2, generator())
    assert compare_systems.answers(model, batch)[0].dtype == torch.float32
    assert compare_systems.answers(model, batch, autocast=True)[0].dtype == torch.bfloat16
    loss, rounded_loss = (train(x)["loss"] for x in (run, rounded))
    assert loss != rounded_loss and loss == pytest.approx(rounded_loss, rel=0.01)


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    trial = Trial(Copy(16), SIZE, 2, 100, (1e-3,), 1)
    model = LinearAttentionForCausalLM(fitted("katharopoulos", trial))
    optimizer, schedule = make_optimizer(model, 1e-3, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(2e-4)
    assert max(rates) == rates[4] == pytest.approx(1e-3, rel=0.01)
    assert rates[-1] == pytest.approx(1e-4, rel=0.01)


def test_a_run_that_breaks_down_has_no_score_and_its_rate_is_not_chosen(tmp_path):
    trial = Trial(Copy(16), SIZE, 2, 3, (float("inf"), 1e-3), 2)
    setting = Setting({"copy": trial})
    log = Log(tmp_path / "runs.jsonl")
    rows = compare(setting, log, ["katharopoulos"], ["copy"])
    assert rows[0]["tasks"]["copy"]["learning_rate"] == 1e-3
    assert len(rows[0]["tasks"]["copy"]["scores"]) == 2
    broken = [result for result in log.results.values() if result["score"] is None]
    assert len(broken) == 1


@pytest.mark.thorough
def test_recall_can_be_learned_and_is_told_apart_from_guessing():
    trial = Trial(Recall(12, 8, 2, held_out_rows=200), SIZE, 64, 100, (8e-3,), 1)
    run = Run("hybrid", "recall", 6e-3, 0, fitted("hybrid", trial), trial, "cpu")
    untrained = train(replace(run, trial=replace(trial, steps=1)))
    result = train(run)
    assert untrained["score"] < 0.4
    assert result["score"] > 0.8


# Killed, and gone on


@pytest.fixture(scope="module")
def tiny(text) -> Setting:
    return Setting(
        {
            "text": Trial(text, SIZE, 2, 3, (1e-3, 4e-3), 2, (*SYSTEMS, *POSITIONS)),
            "recall": Trial(Recall(32, 16, 2, 20), SIZE, 2, 2, (1e-3,), 2),
            "copy": Trial(Copy(16, 20), SIZE, 2, 2, (1e-3,), 1),
        },
        contexts=(16, 64),
        timing_seconds=0.1,
    )


NAMES = ["katharopoulos", "hybrid", "gla, sinusoidal"]
TASKS = ["text", "recall", "copy"]


def scores(log: Log) -> dict[str, tuple]:
    return {key: (result["loss"], result["score"]) for key, result in log.results.items()}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Log:
    """What an uninterrupted comparison leaves."""
    log = Log(tmp_path_factory.mktemp("whole") / "runs.jsonl")
    assert compare(tiny, log, NAMES, TASKS) is not None
    return log


def test_runs_are_counted(tiny, whole):
    # 2 rates and 1 more seed for text of 3 systems; 2 seeds of recall and 1 of copying for 2
    assert len(whole.results) == num_runs(tiny, NAMES, TASKS) == 3 * 3 + 2 * 2 + 2
    assert len(list(all_runs(tiny, NAMES, TASKS, whole))) == len(whole.results)


class Killed(BaseException):
    pass


@pytest.mark.sample(1)
@pytest.mark.parametrize("finished", [0, 4, 14])
def test_a_killed_comparison_goes_on_to_the_same_results(
    tiny, whole, tmp_path, monkeypatch, finished
):
    count = 0

    def train_or_die(run, *more):
        nonlocal count
        count += 1
        if count > finished:
            raise Killed
        return train(run, *more)

    path = tmp_path / "runs.jsonl"
    path.touch()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(compare_systems, "train", train_or_die)
        compare(tiny, Log(path), NAMES, TASKS)
    assert len(path.read_text().splitlines()) == finished
    with path.open("a") as file:
        file.write('{"key": {"system": "kath')  # killed while writing

    resumed = Log(path)
    again = []
    monkeypatch.setattr(
        compare_systems, "train", lambda run, *more: again.append(run) or train(run, *more)
    )
    compare(tiny, resumed, NAMES, TASKS)
    assert len(again) == len(whole.results) - finished
    assert scores(Log(path)) == scores(resumed) == scores(whole)


def test_a_changed_setup_is_run_anew(tiny, tmp_path):
    log = Log(tmp_path / "runs.jsonl")
    compare(tiny, log, ["gla"], ["copy"])
    longer = replace(tiny.trials["copy"], steps=3)
    compare(replace(tiny, trials={"copy": longer}), log, ["gla"], ["copy"])
    assert len(log.results) == 2


def test_time_that_runs_out_ends_it_between_runs(tiny, tmp_path, capsys):
    log = Log(tmp_path / "runs.jsonl")
    assert compare(tiny, log, NAMES, TASKS, stop_after=0) is None
    assert log.results == {}
    assert "stopped: 0 of 15 training runs are done" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["performer", "hybrid"])
def test_a_run_that_was_killed_in_between_goes_on_to_the_same_result(
    text, tmp_path, monkeypatch, name
):
    trial = Trial(text, SIZE, 2, 5, (1e-3,), 1)
    run = Run(name, "text", 1e-3, 3, fitted(name, trial), trial, "cpu")
    expected = train(run)
    file, steps = tmp_path / "state.pt", []

    def step_or_die(model, batch, optimizer, autocast):
        if len(steps) == 3:
            raise Killed
        steps.append(batch)
        return training_step(model, batch, optimizer, autocast)

    monkeypatch.setattr(compare_systems, "SAVE_EVERY", 0)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(compare_systems, "training_step", step_or_die)
        train(run, file)
    assert torch.load(file, weights_only=True)["done"] == 3
    result = train(run, file)
    assert result["train_seconds"] > 0
    assert {**result, "train_seconds": 0} == {**expected, "train_seconds": 0}


def test_time_that_runs_out_ends_it_within_a_run_which_goes_on_later(tiny, tmp_path, monkeypatch):
    setting = replace(tiny, trials={"text": replace(tiny.trials["text"], seeds=1)})
    whole, pieces = Log(tmp_path / "whole.jsonl"), Log(tmp_path / "pieces.jsonl")
    compare(setting, whole, ["gla"], ["text"])

    monkeypatch.setattr(compare_systems, "train", lambda run, file, _: train(run, file, deadline=0))
    num_calls = 1
    while compare(setting, pieces, ["gla"], ["text"]) is None:
        num_calls += 1
    assert num_calls == 5  # two runs of three steps; a call ends after the first or second one
    assert scores(pieces) == scores(whole)
    assert not [*tmp_path.glob("*.pt")]  # no state is left


def test_the_source_of_packages_is_read(tmp_path):
    task = Source(300, 32, 60_000, packages=("tqdm",))
    train_rows, held_out, _ = read_text(task)
    assert len(train_rows) and len(held_out)
    with pytest.raises(ValueError, match="packages must be installed, got nonesuch"):
        Source(packages=("nonesuch",)).paths()


def test_an_earlier_result_gives_what_is_missing_or_of_fewer_seeds_and_was_the_same(tiny, whole):
    document = {
        "setting": json.loads(json.dumps(asdict(tiny))),
        "rows": json.loads(json.dumps(summary(tiny, NAMES, whole))),
    }
    missing = [{**row, "tasks": {}} for row in document["rows"]]
    seeds = len(document["rows"][1]["tasks"]["recall"]["scores"])
    newer, fewer = ({"scores": [9.0] * n} for n in (seeds, seeds - 1))
    missing[1]["tasks"] = {"recall": newer, "text": fewer}
    longer = replace(tiny.trials["copy"], steps=99)
    other = replace(tiny, trials={**tiny.trials, "copy": longer})
    rows = add_earlier(missing, other, document)
    assert rows[0]["tasks"] == {
        task: document["rows"][0]["tasks"][task] for task in ("text", "recall")
    }
    assert rows[1]["tasks"]["recall"] == newer
    assert rows[1]["tasks"]["text"] == document["rows"][1]["tasks"]["text"] != fewer
    other_sizes = [{**row, "parameters": {"text": 1}, "tasks": {}} for row in document["rows"]]
    assert all(row["tasks"] == {} for row in add_earlier(other_sizes, tiny, document))


# From start to end


@pytest.mark.thorough
def test_the_whole_comparison_writes_results_that_the_report_shows(tiny, tmp_path, monkeypatch):
    presets, variants = ["katharopoulos", "based", "softmax", "hybrid"], ["gla, sinusoidal"]
    monkeypatch.setattr(compare_systems, "SYSTEMS", {name: SYSTEMS[name] for name in presets})
    all_of_them = {name: ALL_SYSTEMS[name] for name in presets + variants}
    monkeypatch.setattr(compare_systems, "ALL_SYSTEMS", all_of_them)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "README", tmp_path.parent / "README.md")
    monkeypatch.setitem(SETTINGS, "short", tiny)
    runs = str(tmp_path / "runs.jsonl")
    monkeypatch.setattr(sys, "argv", ["compare_systems.py", "--short", "--runs", runs])
    compare_systems.main()
    (path,) = tmp_path.glob("*-compare-short.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    assert not document["is_full"]
    assert document["machine"] == harness.describe_machine()
    rows = {row["system"]: row for row in document["rows"]}
    assert list(rows) == presets + variants
    for name, row in rows.items():
        assert list(row["tasks"]) == (TASKS if name in presets else ["text"])
        assert bool(row["times"]) == (name in presets)
    linear, softmax = (rows[name]["times"]["cache_bytes"] for name in ("katharopoulos", "softmax"))
    by_position = rows["softmax"]["tasks"]["text"]["by_position"]
    assert [list(seed) for seed in by_position] == [["1", "2", "4", "8", "16", "32"]] * 2
    assert linear["16"] == linear["64"]
    assert softmax["64"] == 4 * softmax["16"]

    path.unlink()
    monkeypatch.setattr(sys, "argv", ["compare_systems.py", "--report", "--runs", runs])
    compare_systems.main()
    assert json.loads(path.read_text())["rows"] == document["rows"]

    section = report.section(path, document)
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]] == presets + variants
    assert len({line.count("|") for line in table}) == 1
    assert table[4].endswith(f"| {softmax['16'] / 1000:.0f} | {softmax['64'] / 1000:.0f} |")
