# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The tasks of MAD, as tasks of tasks.py: what a layer that mixes tokens can keep and find.

Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures", arXiv 2403.17844, section 3.
Their rows are some thousands, read many times; here every row is new.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from hf_linear_attention.fast.sinusoids import sinusoidal_positions
from tasks import UNASKED, Answered, Batch, ask_again


@dataclass(frozen=True)
class InContextRecall(Answered):
    """Pairs of a key and a value, which stays a key's own in a row: asked for where a key returns.

    Half of the vocabulary are keys, half values. `noise`: the share of pairs in whose place there
    are two of as many tokens more, which mean nothing.
    """

    vocab_size: int = 16
    length: int = 128
    noise: float = 0
    held_out_rows: int = 200

    metric = "recall"

    def __post_init__(self):
        if self.vocab_size % 4 or self.length % 2:
            raise ValueError(
                "vocab_size must be a multiple of 4 and length even, "
                f"got {self.vocab_size} and {self.length}"
            )

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        first_of_noise = self.vocab_size // 2 if self.noise else self.vocab_size
        half, pairs = first_of_noise // 2, self.length // 2
        keys = torch.randint(half, (rows, pairs), generator=generator)
        values = half + torch.randint(half, (rows, half), generator=generator).gather(1, keys)
        is_noise = torch.rand(rows, pairs, generator=generator) < self.noise
        past_noise = max(self.vocab_size, first_of_noise + 1)
        noise = torch.randint(first_of_noise, past_noise, (rows, pairs, 2), generator=generator)
        return ask_again(keys, values, is_noise, noise)


@dataclass(frozen=True)
class FuzzyRecall(Answered):
    """As InContextRecall, with keys of several tokens, and values of one to as many.

    A row has `pairs` keys, no two alike, and goes through them again and again in random order; the
    last token is a blank, of which there are some at the end. Asked for is all of a value.
    """

    vocab_size: int = 16
    length: int = 128
    pairs: int = 6
    tokens: int = 3  # of a key
    held_out_rows: int = 200

    metric = "recall"

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        made = [self._row(generator) for _ in range(rows)]
        return Batch(*(torch.tensor(column) for column in zip(*made, strict=True)))

    def _row(self, generator: torch.Generator) -> tuple[list[int], list[int]]:
        def draw(high: int, count: int) -> list[int]:
            return torch.randint(high, (count,), generator=generator).tolist()

        half, blank = (self.vocab_size - 1) // 2, self.vocab_size - 1
        values: dict[tuple[int, ...], list[int]] = {}
        while len(values) < self.pairs:
            size = 1 + draw(self.tokens, 1)[0]
            values[tuple(draw(half, self.tokens))] = [half + v for v in draw(half, size)]
        keys = [*values]
        tokens: list[int] = []
        targets: list[int] = []
        seen = set()
        while True:
            key = keys[draw(self.pairs, 1)[0]]
            value = values[key]
            if len(tokens) + len(key) + len(value) > self.length:
                break
            unasked = [UNASKED] * len(value)
            targets += [UNASKED] * (len(key) - 1) + (value if key in seen else unasked) + [UNASKED]
            tokens += [*key, *value]
            seen.add(key)
        rest = self.length - len(tokens)
        return tokens + [blank] * rest, targets + [UNASKED] * rest


@dataclass(frozen=True)
class SelectiveCopy(Answered):
    """Some tokens among blanks, a token that ends them, then a blank for each, where it is asked
    for.
    """

    vocab_size: int = 16
    length: int = 256
    copied: int = 16
    held_out_rows: int = 200

    metric = "copied"

    def __post_init__(self):
        if self.length <= 2 * self.copied:
            raise ValueError(f"length must be more than 2 * copied, got {self.length}")

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        blank, end = self.vocab_size - 2, self.vocab_size - 1
        given = self.length - self.copied - 1
        words = torch.randint(blank, (rows, self.copied), generator=generator)
        places = torch.rand(rows, given, generator=generator).topk(self.copied).indices
        tokens = torch.full((rows, self.length), blank)
        tokens.scatter_(1, places.sort(dim=1).values, words)
        tokens[:, given] = end
        targets = torch.full_like(tokens, UNASKED)
        targets[:, given + 1 :] = words
        return Batch(tokens, targets)


@dataclass(frozen=True)
class Compression(Answered):
    """A row of random tokens, all of which are told from what the model has of the last one.

    The last token is the same in all rows. The model is to be in a `FromLastToken`.
    """

    vocab_size: int = 16
    length: int = 32
    held_out_rows: int = 200

    metric = "recovered"

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        last = self.vocab_size - 1
        tokens = torch.randint(last, (rows, self.length), generator=generator)
        tokens[:, -1] = last
        return Batch(tokens, tokens)


class FromLastToken(nn.Module):
    """Features of every token that are made of the last token's alone, and of the place."""

    def __init__(self, backbone: nn.Module, features: int):
        super().__init__()
        self.backbone = backbone
        self.decoder = nn.Sequential(
            nn.RMSNorm(features), nn.Linear(features, features), nn.GELU(),
            nn.RMSNorm(features), nn.Linear(features, features), nn.GELU(), nn.RMSNorm(features),
        )  # fmt: skip

    def forward(self, tokens: Tensor, **kwargs) -> BaseModelOutput:
        last = self.backbone(tokens, **kwargs).last_hidden_state[:, -1:]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        positions = sinusoidal_positions(places, last.shape[-1]).to(last.dtype)
        return BaseModelOutput(last_hidden_state=self.decoder(last + positions))


@dataclass(frozen=True)
class Memorization(Answered):
    """Keys, each before a token in whose place its value is asked for: the same in all rows, so
    that it can only be known from training.
    """

    vocab_size: int = 256
    length: int = 32
    held_out_rows: int = 200

    metric = "recall"

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        half, asked = (self.vocab_size - 1) // 2, self.vocab_size - 1
        values = half + torch.randperm(half, generator=torch.Generator().manual_seed(12345))
        keys = torch.randint(half, (rows, self.length // 2), generator=generator)
        tokens = torch.stack([keys, torch.full_like(keys, asked)], dim=-1).flatten(1)
        targets = torch.stack([torch.full_like(keys, UNASKED), values[keys]], dim=-1).flatten(1)
        return Batch(tokens, targets)
