# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Speech: how often a recogniser errs, and how long it trains for an epoch.

    python experiments/speech.py            # seconds of speech, 2 layers of 64: minutes
    python experiments/speech.py --full     # up to ten seconds, 4 layers of 128: two hours
    python experiments/speech.py --gpu --dataset_name mozilla-foundation/common_voice_17_0 \\
        --dataset_config_name cy --text_column sentence

Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, section 4.3: an encoder that reads
features of sound in both directions, and a head for connectionist temporal classification (CTC).
Linear and softmax attention, Reformer and a bidirectional LSTM have as many weights. The gated
delta rule beside them reads from left to right only, as a recogniser must that answers at once.

Without a data set's name the speech is digits whose sounds are two tones each (spoken_digits.py).
What is done is kept in --runs at once: a killed run loses only the model that it was at, and the
same call goes on from there.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from tqdm import tqdm

from contenders import SYMBOLS, Size, make_encoder, num_weights_of_layers
from experiment import harness, parser, publish
from sequences import MULTIPLE
from spoken_digits import MEL_FILTERS, Clip, from_hub, spoken_digits, stacked

# isort: split
from compare_systems import Log, make_optimizer, update

LSTM = "BiLSTM"
NAMES = ("softmax", "linear", "gated delta rule", "Reformer", LSTM)
TONES = "tones"
BLANK = 0  # CTC's; characters follow


class Setting(NamedTuple):
    """digits: fewest and most in a clip; stacked: hundredths of a second that are read as one;
    train, test: clips; rows: in a batch.
    """

    digits: tuple[int, int]
    stacked: int
    train: int
    test: int
    size: Size
    rows: int
    epochs: int
    learning_rate: float
    device: str = "cpu"


SETTINGS = {
    "smallest": Setting((1, 2), 1, 4, 2, Size(1, 2, 8), 2, 2, 1e-3),
    "short": Setting((5, 15), 3, 480, 50, Size(2, 2), 16, 16, 3e-3),
    "full": Setting((15, 40), 3, 1600, 200, Size(4, 4), 16, 8, 2e-3),
    "gpu": Setting((15, 40), 1, 20_000, 500, Size(9, 6), 32, 40, 3e-4, "cuda"),
}


# ---- what is heard and said ----


class Batch(NamedTuple):
    features: Tensor  # (B, frames, what is heard in one), 0 after a clip's end
    frames: Tensor  # (B,) of each clip
    characters: Tensor  # all, clip after clip
    counts: Tensor  # (B,) of each clip


class Speech(NamedTuple):
    """characters: all that are said; a character's number is its place among them, from 1 on."""

    train: list[Clip]
    test: list[Clip]
    characters: str
    frames: int  # of the longest clip

    def batch(self, clips: list[Clip]) -> Batch:
        longest = _rounded_up(max(len(clip.features) for clip in clips))
        features = torch.zeros(len(clips), longest, clips[0].features.shape[1])
        for row, clip in zip(features, clips, strict=True):
            row[: len(clip.features)] = torch.from_numpy(clip.features)
        said = [1 + self.characters.index(c) for clip in clips for c in clip.text]
        return Batch(
            features,
            torch.tensor([len(clip.features) for clip in clips]),
            torch.tensor(said),
            torch.tensor([len(clip.text) for clip in clips]),
        )


def _rounded_up(frames: int) -> int:
    """To pieces that Reformer can hash, of which it takes two at least."""
    return max(-(-frames // MULTIPLE), 2) * MULTIPLE


def load(setting: Setting, flags: argparse.Namespace) -> Speech:
    if flags.dataset_name == TONES:
        train, test = (
            spoken_digits(count, *setting.digits, seed)
            for seed, count in enumerate((setting.train, setting.test))
        )
    else:
        train, test = from_hub(
            flags.dataset_name, flags.dataset_config_name, flags.audio_column, flags.text_column
        )
    train, test = ([stacked(clip, setting.stacked) for clip in part] for part in (train, test))
    clips = [*train, *test]
    characters = "".join(sorted({c for clip in clips for c in clip.text}))
    return Speech(train, test, characters, max(len(clip.features) for clip in clips))


# ---- the recogniser ----


class Recogniser(nn.Module):
    """Log-probabilities (B, frames, outputs) of the blank and of characters at every frame."""

    def __init__(self, encoder: nn.Module, heard: int, inputs: int, features: int, outputs: int):
        """So many numbers are heard in a frame; the encoder's inputs and outputs are so wide."""
        super().__init__()
        self.inputs = nn.Linear(heard, inputs)
        self.encoder = encoder
        self.head = nn.Linear(features, outputs)

    def forward(self, features: Tensor, frames: Tensor) -> Tensor:
        places = torch.arange(features.shape[1], device=features.device)
        mask = (places < frames[:, None].to(features.device)).long()
        output = self.encoder(inputs_embeds=self.inputs(features), attention_mask=mask)
        return F.log_softmax(self.head(output.last_hidden_state).float(), dim=-1)


class Hidden(NamedTuple):
    last_hidden_state: Tensor


class BiLSTM(nn.Module):
    """Takes and gives what an encoder of Transformers does."""

    def __init__(self, inputs: int, width: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, layers, batch_first=True, bidirectional=True)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Hidden:
        frames = attention_mask.sum(1).cpu()
        packed = pack_padded_sequence(inputs_embeds, frames, True, enforce_sorted=False)
        hidden, _ = self.lstm(packed)
        length = inputs_embeds.shape[1]
        return Hidden(pad_packed_sequence(hidden, True, total_length=length)[0])


def make_recogniser(name: str, setting: Setting, speech: Speech) -> Recogniser:
    torch.manual_seed(0)
    size, outputs = setting.size, 1 + len(speech.characters)
    inputs = features = size.hidden_size
    attention = "softmax" if name == LSTM else name
    encoder: nn.Module = make_encoder(attention, size, SYMBOLS, _rounded_up(speech.frames))
    if name == LSTM:
        encoder = fitted_lstm(inputs, size.layers, num_weights_of_layers(encoder))
        features = 2 * encoder.lstm.hidden_size
    elif name == "Reformer":
        features = 2 * inputs  # of both of its streams
    heard = speech.train[0].features.shape[1]
    return Recogniser(encoder, heard, inputs, features, outputs).to(setting.device)


def fitted_lstm(inputs: int, layers: int, num_weights: int) -> BiLSTM:
    """With as many weights, as nearly as can be."""

    def surplus(width: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in BiLSTM(inputs, width, layers).parameters()) - num_weights

    wider = next(width for width in itertools.count(2) if surplus(width) > 0)
    return BiLSTM(inputs, min(wider - 1, wider, key=lambda w: abs(surplus(w))), layers)


def loss_of(model: Recogniser, batch: Batch, device: str) -> Tensor:
    log_probabilities = model(batch.features.to(device), batch.frames).transpose(0, 1)
    return F.ctc_loss(
        log_probabilities, batch.characters.to(device), batch.frames, batch.counts, BLANK
    )


def written(log_probabilities: Tensor, characters: str) -> str:
    """What the likeliest outputs (frames,) say: repeated ones once, without blanks."""
    likeliest = log_probabilities.argmax(-1).unique_consecutive()
    return "".join(characters[number - 1] for number in likeliest if number != BLANK)


def edits(heard: str, said: str) -> int:
    """How many characters must be put in, left out or exchanged (Levenshtein)."""
    row = list(range(len(said) + 1))
    for i, h in enumerate(heard, 1):
        before, row = row, [i]
        for j, s in enumerate(said, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (h != s)))
    return row[-1]


# ---- training ----


class Point(NamedTuple):
    """error: edits for each character of the test clips."""

    epoch: int
    error: float


def batches(clips: list[Clip], setting: Setting, epoch: int) -> Iterator[list[Clip]]:
    """All clips, in an order of the epoch's own."""
    order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(epoch)).tolist()
    for start in range(0, len(clips), setting.rows):
        yield [clips[i] for i in order[start : start + setting.rows]]


def train(name: str, setting: Setting, speech: Speech) -> list[Point]:
    model = make_recogniser(name, setting, speech).train()
    steps = setting.epochs * -(-len(speech.train) // setting.rows)
    optimizer, schedule = make_optimizer(model, setting.learning_rate, steps)
    curve = []
    with tqdm(total=steps, desc=name) as progress:
        for epoch in range(1, setting.epochs + 1):
            for clips in batches(speech.train, setting, epoch):
                update(model, loss_of(model, speech.batch(clips), setting.device), optimizer)
                schedule.step()
                progress.update()
            curve.append(Point(epoch, error_rate(model, setting, speech)))
            progress.set_postfix(error=curve[-1].error)
    return curve


@torch.no_grad()
def error_rate(model: Recogniser, setting: Setting, speech: Speech) -> float:
    model.eval()
    wrong = 0
    for clips in batches(speech.test, setting, 0):
        batch = speech.batch(clips)
        outputs = model(batch.features.to(setting.device), batch.frames).cpu()
        for clip, row, frames in zip(clips, outputs, batch.frames, strict=True):
            wrong += edits(written(row[:frames], speech.characters), clip.text)
    model.train()
    return wrong / sum(len(clip.text) for clip in speech.test)


def train_all(setting: Setting, dataset: str, speech: Speech, log: Log) -> dict[str, list[dict]]:
    curves = {}
    for name in NAMES:
        key = {"name": name, "dataset": dataset, "setting": described(setting)}
        if log.get(key) is None:
            log.add(key, {"curve": [p._asdict() for p in train(name, setting, speech)]})
        curves[name] = log.get(key)["curve"]
    return curves


def described(setting: Setting) -> dict[str, Any]:
    return {**setting._asdict(), "digits": [*setting.digits], "size": setting.size._asdict()}


def seconds_per_epoch(setting: Setting, speech: Speech, budget: float) -> dict[str, float]:
    """Of training only, from a step that all take in turn."""
    batch = speech.batch(speech.train[: setting.rows])

    def step(name: str) -> Callable[[], float]:
        model = make_recogniser(name, setting, speech).train()
        optimizer, _ = make_optimizer(model, setting.learning_rate, 1)

        def run() -> float:
            update(model, loss_of(model, batch, setting.device), optimizer)
            return next(model.parameters()).flatten()[0].item()  # waits for a GPU

        return run

    timings = harness.interleave({name: harness.sample_of(step(name)) for name in NAMES}, budget)
    steps = len(speech.train) / setting.rows
    return {name: steps * timing.median for name, timing in timings.items()}


# ---- what is told ----


def plot(
    curves: dict[str, list[dict]], seconds: dict[str, float], speech: Speech, path: Path
) -> None:
    pyplot = harness.plotter()
    figure = pyplot.figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplot_mosaic([["heard", "heard"], ["error", "seconds"]], height_ratios=(1, 2))
    clip = speech.test[0]
    heard = clip.features.reshape(-1, MEL_FILTERS)
    axes["heard"].imshow(heard.T, origin="lower", aspect="auto")
    axes["heard"].set(title=f"“{clip.text}”", xlabel="hundredths of a second", ylabel="mel filters")
    for name, curve in curves.items():
        epochs, errors = [p["epoch"] for p in curve], [p["error"] for p in curve]
        color = "black" if name == "linear" else None
        axes["error"].plot(epochs, errors, label=name, color=color)
    axes["error"].set(xlabel="epochs", ylabel="edits for each character, test clips")
    axes["error"].grid(True, alpha=0.3)
    axes["error"].legend()
    colors = ["black" if name == "linear" else "C0" for name in seconds]
    bars = axes["seconds"].barh([*seconds], [*seconds.values()], color=colors)
    axes["seconds"].bar_label(bars, fmt="%.3g", padding=3)
    axes["seconds"].set(xlabel="seconds of training for an epoch")
    axes["seconds"].margins(x=0.15)
    axes["seconds"].invert_yaxis()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    arguments = parser(__doc__, "speech")
    arguments.add_argument("--dataset_name", default=TONES, help="of audio and text, on the Hub")
    arguments.add_argument("--dataset_config_name")
    arguments.add_argument("--audio_column", default="audio")
    arguments.add_argument("--text_column", default="text")
    flags = arguments.parse_args()
    torch.set_num_threads(flags.threads)
    setting = SETTINGS[flags.setting]
    speech = load(setting, flags)
    log = Log(flags.runs / f"{flags.setting}.jsonl")
    curves = train_all(setting, flags.dataset_name, speech, log)
    seconds = seconds_per_epoch(setting, speech, 0 if flags.setting == "smallest" else 20)
    figures = {
        "dataset": {
            "name": flags.dataset_name,
            "train": len(speech.train),
            "test": len(speech.test),
            "frames": speech.frames,
        },
        "setting": described(setting),
        "seed": 0,
        "curves": curves,
        "seconds_per_epoch": seconds,
    }
    publish(flags, "speech", log.commits, figures, partial(plot, curves, seconds, speech))
    for name, curve in curves.items():
        print(f"{name:18} {curve[-1]['error']:.3f} edits, {seconds[name]:.2f} s for an epoch")


if __name__ == "__main__":
    main()
