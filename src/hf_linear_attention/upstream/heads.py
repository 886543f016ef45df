# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Small changes in front of the heads of Transformers' models."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from ..model.generation import has_prompts_of_peft

NO_ENGINE = (
    "continuous batching of recurrent models needs a release of Transformers that this package's "
    "engine was made for: {}. generate() works as ever"
)


class HasRead:
    """Told to PEFT before 0.22, which looks for a cache by its older name to see whether its
    prompts are to be read first, and in it for the number of tokens, which states don't count.
    """

    def get_seq_length(self) -> float:
        return float("inf")


class Served:
    """Put before a head of Transformers: its `generate_batch`, and `transformers serve`, too; what
    `cp_size` asks of it (model/context_parallel.py); and prompts that PEFT reads once.
    """

    # Given by shared_sequences.py, which knows layers, and so imports what serves them.
    order_for: ClassVar[Callable[[Any], str | None]]

    def order_of_pieces(self) -> str | None:
        """In which ranks share its sequences, as of this package's models; None: they can't."""
        return type(self).order_for(self)

    @property
    def supports_context_parallel(self) -> bool:
        """As in Transformers, which knows of softmax layers alone."""
        return self.order_of_pieces() is not None

    def _not_read(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None,
        attention_mask: Tensor | None,
        others: dict[str, Any],
    ) -> int | None:
        """How many last tokens a forward is to read; None: all, or as its cache says."""
        return next_sequence_length

    # generate() reads in the names of these arguments what the model takes
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """As in Transformers, for PEFT's prompts, too."""
        inputs = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids,
            next_sequence_length=self._not_read(
                input_ids, next_sequence_length, attention_mask, kwargs
            ),
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        uses_cache = inputs.get("use_cache") is not False
        if uses_cache and not kwargs.get("is_first_iteration") and has_prompts_of_peft(self):
            inputs.setdefault("past_key_values", HasRead())
        return inputs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args,
    ) -> None:
        has_prompts_of_peft(self, generation_mode)
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, *args
        )

    def __call__(self, *args, **kwargs) -> Any:
        if isinstance(kwargs.get("past_key_values"), HasRead):
            del kwargs["past_key_values"]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(
        self, generation_config=None, continuous_batching_config=None, workload_hints=None
    ):
        """As in Transformers, which has no place for a state.

        Raises:
            NotImplementedError: the model can't be served so; it says which part of it, and why.
                Or Transformers is another than the engine was made for.
            ValueError: the settings can't be, for states.
        """
        try:
            from .changed_models import manager_of_changed_model

            return manager_of_changed_model(
                self, generation_config, continuous_batching_config, workload_hints
            )
        except ImportError as error:
            raise NotImplementedError(NO_ENGINE.format(error)) from error


class ListsStates:
    """Put before a head whose model keeps the states of all layers in a list."""

    def _reorder_cache(self, states: list[Tensor], beam_idx: Tensor) -> list[Tensor]:
        """As generate() asks for it."""
        return [x[beam_idx.to(x.device)] for x in states]


class KeepsStatesOnModules:
    """Put before a head whose states are on its modules, where the reordering of a cache, as for
    beams, does not reach them.
    """

    def _reorder_cache(self, cache: Cache, beam_idx: Tensor) -> Cache:
        """As generate() asks for it, of the cache of softmax layers and of the states."""
        for module in self.modules():  # type: ignore[attr-defined]
            if hasattr(module, "reorder_states"):
                module.reorder_states(beam_idx)
        cache.reorder_cache(beam_idx)
        return cache
