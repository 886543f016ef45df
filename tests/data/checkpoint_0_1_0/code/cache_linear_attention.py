# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The cache of a linear-attention model: what it remembers, in a size that reading never changes.

Shapes: B batch, Hkv key-value heads, K key dim, V value dim.
"""

import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)

from .chunked import LinearAttentionState
from .linear_attention import linear_attention

FILE_FORMAT = "hf-linear-attention cache 1"
NOT_IN_THE_STATE = {  # fields of a config that change nothing in what a cache holds
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "use_cache",
}

IS_NOT_STOCK = "the cache of a linear-attention layer is written by the layer itself (`write`)"

# How many of the last tokens crop() can remove while a cache records. Drafts are shorter than the
# first number; with it a long prompt is not kept whole. The second, smaller one holds for tokens
# that an earlier crop() left: an assistant with another tokenizer comes back to a few of them.
RECORDED_TOKENS = 1024
RECORDED_TOKENS_AFTER_CROP = 16


class Recording:
    """The state before the last few tokens, and what they add to it: enough to take them back.

    `before` holds the tensors of a RecurrentLayer as they were then, nothing before the first
    token; nobody changes them in place. `inputs` holds, by name and for each forward since, "k"
    (B, T, Hkv, K), "v" (B, T, Hkv, V), "log_decay" (B, T, Hkv) or None, "key_mask" (B, T) or None,
    decay="aaren"'s "running_max" (B, T, Hkv), and what short convolutions read, "q_conv", "k_conv"
    and "v_conv" (B, T, channels).
    """

    def __init__(self, before: dict[str, Tensor], conv_kernel_size: int):
        self.before = before
        self.conv_kernel_size = conv_kernel_size
        self.inputs: dict[str, list[Tensor | None]] = {}
        self.options: dict[str, Any] = {}  # of the op
        self.num_tokens = 0

    def append(self, **inputs: Tensor | None) -> None:
        for name, x in inputs.items():
            self.inputs.setdefault(name, []).append(x)

    def remove_last(self, n: int) -> None:
        self._slice(0, self.num_tokens - n)

    def fold_all_but(self, n: int) -> None:
        """Moves `before` on, so that the last n tokens can be removed. Not done for each token."""
        if self.num_tokens > 2 * n:
            self.before = self.state_after(self.num_tokens - n)
            self._slice(self.num_tokens - n, self.num_tokens)

    def state_after(self, n: int) -> dict[str, Tensor]:
        """The layer's tensors after the first n of these tokens."""
        if n == 0:
            return self.before
        inputs = {name: None if x is None else x[:, :n] for name, x in self._joined().items()}
        k, v, log_decay, key_mask = map(inputs.pop, ("k", "v", "log_decay", "key_mask"))
        running_max = inputs.pop("running_max", None)
        initial = None
        if self.before:
            initial = LinearAttentionState(self.before["kv"], self.before.get("z"))
        _, (kv, z) = linear_attention(  # nobody reads, so any q will do
            k,
            k,
            v,
            log_decay,
            key_mask=key_mask,
            initial_state=initial,
            return_state=True,
            **self.options,
        )
        after = {"kv": kv} if z is None else {"kv": kv, "z": z}
        if running_max is not None:
            after["running_max"] = running_max[:, -1].clone()
        for name, x in inputs.items():
            past = self.before.get(name)
            if past is None:
                past = x.new_zeros(x.shape[0], self.conv_kernel_size - 1, x.shape[2])
            tokens, _ = padding_first(torch.cat([past, x], dim=1), key_mask)
            after[name] = tokens[:, n:].clone(memory_format=torch.contiguous_format)
        return after

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self.before = {name: function(x) for name, x in self.before.items()}
        for pieces in self.inputs.values():
            pieces[:] = [None if x is None else function(x) for x in pieces]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.before.values()
        for pieces in self.inputs.values():
            yield from (x for x in pieces if x is not None)

    def _joined(self) -> dict[str, Tensor | None]:
        """The inputs of all forwards in one."""
        joined: dict[str, Tensor | None] = {}
        for name, pieces in self.inputs.items():
            if all(x is None for x in pieces):
                joined[name] = None
                continue
            if name == "key_mask":  # where there is none, all tokens are real
                masks = zip(pieces, self.inputs["k"], strict=True)
                pieces = [
                    k.new_ones(k.shape[:2], dtype=torch.bool) if x is None else x for x, k in masks
                ]
            joined[name] = torch.cat(pieces, dim=1)
        return joined

    def _slice(self, start: int, stop: int) -> None:
        self.inputs = {  # copies: the rest is not to be kept in memory
            name: [None if x is None else x[:, start:stop].clone()]
            for name, x in self._joined().items()
        }
        self.num_tokens = stop - start


def padding_first(tokens: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`tokens` (B, past + T, C) with those that key_mask (B, T) hides moved to the front, so that
    every window over real ones is one over neighbours; and the order (B, past + T), if it changed.
    """
    if key_mask is None:
        return tokens, None
    past = tokens.shape[1] - key_mask.shape[1]
    order = F.pad(key_mask, (past, 0), value=True).int().argsort(dim=1, stable=True)
    return tokens.gather(1, order[..., None].expand(tokens.shape)), order


# Transformers asks each base for something: CacheLayerMixin counts tokens, which generate() needs;
# LinearAttentionCacheLayerMixin says that this layer is not one to offload or to make masks for.
class RecurrentLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one linear-attention layer remembers, in `tensors`:

    "kv" (B, Hkv, K, V) and "z" (B, Hkv, K), float32 (float64 in a float64 model); with
    decay="aaren" the largest score, "running_max" (B, Hkv), of the same dtype; and with a short
    convolution the last kernel_size - 1 real inputs of each, "q_conv", "k_conv" and "v_conv"
    (B, kernel_size - 1, channels), in the model's dtype.

    Only this class changes them, in place: their addresses stay until the batch size changes, or
    until autograd or crop() needs their old values.
    """

    is_compileable = False  # generate() would compile every model on CUDA by itself
    is_croppable = True
    supports_early_init = False

    def __init__(self, conv_kernel_size: int = 0, **kwargs):
        self.keys = self.values = None  # of softmax layers; whoever iterates over a cache asks
        self.conv_kernel_size = conv_kernel_size
        self.tensors: dict[str, Tensor] = {}
        self.num_tokens = 0
        self.dtype: torch.dtype | None = None  # of the model; the layer sets it
        self.recording: Recording | None = None

    @property
    def is_initialized(self) -> bool:
        return bool(self.tensors)

    @property
    def has_state(self) -> bool:
        return self.num_tokens > 0

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.has_state}

    @property
    def state(self) -> LinearAttentionState | None:
        """The state to continue from; None before the first token."""
        if not self.has_state:
            return None
        return LinearAttentionState(self._read("kv"), self._read("z"))

    def conv_state(self, name: str) -> Tensor | None:
        """The inputs that the convolution of "q", "k" or "v" still sees, or None."""
        return self._read(f"{name}_conv") if self.has_state else None

    @property
    def running_max(self) -> Tensor | None:
        """The largest score (B, Hkv) before the next token, of decay="aaren"; or None."""
        return self._read("running_max") if self.has_state else None

    def may_change(self, name: str) -> bool:
        """Whether the tensor of that name may change in place, because crop() won't need it."""
        return self.recording is None or self.tensors.get(name) is not self.recording.before.get(
            name
        )

    def write_state(self, state: LinearAttentionState) -> None:
        """Keeps a state that nobody else holds."""
        for name, new in (("kv", state.kv), ("z", state.z)):
            if new is not None and self.recording is not None:
                self.tensors[name] = new  # saves a copy where the old one may have to stay
            elif new is not None:
                self.write(name, new)

    def start(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, normalize: bool
    ) -> LinearAttentionState:
        """An all-zero state in place, for a first token k (B, Hkv, K), v (B, Hkv, V)."""
        kv = k.new_zeros(*k.shape, v.shape[-1], dtype=dtype)
        z = k.new_zeros(k.shape, dtype=dtype) if normalize else None
        self.write_state(LinearAttentionState(kv, z))
        return LinearAttentionState(self.tensors["kv"], self.tensors.get("z"))

    def write(self, name: str, new: Tensor) -> None:
        """Keeps `new`, in the memory of the tensor that it replaces where there is one."""
        old = self._read(name)
        if new.requires_grad:  # the graph holds the old values
            self.tensors[name] = new.contiguous()
        elif (
            old is None or old.shape != new.shape or old.requires_grad or not self.may_change(name)
        ):
            self.tensors[name] = new.clone(memory_format=torch.contiguous_format)
        else:
            old.copy_(new)

    def write_conv(self, name: str, state: Tensor, x: Tensor) -> None:
        """Keeps the state of the convolution of "q", "k" or "v" after it has read x."""
        self.write(f"{name}_conv", state)
        if self.recording is not None:
            self.recording.append(**{f"{name}_conv": x})

    def write_running_max(self, running_max: Tensor) -> None:
        """Keeps the largest score (B, T, Hkv) until each of T tokens."""
        if running_max.shape[1] > 0:
            self.write("running_max", running_max[:, -1])
        if self.recording is not None:
            self.recording.append(running_max=running_max)

    def count(
        self,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        key_mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """Counts the tokens k (B, T, Hkv, K), ... that the state now holds: the last thing that a
        forward does here.
        """
        self.num_tokens += k.shape[1]
        if self.recording is not None:
            self.recording.append(k=k, v=v, log_decay=log_decay, key_mask=key_mask)
            self.recording.num_tokens += k.shape[1]
            self.recording.options = options
            self.recording.fold_all_but(RECORDED_TOKENS)

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
        if self.recording is not None:
            self.recording = Recording({}, self.conv_kernel_size)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(lambda x: x[beam_idx.to(x.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        for name, tensor in self.tensors.items():
            self.write(name, function(tensor))
        if self.recording is not None:
            self.recording.map_rows(function)

    @property
    def record_past(self) -> bool:
        """Whether the last tokens can be removed. generate() may set it to False when it ends."""
        return self.recording is not None

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if not value:
            self.recording = None
        elif self.recording is None:
            before = dict(self.tensors) if self.num_tokens > 0 else {}
            self.recording = Recording(before, self.conv_kernel_size)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises an error if crop() would."""
        if tokens_to_remove > 0:
            raise ValueError(
                "tokens_to_remove must be 0, or negative to remove so many tokens, got "
                f"{tokens_to_remove}"
            )
        recorded = 0 if self.recording is None else self.recording.num_tokens
        if -tokens_to_remove > recorded and self.num_tokens > 0:
            raise RuntimeError(
                f"crop({tokens_to_remove}) can't be: of the {self.num_tokens} tokens read, "
                f"{recorded} can be removed. Call activate_past_recording() before reading those "
                f"that may have to go, the last {RECORDED_TOKENS} at most"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens, read while recording."""
        self.check_crop(tokens_to_remove)
        if self.recording is None or self.num_tokens == 0:
            return
        if tokens_to_remove < 0:
            self.recording.remove_last(-tokens_to_remove)
            self.tensors = dict(self.recording.state_after(self.recording.num_tokens))
            self.num_tokens += tokens_to_remove
        self.recording.fold_all_but(RECORDED_TOKENS_AFTER_CROP)

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


def _promise_address(tensor: Tensor) -> None:
    """Lets CUDA graphs keep the address of a tensor that a static cache writes in place."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


class StaticRecurrentLayer(RecurrentLayer):
    """A RecurrentLayer for compiled graphs: no Python number changes from one token to the next, so
    nothing is compiled twice, and no address ever changes, so CUDA graphs may keep them.
    """

    is_compileable = True
    is_croppable = False
    num_tokens: Any  # a tensor (), where the others have an int

    def __init__(self, max_cache_len: int, conv_kernel_size: int = 0, **kwargs):
        super().__init__(conv_kernel_size)
        self.max_cache_len = max_cache_len  # of softmax layers: masks are made for all alike
        self.num_tokens = torch.zeros((), dtype=torch.long)

    @property
    def has_state(self) -> bool:
        return "kv" in self.tensors  # after reset(), that of no tokens

    def write(self, name: str, new: Tensor) -> None:
        is_first = not self.is_initialized
        if is_first:
            self.num_tokens = self.num_tokens.to(new.device)
        is_new = name not in self.tensors
        super().write(name, new)
        if is_first:
            _promise_address(self.num_tokens)
        if is_new:
            _promise_address(self.tensors[name])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def reset(self) -> None:
        self.num_tokens.zero_()
        for name, tensor in self.tensors.items():
            tensor.fill_(-torch.inf if name == "running_max" else 0)

    def activate_past_recording(self) -> None:
        raise RuntimeError("a static cache takes no tokens back: use one without max_cache_len")


class MemoryLayer(RecurrentLayer):
    """What a layer's cross attention reads, "kv" and "z" as in a RecurrentLayer, static caches
    included: written by the first forward, not changed by the tokens that are read or removed.
    """

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.is_compileable = max_cache_len is not None

    def keep(self, state: LinearAttentionState, dtype: torch.dtype) -> None:
        """Keeps the state of a whole memory, in a model of that dtype."""
        self.write_state(state)
        self.dtype = dtype
        self.num_tokens = 1  # or any other number: compiled graphs must not depend on its length
        if self.is_compileable:
            for tensor in self.tensors.values():
                _promise_address(tensor)

    def activate_past_recording(self) -> None:
        """There is nothing to record."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """No crop changes anything here."""

    def crop(self, tokens_to_remove: int) -> None:
        """Leaves the memory as it is."""


class StaticWindowLayer(StaticLayer):
    """A StaticLayer for sliding-window attention that has room for all tokens; the mask hides those
    outside the window. Transformers' layer for this counts in Python, and moves what it holds.
    """

    is_sliding = True


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """Transformers' layer for sliding-window attention, which can be cropped as often as the others
    while it records.
    """

    keys: Tensor
    values: Tensor
    cumulative_length: int

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        # what the mask covers: transformers 5.17 returns all that was recorded
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]

    def crop(self, tokens_to_remove: int) -> None:
        if not self.is_initialized:
            return
        if not self.record_past:
            super().crop(tokens_to_remove)
            return
        stop = self.keys.shape[-2] + tokens_to_remove
        length = self.cumulative_length + tokens_to_remove
        if stop < min(length, self.sliding_window - 1):
            raise RuntimeError(
                f"crop({tokens_to_remove}) can't be: of the {self.cumulative_length} tokens read, "
                f"only {self.keys.shape[-2]} are kept, for a window of {self.sliding_window}"
            )
        start = max(stop - (self.sliding_window - 1) - RECORDED_TOKENS_AFTER_CROP, 0)
        self.keys, self.values = self.keys[:, :, start:stop], self.values[:, :, start:stop]
        self.cumulative_length = length


class LinearAttentionCache(Cache):
    """One layer per layer of the model: fixed-size states for linear attention, and Transformers'
    own growing and sliding layers for softmax attention. With cross attention, then one per layer
    of the model again: the states of the memory.

    `generate()` makes it by itself. Made by hand, it is passed as `past_key_values`.

    Args:
        config: of the model; decides on the layers. Or what iterating over caches yields, by which
            `torch.nn.DataParallel` makes one of those of its replicas.
        offloading, offload_only_non_sliding: as in `DynamicCache`, for the softmax layers.
        max_cache_len: None, or for a static cache, which compiled models can use without compiling
            again, the number of tokens that its softmax layers have room for.
    """

    def __init__(
        self,
        config: PreTrainedConfig | Iterable[dict[str, Tensor]],
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        max_cache_len: int | None = None,
    ):
        if not isinstance(config, PreTrainedConfig):
            self.config = None  # the model has it
            super().__init__(layers=[_layer_of_rows(named) for named in config])
            return
        self.config = config
        layers = [
            layer_class(
                sliding_window=config.sliding_window,
                conv_kernel_size=config.conv_kernel_size,
                max_cache_len=max_cache_len,
            )
            for layer_class in layer_classes(config, is_static=max_cache_len is not None)
        ]
        leaves = [  # without any, there is no need for CUDA streams
            not isinstance(layer, RecurrentLayer)
            and not (offload_only_non_sliding and layer.is_sliding)
            for layer in layers
        ]
        super().__init__(
            layers=layers,
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
        """What each layer needs to go on, by name, for each row: its tensors, and (B,) of
        `num_tokens`, `sliding_window` and `is_memory`. Nothing before the first token.
        """
        for layer in self.layers:
            rows = dict(_named_tensors(layer, self.config.sliding_window))
            if rows:
                some = next(iter(rows.values()))
                numbers = {"num_tokens": int(layer.get_seq_length())}
                if isinstance(layer, MemoryLayer):
                    numbers["is_memory"] = 1
                if not isinstance(layer, RecurrentLayer) and layer.is_sliding:
                    numbers["sliding_window"] = self.config.sliding_window
                for name, number in numbers.items():
                    rows[name] = some.new_full(some.shape[:1], number, dtype=torch.long)
            yield rows

    def reset(self) -> None:
        """Forgets every token and keeps the memory of the states."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # transformers 5.17 only fills its tensors with zeros, and so keeps counting them
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens. Linear-attention and sliding-window layers can
        do this for tokens read after `activate_past_recording()`.
        """
        for layer in self.layers:  # all layers or none
            if isinstance(layer, RecurrentLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def static_tensors(self) -> dict[str, Tensor]:
        """By name, all tensors that a static cache changes, once it has read something: what a
        module that is exported with the cache must have as buffers.
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, StaticRecurrentLayer):
                named = {**layer.tensors, "num_tokens": layer.num_tokens}
            elif isinstance(layer, MemoryLayer) and layer.is_compileable:
                named = layer.tensors
            elif isinstance(layer, StaticLayer) and layer.is_initialized:
                named = {
                    "keys": layer.keys,
                    "values": layer.values,
                    "num_tokens": layer.cumulative_length,
                }
            else:
                raise RuntimeError(
                    "static_tensors() needs a cache made with max_cache_len that has read a token"
                )
            tensors |= {f"cache_{index}_{name}": x for name, x in named.items()}
        return tensors

    def save(self, path: str | os.PathLike) -> None:
        """Writes the cache to a safetensors file, all of it or nothing.

        What a recording cache could take back is not written. Of a static cache comes back one that
        is not static.
        """
        tensors: dict[str, Tensor] = {}
        layers = []
        for index, layer in enumerate(self.layers):
            named = _named_tensors(layer, self.config.sliding_window)
            layers.append({"num_tokens": int(layer.get_seq_length()), "dtype": _dtype_name(layer)})
            tensors |= {f"layers.{index}.{name}": x.contiguous() for name, x in named.items()}
        metadata = {
            "format": FILE_FORMAT,
            "config": json.dumps(_fingerprint(self.config), sort_keys=True),
            "layers": json.dumps(layers),
        }
        metadata["checksum"] = _checksum(tensors, metadata)
        # of this process alone, and beside the file, so that it can take its place at once
        unfinished = f"{os.fspath(path)}.{uuid.uuid4().hex}.unfinished"
        try:
            save_file(tensors, unfinished, metadata=metadata)
            os.replace(unfinished, path)
        finally:
            if os.path.exists(unfinished):
                os.remove(unfinished)

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
        tensors, metadata = _read_file(path, device)
        written, expected = json.loads(metadata["config"]), _fingerprint(config)
        other = sorted(
            name
            for name in written.keys() | expected.keys()
            if written.get(name) != expected.get(name)
        )
        if other:
            ours = ", ".join(f"{name}={expected.get(name)!r}" for name in other)
            theirs = ", ".join(f"{name}={written.get(name)!r}" for name in other)
            raise ValueError(
                f"{path} must be from a model with {ours}, as config has it, and is from one with "
                f"{theirs}"
            )
        dtype = config.dtype if dtype is None else dtype
        cache = cls(config)
        for index, (layer, saved) in enumerate(
            zip(cache.layers, json.loads(metadata["layers"]), strict=True)
        ):
            if saved["num_tokens"] == 0:
                continue
            if dtype is not None and saved["dtype"] != str(dtype).removeprefix("torch."):
                raise ValueError(
                    f"{path} must be from a model that computes in {dtype}, and is from one in "
                    f"{saved['dtype']}; `dtype` says what the model computes in if config.dtype "
                    "does not"
                )
            prefix = f"layers.{index}."
            named = {
                name.removeprefix(prefix): x
                for name, x in tensors.items()
                if name.startswith(prefix)
            }
            _fill(layer, named, saved["num_tokens"], getattr(torch, saved["dtype"]))
        return cache

    @classmethod
    def join(
        cls,
        caches: Sequence["LinearAttentionCache"],
        attention_masks: Sequence[Tensor] | None = None,
    ) -> tuple["LinearAttentionCache", Tensor]:
        """One cache with the rows of all, in order, for prompts of any lengths.

        Args:
            caches: of one model; each has read something.
            attention_masks: for each cache the mask (rows, tokens read) that it was read with; by
                default no token was padding.

        Returns:
            the cache, as if the shorter prompts had been padded on the left, and the mask
            (rows, longest) that says so; with ones for new tokens appended, it must go with them.
        """
        if not caches:
            raise ValueError("caches must hold at least one cache, got none")
        config = caches[0].config
        expected = _fingerprint(config)
        lengths = [int(cache.get_seq_length()) for cache in caches]
        for cache, length in zip(caches, lengths, strict=True):
            if _fingerprint(cache.config) != expected:
                raise ValueError("caches must be of one model, got some with different configs")
            if length == 0:
                raise ValueError("caches must have read at least one token each, got an empty one")
        T = max(lengths)
        rows = [
            next(iter(_named_tensors(cache.layers[0], config.sliding_window).values()))
            for cache in caches
        ]
        if attention_masks is None:
            attention_masks = [
                x.new_ones(x.shape[0], length, dtype=torch.long)
                for x, length in zip(rows, lengths, strict=True)
            ]
        for mask, x, length in zip(attention_masks, rows, lengths, strict=True):
            if mask.shape != (x.shape[0], length):
                raise ValueError(
                    f"attention_masks must have the shapes of what was read, {(x.shape[0], length)}"
                    f" for one of them, got {tuple(mask.shape)}"
                )
        joined = cls(config)
        for index, layer in enumerate(joined.layers):
            parts = [_named_tensors(cache.layers[index], config.sliding_window) for cache in caches]
            dtypes = {_dtype_name(cache.layers[index]) for cache in caches}
            if len(dtypes) > 1:
                raise ValueError(f"caches must be of one dtype, got {sorted(dtypes)}")
            if not any(parts):  # of a memory, where there is none
                continue
            named = {}
            for name in parts[0]:
                tensors = [part[name] for part in parts]
                if not isinstance(layer, RecurrentLayer):  # (B, Hkv, T, D)
                    longest = max(x.shape[2] for x in tensors)
                    tensors = [F.pad(x, (0, 0, longest - x.shape[2], 0)) for x in tensors]
                named[name] = torch.cat(tensors)
            _fill(layer, named, T, getattr(torch, dtypes.pop()))
        masks = [F.pad(mask, (T - mask.shape[1], 0)) for mask in attention_masks]
        return joined, torch.cat(masks)


def _fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    """What decides whether a model can use a cache, as it comes back from JSON."""
    fields = [name for name in type(config).__annotations__ if name not in NOT_IN_THE_STATE]
    return json.loads(json.dumps({name: getattr(config, name) for name in fields}))


def _dtype_name(layer: CacheLayerMixin) -> str:
    return str(layer.dtype).removeprefix("torch.") if layer.get_seq_length() > 0 else ""


def _named_tensors(layer: CacheLayerMixin, sliding_window: int | None) -> dict[str, Tensor]:
    """What a layer needs to go on, by name; for softmax layers (B, Hkv, tokens, D)."""
    if layer.get_seq_length() == 0:
        return {}
    if isinstance(layer, RecurrentLayer):
        return layer.tensors
    length = int(layer.get_seq_length())  # static layers have room for more
    keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
    if layer.is_sliding:  # what the next token sees: recording and static layers keep more
        first = max(keys.shape[2] - (sliding_window - 1), 0)
        keys, values = keys[:, :, first:], values[:, :, first:]
    return {"keys": keys, "values": values}


def _layer_of_rows(rows: dict[str, Tensor]) -> CacheLayerMixin:
    """The layer of which iterating over a cache yields these."""
    if not rows:
        raise ValueError("only caches that have read a token can be gathered")
    named = dict(rows)
    num_tokens = int(named.pop("num_tokens")[0])
    window = named.pop("sliding_window", None)
    layer: CacheLayerMixin
    if named.pop("is_memory", None) is not None:
        layer = MemoryLayer()
    elif "kv" in named:
        conv = named.get("k_conv")
        layer = RecurrentLayer(conv_kernel_size=0 if conv is None else conv.shape[1] + 1)
    elif window is not None:
        layer = SlidingWindowLayer(sliding_window=int(window[0]))
    else:
        layer = DynamicLayer()
    _fill(layer, named, num_tokens, None)  # the model sets its dtype
    return layer


def _fill(
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


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of everything in a file, in an order of its own."""
    checksum = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu()
        checksum = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), checksum)
        checksum = zlib.crc32(x.flatten().view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def _read_file(
    path: str | os.PathLike, device: torch.device | str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if metadata.get("format") != FILE_FORMAT:
        raise ValueError(
            f"{path} must be a file that LinearAttentionCache.save wrote, of format "
            f"{FILE_FORMAT!r}, got format {metadata.get('format')!r}"
        )
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its checksum does not fit what it holds")
    # copies: memory of their own, which may change in place
    return {name: x.clone().to(device) for name, x in tensors.items()}, metadata


LAYER_CLASSES = {
    "linear_attention": RecurrentLayer,
    "full_attention": DynamicLayer,
    "sliding_attention": SlidingWindowLayer,
}
STATIC_LAYER_CLASSES = {
    "linear_attention": StaticRecurrentLayer,
    "full_attention": StaticLayer,
    "sliding_attention": StaticWindowLayer,
}


def active_layer_types(config: PreTrainedConfig) -> list[str]:
    """The types of the layers that run: to draft, generate() may lower `num_hidden_layers`."""
    return config.layer_types[: config.num_hidden_layers]


def layer_classes(config: PreTrainedConfig, is_static: bool = False) -> list[type[CacheLayerMixin]]:
    """The class of cache layer that each layer of the model writes to, and then, with cross
    attention, of those that its layers read.
    """
    by_type = STATIC_LAYER_CLASSES if is_static else LAYER_CLASSES
    classes = [by_type[layer_type] for layer_type in active_layer_types(config)]
    return [*classes, *([MemoryLayer] * len(classes) if config.add_cross_attention else [])]


def memory_layer(cache: Cache, layer_idx: int) -> MemoryLayer:
    """The cache layer for the cross attention in a layer of the model."""
    return cache.layers[len(cache.layers) // 2 + layer_idx]


def cache_for_model(cache: Cache, config: PreTrainedConfig) -> Cache:
    """`cache`, with the layers that a model of `config` writes to.

    A cache that has them is returned as it is. An empty DynamicCache or StaticCache, which users
    and clients make, gets them, and an empty BoundedCache those for linear attention. Of an
    EncoderDecoderCache the first half is enough. Anything else is an error.
    """
    if isinstance(cache, EncoderDecoderCache):
        return cache_for_model(cache.self_attention_cache, config)
    classes = [type(layer) for layer in cache.layers]
    if classes in (layer_classes(config), layer_classes(config, is_static=True)):
        if getattr(cache, "config", config) is None:  # gathered by DataParallel
            cache.config = config
        return cache
    # the installed package's class, which remote code does not know
    new_softmax_layer = getattr(cache, "new_softmax_layer", None)
    if new_softmax_layer is not None:
        if not cache.layers:
            cache.layers = [
                layer_class(conv_kernel_size=config.conv_kernel_size)
                if issubclass(layer_class, RecurrentLayer)
                else new_softmax_layer()
                for layer_class in layer_classes(config)
            ]
        is_recurrent = [issubclass(x, RecurrentLayer) for x in layer_classes(config)]
        if [isinstance(layer, RecurrentLayer) for layer in cache.layers] == is_recurrent:
            return cache
    has_read = any(_has_read(layer) for layer in cache.layers)
    if type(cache) not in (DynamicCache, StaticCache) or has_read:
        raise ValueError(
            "past_key_values must be a LinearAttentionCache made for this model, or a "
            f"DynamicCache, StaticCache or bounded cache that has read nothing, got {cache}"
        )
    is_recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
    max_cache_len = None
    if type(cache) is StaticCache:  # without softmax layers there is no maximum, and any will do
        max_cache_len = max((getattr(x, "max_cache_len", 1) for x in cache.layers), default=1)
    cache.layers = LinearAttentionCache(config, max_cache_len=max_cache_len).layers
    cache.layer_class_to_replicate = None
    if is_recording:
        cache.activate_past_recording()
    return cache


def count_rows(cache: Cache) -> int | None:
    """The rows of a cache for one of this package's models; None before the first token."""
    if cache.get_seq_length() == 0:
        return None
    layer = cache.layers[0]
    tensors = layer.tensors.values() if isinstance(layer, RecurrentLayer) else [layer.keys]
    return next((x.shape[0] for x in tensors if x is not None), None)


def _has_read(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin) -> bool:
    if isinstance(layer, LinearAttentionLayer):
        return any(layer.has_previous_state.values())
    return layer.is_initialized
