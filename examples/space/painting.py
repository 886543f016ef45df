# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Digits, painted pixel by pixel by a language model as examples/train_digits.py makes it."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_linear_attention  # noqa: F401  so that Transformers knows its models
from race import SNAPSHOT_SECONDS, cache_bytes, first_line

DIGITS = 10  # the first tokens name a digit, the others are shades from black to white
TEMPERATURE = 0.9
WARM_UP_PIXELS = 12


class Painter(NamedTuple):
    """side: of an image, in pixels."""

    model: PreTrainedModel
    side: int
    shades: int


class Painting(NamedTuple):
    """Some images, painted so far.

    pixels: (images, n) from 0 to 1; seconds: that the model took; cache_bytes: of all images.
    """

    digits: tuple[int, ...]
    pixels: Tensor
    side: int
    seconds: float
    painted: int  # pixels of an image, without those that were given
    cache_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.pixels.shape[1] == self.side**2


def load(where: str) -> Painter:
    """A model in a folder or on the Hub."""
    try:
        model = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"No model can be loaded from {where!r}: {first_line(error)}") from error
    config = model.config
    side = math.isqrt(getattr(config, "max_position_embeddings", None) or 0)
    if side == 0 or side**2 != config.max_position_embeddings or config.vocab_size < DIGITS + 2:
        raise ValueError(f"The model in {where!r} paints no digits: see examples/train_digits.py")
    return Painter(model, side, config.vocab_size - DIGITS)


@torch.no_grad()
def paint(
    painter: Painter,
    digits: Sequence[int],
    stop: threading.Event,
    given: Tensor | None = None,
    pixels_per_second: float = math.inf,
    seed: int = 0,
) -> Iterator[Painting]:
    """What there is of the images, some ten times a second, until they are whole or stopped.

    given: (images, n) pixels from 0 to 1 to begin with; pixels_per_second: no faster than that, so
    that one can look on.
    """
    model, side, shades = painter
    random = torch.Generator().manual_seed(seed)
    pixels = torch.empty(len(digits), 0) if given is None else given
    num_given = pixels.shape[1]
    tokens = torch.cat(
        [torch.tensor(digits)[:, None], DIGITS + (pixels * (shades - 1)).round().long()], dim=1
    )
    cache, seconds, start, shown = None, 0.0, time.perf_counter(), -math.inf
    for count in range(num_given, side**2):
        before = time.perf_counter()
        output = model(
            tokens.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        logits = output.logits[:, -1, DIGITS:].float().cpu()
        drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=random)
        tokens = DIGITS + drawn
        pixels = torch.cat([pixels, drawn / (shades - 1)], dim=1)
        now = time.perf_counter()
        seconds += now - before
        painted = count + 1 - num_given
        is_last = count + 1 == side**2 or stop.is_set()
        if is_last or now - shown > SNAPSHOT_SECONDS:
            shown = now
            yield Painting(tuple(digits), pixels, side, seconds, painted, cache_bytes(cache))
        if is_last or stop.wait(start + painted / pixels_per_second - now):
            break
