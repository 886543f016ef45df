# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention that reads its state before a token is written, as a recurrence: RWKV-6's.

Shapes: B batch, T time, H heads, K key dim, V value dim, N packed sequences.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.tokens import Tokens, behind, sequence_of_each_token
from .interface import SlotPieces, State
from .linear_attention import LinearInputs, LinearRecurrence


@dataclass(frozen=True)
class ReadFirst(LinearRecurrence):
    """S_t = Diag(exp(log_decay_t)) S_(t-1) + k_t v_t^T, and y_t = S_(t-1)^T q_t.

    The op reads after it writes. So it gets, for each sequence, one token more: keys, values and
    decays one later than the queries that are to see them last.
    """

    reads_ahead: ClassVar[bool] = False

    def run(self, inputs: LinearInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        parts = parts_of(inputs, tokens.key_mask)
        bounds, tokens = tokens.cu_seqlens, tokens._replace(key_mask=None)
        if bounds is None:
            later = (F.pad(x, (0, 0, 0, 0, 1, 0)) for x in parts[1:])
            longer = LinearInputs(F.pad(parts[0], (0, 0, 0, 0, 0, 1)), *later)
            y, after = super().run(longer, state, tokens)
            return y[:, :-1], after
        longer, bounds, places = with_one_more(parts, bounds)
        y, after = super().run(longer, state, tokens._replace(cu_seqlens=bounds))
        return y[:, places], after

    def run_in_slots_(
        self, inputs: LinearInputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        longer, bounds, places = with_one_more(parts_of(inputs), pieces.cu_seqlens)
        y = super().run_in_slots_(longer, states, pieces._replace(cu_seqlens=bounds), tokens)
        return y[:, places]

    def step_(
        self, inputs: LinearInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        _, k, v, _, _ = inputs
        reading = inputs._replace(k=torch.zeros_like(k), v=torch.zeros_like(v), log_decay=None)
        y = super().step_(reading, state, tokens._replace(key_mask=None), slots=slots)
        super().step_(inputs, state, tokens, slots=slots)
        return y


def parts_of(inputs: LinearInputs, key_mask: Tensor | None = None) -> list[Tensor]:
    """q, k, v and log_decay, all 0 in the place of padding: the op would hide the same tokens of
    queries and keys, which are apart here.
    """
    q, k, v, log_decay, _ = inputs
    assert log_decay is not None
    parts = [q, k, v, log_decay]
    return parts if key_mask is None else [x.masked_fill(~behind(key_mask, x), 0) for x in parts]


def with_one_more(parts: list[Tensor], bounds: Tensor) -> tuple[LinearInputs, Tensor, Tensor]:
    """Of packed sequences, with one token more each: the inputs, their bounds, and the places (T,)
    of the queries.
    """
    T, more = parts[0].shape[1], len(bounds) - 1
    places = torch.arange(T, device=bounds.device) + sequence_of_each_token(bounds, T)
    later = (places + 1).clamp(max=T + more - 1)  # which tokens behind the last bound may exceed
    q, k, v, log_decay = (
        x.new_zeros(x.shape[0], T + more, *x.shape[2:]).index_copy(1, at, x)
        for x, at in zip(parts, (places, later, later, later), strict=True)
    )
    numbers = torch.arange(more + 1, device=bounds.device, dtype=bounds.dtype)
    return LinearInputs(q, k, v, log_decay), bounds + numbers, places
