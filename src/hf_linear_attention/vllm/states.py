# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The states of linear layers in vLLM's memory.

vLLM gives each layer a tensor of pages, and a sequence one page in it, its slot. To vLLM a state is
so many bytes; what is in them says `SlotLayout`.

Shapes: S slots, N sequences in a batch.
"""

import dataclasses
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from ..cache.slots import SlotBatch, SlotCache, SlotLayer, is_step
from ..mixers.facts import facts_of
from ..mixers.tables import build_mixer
from ..recurrences.convolution import TokenWindow
from ..recurrences.interface import Recurrence, State
from ..serving.slot_layout import SlotLayout


def layout_of_layer(config: PreTrainedConfig, dtype: torch.dtype, ranks: int) -> SlotLayout:
    """Where the parts of a linear layer's state lie, as one of so many ranks of tensor parallelism
    has them; all layers have the same. Without parts where no layer is linear.
    """
    if "linear_attention" not in config.layer_types:
        return SlotLayout({0: {}}, 0)
    with torch.device("meta"):
        mixer: Any = build_mixer(config, config.layer_types.index("linear_attention"))
    shared = facts_of(config.mixer).projections
    recurrences = [of_one_rank(recurrence, ranks, shared) for recurrence in mixer.recurrences]
    return SlotLayout.of_recurrences({0: recurrences}, dtype)


def of_one_rank(recurrence: Recurrence, ranks: int, shared: tuple[str, ...]) -> Recurrence:
    """The recurrence with its share of the heads, or of the channels of `shared` projections."""
    rule = getattr(recurrence, "rule", None)  # of several steps a token
    if rule is not None:
        whole: Any = recurrence
        return dataclasses.replace(whole, rule=of_one_rank(rule, ranks, shared))
    sizes: dict[str, int] = {}
    if not isinstance(recurrence, TokenWindow):
        sizes["num_heads"] = recurrence.num_heads // ranks  # type: ignore[attr-defined]
    elif getattr(recurrence, "is_of_heads", False) or (
        f"{recurrence.name.removesuffix('_conv')}_proj" in shared
    ):
        sizes["channels"] = recurrence.channels // ranks
    return dataclasses.replace(recurrence, **sizes)  # type: ignore[arg-type]


class SlotBatchBuilder(AttentionMetadataBuilder):
    """Makes the `SlotBatch` of layers that have their pages in common."""

    reorder_batch_threshold: int = 1  # sequences that go on by one token come first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mode = vllm_config.cache_config.mamba_cache_mode

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SlotBatch:
        batch = common_attn_metadata
        all_slots = mamba_get_block_table_tensor(
            batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, self.mode
        )[:, 0].tolist()
        bounds = batch.query_start_loc_cpu.tolist()  # N + 1 of them
        slots, lengths, is_new = [], [], []
        for slot, start, stop, total in zip(
            all_slots, bounds, bounds[1:], batch.seq_lens.tolist(), strict=False
        ):
            if stop > start:  # else there is no request
                slots.append(slot)
                lengths.append(stop - start)
                is_new.append(total == stop - start)
        # Engines of GPUs may have prompts of one token among those that go on by one.
        num_steps = sum(1 for _ in takewhile(bool, map(is_step, lengths, is_new)))
        return SlotBatch.of(slots, lengths, is_new, self.device, num_steps)


class SlotBackend(AttentionBackend):
    """What vLLM asks for such layers; they compute by themselves."""

    @staticmethod
    def get_name() -> str:
        return "HF_LINEAR_ATTENTION"

    @staticmethod
    def get_builder_cls() -> type[SlotBatchBuilder]:
        return SlotBatchBuilder

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("linear layers have no attention of vLLM's")

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class LayerStates(MambaBase):
    """One layer's pages. vLLM finds it by `prefix` in its config, and hands it the memory."""

    mamba_type: ClassVar[Any] = MambaAttentionBackendEnum.LINEAR

    def __init__(self, prefix: str, layout: SlotLayout, vllm_config: Any):
        self.prefix = prefix
        self.layout = layout
        self.states: State = {}
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return state_shapes(self.layout)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return STATE_DTYPES

    def get_attn_backend(self) -> type[SlotBackend]:
        return SlotBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache: (S, 1, 1, bytes of a page or more) int8."""
        memory = kv_cache.flatten(1).view(torch.uint8)
        self.kv_cache = (memory[:, : self.layout.nbytes],)  # which vLLM copies for shared prompts
        (self.states,) = self.layout.views(memory).values()


STATE_DTYPES = (torch.uint8,)


def state_shapes(layout: SlotLayout) -> tuple[tuple[int, ...], ...]:
    """What vLLM is told of a layer's state: so many bytes."""
    return ((layout.nbytes,),)


class PagedCache(SlotCache):
    """The `past_key_values` of one forward in vLLM: layers may have different slots."""

    def __init__(self, layers: Mapping[int, LayerStates], batches: Mapping[str, SlotBatch]):
        self.layers = {
            number: SlotLayer(layer.states, batches[layer.prefix])
            for number, layer in layers.items()
        }
        self.keep_keys = None
        self.num_tokens = next(iter(self.layers.values())).batch.num_tokens
