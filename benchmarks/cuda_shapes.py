# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sizes of what bench_cuda.py measures."""

from typing import NamedTuple

from torch import Tensor

Inputs = tuple[Tensor, ...]


class Shape(NamedTuple):
    """Of a sequence, or with T = 1 of a token: H heads of values of D features, and as many of
    queries and keys, or `keys` of these.
    """

    B: int
    T: int
    H: int
    D: int
    keys: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self[:4]

    def __str__(self) -> str:
        heads = f"{self.H}" if self.keys is None else f"{self.keys}/{self.H}"
        return f"{self.B}, {self.T}, {heads}, {self.D}"


def num_bytes(tensors: Inputs) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
