# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The layout of a slot in memory: all states of one sequence.

A slot is so many bytes in a row: for each layer with recurrences, in order, the tensors of their
states. Engines give memory as a tensor of bytes (S, bytes of a slot or more), of any stride between
slots, and get views of it.

Shapes: S slots.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..recurrences.interface import Recurrence

ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True)
class Part:
    """A tensor of a layer's state in a slot."""

    start: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SlotLayout:
    """Of a model: each layer's parts by name."""

    parts: Mapping[int, Mapping[str, Part]]
    nbytes: int  # of a slot

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "SlotLayout":
        """By what the mixers of its layers say of their recurrences."""
        recurrences = {
            getattr(module, "layer_idx", number): module.recurrences
            for number, module in enumerate(x for x in model.modules() if hasattr(x, "recurrences"))
        }
        return cls.of_recurrences(recurrences, model.dtype)

    @classmethod
    def of_recurrences(
        cls, layers: Mapping[int, Iterable[Recurrence]], dtype: torch.dtype
    ) -> "SlotLayout":
        """Of each layer's, in a model that computes in `dtype`."""
        parts: dict[int, dict[str, Part]] = {}
        nbytes = 0
        for number, recurrences in layers.items():
            for recurrence in recurrences:
                for name, size in recurrence.state_sizes().items():
                    of_part = recurrence.dtype_of_sums(dtype) if size.is_sum else dtype
                    part = Part(nbytes, tuple(size.shape), of_part)
                    parts.setdefault(number, {})[name] = part
                    nbytes = round_up(part.stop, ALIGNMENT)
        return cls(parts, nbytes)

    def views(self, memory: Tensor) -> dict[int, dict[str, Tensor]]:
        """For each layer its tensors (S, ...) by name, in memory (S, bytes) uint8."""
        return {
            number: {
                name: memory[:, part.start : part.stop].view(part.dtype).unflatten(1, part.shape)
                for name, part in parts.items()
            }
            for number, parts in self.parts.items()
        }


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
