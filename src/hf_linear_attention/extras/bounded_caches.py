# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bounded caches for softmax attention of any model: they keep some of the keys.

Shapes: B batch, T new tokens, n kept keys, Hq query heads, Hkv key-value heads, D head dim.
"""

import functools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ..cache.layers import RecurrentLayer
from ..model.auto import observe_attention

HIDDEN = -1  # instead of the position of a key that no later query may see
IMPLEMENTATIONS = ("eager", "sdpa")
NEEDS_CONFIG = (
    "config must be given to a bounded cache of a model with recurrent layers, as "
    "config=model.config, got None"
)


class BoundedLayer(CacheLayerMixin):
    """Keys and values (B, Hkv, n, D) of one layer, n <= max_cache_len between forwards, and the
    `positions` (B, n) that the keys had in the sequence: HIDDEN for padding, which goes first.

    A forward reads all of them and its own; then the model's attention function, which
    `observe_attention` has wrapped, lets the layer choose.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    needs_weights = False  # of the last query, for `priorities`
    keys: Any  # tensors once it is initialized
    values: Any
    positions: Tensor
    num_tokens: int  # read
    is_waiting: bool  # between `update` and `choose`
    may_hide: bool  # whether a mask was ever given

    def __init__(self, max_cache_len: int):
        super().__init__()
        self.max_cache_len = max_cache_len
        self.reset()

    @abstractmethod
    def priorities(self, positions: Tensor, weights: Tensor | None) -> Tensor:
        """What keys (B, n) are worth: the least are dropped. `weights` (B, n) are the attention
        weights of the last query, averaged over the heads.
        """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        B = key_states.shape[0]
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.positions = torch.zeros(B, 0, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Takes new keys and values (B, Hkv, T, D); returns them after the kept ones."""
        if self.is_waiting:
            raise RuntimeError(
                f"{self} was not told what the last tokens attended to. The model must call its "
                "attention by Transformers' AttentionInterface, not compiled, with "
                f"attn_implementation one of {IMPLEMENTATIONS}; and after an error in the middle "
                "of a forward, reset() makes the cache usable again"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        self.num_tokens += key_states.shape[2]
        self.is_waiting = True
        _latest.layer = weakref.ref(self)
        return self.keys, self.values

    def mask(self, mask: Tensor | None, T: int, like: Tensor, window: int | None) -> Tensor | None:
        """The mask for all keys that `update` returned, bool or added to the scores, of a mask
        (B or 1, 1, T, >= T) whose last T columns are those of the new keys: the model can't know
        which of the others were kept. A query sees `window` tokens, itself included.
        """
        n = self.positions.shape[1]
        if n == 0 or (mask is None and T == 1 and window is None and not self.may_hide):
            return mask
        if mask is None:
            mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=like.device).tril()
        is_seen = (self.positions != HIDDEN)[:, None, None, :].expand(-1, 1, T, -1)
        if window is not None:
            queries = torch.arange(self.num_tokens - T, self.num_tokens, device=like.device)
            first = queries[:, None] - window + 1
            is_seen = is_seen & (self.positions[:, None, None, :] >= first)
        new = mask[..., mask.shape[-1] - T :].expand(is_seen.shape[0], -1, -1, -1)
        if mask.dtype != torch.bool:
            hidden = torch.finfo(mask.dtype).min
            is_seen = torch.zeros_like(is_seen, dtype=mask.dtype).masked_fill(~is_seen, hidden)
        return torch.cat([is_seen, new], dim=-1)

    def choose(self, T: int, mask: Tensor | None, weigh: Callable[[], Tensor]) -> None:
        """Drops what is too much after T tokens were read with `mask`, as `self.mask` made it.

        weigh: gives the attention weights (B, Hq, n + T) of the last query.
        """
        B = self.keys.shape[0]
        new = torch.arange(self.num_tokens - T, self.num_tokens, device=self.positions.device)
        if mask is not None:
            self.may_hide = True
            is_real = mask[:, 0, :, mask.shape[-1] - T :].diagonal(dim1=1, dim2=2)  # sees itself
            if is_real.dtype != torch.bool:
                is_real = is_real > torch.finfo(is_real.dtype).min
            new = new.masked_fill(~is_real, HIDDEN)
        self.positions = torch.cat([self.positions, new.expand(B, T)], dim=1)
        if self.positions.shape[1] > self.max_cache_len:
            weights = weigh().float().mean(dim=1) if self.needs_weights else None
            worth = self.priorities(self.positions, weights)
            worth = worth.masked_fill(self.positions == HIDDEN, -1)
            kept = worth.topk(self.max_cache_len, dim=1).indices.sort(dim=1).values
            self._map(lambda x: x.gather(1, kept), lambda x: _take(x, kept))
        self.is_waiting = False

    def get_seq_length(self) -> int:
        """The number of tokens read, not of those kept: positions go on from there."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if the last tokens had been kept, so that the columns of new tokens are right."""
        n = self.positions.shape[1] if self.is_initialized else 0
        return n + query_length, self.num_tokens - n

    def get_max_length(self) -> int:
        return -1  # it can read any number of tokens

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.num_tokens = 0
        self.is_waiting = False
        self.may_hide = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def _map(
        self,
        function: Callable[[Tensor], Tensor],
        of_states: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Applies a function to the positions, and it or another to the keys and values."""
        if self.is_initialized:
            of_states = of_states or function
            self.positions = function(self.positions)
            self.keys, self.values = of_states(self.keys), of_states(self.values)


def _take(x: Tensor, kept: Tensor) -> Tensor:
    """x (B, Hkv, n, D) at the indices kept (B, m) of n; copied by rows, not by numbers."""
    B, H, n, D = x.shape
    first = torch.arange(0, B * H * n, n, device=x.device).view(B, H, 1)
    return x.reshape(-1, D).index_select(0, (first + kept[:, None]).flatten()).view(B, H, -1, D)


class TOVALayer(BoundedLayer):
    """Keeps the keys that the last query weighs most, on average over the heads."""

    needs_weights = True

    def priorities(self, positions: Tensor, weights: Tensor | None) -> Tensor:
        assert weights is not None
        return weights


class SinkLayer(BoundedLayer):
    """Keeps the first `num_sink_tokens` tokens and the last ones."""

    def __init__(self, max_cache_len: int, num_sink_tokens: int):
        super().__init__(max_cache_len)
        self.num_sink_tokens = num_sink_tokens

    def priorities(self, positions: Tensor, weights: Tensor | None) -> Tensor:
        # in order, so the sinks, none of which was dropped, are the first that are no padding
        is_sink = (positions != HIDDEN).cumsum(dim=1) <= self.num_sink_tokens
        return positions.masked_fill(is_sink, self.num_tokens)


class LayersOfSoftmax(list):
    """What a cache without a config starts with: `update` makes its layers, and nothing else asks
    for one before, unless the model has recurrent layers.
    """

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            raise ValueError(NEEDS_CONFIG)
        return super().__getitem__(index)


class BoundedCache(Cache):
    """A cache whose softmax layers keep `max_cache_len` keys, whatever the model has read.

    Its tensors, `layers[i].keys` and `.values`, hold one token more for each token of a forward
    until that layer's attention is done.
    """

    def __init__(
        self,
        new_softmax_layer: Callable[[], BoundedLayer],
        config: PreTrainedConfig | None = None,
    ):
        observe_attention(_observe)
        if config is None:
            super().__init__(layer_class_to_replicate=new_softmax_layer)
            self.layers = LayersOfSoftmax()
        else:
            super().__init__(layers=_bounded(DynamicCache(config=config).layers, new_softmax_layer))
        self.new_softmax_layer = new_softmax_layer  # for models of which not all layers are

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """As in Transformers, which counts tokens in the first layer: without a config, that must
        be one. RecurrentGemma's begin with recurrent ones, which keep their states themselves.
        """
        if layer_idx > 0 and isinstance(self.layers, LayersOfSoftmax) and not self.layers:
            raise ValueError(NEEDS_CONFIG)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the cache."""
        tensors: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer, BoundedLayer):
                if layer.is_initialized:
                    tensors += layer.keys, layer.values, layer.positions
            elif isinstance(layer, RecurrentLayer):  # of a linear-attention layer
                tensors += layer.tensors.values()
            else:  # of a recurrent layer of Transformers, or of none that remembers
                for name in ("conv_states", "recurrent_states"):
                    tensors += (x for x in getattr(layer, name, {}).values() if x is not None)
        return sum(x.nbytes for x in tensors)

    def crop(self, tokens_to_remove: int) -> None:
        raise RuntimeError(
            f"crop({tokens_to_remove}) can't be: {type(self).__name__} takes no tokens back, for "
            "what it dropped is lost. Keep a copy of the cache (copy.deepcopy) instead"
        )

    def activate_past_recording(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} takes no tokens back, so it can't be used for assisted "
            "generation, which drops rejected drafts"
        )


def _bounded(layers: list[Any], new_softmax_layer: Callable[[], BoundedLayer]) -> list[Any]:
    """The layers of a DynamicCache, with those for softmax bounded."""
    for i, layer in enumerate(layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            layers[i] = new_softmax_layer()
        elif isinstance(layer, CacheLayerMixin):
            raise ValueError(
                "config must be of a model whose layers are either softmax attention or recurrent "
                f"with a bounded cache, got layer {i}, which needs a {type(layer).__name__}"
            )
    return layers


class TOVACache(BoundedCache):
    """Keeps in every layer the `max_cache_len` keys that the last query attends to most.

    After a layer's attention, the weights of the last query are averaged over the heads, and the
    keys with the least are dropped: one per generated token, the last token or the first as well as
    any other. A prompt is read whole and then reduced by its last query; given in pieces, it is
    reduced after each. Keys keep the rotation of their own positions. What has the length of
    `max_cache_len` or less is read as with a full cache.

    Works for models of Transformers and this package whose `attn_implementation` is "eager" or
    "sdpa" (for which the weights of one row are computed once more).

    Args:
        config: the model's, needed where a model of Transformers has recurrent layers, too.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104.

    Raises:
        ValueError: max_cache_len is less than 1, or the config is of a model with other layers.
    """

    def __init__(self, max_cache_len: int, config: PreTrainedConfig | None = None):
        _check_at_least("max_cache_len", max_cache_len, 1)
        super().__init__(functools.partial(TOVALayer, max_cache_len), config)


class SinkCache(BoundedCache):
    """Keeps in every layer the first `num_sink_tokens` tokens and the last `max_cache_len -
    num_sink_tokens`: a sliding window with sinks, or, with num_sink_tokens=0, without.

    Keys keep the rotation of their own positions. (The paper counts positions within the cache,
    which lets a model go on beyond the length that it was trained for.)

    Args:
        config: the model's, needed where a model of Transformers has recurrent layers, too.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv
    2309.17453.

    Raises:
        ValueError: max_cache_len is less than 1, or num_sink_tokens less than 0 or not less than
            max_cache_len, or the config is of a model with other layers.
    """

    def __init__(
        self,
        max_cache_len: int,
        num_sink_tokens: int = 4,
        config: PreTrainedConfig | None = None,
    ):
        _check_at_least("max_cache_len", max_cache_len, 1)
        _check_at_least("num_sink_tokens", num_sink_tokens, 0)
        if num_sink_tokens >= max_cache_len:
            raise ValueError(
                f"num_sink_tokens must be less than max_cache_len={max_cache_len}, got "
                f"{num_sink_tokens}"
            )
        super().__init__(functools.partial(SinkLayer, max_cache_len, num_sink_tokens), config)


def _check_at_least(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


_latest = threading.local()  # .layer: a weak reference to the layer that was updated last


def _observe(function: Callable, attn_implementation: str) -> Callable:
    """What a model gets for an attention function: it, or, after a bounded layer was updated, one
    that lets that layer choose. The layer is recognised by its very tensor of keys.
    """
    if torch.compiler.is_compiling() or _layer_that_waits() is None:
        return function
    return functools.partial(_attend, function, attn_implementation)


def _layer_that_waits() -> BoundedLayer | None:
    reference = getattr(_latest, "layer", None)
    layer = None if reference is None else reference()
    return layer if layer is not None and layer.is_waiting else None


def _attend(
    function: Callable,
    attn_implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """`function`, an attention function, which `get_interface` returned by that name; with the mask
    that the kept keys need, and then their choice.
    """
    layer = _layer_that_waits()
    if layer is None or key is not layer.keys:  # another cache, or a layer that shares keys
        return function(module, query, key, value, attention_mask, *args, **kwargs)
    _check_attention(attn_implementation, module, attention_mask, kwargs)
    T = query.shape[2]
    mask = layer.mask(attention_mask, T, query, _window_of(module, kwargs))
    y, weights = function(module, query, key, value, mask, *args, **kwargs)

    def weigh() -> Tensor:
        if weights is not None:
            return weights[:, :, -1]
        return last_row(query, key, mask, kwargs.get("scaling"))

    layer.choose(T, mask, weigh)
    return y, weights


def _window_of(module: nn.Module, options: dict[str, Any]) -> int | None:
    """How many tokens a query sees, itself included; None: all.

    What is given counts, None, too: a module may have the field of its config, used or not. Where
    neither says a word (PhiMoE), the mask alone has the window: the config's, as Transformers reads
    one without layer types.
    """
    config = getattr(module, "config", None)
    of_all_layers = None
    if getattr(config, "layer_types", None) is None:
        of_all_layers = getattr(config, "sliding_window", None)
    return options.get("sliding_window", getattr(module, "sliding_window", of_all_layers))


def last_row(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax weights (B, Hq, n) of the last of queries (B, Hq, T, D) on keys (B, Hkv, n, D)."""
    B, Hq, _, D = query.shape
    q = query[:, :, -1].view(B, key.shape[1], -1, D)  # grouped by the heads of keys
    scores = (q @ key.transpose(2, 3)).view(B, Hq, -1).float()
    scores = scores * (D**-0.5 if scaling is None else scaling)
    if mask is not None:
        mask = mask[:, :, -1]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    return F.softmax(scores, dim=-1)


def _check_attention(
    attn_implementation: str, module: nn.Module, mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Raises a ValueError where masks are other than those that `BoundedLayer.mask` understands."""
    if attn_implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation must be one of {IMPLEMENTATIONS} with a bounded cache, got "
            f"{attn_implementation!r}"
        )
    config = getattr(module, "config", None)
    for field in ("attention_chunk_size", "num_kv_shared_layers"):
        if getattr(config, field, None):
            raise ValueError(
                f"bounded caches take no models with {field}, got {getattr(config, field)}"
            )
    if options.get("position_bias") is not None or (mask is not None and mask.shape[1] != 1):
        raise ValueError("bounded caches take no models that add a bias to the scores of each head")


__all__ = ["BoundedCache", "SinkCache", "TOVACache"]
