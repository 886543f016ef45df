# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching of Transformers' own recurrent models that `use_kernels` has changed.

Their recurrent layers take a SlotCache in the place of a cache of Transformers, and their softmax
layers are Transformers', with its pages. The engine is that of this package's models: it sees a
ServedModel, which answers as one of them does.

Shapes: T tokens of all sequences in a batch.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ..cache.slots import KeepKeys, SlotBatch, SlotCache
from ..recurrences.interface import State
from ..releases import CACHE, CACHE_NAMES
from ..serving.allocators import LINEAR
from ..serving.continuous_batching import continuous_batching_manager
from .families import family_of, replacement_for
from .family import UNKNOWN, Family
from .functions import ByFunctions
from .module_classes import is_one_of

# By all types of layers for which these models make masks that they are not given.
NO_MASKS = dict.fromkeys(("full_attention", "sliding_attention", LINEAR, "conv"))


def manager_of_changed_model(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """`continuous_batching_manager` of a model of Transformers that `use_kernels` has changed.

    Raises:
        NotImplementedError: the model can't be served so; it says which part of it, and why.
        ValueError: the settings can't be, for states.
    """
    served: Any = ServedModel(model)
    return continuous_batching_manager(
        served, generation_config, continuous_batching_config, workload_hints
    )


class ServedModel:
    """A changed model as the engine calls it. What is not here is the model's own.

    Raises:
        NotImplementedError: the model can't be served.
    """

    def __init__(self, model: PreTrainedModel):
        base = base_of(model)
        family = served_family(base)
        self._model: Any = model
        self._changed_class = type(model)
        self._takes_masks = family.attention is not None
        self.config = ServedConfig(base, family)
        taken = inspect.signature(type(model).forward).parameters
        self._cache = next(name for name in CACHE_NAMES if name in taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def _cached_continuous_batching_manager(self) -> ContinuousBatchingManager:
        return self._model._cached_continuous_batching_manager

    @_cached_continuous_batching_manager.setter
    def _cached_continuous_batching_manager(self, manager: ContinuousBatchingManager) -> None:
        self._model._cached_continuous_batching_manager = manager

    def eval(self) -> "ServedModel":
        self._model.eval()
        return self

    def set_attn_implementation(self, name: str) -> None:
        if self._takes_masks:  # else nobody would use it, and Transformers warns
            self._model.set_attn_implementation(name)

    def slot_cache(
        self,
        states: dict[int, State],
        slots: list[int],
        lengths: list[int],
        is_new: list[bool],
        keep_keys: KeepKeys | None = None,
    ) -> SlotCache:
        """As of this package's models."""
        batch = SlotBatch.of(slots, lengths, is_new, self._model.device)
        return SlotCache(states, batch, keep_keys)

    def __call__(self, **batch: Any) -> Any:
        """The model's output for tokens (1, T)."""
        if type(self._model) is not self._changed_class:
            raise RuntimeError("what use_kernels did to the model was undone while it is served")
        if self._takes_masks:
            batch["attention_mask"] = {**NO_MASKS, **batch.get("attention_mask", {})}
        slots = batch.pop(CACHE)
        return self._model(**batch, **{self._cache: slots})


class ServedConfig:
    """A changed model's config, with what the engine reads of this package's configs. What is not
    here is the config's own.
    """

    add_cross_attention = False
    position_embedding_type = "rope"  # or none, but no learned ones

    def __init__(self, base: PreTrainedModel, family: Family):
        config: Any = base.config.get_text_config()
        self._config = config
        self.softmax_mixer = "mla" if family.is_latent else "softmax"
        layers = softmax_layers(base, family)
        types = [type_of(layers.get(i)) for i in range(config.num_hidden_layers)]
        if LINEAR not in types:  # all layers have states beside softmax attention
            types.append(LINEAR)
        self.layer_types = self.active_layer_types = types
        # Without softmax layers, these are what `num_blocks` and estimates of memory count in.
        heads = getattr(config, "num_attention_heads", 1) if layers else 1
        self.num_attention_heads = heads
        self.num_key_value_heads = heads
        self.head_dim = config.hidden_size // heads
        if layers:
            self.num_key_value_heads = getattr(config, "num_key_value_heads", None) or heads
            self.head_dim = getattr(next(iter(layers.values())), "head_dim", self.head_dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def get_text_config(self, *args: Any, **kwargs: Any) -> "ServedConfig":
        return self


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that holds its recurrent layers."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    with_layers = [part for part in models if any(map(is_recurrent, part.modules()))]
    return with_layers[-1]  # parts come behind what they are in


def is_recurrent(module: nn.Module) -> bool:
    """Whether it is a layer that `use_kernels` has replaced, given functions, or left alone."""
    if isinstance(module, ByFunctions):
        return True
    found = (replacement_for(cls) for cls in type(module).__mro__)
    return any(replacement is not None and replacement.is_recurrent for replacement in found)


def served_family(base: PreTrainedModel) -> Family:
    """What is known of a model that can be served.

    Raises:
        NotImplementedError: it can't be served, or one of its layers can't.
    """
    family = family_of(type(base))
    if family.why_not_served is not None:
        raise refusal(base, family.why_not_served)
    for where, module in base.named_modules():
        if is_recurrent(module) and not hasattr(module, "recurrences"):
            raise refusal(
                base,
                f"{where} ({type(module).__name__}) is Transformers' own, which has no slots; the "
                "report of use_kernels says why",
            )
    if family is UNKNOWN:
        raise refusal(base, "nobody has tried it")
    if family.never_with and getattr(base.config, family.never_with, None) is not None:
        raise refusal(base, f"its config has a {family.never_with}")
    devices = sorted({str(parameter.device) for parameter in base.parameters()})
    if len(devices) > 1:
        raise refusal(base, f"its weights are on several devices: {', '.join(devices)}")
    return family


def refusal(base: PreTrainedModel, why: str) -> NotImplementedError:
    return NotImplementedError(f"continuous batching can't serve {type(base).__name__}: {why}")


def type_of(attention: Any | None) -> str:
    """What a layer keeps in pages, if it has softmax attention."""
    if attention is None:
        return LINEAR
    has_window = getattr(attention, "sliding_window", None) is not None
    return "sliding_attention" if has_window else "full_attention"


def softmax_layers(base: PreTrainedModel, family: Family) -> dict[int, Any]:
    """The modules of softmax attention by their number."""
    modules: Iterator[Any] = base.modules()
    return {one.layer_idx: one for one in modules if is_one_of(one, family.attention)}
