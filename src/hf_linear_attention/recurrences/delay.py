# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The token before, as a recurrence.

Shapes: B batch, T time, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.tokens import Tokens
from .convolution import ConvolutionInputs, ConvolutionWindow, TokenWindow
from .interface import State, StateSize


class DelayInputs(NamedTuple):
    x: Tensor  # (B, T, C)
    first: Tensor | None = None  # (C,)


@dataclass(frozen=True)
class Delay(TokenWindow):
    """x of the token before; where there is none, `first`, or zeros.

    is_exact: whether it is kept in float32 or better, whatever the model's dtype.
    is_of_heads: whether ranks that share heads have shares of the channels.
    """

    kernel_size: int = 2
    is_exact: bool = False
    is_of_heads: bool = False

    parameters: ClassVar[tuple[str, ...]] = ("first",)

    def state_sizes(self) -> dict[str, StateSize]:
        return {self.name: StateSize((1, self.channels), is_sum=self.is_exact)}

    def run(self, inputs: DelayInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        x, first = inputs
        if x.shape[1] == 1 and self.name in state and tokens.key_mask is tokens.cu_seqlens is None:
            return state[self.name].clone().to(x.dtype), {self.name: x.clone()}
        only = F.one_hot(torch.tensor(0), 2).to(x).expand(x.shape[-1], 1, 2)
        one = ConvolutionWindow(self.name, self.channels, 2, activation=None)
        if first is None:
            return one.run(ConvolutionInputs(x, only), state, tokens)
        first = first.to(x.dtype)
        less = {name: kept.to(x.dtype) - first for name, kept in state.items() if name == self.name}
        y, after = one.run(ConvolutionInputs(x - first, only), less, tokens)
        return y + first, {name: kept + first for name, kept in after.items()}
