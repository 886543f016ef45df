# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""MiniMax's cache with rollback. Importing this imports Transformers' MiniMax."""

from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ..cache.rollback import Recording, remove_last
from ..recurrences.interface import State


class CroppableMiniMaxCache(MiniMaxCache):
    """One that records once it is told to, and knows how many tokens it has where its first layer
    is a linear one, too.
    """

    is_croppable = True
    is_recording: bool
    recordings: dict[int, Recording]  # by layer

    @classmethod
    def made_of(cls, cache: MiniMaxCache | None) -> "CroppableMiniMaxCache":
        """A new one, or this one, which becomes one."""
        if isinstance(cache, cls):
            return cache
        cache = MiniMaxCache() if cache is None else cache
        cache.__class__ = cls
        cache.is_recording, cache.recordings = False, {}
        return cache

    def recording_of(self, layer_idx: int, state: State) -> Recording | None:
        """What records the tokens of a linear layer, which has this state now."""
        if not self.is_recording:
            return None
        if layer_idx not in self.recordings:
            self.recordings[layer_idx] = Recording({name: x.clone() for name, x in state.items()})
        return self.recordings[layer_idx]

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.is_recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens."""
        states = remove_last(self.recordings, tokens_to_remove)
        for layer in self.layers:
            if layer.is_initialized:  # those of linear layers are not
                layer.crop(-abs(tokens_to_remove))
        for layer_idx, state in states.items():
            self.linear_cache[layer_idx] = state["kv"].clone() if state else []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As Transformers', and the states of linear layers, too."""
        super().reorder_cache(beam_idx)
        for layer_idx, state in enumerate(self.linear_cache):
            if isinstance(state, Tensor):
                self.linear_cache[layer_idx] = state[beam_idx.to(state.device)]
        for recording in self.recordings.values():
            recording.map_rows(lambda x: x[beam_idx.to(x.device)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max((layer.get_seq_length() for layer in self.layers), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0
