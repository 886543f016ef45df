# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Queries, keys and values of compressed convolutional attention in Transformers: ZAYA.

Source: Figliolia et al., "Compressed Convolutional Attention", arXiv 2510.04476.

Shapes: B batch, T time, C channels of queries and keys, H heads of P channels, W tokens that the
convolutions read before the present one, V channels of delayed values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.integrations.accelerate import force_accelerate_hooks

from ...cache.layer_state import LayerMemory
from ...ops.tokens import Tokens
from ...recurrences.convolution import ConvolutionInputs, ConvolutionWindow, TokenWindow
from ...recurrences.delay import Delay, DelayInputs
from ...recurrences.interface import Recurrence, State
from ..stock_caches import StockLayer, recording_of, stock_layer
from .parts import ReplacedLayer, take_cache, tokens_of


class CompressedProjection(ReplacedLayer):
    """Queries and keys are mixed by two convolutions, channel by channel and head by head, beside
    means of both; half of the values are those of the token before.
    """

    config: Any
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    num_key_value_heads: int
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj_current: nn.Module
    v_proj_delayed: nn.Module
    conv_qk_depthwise: nn.Conv1d
    conv_qk_grouped: nn.Conv1d

    @property
    def mended(self) -> set[str]:
        return {"padding"} if self.config.attention_bias else set()

    @force_accelerate_hooks(["conv_qk_depthwise", "conv_qk_grouped"])  # read without calling them
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        conv_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states (B, T, hidden) -> queries, keys and values (B, T, H, P)"""
        B, T, _ = hidden_states.shape
        x, memory = self.begin(hidden_states, cache, conv_mask, kwargs)
        q, k = self.q_proj(x), self.k_proj(x)
        mixed = self.mixed(torch.cat([q, k], -1), memory)
        of_heads = (-1, self.head_dim)
        q, k = q.unflatten(-1, of_heads), k.unflatten(-1, of_heads)
        q = (q + k.repeat_interleave(self.num_key_value_groups, dim=2)) * 0.5
        k = q.unflatten(2, (-1, self.num_key_value_groups)).mean(3)
        mixed_q, mixed_k = mixed.unflatten(-1, of_heads).split([q.shape[2], k.shape[2]], 2)

        v, delayed = self.v_proj_current(x), self.v_proj_delayed(x)
        if memory.is_empty:  # Transformers asks for as many zeros
            first = self.v_proj_delayed(hidden_states.new_zeros(B, 1, x.shape[-1]))[0, 0]
        else:
            first = delayed.new_zeros(delayed.shape[-1])
        v_before = memory.run(self.delay, DelayInputs(delayed, first))
        memory.write(v.dtype)
        v = torch.cat([v, v_before.to(v.dtype)], -1).unflatten(-1, of_heads)
        return tuple(y.reshape(B, T, *y.shape[2:]) for y in (mixed_q + q, mixed_k + k, v))

    def begin(
        self,
        hidden_states: Tensor,
        cache: Cache | None,
        mask: Any,
        kwargs: Mapping[str, Any],
    ) -> tuple[Tensor, LayerMemory]:
        """As layer_parts.begin."""
        cache, kwargs = take_cache(cache, kwargs)
        tokens = tokens_of(hidden_states, cache, mask, kwargs)
        stored, (B, T, _) = None, hidden_states.shape
        if cache is not None:
            stored = StoredWindows(cache, self.layer_idx)
            stored.check_rows(B)
        hidden_states, _ = tokens.one_row(hidden_states)
        return hidden_states, LayerMemory(stored, tokens, T)

    def mixed(self, qk: Tensor, memory: LayerMemory) -> Tensor:
        """Queries and keys (B, T, C) through both convolutions."""
        one, other = self.conv_qk_depthwise, self.conv_qk_grouped
        x = qk.to(one.weight.dtype)
        inputs = TwiceInputs(x, one.weight, one.bias, other.weight, other.bias)
        return memory.run(self.window, inputs).to(qk.dtype)

    @property
    def window(self) -> "TwoConvolutions":
        one, other = self.conv_qk_depthwise.weight, self.conv_qk_grouped.weight
        return TwoConvolutions("conv", one.shape[0], one.shape[2] + other.shape[2] - 1)

    @property
    def delay(self) -> Delay:
        return Delay("delayed", self.v_channels)

    @property
    def v_channels(self) -> int:
        """Of delayed values: half of those of all heads."""
        return self.num_key_value_heads * self.head_dim // 2

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers beside keys and values."""
        return [self.window, self.delay]


class StoredWindows(StockLayer):
    """One layer of a stock cache, as LayerMemory reads and writes it: "conv" (B, W, C) are the last
    queries and keys, and "delayed" (B, 1, V) the last delayed values.
    """

    may_change = False

    def __init__(self, cache: Cache, layer_idx: int):
        self.layer = stock_layer(cache, layer_idx)
        self.views = windows_in(self.layer)
        self.recording = recording_of(self.layer, windows_in)

    def read(self) -> State:
        is_safe = not torch.is_grad_enabled()
        return {name: x if is_safe else x.clone() for name, x in self.views.items()}

    def begin(self, state: State) -> None:
        self.layer.update_conv_state(state["conv"].transpose(1, 2))
        self.layer.update_recurrent_state(state["delayed"][:, 0])


def windows_in(layer: LinearAttentionLayer) -> State:
    """{} before the first token."""
    if not layer.has_previous_state[0]:
        return {}
    conv, delayed = layer.conv_states[0], layer.recurrent_states[0]
    return {"conv": conv.transpose(1, 2), "delayed": delayed[:, None]}


class TwiceInputs(NamedTuple):
    """With the parameters of a convolution, channel by channel, and of one of its outputs, head by
    head.
    """

    x: Tensor  # (B, T, C)
    weight: Tensor  # (C, 1, k)
    bias: Tensor | None  # (C,)
    head_weight: Tensor  # (C, P, n)
    head_bias: Tensor | None  # (C,)


@dataclass(frozen=True)
class TwoConvolutions(TokenWindow):
    """Both convolutions; kernel_size is k + n - 1. Before a sequence there are zeros, of which the
    former makes its bias.
    """

    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias", "head_weight", "head_bias")

    def run(self, inputs: TwiceInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        x, weight, bias, mixing, y_bias = inputs
        assert y_bias is not None
        window = ConvolutionWindow(self.name, self.channels, self.kernel_size, activation=None)
        n, P = mixing.shape[2], mixing.shape[1]
        y = torch.zeros_like(x)
        after: State = {}
        for lag in range(n):
            earlier = ConvolutionInputs(x, F.pad(weight, (n - 1 - lag, lag)), bias)
            of_channels, after = window.run(earlier, state, tokens)
            of_head = mixing[:, :, n - 1 - lag].unflatten(0, (-1, P))  # (H, P, P)
            by_head = of_channels.flatten(0, 1).unflatten(-1, (-1, P)).transpose(0, 1)
            y = y + (by_head @ of_head.mT).transpose(0, 1).reshape(y.shape)
        return y + y_bias, after
