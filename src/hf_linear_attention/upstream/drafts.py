# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Speculative decoding with models of Transformers whose caches count no tokens, have another name,
or are of another class than generate() expects: Mamba, Mamba-2, Falcon-Mamba, MiniMax and xLSTM.

Drafts are of an assistant, which is such a model itself perhaps, or of prompt lookup.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from ..releases import CACHE
from .heads import Served


def is_drafting(generation_config: GenerationConfig, mode: GenerationMode) -> bool:
    """Whether tokens are drafted: for the model, or by it."""
    return mode == GenerationMode.ASSISTED_GENERATION or bool(generation_config.is_assistant)


class CountedCache(DynamicCache):
    """One of recurrent layers only, which knows the number of its tokens, all of them recorded."""

    counts_tokens = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return getattr(self.layers[layer_idx], "num_tokens", 0)


def count_tokens(cache: Any) -> None:
    """Makes a stock cache of recurrent layers only one that drafts can be taken back from."""
    if type(cache) is DynamicCache:
        cache.__class__ = CountedCache


class DraftsOfMamba(Served):
    """A head whose layers are all recurrent."""

    _is_stateful = False
    _cache_of_forward = CACHE

    def _counted(self, cache: Any, is_assistant: bool) -> Any:
        """The cache, perhaps None, that drafts are taken back from."""
        count_tokens(cache)
        return cache

    def _not_read(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None,
        attention_mask: Tensor | None,
        others: dict[str, Any],
    ) -> int | None:
        """Of a whole text only what its cache has not read, which generate() asks no cache of
        recurrent layers only: an assistant is given all of it again and again.
        """
        cache: Any = others.get(self._cache_of_forward)
        T = input_ids.shape[1]
        is_whole = attention_mask is None or attention_mask.shape[1] == T
        if next_sequence_length is None and is_whole and hasattr(cache, "counts_tokens"):
            return T - cache.get_seq_length()
        return next_sequence_length

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args,
    ) -> None:
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, *args
        )
        if is_drafting(generation_config, generation_mode):
            cache = self._counted(model_kwargs.get(CACHE), bool(generation_config.is_assistant))
            if cache is not None:
                model_kwargs[CACHE] = cache


class DraftsOfEarlierMamba(DraftsOfMamba):
    """The same before 5.24: its cache is `cache_params`, and while it drafts `past_key_values`,
    too.
    """

    _cache_of_forward = "cache_params"

    def __call__(self, *args, **kwargs) -> Any:
        output = super().__call__(*args, **kwargs)
        cache = kwargs.get("cache_params")
        if hasattr(cache, "counts_tokens") and isinstance(output, ModelOutput):
            output["past_key_values"] = cache
        return output

    # generate() reads in the names of these arguments what the model takes
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        cache = kwargs.pop("past_key_values", None)
        if cache is not None:
            kwargs["cache_params"] = cache
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, attention_mask, inputs_embeds, **kwargs
        )

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        if hasattr(model_kwargs.get("past_key_values"), "counts_tokens"):  # an assistant's own
            model_kwargs = {k: x for k, x in model_kwargs.items() if k != "past_key_values"}
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args,
    ) -> None:
        ours, theirs = "cache_params", "past_key_values"
        if theirs in model_kwargs:  # an assistant is called again
            model_kwargs[ours] = model_kwargs.pop(theirs)
        super(DraftsOfMamba, self)._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, *args
        )
        if is_drafting(generation_config, generation_mode):
            cache = self._counted(
                model_kwargs.pop(ours, None), bool(generation_config.is_assistant)
            )
            if cache is not None:
                model_kwargs[theirs] = cache


class DraftsOfMiniMax(Served):
    """A head that makes its cache in the forward, where generate() must have it before."""

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args,
    ) -> None:
        from .minimax_cache import CroppableMiniMaxCache  # imports a model of Transformers

        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, *args
        )
        uses_cache = generation_config.use_cache is not False
        has_beams = (generation_config.num_beams or 1) > 1  # Transformers' leaves states to others
        if uses_cache and (has_beams or is_drafting(generation_config, generation_mode)):
            cache = CroppableMiniMaxCache.made_of(model_kwargs.get(CACHE))
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs[CACHE] = cache


class CountsMatrixMemory:
    """Put before the head of xLSTM, which makes its cache in the forward, too."""

    def _counted(self, cache: Any, is_assistant: bool) -> Any:
        from .xlstm_cache import XLSTMStates  # imports a model of Transformers

        model: Any = self
        if cache is None:
            cache = XLSTMStates.new(model.config, 1, model.dtype, model.device)
        cache = XLSTMStates.made_of(cache)
        if is_assistant:
            cache.activate_past_recording()
        return cache


# Of heads whose layers are all recurrent.
DRAFTS_OF_MAMBA = DraftsOfMamba if CACHE == "cache" else DraftsOfEarlierMamba
DRAFTS_OF_XLSTM = type("DraftsOfXLSTM", (CountsMatrixMemory, DRAFTS_OF_MAMBA), {})
