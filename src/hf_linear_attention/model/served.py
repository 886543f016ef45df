# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Further methods of models that generate: speculative decoding, continuous batching."""

import copy
import functools
import sys

from transformers import GenerationMixin, PreTrainedConfig
from transformers.utils.generic import is_flash_attention_requested

from ..cache.slots import KeepKeys, SlotBatch, SlotCache
from ..recurrences.interface import State

NO_ENGINE = (
    "continuous batching (generate_batch, init_continuous_batching) needs the package "
    "hf-linear-attention, and a release of Transformers that it was made for: the "
    "PagedAttentionCache has no place of its own for the state of linear attention. {}. generate() "
    "takes left-padded batches, and rows of a cache come and go by LinearAttentionCache.join and "
    "batch_select_indices"
)


class ServedMixin(GenerationMixin):
    """Speculative decoding, and engines."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in Transformers, whose server is prepared for requests if it loads the model."""
        prepare_server()
        return super().from_pretrained(*args, **kwargs)

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, input_ids, *args, generation_config, **kwargs):
        """As in Transformers, which looks at the first attention map of a forward, as if there had
        to be one. Where there is none, every token gets the () that it gets without drafts.

        To draft with its first layers, Transformers lowers the number of a model's layers, and an
        error or an interrupt in a draft would leave it so.
        """
        num_hidden_layers = self.config.num_hidden_layers
        try:
            return self._draft(input_ids, *args, generation_config=generation_config, **kwargs)
        finally:
            if self.config.num_hidden_layers != num_hidden_layers:
                self.config.num_hidden_layers = num_hidden_layers

    def _draft(self, input_ids, *args, generation_config, **kwargs):
        """`_assisted_decoding`, but for what an error leaves behind."""
        if not generation_config.output_attentions or has_attention_maps(self.config):
            return super()._assisted_decoding(
                input_ids, *args, generation_config=generation_config, **kwargs
            )
        without_maps = copy.copy(generation_config)
        without_maps.output_attentions = False
        kwargs.pop("output_attentions", None)
        outputs = super()._assisted_decoding(
            input_ids, *args, generation_config=without_maps, **kwargs
        )
        if generation_config.return_dict_in_generate:
            num_new_tokens = outputs.sequences.shape[1] - input_ids.shape[1]
            outputs["attentions"] = ((),) * num_new_tokens
        return outputs

    def init_continuous_batching(
        self, generation_config=None, continuous_batching_config=None, workload_hints=None
    ):
        """As in Transformers, for `generate_batch()` and `transformers serve`, too, where this
        package is installed. Transformers' paged cache alone holds keys and values of softmax
        layers, page by page, and has no place for a state.
        """
        try:
            from hf_linear_attention.serving.continuous_batching import (
                continuous_batching_manager,
            )

            return continuous_batching_manager(
                self, generation_config, continuous_batching_config, workload_hints
            )
        except ImportError as error:
            raise NotImplementedError(NO_ENGINE.format(error)) from error

    def slot_cache(
        self,
        states: dict[int, State],
        slots: list[int],
        lengths: list[int],
        is_new: list[bool],
        keep_keys: KeepKeys | None = None,
    ) -> SlotCache:
        """The `past_key_values` of a forward for an engine with continuous batching, which gives
        packed tokens (1, T) of sequences, with their positions.

        Args:
            states: for the number of each layer with recurrences its tensors (S, ...) by name, S
                being the number of slots: of all that the recurrences' `state_sizes` say.
            slots, lengths, is_new: of each sequence in the batch its slot, its number of tokens,
                and whether they are its first. Those that go on by one token come first.
            keep_keys: for latent attention: `slots.KeepKeys`.
        """
        return SlotCache(states, SlotBatch.of(slots, lengths, is_new, self.device), keep_keys)


def prepare_server() -> None:
    """What the installed package does in `transformers serve` before there are requests."""
    if "transformers.cli.serve" not in sys.modules:
        return
    try:
        from hf_linear_attention.serving.over_http import prepare_server as prepare
    except ImportError:  # `init_continuous_batching` tells users of it
        return
    prepare()


def has_attention_maps(config: PreTrainedConfig) -> bool:
    """Whether `output_attentions` gives any: for softmax layers, and not by fused kernels."""
    is_fused = config._attn_implementation in ("sdpa", "flex_attention")
    is_fused = is_fused or is_flash_attention_requested(config)
    return set(config.active_layer_types) != {"linear_attention"} and not is_fused
