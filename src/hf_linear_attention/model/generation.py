# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The methods that `generate()` calls: they make the cache, and the inputs of the next forward."""

import functools
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from ..cache.caches import LinearAttentionCache, StaticLinearAttentionCache, cache_for_model
from ..cache.layers import count_rows, left_padding_of
from ..releases import CACHE, CACHE_NAMES, cache_among
from .arguments import count_past, hide_left_padding
from .served import ServedMixin

CACHE_IMPLEMENTATIONS = (None, "dynamic", "offloaded", "static", "offloaded_static")
# the ways of generate() that never take a token back, nor move a row
ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# what generate() gives a forward with each of many tokens, beside the token and the cache
FOR_EVERY_TOKEN = {"use_cache", "logits_to_keep"}
# the names of the cache among what generate() gives a forward
CACHE_OF_INPUTS = {CACHE, "past_key_values"}
PROMPTS = ("inputs", "input_ids")  # the names of the prompt among the arguments of generate()
# what generate() itself uses, and leaves among the arguments of the model
LEFT_AMONG_ARGUMENTS = ("tokenizer", "assistant_tokenizer")

# Of the generate() that runs in this thread, its model and the cache that it made or was given,
# until a forward has it. Other threads may generate with the same model, or run it without a cache.
_made_caches: ContextVar[tuple[GenerationMixin, list[Cache]] | None] = ContextVar(
    "made_caches", default=None
)


def has_prompts_of_peft(model: Any, mode: GenerationMode | None = None) -> bool:
    """Whether PEFT puts prompts before the tokens; a ValueError where it does and a mode drafts."""
    # Its method has then taken the place of the model's.
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", model)
    config = getattr(wrapper, "active_peft_config", None) if wrapper is not model else None
    has_prompts = getattr(config, "is_prompt_learning", False)
    if has_prompts and mode is GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            "generate() can't draft tokens for a model with prompts of PEFT: give neither "
            "prompt_lookup_num_tokens nor assistant_model"
        )
    return has_prompts


def check_prompt(*given: Any) -> None:
    """Raises a ValueError where a prompt, by any of its names, is no tensor of rows of tokens."""
    for prompt in given:
        if isinstance(prompt, Tensor) and (prompt.dim() != 2 or prompt.shape[1] == 0):
            raise ValueError(
                "inputs must be a tensor (B, T) with a token at least in each row, got "
                f"{tuple(prompt.shape)}"
            )


class LinearAttentionGenerationMixin(ServedMixin, GenerationMixin):
    """GenerationMixin for models whose cache is a LinearAttentionCache."""

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, custom_generate=None, **kwargs):
        """As in Transformers, with the cache by either of its names.

        Raises:
            ValueError: a prompt that is no tensor of rows of tokens.
        """
        names = [name for name in CACHE_NAMES if name in kwargs]
        if names:
            kwargs[CACHE] = cache_among(**{name: kwargs.pop(name) for name in names})
        if kwargs.get("inputs_embeds") is None:
            check_prompt(*args[:1], *map(kwargs.get, PROMPTS))
        # A search of the user's own may leave the cache that is made for it unused.
        before = _made_caches.set((self, []) if custom_generate is None else None)
        try:
            return super().generate(*args, custom_generate=custom_generate, **kwargs)
        finally:
            _made_caches.reset(before)  # of a generate() that drafts with this one

    def _find_made_cache(self, cache: Cache | None) -> None:
        """Raises a RuntimeError where the first forward of a generate() has no cache, although one
        was made for it: each further token would be read as if it were the first.
        """
        made = None if torch.compiler.is_compiling() else _made_caches.get()
        if made is None or made[0] is not self or not made[1]:
            return
        made[1].clear()
        if cache is None:
            raise RuntimeError(
                "generate() made a cache, and the forward of the prompt was given none: "
                f"transformers {transformers.__version__} hands it over otherwise than any release "
                "that this code was written for. generate(use_cache=False) is right, and slow"
            )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # generate() looks whether it is here
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """As in Transformers, which would read again what a cache has read when drafts begin. The
        cache also has its older name, by which PEFT sees whether its prompts are to be read first.
        """
        past_key_values = cache_among(past_key_values=past_key_values, cache=cache)
        for name in LEFT_AMONG_ARGUMENTS:
            kwargs.pop(name, None)
        is_plain = attention_mask is None and inputs_embeds is None and position_ids is None
        if next_sequence_length == 1 and is_plain and kwargs.keys() <= FOR_EVERY_TOKEN:
            is_growing = past_key_values is not None and not past_key_values.is_compileable
            if is_growing and input_ids.device == self.device:
                # all that Transformers would make of it, in a third of the time
                token = input_ids[:, -1:].clone(memory_format=torch.contiguous_format)
                named = dict.fromkeys(CACHE_OF_INPUTS, past_key_values)
                return {"input_ids": token, **named, **kwargs}
        past = int(count_past(past_key_values)) if next_sequence_length is None else 0
        if past > 0:
            T = input_ids.shape[1]
            if attention_mask is not None:
                is_whole = attention_mask.shape[-1] == T
            elif position_ids is not None:
                # a mask of ones was left out; a piece of a prompt has later positions
                is_whole = T == position_ids.shape[-1] and bool((position_ids[..., 0] == 0).all())
            else:
                is_whole = False
            if is_whole:
                next_sequence_length = T - past
        if next_sequence_length is not None and next_sequence_length < 1:
            given = input_ids if inputs_embeds is None else inputs_embeds
            raise ValueError(
                f"{CACHE} must have read less than all of the prompt, got a cache of "
                f"{int(count_past(past_key_values))} tokens for a prompt of "
                f"{given.shape[1]}, or a piece of one; its crop(-n) takes tokens back"
            )
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            **{CACHE: past_key_values},
            **kwargs,
        )
        masks = inputs.get("attention_mask")
        if isinstance(masks, dict) and all(mask is None for mask in masks.values()):
            inputs["attention_mask"] = None  # PEFT looks at the one mask of a dict
        return inputs | dict.fromkeys(CACHE_OF_INPUTS, past_key_values)

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """As in Transformers, which counts what the mask shows; a joined cache knows what in its
        rows is padding, whatever the mask says.
        """
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        if mask is not None and left_padding_of(cache) is not None:
            T = mask.shape[1] - int(count_past(cache))
            model_kwargs["attention_mask"] = hide_left_padding(mask, cache, T)
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Gives `generate()` this model's cache instead of a DynamicCache or StaticCache."""
        check_generation(generation_config, generation_mode)
        has_prompts = has_prompts_of_peft(self, generation_mode)
        has_more = [model_kwargs.get(name) for name in ("inputs_embeds", "encoder_outputs")]
        if has_prompts or any(x is not None for x in has_more):
            # Transformers cuts the tokens into chunks and would read all embeddings with each, and
            # with an encoder it would cut the mask of the memory like one of the tokens. PEFT would
            # hand on one token of each later chunk.
            generation_config.prefill_chunk_size = None
        if model_kwargs.get(CACHE) is not None:
            cache = cache_for_model(model_kwargs[CACHE], self.config)
            repeat_rows(cache, generation_config, batch_size)
            model_kwargs[CACHE] = cache
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif generation_config.use_cache is not False:
            cache = self._new_cache(generation_config, max_cache_length)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs[CACHE] = cache
        made = _made_caches.get()
        if made is not None and made[0] is self and model_kwargs.get(CACHE) is not None:
            made[1].append(model_kwargs[CACHE])
        if generation_mode in ONE_BY_ONE:
            leave_positions_to_cache(generation_config, model_kwargs)

    def _new_cache(self, generation_config: GenerationConfig, max_cache_length: int) -> Cache:
        kind = generation_config.cache_implementation or "dynamic"
        # on a CPU, the cache is where it would be brought to
        offloading = "offloaded" in kind and self.device.type != "cpu"
        if "static" not in kind:
            return LinearAttentionCache(self.config, offloading=offloading)
        # as long as ever before: another length would be compiled again
        wanted = getattr(generation_config, "max_cache_len", None) or 0
        longest = getattr(self, "_previous_max_cache_length", 0)
        self._previous_max_cache_length = max(max_cache_length, wanted, longest)
        return StaticLinearAttentionCache(
            self.config, self._previous_max_cache_length, offloading=offloading
        )


def check_generation(generation_config: GenerationConfig, mode: GenerationMode) -> None:
    """Raises a ValueError for what `generate()` would do wrong, or can't do, with these models."""
    kind = generation_config.cache_implementation
    if kind not in CACHE_IMPLEMENTATIONS:
        raise ValueError(
            f"cache_implementation must be one of {CACHE_IMPLEMENTATIONS} here, got {kind!r}"
        )
    guidance = generation_config.guidance_scale
    if guidance not in (None, 1) and mode not in ONE_BY_ONE:
        raise ValueError(
            f"guidance_scale must be None or 1 with beams or drafts, got {guidance}: Transformers' "
            "unguided pass would go on from other tokens than the text's, with any model"
        )


def leave_positions_to_cache(generation_config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Takes positions out of a model's arguments where the model counts the same by itself, so that
    `generate()` does not make them longer with each token. Graphs compiled for static caches read
    them.
    """
    cache, positions = kwargs.get(CACHE), kwargs.get("position_ids")
    if cache is None or positions is None or cache.is_compileable:
        return
    if kwargs.get("attention_mask") is not None or left_padding_of(cache) is not None:
        return
    # of the mask of ones that Transformers has left out
    length = getattr(generation_config, "_mask_length", None)
    if positions.shape[-1] == length:
        if bool((positions == torch.arange(length, device=positions.device)).all()):
            del kwargs["position_ids"]


def repeat_rows(cache: Cache, generation_config: GenerationConfig, batch_size: int) -> None:
    """Makes of a cache for batch_size rows one for all that `generate()` will make of them."""
    beams, sequences = generation_config.num_beams, generation_config.num_return_sequences
    copies = max(beams or 1, sequences or 1)
    rows = count_rows(cache)
    if rows == batch_size and copies > 1 and not cache.is_compileable:
        cache.batch_repeat_interleave(copies)
    elif rows not in (None, batch_size * copies):
        wanted = f"{batch_size * copies} rows"
        if copies > 1:
            wanted += f", or {batch_size} if it is not static"
        raise ValueError(f"{CACHE} must have {wanted}, as the prompts' batch says, got {rows}")
