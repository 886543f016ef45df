# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The inputs of a batch for models that have states and no keys.

Transformers prepares a batch in tensors with room for the largest one, which it resets and copies
to: indices of keys and values, bounds by type of layer, masks. For a model without keys that takes
longer than a layer, and all that it needs are four small tensors.

Shapes: T tokens of all sequences in a batch, N sequences.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID, FutureRequestState


class StateInputs(ContinuousBatchingIOs):
    """What ContinuousBatchingIOs become whose inputs are to be made anew for each batch."""

    batch: Mapping[str, Any] = MappingProxyType({})  # none yet

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[FutureRequestState],
        logits_processors: Any,
        *sizes: Any,
        **others: Any,
    ) -> None:
        """As in Transformers, also of what it changes in requests."""
        ids: list[int] = []
        positions: list[int] = []
        bounds, last = [0], []
        for request in requests_in_batch:
            state, length = request.state, request.query_length
            before = state.position_offset
            state.position_offset = before + length
            ids += state.tokens_to_process
            positions += range(before, before + length)
            bounds.append(bounds[-1] + length)
            if request.has_new_token:
                last.append(bounds[-1] - 1)
                state.tokens_to_process = [TMP_TOKEN_ID]
        N = len(requests_in_batch)
        last += [0] * (N - len(last))  # of rows that nobody reads
        self.requests_in_batch, self.num_request_in_batch = list(requests_in_batch), N
        tensor = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        self.batch = {
            "input_ids": tensor([ids]),
            "position_ids": tensor([positions]),
            "cu_seq_lens_q": tensor(bounds),
            "logits_indices": tensor(last),
            "logits_processor_args": None,
            "use_cache": False,
        }
        if logits_processors.tensors_required > 0:
            arguments = self._bulk_input_tensor[self.static_inputs :]
            logits_processors.prepare_tensor_args(requests_in_batch, arguments)
            self.batch["logits_processor_args"] = arguments[:, :N]

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        return self.batch
