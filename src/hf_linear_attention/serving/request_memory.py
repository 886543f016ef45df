# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The contents of a request's slot and pages, as tensors by name.

Shapes: T tokens, N tensors of rows that a type of layer has (keys and values of each layer).
"""

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.utils import stream_context

from .allocators import LINEAR, LatentAllocator

FULL, SLIDING = "full_attention", "sliding_attention"


class RequestMemory:
    """Of all requests of an engine with slots. Tensors that it gives are on the CPU."""

    def __init__(self, processor: Any):
        self.allocators = dict(processor.cache.cache_allocators)
        self.slots = self.allocators.pop(LINEAR)
        self.stream = processor.inputs_and_outputs.compute_stream
        self.bytes = self.slots._copy_view[:, : self.slots.layout.nbytes]  # of all slots
        self.rows = {kind: rows_of(allocator) for kind, allocator in self.allocators.items()}

    def read(self, request_id: str, start: int, stop: int) -> dict[str, Tensor]:
        """What `stop` tokens left, when no more were read: all states, as the bytes of the slot, a
        sliding window's keys and values (T, N, ...), and those of full attention for tokens from
        `start` on.
        """
        slot = self.slots.slot_of(request_id)
        with stream_context(self.stream):
            tensors = {LINEAR: self.bytes[slot].to("cpu", copy=True)}
            for kind, rows in self.rows.items():
                index = self._index(kind, request_id, start, stop)
                tensors[kind] = torch.stack([x.index_select(0, index) for x in rows], dim=1).cpu()
        return tensors

    def write(self, request_id: str, stop: int, pieces: list[dict[str, Tensor]]) -> None:
        """Puts into a request's memory, which is there for `stop` tokens, what `read` gave: of all
        pieces of these tokens, or the last one, where there is no full attention.
        """
        slot, last = self.slots.slot_of(request_id), pieces[-1]
        with stream_context(self.stream):
            self.bytes[slot].copy_(last[LINEAR])
            for kind, rows in self.rows.items():
                kept = [piece[kind] for piece in (pieces if kind == FULL else [last])]
                index = self._index(kind, request_id, 0, stop)
                for part, new in zip(index.split([len(x) for x in kept]), kept, strict=True):
                    for x, values in zip(rows, new.to(part.device).unbind(1), strict=True):
                        x.index_copy_(0, part, values)

    def fits(self, start: int, stop: int, tensors: dict[str, Tensor]) -> bool:
        """Whether tensors are of the names, shapes and dtypes that `read` would give."""
        expected = {LINEAR: (self.bytes.shape[1:], self.bytes.dtype)}
        for kind, rows in self.rows.items():
            num_tokens = stop - start
            if kind == SLIDING:
                num_tokens = min(stop, self.allocators[kind].sliding_window - 1)
            shape = torch.Size([num_tokens, len(rows), *rows[0].shape[1:]])
            expected[kind] = shape, rows[0].dtype
        return {name: (x.shape, x.dtype) for name, x in tensors.items()} == expected

    def has_nan(self, tensors: dict[str, Tensor]) -> bool:
        """Whether anything in what `read` gave, where states are bytes, is not a number."""
        states = self.slots.layout.views(tensors[LINEAR].unsqueeze(0))
        parts = [x for named in states.values() for x in named.values()]
        return any(bool(x.isnan().any()) for x in (*parts, *(tensors[kind] for kind in self.rows)))

    def _index(self, kind: str, request_id: str, start: int, stop: int) -> Tensor:
        """Which rows hold the tokens."""
        allocator = self.allocators[kind]
        index = allocator.get_read_indices(request_id, stop, 0)
        if kind == FULL:
            index = index[start:]
        return torch.tensor(index, dtype=torch.int64, device=self.rows[kind][0].device)


def rows_of(allocator: Any) -> list[Tensor]:
    """The tensors that hold a row for each token, of all layers of a type."""
    if isinstance(allocator, LatentAllocator):
        return list(allocator.rows.values())
    return [x for pair in allocator._kv_token_views.values() for x in pair]
