# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A causal convolution over the last few tokens, channel by channel, as a recurrence.

Shapes: B batch, T time, C channels, W = kernel_size - 1 tokens before the present one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.convolution import short_convolution, short_convolution_step_
from ..ops.in_slots import short_convolution_
from ..ops.tokens import Tokens
from .interface import Recurrence, SlotPieces, State, StateSize, padding_first


@dataclass(frozen=True)
class TokenWindow(Recurrence):
    """The state, called `name`: the last W real tokens of x, (B, W, C), zeros where none were."""

    name: str
    channels: int
    kernel_size: int

    packs_states: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return {self.name: StateSize((self.kernel_size - 1, self.channels), is_sum=False)}

    def start(self, inputs: Any) -> State:
        x = inputs.x
        return {self.name: x.new_zeros(x.shape[0], self.kernel_size - 1, x.shape[2])}

    def replay(self, inputs: Any, state: State, key_mask: Tensor | None) -> State:
        x = inputs.x
        past = state[self.name] if self.name in state else self.start(inputs)[self.name]
        window = padding_first(torch.cat([past, x], dim=1), key_mask)[:, x.shape[1] :]
        return {self.name: window.clone(memory_format=torch.contiguous_format)}

    def piece(self, inputs: Any, tokens: Tokens) -> dict[str, Tensor]:
        """The last W tokens (B, W, C + 1): 1 is behind real ones, 0 where there are fewer."""
        x, W = inputs.x, self.kernel_size - 1
        is_real = torch.ones_like(x[..., :1])
        padded = F.pad(torch.cat([x, is_real], -1), (0, 0, W, 0))  # as if nothing came before
        return {self.name: padding_first(padded, tokens.key_mask)[:, x.shape[1] :]}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        tails = pieces[self.name]  # (n, B, W, C + 1)
        W = tails.shape[2]
        in_order = F.pad(tails.transpose(0, 1).flatten(1, 2), (0, 0, W, 0))
        in_order = padding_first(in_order, in_order[..., -1] != 0)
        return {self.name: in_order[:, in_order.shape[1] - W :, :-1]}


class ConvolutionInputs(NamedTuple):
    x: Tensor  # (B, T, C)
    weight: Tensor  # (C, 1, kernel_size)
    bias: Tensor | None = None  # (C,)


@dataclass(frozen=True)
class ConvolutionWindow(TokenWindow):
    """The recurrence of `short_convolution`."""

    activation: str | None = "silu"

    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def run(self, inputs: ConvolutionInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        x, weight, bias = inputs
        past = state.get(self.name)
        y, window = short_convolution(
            x,
            weight.squeeze(1),
            bias,
            activation=self.activation,
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            initial_state=None if past is None else past.to(x.dtype),
            return_state=True,
        )
        return y, {self.name: window}

    def step_in_slots_(
        self, inputs: ConvolutionInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        if states[self.name].dtype != inputs.x.dtype:
            return super().step_in_slots_(inputs, states, slots, tokens)
        return self.step_(inputs, states, tokens, slots)

    def run_in_slots_(
        self, inputs: ConvolutionInputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        x, weight, bias = inputs
        if states[self.name].dtype != x.dtype:
            return super().run_in_slots_(inputs, states, pieces, tokens)
        return short_convolution_(
            x,
            weight.squeeze(1),
            bias,
            states[self.name],
            activation=self.activation,
            cu_seqlens=pieces.cu_seqlens,
            state_indices=pieces.slots,
            is_new=pieces.is_new,
        )

    def step_(
        self, inputs: ConvolutionInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        x, weight, bias = inputs
        if state[self.name].dtype != x.dtype:  # as under autocast
            return super().step_(inputs, state, tokens)
        weight, key_mask = weight.squeeze(1), tokens.key_mask
        y = short_convolution_step_(
            x[:, 0],
            weight,
            bias,
            state[self.name],
            activation=self.activation,
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=slots,
        )
        return y[:, None]
