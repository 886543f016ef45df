# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The caches of a linear-attention model: what it remembers, in a size that never changes."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
)

from .cache_files import check_same_state, fingerprint, load_into, save_cache
from .cache_layers import (
    TAKES_NOTHING_BACK,
    MemoryLayer,
    RecurrentLayer,
    SlidingWindowLayer,
    StaticRecurrentLayer,
    layer_classes,
)
from .cache_rows import join_layers, layer_of_rows, read_masks, rows_of
from .releases import CACHE

NEEDS_CONFIG = (
    "must be one that its model has read with, which gives it the model's config, "
    "got one that was gathered from rows and not used since"
)


class RecurrentCache(Cache):
    """What the dynamic and the static cache of this package's models have in common: one layer per
    layer of the model, of fixed size where it has recurrences. With cross attention, then one per
    layer of the model again: the states of the memory.
    """

    config: Any  # of the model; None in a gathered cache that it has not seen yet
    # Of rows that were joined, how many of the tokens in front of each (B,) are padding.
    left_padding: Tensor | None

    def _make_layers(
        self,
        config: PreTrainedConfig,
        max_cache_len: int | None,
        offloading: bool,
        offload_only_non_sliding: bool,
    ) -> None:
        """Begins as a `Cache` with the layers that `config` asks for. The constructors of
        Transformers' DynamicCache and StaticCache would look them up in tables of its own.
        """
        if not hasattr(config, "active_layer_types"):
            raise ValueError(f"config must be a LinearAttentionConfig, got {type(config).__name__}")
        self.config, self.left_padding = config, None
        classes = layer_classes(config, is_static=max_cache_len is not None)
        sizes = {"sliding_window": config.sliding_window, "max_cache_len": max_cache_len}
        leaves = [  # without any, there is no need for CUDA streams
            layer_type != "linear_attention"
            and not (offload_only_non_sliding and layer_type == "sliding_attention")
            for layer_type in config.active_layer_types
        ]
        Cache.__init__(
            self,
            layers=[make(**sizes) for make in classes],
            offloading=offloading and any(leaves),
            offload_only_non_sliding=offload_only_non_sliding,
        )

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

    def reset(self) -> None:
        """Forgets every token and keeps the memory of the states."""
        self.left_padding = None
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # transformers 5.17 only fills its tensors with zeros, and so keeps counting them
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens. Recurrent and sliding-window layers can do
        this for tokens read after `activate_past_recording()`.
        """
        for layer in self.layers:  # all layers or none
            if isinstance(layer, (RecurrentLayer, SlidingWindowLayer)):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_left_padding(lambda x: x[beam_idx.to(x.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._check_rows("batch_select_indices")
        super().batch_select_indices(indices)
        self._map_left_padding(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._check_rows("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)
        self._map_left_padding(lambda x: x.repeat_interleave(repeats))

    def _check_rows(self, method: str) -> None:
        """Raises an error where a layer can't have another number of rows, before any has."""
        if not all(hasattr(layer, method) for layer in self.layers):
            raise RuntimeError(
                f"{method}() is not for a static cache with softmax layers, whose number of rows "
                "is fixed. Use a LinearAttentionCache; LinearAttentionCache.join makes one of this"
            )

    def _map_left_padding(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.left_padding is not None:
            self.left_padding = function(self.left_padding)

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


class LinearAttentionCache(RecurrentCache, DynamicCache):
    """A cache of fixed-size states for linear attention, and of Transformers' own growing and
    sliding layers for softmax attention. Transformers and its clients branch on DynamicCache: on
    what grows and can be cropped.

    `generate()` makes it by itself. Made by hand, it is passed as `past_key_values`, or `cache`, as
    Transformers calls it since 5.24.

    Args:
        config: of the model; decides on the layers. Or what iterating over caches yields, by which
            `torch.nn.DataParallel` makes one of those of its replicas.
        offloading, offload_only_non_sliding: as in `DynamicCache`, for the softmax layers.
    """

    def __init__(
        self,
        config: PreTrainedConfig | Iterable[dict[str, Tensor]],
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ):
        if config is not None and not isinstance(config, PreTrainedConfig):
            self.config = None
            gathered = [layer_of_rows(rows) for rows in config]
            Cache.__init__(self, layers=[layer for layer, _ in gathered])
            self.left_padding = gathered[0][1]
            return
        self._make_layers(config, None, offloading, offload_only_non_sliding)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "LinearAttentionCache":
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
        caches: Sequence[RecurrentCache],
        attention_masks: Sequence[Tensor] | None = None,
    ) -> "LinearAttentionCache":
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


class StaticLinearAttentionCache(RecurrentCache, StaticCache):
    """A cache that compiled models can use without compiling again: it counts its tokens in a
    tensor and keeps every address. Transformers and its clients branch on StaticCache: on lengths
    that don't change.

    `generate(cache_implementation="static")` makes it by itself.

    Args:
        config: of the model; decides on the layers.
        max_cache_len: the number of tokens that its softmax layers have room for; states need none.
        offloading, offload_only_non_sliding: as in `StaticCache`, for the softmax layers.

    Raises:
        ValueError: max_cache_len is no number of tokens.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ):
        if type(max_cache_len) is not int or max_cache_len < 1:
            raise ValueError(f"max_cache_len must be an integer from 1 on, got {max_cache_len!r}")
        self._make_layers(config, max_cache_len, offloading, offload_only_non_sliding)

    def activate_past_recording(self) -> None:
        """Refuses: Transformers does so for its own StaticCache, and not for what derives from it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(TAKES_NOTHING_BACK)

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


def cache_for_model(cache: Cache, config: PreTrainedConfig) -> Cache:
    """`cache`, with the layers that a model of `config` writes to.

    A cache that has them is returned as it is. An empty DynamicCache or StaticCache, which users
    and clients make, gets them, and a BoundedCache that has read nothing. Of an
    EncoderDecoderCache the first half is enough. Anything else is an error.
    """
    if isinstance(cache, EncoderDecoderCache):
        return cache_for_model(cache.self_attention_cache, config)
    if not isinstance(cache, Cache):
        raise ValueError(f"{CACHE} must be a Cache, got {type(cache).__name__}")
    classes = [type(layer) for layer in cache.layers]
    if classes in (layer_classes(config), layer_classes(config, is_static=True)):
        theirs = getattr(cache, "config", config)
        if theirs is not config:
            if theirs is not None:  # as one is that DataParallel gathered
                check_same_state(theirs, config)
            cache.config = config
        return cache
    # the installed package's class, which remote code does not know
    new_softmax_layer = getattr(cache, "new_softmax_layer", None)
    if new_softmax_layer is not None:
        if not any(_has_read(layer) for layer in cache.layers):
            cache.layers = [
                layer_class() if issubclass(layer_class, RecurrentLayer) else new_softmax_layer()
                for layer_class in layer_classes(config)
            ]
        is_recurrent = [issubclass(x, RecurrentLayer) for x in layer_classes(config)]
        if [isinstance(layer, RecurrentLayer) for layer in cache.layers] == is_recurrent:
            return cache
    has_read = any(_has_read(layer) for layer in cache.layers)
    if type(cache) not in (DynamicCache, StaticCache) or has_read:
        raise ValueError(
            f"{CACHE} must be a LinearAttentionCache or StaticLinearAttentionCache made for "
            "this model, or a DynamicCache, StaticCache or bounded cache that has read nothing, "
            f"got {cache}. Keys and values that others make, as PEFT's prefix tuning does, are no "
            "state of linear attention"
        )
    is_recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
    if type(cache) is StaticCache:  # without softmax layers there is no maximum, and any will do
        max_cache_len = max((getattr(x, "max_cache_len", 1) for x in cache.layers), default=1)
        softmax_types = set(config.active_layer_types) - {"linear_attention"}
        if softmax_types == {"sliding_attention"} and max_cache_len >= config.sliding_window:
            raise ValueError(
                f"{CACHE} must be a StaticLinearAttentionCache(config, max_cache_len) for a "
                "model whose softmax layers all have a sliding window, got a StaticCache, which "
                f"knows nothing longer than that window of {config.sliding_window}"
            )
        cache.layers = StaticLinearAttentionCache(config, max_cache_len).layers
    else:
        cache.layers = LinearAttentionCache(config).layers
    cache.layer_class_to_replicate = None
    if is_recording:
        cache.activate_past_recording()
    return cache


def _has_read(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin) -> bool:
    if isinstance(layer, LinearAttentionLayer):
        return any(layer.has_previous_state.values())
    return layer.is_initialized
