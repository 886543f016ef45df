# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The rows of caches: cut apart, gathered, and joined from several caches into one batch.

Shapes: B batch, Hkv key-value heads, T tokens, D head dim.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from .growing import GrowingLayer
from .layers import MemoryLayer, RecurrentLayer, SlidingWindowLayer

# What gathered rows become: the place in this list goes with them.
KINDS: tuple[type[CacheLayerMixin], ...] = (
    RecurrentLayer,
    MemoryLayer,
    SlidingWindowLayer,
    GrowingLayer,
)


def dtype_of_layer(layer: CacheLayerMixin) -> str:
    """The dtype of what a layer keeps for its model; "" before the first token."""
    if layer.get_seq_length() == 0:
        return ""
    dtype = layer.dtype if isinstance(layer, RecurrentLayer) else layer.keys.dtype
    return str(dtype).removeprefix("torch.")


def named_tensors(layer: CacheLayerMixin, sliding_window: int | None) -> dict[str, Tensor]:
    """What a layer needs to go on, by name; for softmax layers (B, Hkv, tokens, D)."""
    if layer.get_seq_length() == 0:
        return {}
    if isinstance(layer, RecurrentLayer):
        return layer.tensors
    length = int(layer.get_seq_length())  # static layers have room for more
    keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
    if layer.is_sliding:  # what the next token sees: recording and static layers keep more
        assert sliding_window is not None
        first = max(keys.shape[2] - (sliding_window - 1), 0)
        keys, values = keys[:, :, first:], values[:, :, first:]
    return {"keys": keys, "values": values}


def fill(
    layer: CacheLayerMixin, named: dict[str, Tensor], num_tokens: int, dtype: torch.dtype | None
) -> None:
    """Makes of an empty layer one with these tensors, which it takes over."""
    if isinstance(layer, RecurrentLayer):
        layer.tensors, layer.num_tokens, layer.dtype = named, num_tokens, dtype
        return
    layer.lazy_initialization(named["keys"], named["values"])
    layer.keys, layer.values = named["keys"], named["values"]
    if isinstance(layer, SlidingWindowLayer):
        layer.cumulative_length = num_tokens


# ---- rows of a cache, as tensors (B, ...) that torch.nn.DataParallel gathers ----


def rows_of(cache: Cache) -> Iterator[dict[str, Tensor]]:
    """For each layer its tensors by name, and (B,) of what else it needs to go on: `kind`,
    `num_tokens`, `sliding_window`, `left_padding`. Nothing before the first token.
    """
    for layer in cache.layers:
        rows = dict(named_tensors(layer, cache.config.sliding_window))
        if rows:
            some = next(iter(rows.values()))
            kind = _kind_of(layer)
            numbers = {
                "kind": KINDS.index(kind),
                "num_tokens": int(layer.get_seq_length()),
            }
            if kind is SlidingWindowLayer:
                numbers["sliding_window"] = cache.config.sliding_window
            for name, number in numbers.items():
                rows[name] = some.new_full(some.shape[:1], number, dtype=torch.long)
            if cache.left_padding is not None:
                rows["left_padding"] = cache.left_padding
        yield rows


def _kind_of(layer: CacheLayerMixin) -> type[CacheLayerMixin]:
    """Of static layers the class of those that are not."""
    if isinstance(layer, RecurrentLayer):
        return MemoryLayer if isinstance(layer, MemoryLayer) else RecurrentLayer
    return SlidingWindowLayer if layer.is_sliding else GrowingLayer


def layer_of_rows(rows: dict[str, Tensor]) -> tuple[CacheLayerMixin, Tensor | None]:
    """The layer that `rows_of` took apart, and the left padding of its rows."""
    if not rows:
        raise ValueError("only caches that have read a token can be gathered")
    named = dict(rows)
    kind, num_tokens = (int(named.pop(name)[0]) for name in ("kind", "num_tokens"))
    left_padding = named.pop("left_padding", None)
    window = named.pop("sliding_window", None)
    layer = KINDS[kind](**({} if window is None else {"sliding_window": int(window[0])}))
    fill(layer, named, num_tokens, None)  # the model sets its dtype
    return layer, left_padding


# ---- rows of several caches ----


def read_masks(caches: Sequence[Cache], attention_masks: Sequence[Tensor] | None) -> list[Tensor]:
    """For each cache the mask (B, T) of the real ones of its tokens.

    Raises:
        ValueError: a mask has another shape, or there are not as many as caches.
    """
    if attention_masks is not None and len(attention_masks) != len(caches):
        raise ValueError(
            f"attention_masks must be one for each of {len(caches)} caches, got "
            f"{len(attention_masks)}"
        )
    masks = []
    for index, cache in enumerate(caches):
        length = int(cache.get_seq_length())
        some = next(iter(named_tensors(cache.layers[0], cache.config.sliding_window).values()))
        mask = torch.ones(some.shape[0], length, dtype=torch.bool, device=some.device)
        if attention_masks is not None:
            given = attention_masks[index]
            if given.shape != mask.shape:
                raise ValueError(
                    "attention_masks must have the shapes of what was read, "
                    f"{tuple(mask.shape)} for one of them, got {tuple(given.shape)}"
                )
            mask = mask & (given.to(mask.device) != 0)
        if cache.left_padding is not None:
            mask = mask & (torch.arange(length, device=mask.device) >= cache.left_padding[:, None])
        masks.append(mask)
    return masks


def join_layers(
    joined: CacheLayerMixin,
    layers: Sequence[CacheLayerMixin],
    masks: Sequence[Tensor],
    num_tokens: int,
    sliding_window: int | None,
) -> None:
    """Fills the layer `joined` with the rows of `layers`, which have read tokens with these masks,
    and of which none has more than num_tokens real ones.
    """
    parts = [named_tensors(layer, sliding_window) for layer in layers]
    dtypes = {dtype_of_layer(layer) for layer in layers}
    if len(dtypes) > 1:
        raise ValueError(f"caches must be of one dtype, got {sorted(dtypes)}")
    if not any(parts):  # of a memory, where there is none
        return
    if isinstance(joined, SlidingWindowLayer):
        assert sliding_window is not None
        for part, mask in zip(parts, masks, strict=True):
            _check_window(mask, part["keys"].shape[2], sliding_window)
    named = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if not isinstance(joined, RecurrentLayer):
            tensors = [
                _real_keys_last(x, mask, num_tokens) for x, mask in zip(tensors, masks, strict=True)
            ]
            longest = max(x.shape[2] for x in tensors)
            tensors = [F.pad(x, (0, 0, longest - x.shape[2], 0)) for x in tensors]
        named[name] = torch.cat(tensors)
    fill(joined, named, num_tokens, getattr(torch, dtypes.pop()))


def _check_window(mask: Tensor, num_kept: int, sliding_window: int) -> None:
    """Raises a ValueError where of rows with a mask (B, T), the last num_kept of whose tokens are
    kept, real ones are lost that the next token must see.
    """
    kept = mask[:, mask.shape[1] - num_kept :].sum(1)
    needed = mask.sum(1).clamp(max=sliding_window - 1)
    if (kept < needed).any():
        raise ValueError(
            "attention_masks must not have so much padding behind real tokens that it took their "
            f"place in a sliding window of {sliding_window}: rows need {needed.tolist()} real "
            f"tokens of it, got {kept.tolist()}; read them with padding in front"
        )


def _real_keys_last(x: Tensor, mask: Tensor, most: int) -> Tensor:
    """x (B, Hkv, n, D), of the last n tokens of a mask (B, T), with the real ones moved to the end,
    and of all of them the last `most`.
    """
    order = mask[:, mask.shape[1] - x.shape[2] :].int().argsort(dim=1, stable=True)
    x = x.gather(2, order[:, None, :, None].expand(x.shape))
    return x[:, :, max(x.shape[2] - most, 0) :]
