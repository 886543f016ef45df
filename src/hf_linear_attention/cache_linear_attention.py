# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The cache of a linear-attention model: what it remembers, in a size that reading never changes.

Shapes: B batch, Hkv key-value heads, K key dim, V value dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .chunked import LinearAttentionState

IS_NOT_STOCK = "the cache of a linear-attention layer is written by the layer itself (`write`)"
CANNOT_ROLL_BACK = (
    "a linear-attention state can't be rolled back yet, so neither crop() nor assisted generation "
    "works with this cache: reset() it and read the shorter prompt again"
)


# Transformers asks each base for something: CacheLayerMixin counts tokens, which generate() needs;
# LinearAttentionCacheLayerMixin says that this layer is not one to offload or to make masks for.
class RecurrentLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one linear-attention layer remembers, in `tensors`:

    "kv" (B, Hkv, K, V) and "z" (B, Hkv, K), float32 (float64 in a float64 model), and, with a short
    convolution, the last kernel_size - 1 real inputs of each, "q_conv", "k_conv" and "v_conv"
    (B, kernel_size - 1, channels), in the model's dtype.

    Only this class changes them, in place: their addresses stay until the batch size changes, or
    until autograd needs their old values.
    """

    is_compileable = False  # generate() would compile every model on CUDA by itself
    is_croppable = False
    supports_early_init = False

    def __init__(self, **kwargs):
        self.keys = self.values = None  # of softmax layers; whoever iterates over a cache asks
        self.tensors: dict[str, Tensor] = {}
        self.num_tokens = 0

    @property
    def is_initialized(self) -> bool:
        return bool(self.tensors)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.num_tokens > 0}

    @property
    def state(self) -> LinearAttentionState | None:
        """The state to continue from; None before the first token."""
        if self.num_tokens == 0:
            return None
        return LinearAttentionState(self._read("kv"), self._read("z"))

    def conv_state(self, name: str) -> Tensor | None:
        """The inputs that the convolution of "q", "k" or "v" still sees, or None."""
        return self._read(f"{name}_conv") if self.num_tokens > 0 else None

    def write_state(self, state: LinearAttentionState) -> None:
        self.write("kv", state.kv)
        if state.z is not None:
            self.write("z", state.z)

    def start(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, normalize: bool
    ) -> LinearAttentionState:
        """An all-zero state in place, for a first token k (B, Hkv, K), v (B, Hkv, V)."""
        kv = k.new_zeros(*k.shape, v.shape[-1], dtype=dtype)
        self.write_state(LinearAttentionState(kv, kv[..., 0] if normalize else None))
        return LinearAttentionState(self.tensors["kv"], self.tensors.get("z"))

    def write(self, name: str, new: Tensor) -> None:
        """Keeps `new`, in the memory of the tensor that it replaces where there is one."""
        old = self._read(name)
        if new.requires_grad:  # the graph holds the old values
            self.tensors[name] = new.contiguous()
        elif old is None or old.shape != new.shape or old.requires_grad:
            self.tensors[name] = new.clone(memory_format=torch.contiguous_format)
        else:
            old.copy_(new)

    def _read(self, name: str) -> Tensor | None:
        """The tensor of that name, which may be changed in place in the current grad mode."""
        tensor = self.tensors.get(name)
        if tensor is None or torch.compiler.is_compiling():
            return tensor
        has_graph = tensor.requires_grad and not torch.is_grad_enabled()
        is_frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
        if has_graph or is_frozen:
            tensor = self.tensors[name] = tensor.clone()
        return tensor

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1  # none

    def reset(self) -> None:
        self.num_tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for name, tensor in self.tensors.items():
            self.write(name, tensor.repeat_interleave(repeats, dim=0))

    def _select_rows(self, indices: Tensor) -> None:
        for name, tensor in self.tensors.items():
            self.write(name, tensor[indices.to(tensor.device)])

    def activate_past_recording(self) -> None:
        raise RuntimeError(CANNOT_ROLL_BACK)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise RuntimeError(CANNOT_ROLL_BACK)

    def offload(self) -> None:
        """Stays on its device: it never grows."""

    def prefetch(self) -> None:
        """Never left its device."""

    # The interface of stock layers, which the model does not use.
    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(IS_NOT_STOCK)

    def update_conv_state(self, conv_states, state_idx=0, **kwargs):
        raise TypeError(IS_NOT_STOCK)

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        raise TypeError(IS_NOT_STOCK)

    def lazy_initialization(self, *args, **kwargs):
        raise TypeError(IS_NOT_STOCK)


class LinearAttentionCache(Cache):
    """One layer per layer of the model: fixed-size states for linear attention, and Transformers'
    own growing and sliding layers for softmax attention.

    `generate()` makes it by itself. Made by hand, it is passed as `past_key_values`.

    Args:
        config: of the model; decides on the layers.
        offloading, offload_only_non_sliding: as in `DynamicCache`, for the softmax layers.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ):
        layers = [
            layer_class(sliding_window=config.sliding_window)
            for layer_class in layer_classes(config)
        ]
        super().__init__(
            layers=layers,
            # without softmax layers there is nothing to offload, nor a need for CUDA streams
            offloading=offloading and any(type(layer) is not RecurrentLayer for layer in layers),
            offload_only_non_sliding=offload_only_non_sliding,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the cache."""
        return sum(tensor.nbytes for tensors in self for tensor in tensors if tensor is not None)

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """The tensors of each layer; None where there is nothing yet."""
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                yield tuple(layer.tensors.values())
            else:
                yield layer.keys, layer.values

    def reset(self) -> None:
        """Forgets every token and keeps the memory of the states."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # transformers 5.17 only fills its tensors with zeros, and so keeps counting them
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens; only where every layer can."""
        if tokens_to_remove != 0 and not self.is_croppable:
            raise RuntimeError(CANNOT_ROLL_BACK)
        super().crop(tokens_to_remove)


LAYER_CLASSES = {
    "linear_attention": RecurrentLayer,
    "full_attention": DynamicLayer,
    "sliding_attention": DynamicSlidingWindowLayer,
}


def layer_classes(config: PreTrainedConfig) -> list[type[CacheLayerMixin]]:
    """The class of cache layer that each layer of the model writes to."""
    return [LAYER_CLASSES[layer_type] for layer_type in config.layer_types]


def cache_for_model(cache: Cache, config: PreTrainedConfig) -> Cache:
    """`cache`, with the layers that a model of `config` writes to.

    A cache that has them is returned as it is. An empty DynamicCache, which users and clients make,
    gets them. Anything else is an error.
    """
    if [type(layer) for layer in cache.layers] == layer_classes(config):
        return cache
    if type(cache) is not DynamicCache or any(_has_read(layer) for layer in cache.layers):
        raise ValueError(
            "past_key_values must be a LinearAttentionCache made for this model, or a DynamicCache "
            f"that has read nothing, got {cache}"
        )
    cache.layers = LinearAttentionCache(config).layers
    cache.layer_class_to_replicate = None
    return cache


def _has_read(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin) -> bool:
    if isinstance(layer, LinearAttentionLayer):
        return any(layer.has_previous_state.values())
    return layer.is_initialized
