# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""xLSTM's cache, which carries padding and bounds to the layers, has rollback, and follows beams.
Importing this imports Transformers' xLSTM.

Shapes: B batch, T time.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

from ..cache.rollback import Recording, remove_last
from ..ops.numerics import accumulation_dtype
from .layers.xlstm import NAMES, LayerState


class XLSTMStates(xLSTMCache):
    """Records once it is told to."""

    is_croppable = True
    is_compileable = False
    is_linear = (True,)  # all layers
    counts_tokens = True
    is_recording: bool
    recordings: dict[int, Recording]  # by layer

    @classmethod
    def new(
        cls, config: PreTrainedConfig, B: int, dtype: torch.dtype, device: torch.device
    ) -> "XLSTMStates":
        """Of a model that computes in `dtype`; sums are kept in float32 or better."""
        return cls.made_of(cls(config, B, dtype=accumulation_dtype(dtype), device=device))

    @classmethod
    def made_of(cls, cache: xLSTMCache) -> "XLSTMStates":
        """This one, which becomes one."""
        if not hasattr(cache, "recordings"):
            cache.__class__ = cls
            cache.is_recording, cache.recordings = False, {}
        return cache

    def tell(self, mask: Tensor | None, is_new: bool) -> None:
        """What the layers are to know in the next forward: of what padding is (B, T), and whether
        it is the first.
        """
        for number, state in self.rnn_state.items():
            if self.is_recording and number not in self.recordings:
                before = dict(zip(NAMES, map(Tensor.clone, state), strict=True))
                self.recordings[number] = Recording(before)
            self.rnn_state[number] = LayerState.told(
                state,
                mask=mask,
                is_new=is_new,
                may_change=True,
                recording=self.recordings.get(number),
            )

    def activate_past_recording(self) -> None:
        self.is_recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens."""
        for number, state in remove_last(self.recordings, tokens_to_remove).items():
            for x, name in zip(self.rnn_state[number], NAMES, strict=True):
                x.copy_(state[name])
        self.seqlen_offset -= abs(tokens_to_remove)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.seqlen_offset)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Each row goes on from another, as beams do."""
        for number, state in self.rnn_state.items():
            self.rnn_state[number] = LayerState(x[beam_idx.to(x.device)] for x in state)
        for recording in self.recordings.values():
            recording.map_rows(lambda x: x[beam_idx.to(x.device)])

    def reset(self) -> None:
        super().reset()
        self.seqlen_offset.zero_()
        self.recordings = {}
