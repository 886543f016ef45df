# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Slots, and the pages of latent attention, in the memory of Transformers' paged cache.

That memory is sectors. Each is given to one type of layer and divided into blocks of that type: of
pages of keys and values, or here of slots. What the methods are to do says CacheAllocator, the
interface of transformers.generation.continuous_batching.

Shapes: T new tokens, S tokens attended to, L size of a latent vector, R of the keys' shared part.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import (
    CacheAllocator,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from .slot_layout import ALIGNMENT, SlotLayout, round_up

LINEAR = "linear_attention"
SECTOR_ALIGNMENT = 128  # bytes; Transformers' own


class SlotAllocator(CacheAllocator):
    """A block is a slot, that of one sequence, however long the sequence is. To the base class it
    is one page for one token.
    """

    supports_block_sharing = False
    supports_block_table = False
    rows_per_token = 1
    layer_type = LINEAR

    def __init__(
        self,
        layout: SlotLayout,
        sector: int,
        index: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ):
        """sector: bytes of the sectors that the other types of layers would have."""
        self.layout = layout
        nbytes = fit_into_sectors(layout.nbytes, sector)
        self._before_cache_tensor_init(index, layer_indices[:1], 1, nbytes, allow_block_sharing)
        self.layer_indices = layer_indices

    def register_cache_tensor(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool):
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.states = self.layout.views(self._copy_view)

    def slot_of(self, request_id: str) -> int:
        return self.block_table[request_id][0]

    def needs_new_blocks(self, request_id, past_length, query_length):
        return int(request_id not in self.block_table)

    def allocate_cache_to_request(self, request_id, past_length, query_length):
        if request_id not in self.block_table:
            self.block_table[request_id] = self.pool.get_free_blocks(self.index, 1)

    def get_seqlen_k(self, past_length, query_length):
        return 0  # there are no keys

    def get_read_indices(self, request_id, past_length, query_length):
        return []

    def get_write_indices(self, request_id, past_length, query_length):
        return []

    def fill_block_table(self, request_id, past_length, query_length, block_table):
        raise NotImplementedError("a slot has no table of pages")

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        raise NotImplementedError("a layer with slots keeps no keys and values")

    def get_cache_for_block_table(self, layer_idx):
        raise NotImplementedError("a layer with slots keeps no keys and values")


class FiniteKeys:
    """Mixed into allocators of pages. A mask of 0 and -inf hides the keys and values of the others
    in a batch, but not NaN or infinity among them: these are 0 for whoever reads.
    """

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        return super().update(  # type: ignore[misc]
            finite(key_states), finite(value_states), layer_idx, read_index, write_index
        )


class FullAllocator(FiniteKeys, FullAttentionCacheAllocator):
    pass


class SlidingAllocator(FiniteKeys, SlidingAttentionCacheAllocator):
    pass


class LatentAllocator(FullAttentionCacheAllocator):
    """Pages for latent attention: a row for each token, its latent vector and its part of the keys
    that all heads share (L + R).

    The layer itself keeps them, by `keep`, and makes keys and values of what it gets back. Those it
    gives to an attention function, which calls `update` for the second time.
    """

    supports_block_table = False
    rows_per_token = 1

    def __init__(
        self, index, config, num_key_value_heads, cache_dtype, page_size, layer_indices,
        allow_block_sharing,
    ):  # fmt: skip
        self.sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
        self.cache_dtype = cache_dtype
        nbytes = sum(self.sizes) * cache_dtype.itemsize * page_size
        self._before_cache_tensor_init(index, layer_indices, page_size, nbytes, allow_block_sharing)

    def register_cache_tensor(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool):
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        rows = cache_tensor.view(self.cache_dtype).view(-1, sum(self.sizes))
        self.rows = {  # a block has a page for each layer
            layer_idx: rows[number * self.tokens_per_page :]
            for number, layer_idx in enumerate(self.layer_indices)
        }

    def keep(
        self, latent: Tensor, shared: Tensor, layer_idx: int, read: Tensor, write: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(1, 1, T, L) and (1, 1, T, R) -> (1, 1, S, L) and (1, 1, S, R), for rows to read (S,), or
        none where nothing was read before, and rows to write (T,).
        """
        rows, new = self.rows[layer_idx], finite(torch.cat([latent, shared], -1)[0, 0])
        rows.index_copy_(0, write, new)
        everything = new if read.numel() == 0 else rows.index_select(0, read)
        latent, shared = everything[None, None].split(self.sizes, dim=-1)
        return latent, shared

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        return key_states, value_states

    def get_cache_for_block_table(self, layer_idx):
        raise NotImplementedError("a latent vector is no key")


def finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0, 0, 0)


def fit_into_sectors(nbytes: int, sector: int) -> int:
    """The least number from nbytes on of which a sector holds a whole number, or which is a whole
    number of sectors. Any other would make sectors, the common multiple of all blocks, huge.
    """
    for parts in range(sector // nbytes, 0, -1):
        if sector % (parts * ALIGNMENT) == 0:
            return sector // parts
    return round_up(nbytes, sector)


def allocators_of(config: Any, layout: SlotLayout) -> dict[str, Any]:
    """What makes the allocator of each type of layer, for Transformers' table of them."""
    full = LatentAllocator if config.softmax_mixer == "mla" else FullAllocator
    softmax = {"full_attention": full, "sliding_attention": SlidingAllocator}

    class SlotAllocatorOfModel(SlotAllocator):
        def __init__(self, index, layer_indices, allow_block_sharing, config, **sizes):
            blocks = [
                make(
                    index=0,
                    layer_indices=[i for i, name in enumerate(config.layer_types) if name == kind],
                    allow_block_sharing=False,
                    config=config,
                    **sizes,
                ).bytes_per_block
                for kind, make in softmax.items()
                if kind in config.layer_types
            ]
            sector = math.lcm(SECTOR_ALIGNMENT, *blocks)
            super().__init__(layout, sector, index, layer_indices, allow_block_sharing)

    return {**softmax, LINEAR: SlotAllocatorOfModel}
