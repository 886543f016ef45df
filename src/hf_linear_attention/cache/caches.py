# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The caches of a linear-attention model, whose size does not depend on the number of tokens."""

from collections.abc import Iterable
from typing import Any

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

from ..releases import CACHE
from .extras import ExportedCache, JoinedCache, SavedCache
from .files import check_same_state
from .layers import TAKES_NOTHING_BACK, RecurrentLayer, layer_classes


class RecurrentCache(SavedCache, Cache):
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
        self.config = config
        self.left_padding = None
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

    def reset(self) -> None:
        """Forgets every token and keeps the memory of the states."""
        self.left_padding = None
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # transformers 5.17 only fills its tensors with zeros, and so keeps counting them
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.left_padding is not None:
            self.left_padding = self.left_padding[beam_idx.to(self.left_padding.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        self._check_rows("batch_select_indices")
        super().batch_select_indices(indices)
        if self.left_padding is not None:
            self.left_padding = self.left_padding[indices.to(self.left_padding.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._check_rows("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)
        if self.left_padding is not None:
            self.left_padding = self.left_padding.repeat_interleave(repeats)

    def _check_rows(self, method: str) -> None:
        """Raises an error where a layer can't have another number of rows, before any has."""
        if not all(hasattr(layer, method) for layer in self.layers):
            raise RuntimeError(
                f"{method}() is not for a static cache with softmax layers, whose number of rows "
                "is fixed. Use a LinearAttentionCache; LinearAttentionCache.join makes one of this"
            )


class LinearAttentionCache(JoinedCache, RecurrentCache, DynamicCache):
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
        if config is None or isinstance(config, PreTrainedConfig):
            self._make_layers(config, None, offloading, offload_only_non_sliding)
        else:
            self._gather(config)


class StaticLinearAttentionCache(ExportedCache, RecurrentCache, StaticCache):
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
    if (new_softmax_layer := getattr(cache, "new_softmax_layer", None)) is not None:
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
