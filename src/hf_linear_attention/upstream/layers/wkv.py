# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-4's layers in Transformers: means of all earlier values, channel by channel, by exponential
weights that decay.

Transformers loops over tokens in Python, and for one token of several rows it mixes the rows up.

Source: Peng et al., "RWKV", arXiv 2305.13048, section 3.

Shapes: B batch, T time, C channels, N packed sequences.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.elementwise_scan import elementwise_scan
from ...ops.numerics import at_least_float32, bounded, without_excess
from ...ops.tokens import Tokens, behind
from ...recurrences.delay import Delay, DelayInputs
from ..bounds import MaskAndBounds
from .parts import ReplacedLayer, tokens_of

LEAST = -1e38  # the largest exponent of no token
LARGEST_DECAY = 20.0  # in logs: e^-(e^20) forgets all, and sums of e^20 are finite
BLOCK = 64  # tokens that are computed with at once


class ListedStates(list):
    """What RwkvModel hands on to its layers as their states: those of all layers, or nothing, and
    what else they are to know: of what padding is, and of packed sequences.
    """

    told: Tensor | MaskAndBounds | None = None


class BesideTheTokenBefore(ReplacedLayer):
    """What both layers of a block have: a mean of each token and the one before, channel by
    channel.
    """

    takes_tokens_back = False
    layer_id: int
    place_before: int  # of the token before, among the states

    @property
    def mended(self) -> set[str]:
        """Transformers reads padding as text, and mixes rows up where they are of one token."""
        return {"padding", "rows"}

    def begin(self, x: Tensor, states: Any) -> tuple[Tensor, Tensor, Tokens]:
        """Tokens and those before them (B, T, C), in one row where sequences are packed; the last
        ones are kept.
        """
        tokens = tokens_of(x, None, getattr(states, "told", None), {})
        x, _ = tokens.one_row(x)
        delay = Delay("before", x.shape[-1])
        given = {}
        if states:
            given = {"before": self.read(states, self.place_before)[:, None].to(x.dtype)}
        before, after = delay.run(DelayInputs(x), given, tokens)
        if states:
            self.write(states, self.place_before, after["before"][:, 0])
        return x, before, tokens

    def read(self, states: Any, place: int) -> Tensor:
        state = states[place][:, :, self.layer_id]
        return state.clone() if torch.is_grad_enabled() else state

    def write(self, states: Any, place: int, state: Tensor) -> None:
        states[place][:, :, self.layer_id] = state


class WKV(BesideTheTokenBefore):
    """y_t = (sum_s e^((t - 1 - s) w + k_s) v_s + e^(u + k_t) v_t) / (the same without v), s < t."""

    place_before = 1
    time_decay: Tensor  # (C,)
    time_first: Tensor
    time_mix_key: Tensor  # (1, 1, C)
    time_mix_value: Tensor
    time_mix_receptance: Tensor
    key: nn.Module
    value: nn.Module
    receptance: nn.Module
    output: nn.Module

    def forward(
        self, hidden: Tensor, state: Any = None, use_cache: bool = False
    ) -> tuple[Tensor, Any]:
        """hidden (B, T, C), and what was read before -> (B, T, C), and the state after it."""
        x, before, tokens = self.begin(hidden, state)
        key, value, receptance = (
            project(x * mix + before * (1 - mix))
            for project, mix in (
                (self.key, self.time_mix_key),
                (self.value, self.time_mix_value),
                (self.receptance, self.time_mix_receptance),
            )
        )
        sums = [self.read(state, place) for place in (2, 3, 4)] if state else None
        y, after = self.mean(at_least_float32(key), at_least_float32(value), sums, tokens)
        if state:
            for place, one in zip((2, 3, 4), after, strict=True):
                self.write(state, place, one)
        y = self.output(torch.sigmoid(receptance) * y.to(key.dtype))
        return y.view(hidden.shape), state

    def mean(
        self, k: Tensor, v: Tensor, sums: list[Tensor] | None, tokens: Tokens
    ) -> tuple[Tensor, list[Tensor]]:
        """The means (B, T, C) of keys and values in float32 or better, and the sums of v e^k and of
        e^k after them, both divided by e^m, and m, the largest exponent.
        """
        mask, bounds = tokens.key_mask, tokens.cu_seqlens
        decay = bounded(at_least_float32(self.time_decay), high=LARGEST_DECAY)
        decay = -decay.exp().expand_as(k)
        if mask is not None:
            is_padding = ~behind(mask, k)
            k, decay = k.masked_fill(is_padding, -torch.inf), decay.masked_fill(is_padding, 0)
            v = v.masked_fill(is_padding, 0)
        if sums is None:
            zeros = k.new_zeros(k.shape[0], k.shape[2])
            sums = [zeros, zeros, zeros + LEAST]
        first = sums = [x.to(k.dtype) for x in sums]
        outputs, afters = [], []
        lengths = [k.shape[1]] if bounds is None else bounds.diff().tolist()
        for sequence in zip(*(x.split(lengths, 1) for x in (k, v, decay)), strict=True):
            sums = first
            blocks = zip(*(x.split(BLOCK, 1) for x in sequence), strict=True)
            for k, v, decay in blocks if sequence[0].shape[1] else ():
                y, sums = self.mean_of_block(k, v, decay, sums)
                outputs.append(y)
            afters.append(sums)
        y = torch.cat(outputs, 1)
        if mask is not None:
            y = y.masked_fill(is_padding, 0)
        return y, [torch.cat(x) for x in zip(*afters, strict=True)]

    def mean_of_block(
        self, k: Tensor, v: Tensor, decay: Tensor, sums: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Of tokens (B, T, C) in a row, few enough to stay in the processor's cache."""
        earlier, largest = exponents(k, decay, sums[2])
        log_decay = without_excess(decay + earlier - largest).to(k.dtype)
        weight = (k - largest).to(k.dtype).exp()
        first = torch.cat(sums[:2], -1)
        scanned, after = elementwise_scan(
            torch.cat([weight * v, weight], -1),
            torch.cat([log_decay, log_decay], -1),
            initial_state=first,
            return_state=True,
        )
        num, den = torch.cat([first[:, None], scanned[:, :-1]], 1).chunk(2, -1)
        own = k + at_least_float32(self.time_first)
        top = torch.maximum(earlier, own.detach())
        kept, written = ((x - top).to(k.dtype).exp() for x in (earlier, own))
        y = (kept * num + written * v) / (kept * den + written)
        return y, [*after.chunk(2, -1), largest[:, -1].to(k.dtype)]


class GatedShift(BesideTheTokenBefore):
    """The MLP of a block, squared behind its activation, with a gate."""

    place_before = 0
    time_mix_key: Tensor  # (1, 1, C)
    time_mix_receptance: Tensor
    key: nn.Module
    value: nn.Module
    receptance: nn.Module

    def forward(self, hidden: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """hidden (B, T, C), and what was read before -> (B, T, C), and the state after it."""
        x, before, _ = self.begin(hidden, state)
        key = x * self.time_mix_key + before * (1 - self.time_mix_key)
        receptance = x * self.time_mix_receptance + before * (1 - self.time_mix_receptance)
        value = self.value(torch.square(torch.relu(self.key(key))))
        y = torch.sigmoid(self.receptance(receptance)) * value
        return y.view(hidden.shape), state


@torch.no_grad()
def exponents(k: Tensor, decay: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys and log decays (B, T, C) in a row, the largest exponent before and behind each token,
    from that before all of them (B, C). Sums over many tokens lose digits, which only float64 has
    to spare. Means are the same whatever these are.
    """
    total = decay.double().cumsum(1)
    start = start.double()[:, None]
    largest = total + torch.maximum(start, (k.double() - total).cummax(1).values)
    return torch.cat([start, largest[:, :-1]], 1), largest
