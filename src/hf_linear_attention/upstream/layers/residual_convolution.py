# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Short convolutions beside the identity in Transformers: Inkling and Inkling 2, which have four in
each layer, behind its keys, values, attention and MLP.

Shapes: B batch, T time, C channels, H heads, k tokens that a convolution reads.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from ...cache.layer_state import LayerMemory
from ...ops.numerics import at_least_float32
from ...ops.tokens import Tokens
from ...recurrences.convolution import ConvolutionInputs, ConvolutionWindow, TokenWindow
from ...recurrences.interface import State
from ..stock_caches import stock_layer
from .parts import ReplacedLayer, begin, convolve, take_cache


class ConvolvedBeside(ReplacedLayer):
    """What all kinds have. While a cache records, to take tokens back, they leave it all to
    Transformers, whose cache knows how where there are convolutions only.

    `cache_offset` says how many layers behind its own a layer finds its states, where layers run
    several times.
    """

    layer_idx: int
    conv_idx: int
    conv_kernel_size: int

    def is_recorded(self, cache: Cache | None, cache_offset: int = 0) -> bool:
        if not isinstance(cache, Cache):
            return False
        return getattr(stock_layer(cache, self.layer_idx + cache_offset), "record_past", False)

    def begin(
        self,
        hidden_states: Tensor,
        cache: Cache | None,
        mask: Any,
        kwargs: Mapping[str, Any],
        cache_offset: int = 0,
    ) -> tuple[Tensor, LayerMemory]:
        """As layer_parts.begin, and in float32 or better."""
        x, place = at_least_float32(hidden_states), self.layer_idx + cache_offset
        return begin(self, x, cache, mask, kwargs, state_idx=self.conv_idx, layer_idx=place)


class OneConvolution(ConvolvedBeside):
    """y_t = x_t + sum_j weight_j x_{t-k+1+j}, channel by channel, in float32 or better."""

    conv1d: nn.Conv1d
    is_scaled = False  # by 1 / sqrt(k + 1)

    def convolved(self, hidden_states: Tensor, *options: Any) -> Tensor:
        """hidden_states (B, T, C) -> (B, T, C); options as of `begin`."""
        x, memory = self.begin(hidden_states, *options)
        y = x + convolve(self.conv1d, x, memory, activation=None)
        memory.write(y.dtype)
        if self.is_scaled:
            y = y / math.sqrt(self.conv_kernel_size + 1)
        return y.to(hidden_states.dtype).view_as(hidden_states)


class ResidualConvolution(OneConvolution):
    """Inkling's."""

    @force_accelerate_hooks("conv1d")  # its weights are read without calling it
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        conv_mask: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """hidden_states (B, T, C) -> (B, T, C)"""
        cache, kwargs = take_cache(cache, kwargs)
        if self.is_recorded(cache):
            return super().forward(hidden_states, cache, conv_mask, **kwargs)
        return self.convolved(hidden_states, cache, conv_mask, kwargs)


class EarlierScaledConvolution(ResidualConvolution):
    """Inkling 2's before 5.24."""

    is_scaled = True


class ScaledConvolution(OneConvolution):
    """Inkling 2's, which takes what the kind below takes."""

    is_scaled = True

    @force_accelerate_hooks("conv1d")  # its weights are read without calling it
    def forward(
        self,
        hidden_states: Tensor,
        dynamic_input: Tensor | None = None,
        cache: Cache | None = None,
        conv_mask: Tensor | None = None,
        cache_offset: int = 0,
        **kwargs,
    ) -> Tensor:
        """hidden_states (B, T, C) -> (B, T, C)"""
        cache, kwargs = take_cache(cache, kwargs)
        if self.is_recorded(cache, cache_offset):
            return super().forward(
                hidden_states, dynamic_input, cache, conv_mask, cache_offset, **kwargs
            )
        return self.convolved(hidden_states, cache, conv_mask, kwargs, cache_offset)


class ConvolutionOfTokens(ConvolvedBeside):
    """Inkling 2's other kind, where each token brings weights of its own, one of each head and lag,
    that are added to those of the channels.
    """

    static_weight: Tensor  # (k, C), that of the present token first
    weight_proj: nn.Module
    num_heads: int

    def forward(
        self,
        hidden_states: Tensor,
        dynamic_input: Tensor,
        cache: Cache | None = None,
        conv_mask: Tensor | None = None,
        cache_offset: int = 0,  # since 5.24
        **kwargs,
    ) -> Tensor:
        """hidden_states (B, T, C) and what weights are made of -> (B, T, C)"""
        cache, kwargs = take_cache(cache, kwargs)
        if self.is_recorded(cache, cache_offset):
            return super().forward(
                hidden_states, dynamic_input, cache, conv_mask, cache_offset=cache_offset, **kwargs
            )
        x, memory = self.begin(hidden_states, cache, conv_mask, kwargs, cache_offset)
        k, C = self.static_weight.shape
        of_tokens = self.weight_proj(dynamic_input).to(x.dtype).view(*x.shape[:2], -1, k)
        of_channels = self.static_weight.to(x.dtype).view(k, self.num_heads, -1)
        weights = of_tokens.transpose(2, 3)[..., None] + of_channels  # (B, T, k, H, C / H)
        inputs = WeightedInputs(x, weights.flatten(3))
        y = x + memory.run(WindowOfWeightedTokens("conv", C, k), inputs)
        memory.write(y.dtype)
        return (y / math.sqrt(2 * k + 1)).to(hidden_states.dtype).view_as(hidden_states)


class WeightedInputs(NamedTuple):
    x: Tensor  # (B, T, C)
    weights: Tensor  # (B, T, k, C) of each token, that of the token itself first


class WindowOfWeightedTokens(TokenWindow):
    """The sum of what a convolution by one lag after the other reads."""

    only_read: ClassVar[tuple[str, ...]] = ("weights",)

    def run(self, inputs: WeightedInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        x, weights = inputs
        k, C = self.kernel_size, self.channels
        window = ConvolutionWindow(self.name, C, k, activation=None)
        y = torch.zeros_like(x)
        after: State = {}
        for lag in range(k):
            only = F.one_hot(torch.tensor(k - 1 - lag), k).to(x)
            one_lag = ConvolutionInputs(x, only.expand(C, 1, k))
            earlier, after = window.run(one_lag, state, tokens)
            y = torch.addcmul(y, weights[:, :, lag], earlier)
        return y, after
