# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan as a recurrence: a sum for each channel, which decays.

Shapes: B batch, T time, C channels, n pieces of a sequence.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.elementwise_scan import elementwise_scan, elementwise_scan_step_
from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens, behind
from .interface import Recurrence, State, StateSize, sum_of_later


class ElementwiseInputs(NamedTuple):  # arguments of `elementwise_scan`
    x: Tensor  # (B, T, C)
    log_decay: Tensor


@dataclass(frozen=True)
class ElementwiseRecurrence(Recurrence):
    """The recurrence of `elementwise_scan`. Its state is "h" (B, C). Heads are shares of the
    channels, C = num_heads head_dim.
    """

    num_heads: int
    head_dim: int

    packs_states: ClassVar[bool] = True
    state_is_first_piece: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return {"h": StateSize((self.num_heads * self.head_dim,), is_sum=True)}

    def start(self, inputs: ElementwiseInputs) -> State:
        x = inputs.x
        return {"h": x.new_zeros(x.shape[0], x.shape[2], dtype=accumulation_dtype(x.dtype))}

    def run(self, inputs: ElementwiseInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        y, h = elementwise_scan(
            *inputs,
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            initial_state=state.get("h"),
            return_state=True,
        )
        return y, {"h": h}

    def step_in_slots_(
        self, inputs: ElementwiseInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self.step_(inputs, states, tokens, slots)

    def step_(
        self, inputs: ElementwiseInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        key_mask = tokens.key_mask
        y = elementwise_scan_step_(
            inputs.x[:, 0],
            inputs.log_decay[:, 0],
            state["h"],
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=slots,
        )
        return y[:, None]

    def piece(self, inputs: ElementwiseInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "log_decay" (B, C), by which a piece decays the one before."""
        log_decay = inputs.log_decay
        if tokens.key_mask is not None:
            log_decay = torch.where(behind(tokens.key_mask, log_decay), log_decay, 0)
        after = self.run(inputs, {}, tokens)[1]
        return {**after, "log_decay": log_decay.to(after["h"].dtype).sum(1)}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        return {"h": (sum_of_later(pieces["log_decay"]).exp() * pieces["h"]).sum(0)}
