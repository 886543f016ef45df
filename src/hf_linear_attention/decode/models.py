# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Traces of whole models: how a model records one token, and replays it in place of its modules."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from ..ops.checks import check_tokens
from ..ops.tokens import Tokens
from ..releases import CACHE
from .conditions import caches_of_a_step, may_be_recorded, recordable_caches
from .layers import RecordedTokens, recorded_tokens_of, stretches


def outputs_of(kind: Any, fields: Mapping[str, Any]) -> Any:
    """What a model returns, without its __init__, which looks at every field several times."""
    outputs = kind.__new__(kind)
    for name, value in fields.items():
        outputs[name] = value
    return outputs


class CountsCasts:
    """Counts calls like `.to()`, which keep Parameter objects and replace their storage."""

    times_applied = 0

    def _apply(self, *args, **kwargs) -> nn.Module:
        self.times_applied += 1  # what was recorded of it holds no more
        return super()._apply(*args, **kwargs)  # type: ignore[misc]


class RecordsLayers:
    """Of a model of layers and a norm."""

    config: Any
    layers: Any
    norm: Any

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        # Of layers that follow each other, by the number of the first.
        self.recorded_tokens = [RecordedTokens() for _ in range(config.num_hidden_layers)]

    def may_be_recorded(self, inputs: Tensor, tokens: Tokens, past_key_values: Any) -> bool:
        """Whether layers would do the same with other tokens."""
        is_causal = self.config.is_causal
        return not self.config.add_cross_attention and may_be_recorded(
            inputs, tokens.key_mask, is_causal, past_key_values
        )

    def _run_recorded(
        self,
        run: Callable[..., Tensor],
        hidden_states: Tensor,
        tokens: Tokens,
        position_embeddings: tuple[Tensor, ...],
        past_key_values: Any,
    ) -> Tensor:
        """All layers and the last norm: those whose operations may be recorded by recordings of
        them, others by run(hidden_states, their numbers).
        """
        num_layers = self.config.num_hidden_layers  # fewer than there are, for drafts
        all_caches = recordable_caches(self.config, past_key_values, num_layers, tokens)
        for first, caches in stretches(all_caches):
            numbers = range(first, first + len(caches))
            by_modules = functools.partial(run, hidden_states, numbers)
            if caches[0] is None:
                hidden_states = by_modules()
                continue
            inputs = [hidden_states, *position_embeddings]
            is_last = numbers.stop == num_layers
            modules: list[nn.Module] = list(self.layers)[first : numbers.stop]
            lower_bounds = getattr(self, "lower_bounds", None)
            if lower_bounds is not None:
                modules.append(lower_bounds)
            if is_last:
                modules.append(self.norm)
            hidden_states = self.recorded_tokens[first].run(
                modules, caches, inputs, by_modules, constants=(is_last,)
            )
        return hidden_states


class RecordsSteps:
    """Of a language model."""

    config: Any
    model: Any
    get_input_embeddings: Any
    _by_modules: Any

    @staticmethod
    def may_be_step(input_ids: Any, logits_to_keep: Any, *others: Any, **named: Any) -> bool:
        """Whether a forward is given a token and a cache alone, so that `caches_of_a_step` may be
        asked.
        """
        is_plain = not named and all(x is None for x in others)
        return is_plain and input_ids is not None and isinstance(logits_to_keep, int)

    def _step(
        self,
        input_ids: Any,
        position_ids: Tensor | None,
        past_key_values: Any,
        use_cache: bool | None,
        logits_to_keep: Any,
    ) -> CausalLMOutputWithCrossAttentions | None:
        """`forward` of one token in each row, by a recording where that can be; None where it does
        more than to give logits and to change states.
        """
        caches = caches_of_a_step(self.config, input_ids, past_key_values)
        if caches is None:
            return None
        if position_ids is None:
            past = past_key_values.get_seq_length()
            position_ids = input_ids.new_full((1, 1), past, dtype=torch.long)
        outputs: CausalLMOutputWithCrossAttentions | None = None

        def by_modules() -> Tensor | None:
            nonlocal outputs
            inputs = {
                "input_ids": input_ids,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
                "use_cache": use_cache,
            }
            outputs = self._by_modules(inputs, None, logits_to_keep)
            has_more = outputs.hidden_states is not None or outputs.attentions is not None
            return None if has_more else outputs.logits  # which alone are recorded

        whole: Any = self
        table = getattr(getattr(self.model, "embed_tokens", None), "weight", None)
        constants = (logits_to_keep, getattr(table, "dtype", None))  # which .to() changes in place
        try:
            logits = recorded_tokens_of(whole).run(
                [whole], caches, [input_ids, position_ids], by_modules, constants
            )
        except RuntimeError:
            check_tokens(input_ids, self.get_input_embeddings())
            raise
        if outputs is None:
            fields = {"logits": logits, CACHE: past_key_values}
            outputs = outputs_of(CausalLMOutputWithCrossAttentions, fields)
        return outputs
