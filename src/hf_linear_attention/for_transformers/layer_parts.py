# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What our forwards of Transformers' recurrent layers share: tokens, caches and convolutions.

Shapes: B batch, T time, C channels, H heads, K key dim, V value dim, W tokens of a convolution
before the present one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..memory import LayerMemory
from ..numerics import accumulation_dtype
from ..recurrence import Inputs, Recurrence, State
from ..short_convolution import ConvolutionWindow
from ..tokens import Tokens
from .packing import bounds_for_layers


class StockLayer:
    """One layer of a stock cache, as LayerMemory reads and writes it: "conv" (B, W, C) are the last
    inputs of a convolution, "kv" (B, H, K, V) the state of a recurrence.

    Transformers keeps (B, C, W + 1), whose first is never read again, and (B, H, K, V), or with
    `is_transposed` (B, H, V, K). Both are handed out as views, which a step changes in place. A
    transposed state lies in memory as ours: a cache keeps the layout of what it is given first.
    """

    may_change = True  # in place

    def __init__(self, cache: Cache, layer_idx: int, is_transposed: bool, dtype: torch.dtype):
        self.layer = cache.layers[layer_idx]
        self.is_transposed = is_transposed
        self.dtype = accumulation_dtype(dtype)
        self.views: State = {}  # of what is stored

    def read(self) -> State:
        if not self.layer.has_previous_state[0]:
            return {}
        kv = self._turned(self.layer.recurrent_states[0])
        self.views = {"conv": self.layer.conv_states[0][..., 1:].transpose(1, 2), "kv": kv}
        if torch.is_grad_enabled():  # a gradient may need what will be written over
            kv = kv.clone()
        # Beam search leaves another layout, and who cached it may have computed otherwise.
        return {**self.views, "kv": kv.to(self.dtype).contiguous()}

    def write(
        self,
        state: State,
        inputs: list[tuple[Recurrence, Inputs]],
        num_tokens: int,
        key_mask: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        if not self.views:
            window = state["conv"].transpose(1, 2)
            self.layer.update_conv_state(F.pad(window, (1, 0)))
            self.layer.update_recurrent_state(self._turned(state["kv"]))
        for name, view in self.views.items():
            if state[name] is not view:
                view.copy_(state[name])

    def _turned(self, kv: Tensor) -> Tensor:
        return kv.transpose(-1, -2) if self.is_transposed else kv


class ConvolvedLayer(nn.Module):
    """What is read of Transformers' layers with a convolution before their recurrence."""

    layer_idx: int
    activation: str
    conv1d: nn.Conv1d

    @staticmethod
    def why_not(layer: nn.Module) -> str | None:
        """Why this must not replace a layer of Transformers; None where it may."""
        if layer.activation in ("silu", "swish"):
            return None
        return f"its convolution is followed by {layer.activation!r}, and ours by SiLU"


def tokens_of(
    hidden_states: Tensor,
    cache: Cache | None,
    attention_mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> Tokens:
    """What a layer is told of its tokens.

    Args:
        hidden_states: (B, T, C).
        attention_mask: (B, T), false or 0 for padding.
        kwargs: the layer's other arguments, among them, perhaps, bounds of packed sequences.
    """
    B, T, _ = hidden_states.shape
    cu_seqlens = bounds_for_layers(kwargs, B, T)
    if cu_seqlens is not None and cache is not None:
        raise ValueError(
            "packed sequences can't be cached, since a cache keeps one state a row: give "
            "use_cache=False, or the sequences as rows with an attention_mask"
        )
    if attention_mask is not None:
        if attention_mask.shape != (B, T):
            raise ValueError(
                f"attention_mask must be {(B, T)} like the tokens, got "
                f"{tuple(attention_mask.shape)}"
            )
        attention_mask = attention_mask.bool()
        if cu_seqlens is not None:
            attention_mask = attention_mask.view(1, B * T)
    return Tokens(is_causal=True, key_mask=attention_mask, cu_seqlens=cu_seqlens)


def begin(
    layer: "ConvolvedLayer",
    hidden_states: Tensor,
    cache: Cache | None,
    attention_mask: Tensor | None,
    kwargs: Mapping[str, Any],
    is_transposed: bool = False,
) -> tuple[Tensor, LayerMemory]:
    """What the forward of a layer with a stock cache begins with: hidden states, in one row where
    sequences are packed, and the layer's memory. Arguments as of `tokens_of` and StockLayer.
    """
    tokens = tokens_of(hidden_states, cache, attention_mask, kwargs)
    stored = None
    if cache is not None:
        stored = StockLayer(cache, layer.layer_idx, is_transposed, hidden_states.dtype)
    T = hidden_states.shape[1]
    hidden_states, _ = tokens.one_row(hidden_states)
    return hidden_states, LayerMemory(stored, tokens, T)


def convolve(conv1d: nn.Conv1d, x: Tensor, memory: LayerMemory) -> Tensor:
    """x (B, T, C) through a causal convolution, channel by channel, and SiLU."""
    channels, _, kernel_size = conv1d.weight.shape
    recurrence = ConvolutionWindow("conv", channels, kernel_size)
    x_in = x.to(conv1d.weight.dtype)
    y = memory.run(recurrence, {"x": x_in, "weight": conv1d.weight, "bias": conv1d.bias})
    return y.to(x.dtype)
