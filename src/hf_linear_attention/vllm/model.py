# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The language model as vLLM runs it: this package's own, with a cache in vLLM's memory.

Shapes: T tokens of all requests, C hidden size, V size of the vocabulary.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsMambaPrefixCaching,
)
from vllm.model_executor.models.transformers.utils import init_on_device_without_buffers

from ..fast.linear import project
from ..model.modeling import RENAMED, LinearAttentionForCausalLM
from ..serving.slot_layout import SlotLayout
from .attention import PAGED, make_attentions, no_masks
from .parallel import parallelize
from .settings import own_config
from .states import STATE_DTYPES, LayerStates, PagedCache, layout_of_layer, state_shapes


class PagedLinearAttentionForCausalLM(
    nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching
):
    """To vLLM all are hybrids, a pure model one without attention."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        return state_shapes(layout_for(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return STATE_DTYPES

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)  # a state is copied as a whole

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        config = copy.deepcopy(own_config(vllm_config.model_config.hf_config))
        config._attn_implementation = PAGED
        with init_on_device_without_buffers("meta"):
            model = LinearAttentionForCausalLM(config).eval()
        self.gather_logits = parallelize(model)
        make_parameters(model)
        self.config = config
        self.model, self.lm_head = model.model, model.lm_head  # so parameters have our names
        self.attentions = make_attentions(self.model, vllm_config)
        layout = layout_for(vllm_config)
        self.linear_layers = {
            number: LayerStates(f"model.layers.{number}.self_attn", layout, vllm_config)
            for number, kind in enumerate(config.layer_types)
            if kind == "linear_attention"
        }

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """input_ids (T,) or inputs_embeds (T, C) -> hidden states (T, C)."""
        T = len(positions)
        cache = self.cache()
        n = T if cache is None else cache.num_tokens  # behind them is padding
        if inputs_embeds is not None:  # vLLM may give the ids, too
            input_ids = None
        outputs = self.model(
            input_ids=None if input_ids is None else input_ids[None, :n],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None, :n],
            position_ids=positions[None, :n],
            attention_mask=no_masks(self.config),
            past_key_values=cache,
            cu_seq_lens_q=torch.tensor([0, n], dtype=torch.int32, device=positions.device),
            use_cache=False,
            attentions=self.attentions,
        )
        return F.pad(outputs.last_hidden_state[0], (0, 0, 0, T - n))

    def cache(self) -> PagedCache | None:
        """The states of the requests in the batch; None where vLLM measures memory, with none."""
        batches: Mapping[str, Any] | None = get_forward_context().attn_metadata
        prefixes = [layer.prefix for layer in self.linear_layers.values()]
        if not batches or not prefixes or prefixes[0] not in batches:
            return None
        return PagedCache(self.linear_layers, batches)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """(n, C) -> (n, V)"""
        if self.gather_logits is not None:
            return self.gather_logits(self.lm_head, hidden_states)
        return project(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Reads a checkpoint's tensors, by the names that the package gives them, or gave them.

        Raises:
            ValueError: one is missing, or is no part of this model.
        """
        places = {
            name: place
            for name, place in self.state_dict(keep_vars=True).items()
            if not name.startswith("attentions.")  # vLLM's own
        }
        missing = set(places)
        for name, value in weights:
            for old, new in RENAMED.items():
                name = re.sub(old, new, name)
            if name not in places:
                raise ValueError(f"the checkpoint has {name!r}, which is no part of the model")
            load = getattr(places[name], "weight_loader", default_weight_loader)
            load(places[name], value)
            missing.discard(name)
        if self.config.tie_word_embeddings:
            missing.discard("lm_head.weight")
        if missing:
            raise ValueError(f"the checkpoint has no {sorted(missing)}")
        return set(places)


def make_parameters(model: PreTrainedModel) -> None:
    """Gives memory to the parameters that have none, and one to both that are tied."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def layout_for(vllm_config: Any) -> SlotLayout:
    model = vllm_config.model_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return layout_of_layer(own_config(model.hf_config), model.dtype, ranks)
