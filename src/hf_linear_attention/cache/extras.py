# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Further methods of caches: saving, joining, gathering rows, cropping, exporting."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .files import fingerprint, load_into, save_cache
from .layers import MemoryLayer, RecurrentLayer, SlidingWindowLayer, StaticRecurrentLayer
from .rows import join_layers, layer_of_rows, read_masks, rows_of

NEEDS_CONFIG = (
    "must be one that its model has read with, which gives it the model's config, "
    "got one that was gathered from rows and not used since"
)


class SavedCache(Cache):
    """Of the dynamic and the static cache."""

    config: Any
    left_padding: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the cache."""
        tensors: list[Tensor | None] = []
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                tensors += layer.tensors.values()
                tensors += [] if layer.recording is None else layer.recording.tensors()
            else:
                tensors += [layer.keys, layer.values]
        return sum({id(x): x.nbytes for x in tensors if x is not None}.values())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """What each layer needs to go on, by name, for each row; a LinearAttentionCache is made of
        it. Nothing before the first token.
        """
        return rows_of(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens. Recurrent and sliding-window layers can do
        this for tokens read after `activate_past_recording()`.
        """
        for layer in self.layers:  # all layers or none
            if isinstance(layer, (RecurrentLayer, SlidingWindowLayer)):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the cache to a safetensors file, all of it or nothing.

        What a recording cache could take back is not written. Of a static cache comes back one that
        is not static.

        Raises:
            ValueError: it was gathered from rows, and no model has read with it since.
        """
        if self.config is None:
            raise ValueError(f"a cache that is saved {NEEDS_CONFIG}")
        save_cache(self, path)


class JoinedCache(SavedCache):
    """Of the dynamic cache."""

    def _gather(self, rows_of_layers: Iterable[dict[str, Tensor]]) -> None:
        """Begins with what iterating over other caches yields."""
        self.config = None
        gathered = [layer_of_rows(rows) for rows in rows_of_layers]
        Cache.__init__(self, layers=[layer for layer, _ in gathered])
        self.left_padding = gathered[0][1]

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "JoinedCache":
        """A cache that `save` wrote, to continue from where that one was.

        Args:
            config: of the model that will use it.
            device: of that model.
            dtype: of that model; by default config.dtype, which from_pretrained sets. None is not
                checked.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: it is no such file, or damaged, or from a model with another config or
                dtype. (Whether the weights are others can't be seen.)
        """
        cache = cls(config)
        load_into(cache, path, device, config.dtype if dtype is None else dtype)
        return cache

    @classmethod
    def join(
        cls,
        caches: Sequence[SavedCache],
        attention_masks: Sequence[Tensor] | None = None,
    ) -> "JoinedCache":
        """One cache with the rows of all, in order, for prompts of any lengths.

        The cache counts the tokens of each row: what is read next needs no mask and no positions.
        Its length is that of the longest row, as if the others had been padded on the left.

        Args:
            caches: of one model; each has read something.
            attention_masks: for each cache the mask (rows, tokens read) that it was read with; by
                default no token was padding.

        Raises:
            ValueError: they are of different models or dtypes, one is empty, a mask has another
                shape, or padding behind a row has taken its place in a sliding window.
        """
        if not caches:
            raise ValueError("caches must hold at least one cache, got none")
        if not all(isinstance(cache, Cache) and hasattr(cache, "config") for cache in caches):
            names = [type(cache).__name__ for cache in caches]
            raise ValueError(f"each of caches must be a LinearAttentionCache, got {names}")
        if any(cache.config is None for cache in caches):
            raise ValueError(f"each of caches {NEEDS_CONFIG}")
        config = caches[0].config
        expected = fingerprint(config)
        for cache in caches:
            if fingerprint(cache.config) != expected:
                raise ValueError("caches must be of one model, got some with different configs")
            if int(cache.get_seq_length()) == 0:
                raise ValueError("caches must have read at least one token each, got an empty one")
        masks = read_masks(caches, attention_masks)
        counts = torch.cat([mask.sum(1) for mask in masks])
        longest = int(counts.max())
        joined = cls(config)
        if (counts != longest).any():
            joined.left_padding = longest - counts
        for index, layer in enumerate(joined.layers):
            layers = [cache.layers[index] for cache in caches]
            join_layers(layer, layers, masks, longest, config.sliding_window)
        return joined


class ExportedCache(SavedCache):
    """Of the static cache."""

    def static_tensors(self) -> dict[str, Tensor]:
        """By name, all tensors that the cache changes, once it has read something: what a module
        that is exported with the cache must have as buffers.

        Raises:
            RuntimeError: it has read nothing yet.
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, MemoryLayer):  # there may be no memory
                named = layer.tensors
            elif not layer.is_initialized:
                raise RuntimeError("static_tensors() needs a cache that has read a token")
            elif isinstance(layer, StaticRecurrentLayer):
                named = {**layer.tensors, "num_tokens": layer.num_tokens}
            else:
                named = {
                    "keys": layer.keys,
                    "values": layer.values,
                    "num_tokens": layer.cumulative_length,
                }
            tensors |= {f"cache_{index}_{name}": x for name, x in named.items()}
        return tensors
