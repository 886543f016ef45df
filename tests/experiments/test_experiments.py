# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Every experiment runs, in its smallest setting, and writes figures and a picture."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "examples", "experiments")]

import copying  # noqa: E402
import harness  # noqa: E402
import image_model  # noqa: E402
import image_speed  # noqa: E402
import images  # noqa: E402
import length  # noqa: E402
import long_range  # noqa: E402
import mad  # noqa: E402
import needle  # noqa: E402
import speech  # noqa: E402
from contenders import (  # noqa: E402
    BASELINE,
    CONTENDERS,
    ENCODERS,
    Size,
    make_encoder,
    make_model,
    num_weights_of_layers,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def run(experiment, folder: Path, monkeypatch, *more: str) -> dict:
    """What the experiment writes."""
    flags = ["--smallest", "--threads", "1", "--results", str(folder), *more]
    monkeypatch.setattr(sys, "argv", [experiment.__file__, *flags])
    experiment.main()
    (path,) = folder.glob("*-smallest.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


@pytest.mark.sample(7)
@pytest.mark.parametrize("length", [64, 2**16])
@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_have_as_many_weights_at_every_length(name, length):
    size = Size(4, 4, 16)
    expected = num_weights_of_layers(make_model(BASELINE, size, 100, length))
    model = make_model(name, size, 100, length)
    assert num_weights_of_layers(model) == pytest.approx(expected, rel=0.01)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_as_many_weights_and_learn(name):
    size = Size(2, 2, 16)
    model = make_encoder(name, size, 40, 64, 3)
    expected = num_weights_of_layers(make_encoder(BASELINE, size, 40, 64, 3))
    assert num_weights_of_layers(model) == pytest.approx(expected, rel=0.01)
    tokens = torch.randint(3, 40, (2, 64))
    logits = long_range.logits_of(model, name, tokens)
    assert logits.shape == (2, 3)
    logits.sum().backward()
    used = model.get_input_embeddings().weight.grad.abs().sum(-1) > 0
    assert used[tokens.unique()].all()  # each token can tell in the label


@pytest.mark.thorough
def test_lengths_are_measured_and_a_run_goes_on_where_it_was_ended(tmp_path, monkeypatch):
    flags = ["--runs", str(tmp_path / "runs")]
    document = run(length, tmp_path / "first", monkeypatch, *flags)
    lengths = length.SETTINGS["smallest"].lengths
    measured = {(row["contender"], row["x"]) for row in document["rows"]}
    assert measured == {(name, n) for name in length.NAMES for n in lengths}
    assert sum(note.startswith("slopes of") for note in document["notes"]) == len(length.NAMES)
    monkeypatch.setattr(length, "prepare", None)  # would be called where nothing is known
    again = run(length, tmp_path / "second", monkeypatch, *flags)
    assert again["rows"] == document["rows"]


def test_slopes_are_those_of_powers():
    x = [512, 1024, 2048]
    assert length.slope_of(x, [3 * n**2 for n in x]) == pytest.approx(2)


def rows(*seconds_and_mib: tuple[float, float]) -> list[harness.Row]:
    """Of a contender, at 4,096 tokens, 8,192 and so on."""
    return [
        harness.Row("", "", 4096 * 2**i, "", 1e3 * s, 0, 0, 3, 1, 0, peak_mib=mib)
        for i, (s, mib) in enumerate(seconds_and_mib)
    ]


def test_who_would_take_too_long_is_left_out():
    quadratic = rows((1, 10), (4, 20))
    assert length.is_within(quadratic, 16384, 17, 1)
    assert not length.is_within(quadratic, 16384, 15, 1)
    assert not length.is_within(rows((1, 300), (2, 1200)), 16384, 100, 4)
    assert length.is_within(rows((1, 10)), 8192, 0.1, 1)  # nothing is known of its growth


def test_copying_goes_on_where_it_was_ended(tmp_path, monkeypatch):
    runs = ["--runs", str(tmp_path / "runs")]
    document = run(copying, tmp_path / "first", monkeypatch, *runs)
    assert list(document["curves"]) == list(copying.NAMES)
    setting = copying.SETTINGS["smallest"]
    for found in document["curves"].values():
        assert [point["step"] for point in found["curve"]] == [0, 2, 4]
    monkeypatch.setattr(copying, "train", None)  # would be called where nothing is known
    again = run(copying, tmp_path / "second", monkeypatch, *runs)
    assert again["curves"] == document["curves"]
    assert setting.learning_rates[0] == document["curves"]["softmax"]["learning_rate"]


@pytest.mark.thorough
def test_images_are_learned_and_drawn_and_a_run_goes_on(tmp_path, monkeypatch):
    flags = ["--runs", str(tmp_path / "runs")]
    first = run(images, tmp_path / "first", monkeypatch, *flags)
    assert [point["step"] for point in first["curves"]["linear"]] == [0, 2, 4]
    assert set(first["curves"]) == set(images.NAMES)
    # As if it had been killed: one model is to be trained again, the others are not.
    (tmp_path / "runs" / "smallest" / images.DIGITS / "linear.pt").unlink()
    monkeypatch.setattr(images, "save_state", lambda state, file: saved.append(file.stem))
    saved: list[str] = []
    again = run(images, tmp_path / "again", monkeypatch, *flags)
    assert again["curves"] == first["curves"]
    assert set(saved) == {"linear"}


@pytest.mark.thorough
def test_how_long_images_take_is_measured(tmp_path, monkeypatch):
    document = run(image_speed, tmp_path, monkeypatch)
    assert [row["contender"] for row in document["rows"]] == list(image_speed.NAMES)


@pytest.mark.parametrize("name", sorted({*images.NAMES, "hybrid"} - {*images.UNCACHED}))
def test_images_are_the_same_with_a_cache(name):
    torch.manual_seed(0)
    model = images.make_image_model(name, Size(4, 2, 8), 40).eval()
    given = torch.randint(256, (2, 10))
    with_cache, without = (
        model.complete(given, 40, use_cache, torch.Generator().manual_seed(0))
        for use_cache in (True, False)
    )
    assert with_cache.equal(without)
    assert with_cache[:, :10].equal(given)


def test_mixtures_of_logistics_have_probabilities_of_numbers():
    # One distribution in each mixture; the plain difference of sigmoids, in float64.
    mean, log_scale = torch.randn(50, 1), torch.randn(50, 1) - 3
    parameters = torch.cat([torch.zeros(50, 1), mean, log_scale], dim=1)
    numbers = torch.arange(256)[:, None].expand(256, 50)
    actual = image_model.log_likelihood(parameters.expand(256, 50, 3), numbers).exp()
    edges = (torch.arange(257, dtype=torch.float64) - 0.5) / 127.5 - 1
    edges[0], edges[-1] = -torch.inf, torch.inf
    cumulative = torch.sigmoid((edges[:, None] - mean.T) / log_scale.T.double().exp())
    torch.testing.assert_close(actual.double(), cumulative.diff(dim=0), atol=1e-5, rtol=1e-4)


def test_numbers_are_drawn_as_likely_as_they_are():
    torch.manual_seed(0)
    parameters = torch.tensor([0.5, -0.5, 0.3, -0.4, -2.0, -3.0])  # two in a mixture
    drawn = image_model.draw(parameters.expand(200_000, 6), torch.Generator().manual_seed(0))
    expected = image_model.log_likelihood(parameters.expand(256, 6), torch.arange(256)).exp()
    actual = drawn.bincount(minlength=256) / len(drawn)
    assert (actual - expected).abs().sum() < 0.05


def trains_no_more(*_):
    raise AssertionError("all is known")


@pytest.mark.thorough
def test_labels_of_long_sequences_are_learned_and_a_run_goes_on(tmp_path, monkeypatch):
    flags = ["--runs", str(tmp_path / "runs")]
    first = run(long_range, tmp_path / "first", monkeypatch, *flags)
    setting = long_range.SETTINGS["smallest"]
    assert {title: set(found) for title, found in first["accuracy"].items()} == dict.fromkeys(
        setting.tasks, set(ENCODERS)
    )
    measured = first["training_step"]["64"]
    assert all(measured[name]["sequences_per_second"] > 0 for name in ENCODERS)
    monkeypatch.setattr(long_range, "learn", trains_no_more)
    some = run(long_range, tmp_path / "some", monkeypatch, *flags, "--tasks", "digits")
    assert some["accuracy"] == {"digits": first["accuracy"]["digits"]}


@pytest.mark.thorough
def test_speech_is_recognised_and_a_run_goes_on(tmp_path, monkeypatch):
    flags = ["--runs", str(tmp_path / "runs")]
    first = run(speech, tmp_path / "first", monkeypatch, *flags)
    assert set(first["curves"]) == set(first["seconds_per_epoch"]) == set(speech.NAMES)
    assert [point["epoch"] for point in first["curves"]["linear"]] == [1, 2]
    monkeypatch.setattr(speech, "train", trains_no_more)
    assert run(speech, tmp_path / "again", monkeypatch, *flags)["curves"] == first["curves"]


def test_speech_is_that_of_a_data_set(tmp_path, monkeypatch):
    import datasets

    clip = {"array": torch.randn(16000).tolist(), "sampling_rate": 16000}
    rows = datasets.Dataset.from_dict({"sound": [clip] * 2, "text": ["Yes", "no"]})
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: splits)
    flags = ["--runs", str(tmp_path), "--dataset_name", "a/b", "--audio_column", "sound"]
    document = run(speech, tmp_path / "results", monkeypatch, *flags)
    assert document["dataset"] == {"name": "a/b", "train": 2, "test": 2, "frames": 101}
    with pytest.raises(SystemExit, match=r"has no columns \['audio'\]"):
        run(speech, tmp_path / "none", monkeypatch, *flags[:4])


@pytest.mark.parametrize("name", speech.NAMES)
def test_recognisers_have_as_many_weights_and_skip_what_is_filled_up(name):
    setting = speech.SETTINGS["short"]
    clips = speech.spoken_digits(2, 1, 2, 0)
    heard = speech.Speech(clips, clips, "0123456789", max(len(c.features) for c in clips))
    model, softmax = (speech.make_recogniser(n, setting, heard).eval() for n in (name, "softmax"))
    counts = [speech.num_weights_of_layers(m.encoder) for m in (model, softmax)]
    assert counts[0] == pytest.approx(counts[1], rel=0.02)
    if name == "Reformer":
        return  # its hashes are drawn anew in every call
    features, frames, *_ = heard.batch(clips)
    shorter = int(frames.argmin())
    changed = features.clone()
    changed[shorter, frames[shorter] :] = 1
    heard_before = slice(frames[shorter])
    with torch.no_grad():
        actual, expected = (model(x, frames)[shorter, heard_before] for x in (changed, features))
    assert actual.equal(expected)


@pytest.mark.parametrize(
    ("heard", "said", "count"),
    [("", "", 0), ("12", "", 2), ("", "12", 2), ("123", "13", 1), ("kitten", "sitting", 3)],
)
def test_edits_are_counted(heard, said, count):
    assert speech.edits(heard, said) == count


def test_repeated_outputs_are_written_once_but_for_blanks_between():
    outputs = torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 0, 1, 2, 2, 0, 0]), 3)
    assert speech.written(outputs, "ab") == "aab"


def test_the_six_tasks_are_learned_and_a_run_goes_on(tmp_path, monkeypatch):
    flags = ["--runs", str(tmp_path / "runs")]
    first = run(mad, tmp_path / "first", monkeypatch, *flags)
    trials = mad.SETTINGS["smallest"].trials
    assert all(set(row["tasks"]) == set(trials) for row in first["rows"])
    monkeypatch.setattr(mad.compare_systems, "train", trains_no_more)
    assert run(mad, tmp_path / "again", monkeypatch, *flags)["rows"] == first["rows"]


@pytest.mark.thorough
@pytest.mark.parametrize("setting", ["short", "full", "gpu"])
def test_every_system_is_fitted_to_every_task(setting):
    for trial in mad.SETTINGS[setting].trials.values():
        for name in trial.systems:
            mad.compare_systems.fitted(name, trial)
    trial = needle.SETTINGS[setting].trial
    for name in trial.systems:
        needle.fitted(name, trial)


@pytest.mark.thorough
def test_needles_are_found_by_length_and_place_and_a_run_goes_on(tmp_path, monkeypatch):
    flags = ["--runs", str(tmp_path / "runs")]
    first = run(needle, tmp_path / "first", monkeypatch, *flags)
    setting = needle.SETTINGS["smallest"]
    assert list(first["found"]) == list(setting.trial.systems)
    for by_length in first["found"].values():
        assert {int(n): len(parts) for n, parts in by_length.items()} == {64: 2, 128: 2}
    longer = run(needle, tmp_path / "longer", monkeypatch, *flags, "--steps", "3")
    assert longer["setting"]["trial"]["steps"] == 3
    assert longer["found"].keys() == first["found"].keys()
    monkeypatch.setattr(needle, "train_and_ask", trains_no_more)
    assert run(needle, tmp_path / "again", monkeypatch, *flags)["found"] == first["found"]
