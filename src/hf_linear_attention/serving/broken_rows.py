# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Rows of a batch whose logits give no token, such as NaN, end alone.

Transformers draws the tokens of a batch in one call, which raises an error for all of its rows; and
where nothing is drawn, it takes NaN for the largest of numbers.

Shapes: N rows of logits, those of sequences with a new token first; V size of the vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.requests import RequestState

NO_TOKEN = "the logits of its next token are not finite, and so there is none"


class RowSampler:
    """Chooses tokens as Transformers' ModelRunner does, which calls it from now on; and any token
    for the rows that give none, whose numbers are in `broken` then.
    """

    def __init__(self, runner: Any):
        self.sample = runner._sample
        self.draws = runner.do_sample or runner.return_logprobs  # by probabilities
        self.broken: list[int] = []
        # Where this would be compiled or a graph, or results are read later, all is as it was:
        # with layers with states it never is.
        if not (runner.pad_inputs or runner.cb_config.use_async_batching):
            runner._sample = self

    def __call__(self, scores: Tensor, output_ids: Tensor) -> None:
        """scores: (1, N, V) float32. Writes to output_ids (2, N or more)."""
        largest = scores[0].amax(-1).tolist()
        is_right = math.isfinite if self.draws else is_number
        self.broken = [row for row, x in enumerate(largest) if not is_right(x)]
        if self.broken:
            scores = scores.index_fill(1, torch.tensor(self.broken, device=scores.device), 0)
        self.sample(scores, output_ids)


def is_number(x: float) -> bool:
    return not math.isnan(x)


def take_out(processor: Any, broken: list[int]) -> list[RequestState]:
    """Takes the sequences of broken rows, and their tokens, out of a batch that was computed."""
    io, scheduler = processor.inputs_and_outputs, processor.scheduler
    rows = [request for request in io.requests_in_batch if request.has_new_token]
    lost = [rows[number] for number in broken if number < len(rows)]
    kept = [number for number in range(len(rows)) if number not in broken]
    io.output_ids[:, : len(kept)] = io.output_ids[:, torch.tensor(kept, dtype=torch.int64)]
    io.requests_in_batch = [request for request in io.requests_in_batch if request not in lost]
    scheduler.batch = [request for request in scheduler.batch if request not in lost]
    return [request.state for request in lost]
