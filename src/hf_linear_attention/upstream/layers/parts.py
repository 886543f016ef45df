# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Parts that our forwards of Transformers' recurrent layers share: tokens, states and convolutions.

Shapes: B batch, T time, C channels.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...cache.layer_state import LayerMemory
from ...cache.slots import SlotCache
from ...ops.tokens import Tokens
from ...recurrences.convolution import ConvolutionInputs, ConvolutionWindow
from ...recurrences.interface import Recurrence
from ...recurrences.sequence_parallel import Shards
from ...recurrences.tree import TokenTree
from ...releases import CACHE, CACHE_NAMES, cache_among
from ..bounds import BOUNDS, SHARDS, MaskAndBounds, bounds_for_layers
from ..stock_caches import StockLayer

CACHES = (Cache, SlotCache)
PACKED_AND_CACHED = (
    "packed sequences can't be cached, since a cache keeps one state a row: give use_cache=False, "
    "or the sequences as rows with an attention_mask"
)


class ReplacedLayer(nn.Module):
    """What all of Transformers' recurrent layers on our kernels are asked for."""

    takes_tokens_back = True
    state_in_fp64: bool | None = None  # whatever the model's dtype; None: it can't
    is_cached = True  # what it remembers; else it is on modules
    # What limits nothing in most models, and values at which it does (for trials, see proof.py).
    limits: ClassVar[Mapping[str, Any]] = {}

    @property
    def mended(self) -> set[str]:
        """Where Transformers' own layer is wrong, and this one is not: "padding" on the left,
        "steps" by one token, those of several "rows", "pieces" of several after others, "half
        precision without a cache".
        """
        names = (name for name, _ in self.named_parameters())
        return {"padding"} if any(name.endswith("in_proj.bias") for name in names) else set()


class ConvolvedLayer(ReplacedLayer):
    """What is read of Transformers' layers with a convolution before their recurrence."""

    state_in_fp64 = False
    layer_idx: int
    activation: str
    conv1d: nn.Conv1d

    @staticmethod
    def why_not(layer: nn.Module) -> str | None:
        """Why this must not replace a layer of Transformers; None where it may."""
        if layer.activation in ("silu", "swish"):
            return None
        return f"its convolution is followed by {layer.activation!r}, and ours by SiLU"

    @property
    def recurrence(self) -> Recurrence:
        """That behind the convolution."""
        raise NotImplementedError

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        return [self.recurrence, window_of(self.conv1d)]


def tokens_of(
    hidden_states: Tensor,
    cache: Cache | None,
    attention_mask: Tensor | MaskAndBounds | None,
    kwargs: Mapping[str, Any],
) -> Tokens:
    """What a layer is told of its tokens.

    Args:
        hidden_states: (B, T, C).
        attention_mask: (B, T), false or 0 for padding; perhaps with bounds of packed sequences.
        kwargs: the layer's other arguments, among them, perhaps, such bounds.
    """
    B, T, _ = hidden_states.shape
    shards: Shards | None = kwargs.get(SHARDS)
    if shards is not None:
        key_mask = None if shards.key_mask is None else shards.part(shards.key_mask)
        return Tokens(is_causal=True, key_mask=key_mask, shards=shards)
    tree = kwargs.get(BOUNDS)
    if isinstance(attention_mask, MaskAndBounds):
        tree = attention_mask.bounds
    if isinstance(tree, TokenTree):
        return Tokens(is_causal=True, tree=tree.levels(hidden_states.device))
    cu_seqlens = bounds_for_layers(kwargs, B, T)
    if isinstance(attention_mask, MaskAndBounds):
        cu_seqlens = attention_mask.bounds
        attention_mask = attention_mask.mask
    if cu_seqlens is not None and cache is not None:
        raise ValueError(PACKED_AND_CACHED)
    if attention_mask is not None:
        if attention_mask.shape != (B, T):
            raise ValueError(
                f"attention_mask must be {(B, T)} like the tokens, got "
                f"{tuple(attention_mask.shape)}. generate() with guidance_scale loses the cache "
                "of some models, and needs use_cache=False there"
            )
        attention_mask = attention_mask.bool()
        if cu_seqlens is not None:
            attention_mask = attention_mask.view(1, B * T)
    return Tokens(is_causal=True, key_mask=attention_mask, cu_seqlens=cu_seqlens)


def take_cache(cache: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The cache that a layer is given as `cache`, or among its other arguments by a name that it
    has in another release of Transformers; and the other arguments without it. In a continuous
    batch it is that of slots: before 5.24 every layer is given softmax layers' pages, as `cache`.

    Raises:
        TypeError: there is one by a name that nobody knows, which would not be read.
        ValueError: two are given by different names, and are not the same.
    """
    caches, others = {"cache": cache}, {}
    for name, given in kwargs.items():
        if name in CACHE_NAMES:
            caches[name] = given
        elif isinstance(given, CACHES):
            raise TypeError(f"a layer's cache has no name like {name!r}: give it as {CACHE!r}")
        else:
            others[name] = given
    slots = next((given for given in caches.values() if isinstance(given, SlotCache)), None)
    return cache_among(**caches) if slots is None else slots, others


def begin(
    layer: Any,  # of a layer_idx
    hidden_states: Tensor,
    cache: Cache | SlotCache | None,
    attention_mask: Tensor | None,
    kwargs: Mapping[str, Any],
    is_transposed: bool = False,
    state_idx: int = 0,
    layer_idx: int | None = None,
) -> tuple[Tensor, LayerMemory]:
    """What the forward of a layer with a stock cache begins with: hidden states, in one row where
    sequences are packed, and the layer's memory. Arguments as of `tokens_of` and StockLayer; the
    cache may be among `kwargs`, by another name of it.
    """
    cache, kwargs = take_cache(cache, kwargs)
    layer_idx = layer.layer_idx if layer_idx is None else layer_idx
    if isinstance(cache, SlotCache):
        return hidden_states, memory_in_slots(layer_idx, hidden_states, cache)
    T, stored = hidden_states.shape[1], None
    if cache is not None:
        dtype = torch.float64 if layer.state_in_fp64 else hidden_states.dtype
        stored = StockLayer(cache, layer_idx, is_transposed, dtype, state_idx)
        stored.check_rows(hidden_states.shape[0])
        if stored.views and isinstance(attention_mask, Tensor):
            attention_mask = attention_mask[:, -T:]  # Mamba's is of the tokens before, too
    tokens = tokens_of(hidden_states, cache, attention_mask, kwargs)
    hidden_states, _ = tokens.one_row(hidden_states)
    return hidden_states, LayerMemory(stored, tokens, T)


def memory_in_slots(layer_idx: int, hidden_states: Tensor, cache: SlotCache) -> LayerMemory:
    """The memory of a layer in a continuous batch, all of whose tokens (1, T, C) are real."""
    tokens = Tokens(is_causal=True)
    return LayerMemory(cache.layers[layer_idx], tokens, hidden_states.shape[1])


def window_of(conv1d: nn.Conv1d, activation: str | None = "silu") -> ConvolutionWindow:
    """What a causal convolution remembers, channel by channel; then SiLU or no activation."""
    channels, _, kernel_size = conv1d.weight.shape
    return ConvolutionWindow("conv", channels, kernel_size, activation)


def convolve(
    conv1d: nn.Conv1d, x: Tensor, memory: LayerMemory, activation: str | None = "silu"
) -> Tensor:
    """x (B, T, C) through a causal convolution, channel by channel, and SiLU or no activation."""
    recurrence = window_of(conv1d, activation)
    x_in = x.to(conv1d.weight.dtype)
    y = memory.run(recurrence, ConvolutionInputs(x_in, conv1d.weight, conv1d.bias))
    return y.to(x.dtype)
