# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Clips of audio with what is said in them: digits made of tones, or a data set on the Hub."""

import random
from collections.abc import Iterable
from typing import NamedTuple

import numpy
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

RATE = 8000  # samples per second of the digits
MEL_FILTERS = 40

# Two tones in Hz for a sound: roughly the first formants of vowels, as Peterson and Barney measured
# them in 1952; for consonants two of our own.
SOUNDS = {
    "IY": (270, 2290), "IH": (390, 1990), "EH": (530, 1840), "AH": (640, 1190), "AA": (730, 1090),
    "AO": (570, 840), "UH": (440, 1020), "UW": (300, 870), "R": (490, 1350), "W": (290, 610),
    "N": (280, 1700), "V": (220, 1100), "Z": (240, 3100), "F": (1200, 2900), "TH": (1400, 3200),
    "S": (2500, 3400), "T": (1800, 3000), "K": (1600, 2400),
}  # fmt: skip
DIGITS = (
    "Z IH R AO UH", "W AH N", "T UW", "TH R IY", "F AO R", "F AA IH V", "S IH K S", "S EH V AH N",
    "EH IH T", "N AA IH N",
)  # fmt: skip


class Clip(NamedTuple):
    features: numpy.ndarray  # (frames, what is heard in one), float32
    text: str


def log_mel(waveform: numpy.ndarray, rate: int) -> numpy.ndarray:
    """(frames, MEL_FILTERS), every hundredth of a second; of mean 0 and variance 1 in a clip."""
    fft_length = 512 if rate > RATE else 256
    filters = mel_filter_bank(fft_length // 2 + 1, MEL_FILTERS, 20, rate / 2, rate)
    length = rate // 40
    result = spectrogram(
        waveform,
        window_function(length, "hann"),
        frame_length=length,
        hop_length=rate // 100,
        fft_length=fft_length,
        power=2.0,
        mel_filters=filters,
        log_mel="log",
    ).T
    return ((result - result.mean()) / result.std()).astype(numpy.float32)


def stacked(clip: Clip, frames: int) -> Clip:
    """So many neighbouring frames as one; what is left over at the end is dropped."""
    count = len(clip.features) // frames
    return clip._replace(features=clip.features[: count * frames].reshape(count, -1))


def spoken_digits(count: int, fewest: int, most: int, seed: int) -> list[Clip]:
    """Clips of so many digits each, in random order, by speakers with other pitches and speeds, in
    noise.
    """
    source, noise = random.Random(seed), numpy.random.default_rng(seed)
    clips = []
    for _ in range(count):
        digits = [source.randrange(10) for _ in range(source.randint(fewest, most))]
        waveform = _say(digits, source)
        # The signal's mean square over the noise's, 5 to 20 dB.
        ratio = 10 ** source.uniform(0.5, 2)
        waveform += noise.normal(size=len(waveform)) * numpy.sqrt((waveform**2).mean() / ratio)
        clips.append(Clip(log_mel(waveform, RATE), "".join(map(str, digits))))
    return clips


def _say(digits: Iterable[int], source: random.Random) -> numpy.ndarray:
    pitch, speed = source.uniform(0.85, 1.15), source.uniform(0.7, 1.4)
    pieces = []
    for digit in digits:
        for sound in DIGITS[digit].split():
            times = numpy.arange(int(source.uniform(0.04, 0.09) / speed * RATE)) / RATE
            tones = sum(
                numpy.sin(2 * numpy.pi * (pitch * tone * times + source.random()))
                for tone in SOUNDS[sound]
            )
            ramp = numpy.minimum(times, times[::-1]) / 0.005  # no clicks
            pieces.append(tones * numpy.minimum(ramp, 1) * source.uniform(0.5, 1))
        pieces.append(numpy.zeros(int(source.uniform(0, 0.1) / speed * RATE)))
    return numpy.concatenate(pieces)


def from_hub(
    name: str, config_name: str | None, audio_column: str, text_column: str
) -> tuple[list[Clip], list[Clip]]:
    """The clips of a data set's splits "train" and "test", what is said in lower case."""
    import datasets

    splits = datasets.load_dataset(name, config_name)
    result = []
    for split in ("train", "test"):
        if split not in splits:
            raise SystemExit(f"{name} must have the splits train and test, got {sorted(splits)}")
        rows = splits[split]
        missing = {audio_column, text_column} - {*rows.column_names}
        if missing:
            raise SystemExit(f"{name} has no columns {sorted(missing)}, but {rows.column_names}")
        result.append([_clip(row[audio_column], row[text_column]) for row in rows])
    return result[0], result[1]


def _clip(audio, text: str) -> Clip:
    waveform = numpy.asarray(audio["array"], dtype=numpy.float64)
    return Clip(log_mel(waveform, audio["sampling_rate"]), text.lower())
