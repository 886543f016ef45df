# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan as a recurrence: a sum for each channel, which decays.

Shapes: B batch, T time, C channels, n pieces of a sequence.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.elementwise_scan import elementwise_scan, elementwise_scan_step_
from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens, behind
from .interface import Inputs, Recurrence, State, StateSize, sum_of_later


@dataclass(frozen=True)
class ElementwiseRecurrence(Recurrence):
    """The recurrence of `elementwise_scan`, whose arguments x and log_decay (B, T, C) are its
    inputs. Its state is "h" (B, C). Heads are shares of the channels, C = num_heads head_dim.
    """

    num_heads: int
    head_dim: int

    packs_states: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return {"h": StateSize((self.num_heads * self.head_dim,), is_sum=True)}

    def start(self, inputs: Inputs) -> State:
        x, _ = _writes_and_decays(inputs)
        return {"h": x.new_zeros(x.shape[0], x.shape[2], dtype=accumulation_dtype(x.dtype))}

    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        y, h = elementwise_scan(
            *_writes_and_decays(inputs),
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            initial_state=state.get("h"),
            return_state=True,
        )
        return y, {"h": h}

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        return self._step_(inputs, state, tokens, None)

    def step_in_slots_(
        self, inputs: Inputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self._step_(inputs, states, tokens, slots)

    def _step_(
        self, inputs: Inputs, state: State, tokens: Tokens, state_indices: Tensor | None
    ) -> Tensor:
        x, log_decay = _writes_and_decays(inputs)
        key_mask = tokens.key_mask
        y = elementwise_scan_step_(
            x[:, 0],
            log_decay[:, 0],
            state["h"],
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=state_indices,
        )
        return y[:, None]

    def piece(self, inputs: Inputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "log_decay" (B, C), by which a piece decays the one before."""
        _, log_decay = _writes_and_decays(inputs)
        if tokens.key_mask is not None:
            log_decay = torch.where(behind(tokens.key_mask, log_decay), log_decay, 0)
        after = self.run(inputs, {}, tokens)[1]
        return {**after, "log_decay": log_decay.to(after["h"].dtype).sum(1)}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        return {"h": (sum_of_later(pieces["log_decay"]).exp() * pieces["h"]).sum(0)}


def _writes_and_decays(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, log_decay = inputs["x"], inputs["log_decay"]
    assert x is not None and log_decay is not None
    return x, log_decay
