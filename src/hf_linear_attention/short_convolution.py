# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A causal convolution over the last few tokens, channel by channel, as a recurrence.

Shapes: B batch, T time, C channels, W = kernel_size - 1 tokens before the present one.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .memory import LayerMemory
from .recurrence import Inputs, Recurrence, State, StateSize
from .tokens import Tokens, sequence_of_each_token


@dataclass(frozen=True)
class ConvolutionWindow(Recurrence):
    """Inputs "x" (B, T, C), "weight" (C, 1, kernel_size) and "bias" (C,) or None; the state, under
    the name that it is made with, is the last W real tokens (B, W, C), zeros where there were
    fewer.
    """

    name: str
    channels: int
    kernel_size: int

    only_read: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def state_sizes(self) -> dict[str, StateSize]:
        return {self.name: StateSize((self.kernel_size - 1, self.channels), is_sum=False)}

    def start(self, inputs: Inputs) -> State:
        x = _given(inputs, "x")
        return {self.name: x.new_zeros(x.shape[0], self.kernel_size - 1, x.shape[2])}

    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        x, weight = _given(inputs, "x"), _given(inputs, "weight")
        past, bias = self._past(inputs, state), inputs.get("bias")
        if x.shape[1] == 0:
            return x, {self.name: past}
        if x.shape[1] == 1 and tokens.cu_seqlens is None:
            y, window = _step(x, weight, bias, past, tokens.key_mask)
        else:
            in_order, place = _in_order(x, past, tokens)
            y = F.conv1d(in_order.transpose(1, 2), weight, bias, groups=x.shape[2]).transpose(1, 2)
            if place is not None:
                y = y.gather(1, place[..., None].expand(x.shape))
            window = in_order[:, in_order.shape[1] - past.shape[1] :]
        return F.silu(y), {self.name: window.clone(memory_format=torch.contiguous_format)}

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        past = state[self.name]
        x, weight = _given(inputs, "x"), _given(inputs, "weight")
        y, window = _step(x, weight, inputs.get("bias"), past, tokens.key_mask)
        past.copy_(window)
        return F.silu(y)

    def replay(self, inputs: Inputs, state: State, key_mask: Tensor | None) -> State:
        past, x = self._past(inputs, state), _given(inputs, "x")
        in_order, _ = padding_first(torch.cat([past, x], dim=1), key_mask)
        window = in_order[:, x.shape[1] :]
        return {self.name: window.clone(memory_format=torch.contiguous_format)}

    def piece(self, inputs: Inputs, tokens: Tokens) -> dict[str, Tensor]:
        """The last W tokens (B, W, C + 1): 1 is behind real ones, 0 where there are fewer."""
        x, W = _given(inputs, "x"), self.kernel_size - 1
        is_real = torch.ones_like(x[..., :1])
        padded = F.pad(torch.cat([x, is_real], -1), (0, 0, W, 0))  # as if nothing came before
        in_order, _ = padding_first(padded, tokens.key_mask)
        return {self.name: in_order[:, x.shape[1] :]}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        tails = pieces[self.name]  # (n, B, W, C + 1)
        W = tails.shape[2]
        in_order = F.pad(tails.transpose(0, 1).flatten(1, 2), (0, 0, W, 0))
        in_order, _ = padding_first(in_order, in_order[..., -1] != 0)
        return {self.name: in_order[:, in_order.shape[1] - W :, :-1]}

    def _past(self, inputs: Inputs, state: State) -> Tensor:
        return state[self.name] if self.name in state else self.start(inputs)[self.name]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the last `kernel_size` real tokens, then SiLU."""

    has_parameters_per_head = True

    def __init__(self, name: str, channels: int, kernel_size: int, bias: bool = False):
        super().__init__()
        self.recurrence = ConvolutionWindow(name, channels, kernel_size)
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))  # as in nn.Conv1d
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset_parameters(self) -> None:
        """Draws weight and bias as nn.Conv1d does; the model's `_init_weights` calls it."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = self.recurrence.kernel_size**-0.5
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, memory: LayerMemory) -> Tensor:
        """x (B, T, C) -> y of that shape."""
        inputs = {"x": x, "weight": self.weight, "bias": self.bias}
        return memory.run(self.recurrence, inputs)


def padding_first(tokens: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`tokens` (B, past + T, C) with those that key_mask (B, T) hides moved to the front, so that
    every window over real ones is one over neighbours; and the order (B, past + T), if it changed.
    """
    if key_mask is None:
        return tokens, None
    past = tokens.shape[1] - key_mask.shape[1]
    order = F.pad(key_mask, (past, 0), value=True).int().argsort(dim=1, stable=True)
    return tokens.gather(1, order[..., None].expand(tokens.shape)), order


def _step(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The convolution of one token x (B, 1, C), before SiLU, and the window after it."""
    tokens = torch.cat([past, x], dim=1)
    y = (tokens * weight[:, 0].t().to(x.dtype)).sum(1, keepdim=True)
    if bias is not None:
        y = y + bias.to(x.dtype)
    window = tokens[:, 1:]
    return y, window if key_mask is None else torch.where(key_mask[..., None], window, past)


def _in_order(x: Tensor, past: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
    """All tokens, each real one right after its predecessors, and what undoes that: where each
    token of x (B, T) is in the convolution of them, which is shorter by the past.
    """
    B, T, C = x.shape
    W = past.shape[1]
    if tokens.cu_seqlens is not None:  # zeros before every sequence
        place = torch.arange(T, device=x.device) + W * sequence_of_each_token(tokens.cu_seqlens, T)
        in_order = x.new_zeros(B, T + W * (len(tokens.cu_seqlens) - 1), C)
        return in_order.index_copy(1, place + W, x), place[None]
    # Padding goes to the front. The past follows it, so no real token's window sees padding.
    in_order, order = padding_first(torch.cat([past, x], dim=1), tokens.key_mask)
    if order is None:
        return in_order, None
    place = order.argsort(dim=1)[:, W:] - W
    return in_order, place.clamp(min=0)  # where padding looks does not matter


def _given(inputs: Inputs, name: str) -> Tensor:
    x = inputs[name]
    assert x is not None
    return x
