# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The token before, as a recurrence.

Shapes: B batch, T time, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.tokens import Tokens
from .convolution import ConvolutionWindow
from .interface import Inputs, Recurrence, State


@dataclass(frozen=True)
class Delay(ConvolutionWindow):
    """Input "x" (B, T, C): that of the token before; where there is none, "first" (C,), or
    zeros.
    """

    only_read: ClassVar[tuple[str, ...]] = ("first",)
    parameters: ClassVar[tuple[str, ...]] = ("first",)

    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        x, first = inputs["x"], inputs.get("first")
        assert x is not None
        if x.shape[1] == 1 and self.name in state and tokens.key_mask is tokens.cu_seqlens is None:
            return state[self.name].to(x.dtype, copy=True), {self.name: x}
        only = F.one_hot(torch.tensor(0), 2).to(x).expand(x.shape[-1], 1, 2)
        if first is None:
            return super().run({"x": x, "weight": only, "bias": None}, state, tokens)
        first = first.to(x.dtype)
        less = {name: kept.to(x.dtype) - first for name, kept in state.items() if name == self.name}
        y, after = super().run({"x": x - first, "weight": only, "bias": None}, less, tokens)
        return y + first, {name: kept + first for name, kept in after.items()}

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        return Recurrence.step_(self, inputs, state, tokens)
