# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The tokens of a batch by its logits. Rows whose logits give none, such as NaN, end alone.

Transformers draws the tokens of a batch in one call, which raises an error for all of its rows; and
where nothing is drawn, it takes NaN for the largest of numbers.

Shapes: N rows of logits, those of sequences with a new token first; V size of the vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.requests import RequestState

from .sampling import KEY, Sampling, drawn, sampled

NO_TOKEN = "the logits of its next token are not finite, and so there is none"


class RowSampler:
    """Chooses tokens as Transformers' ModelRunner does, which calls it from now on; and any token
    for the rows that give none, whose numbers are in `broken` then.

    sampling: where requests have settings of their own, those of the ones without; else None.
    """

    def __init__(self, runner: Any, sampling: Sampling | None = None):
        self.runner, self.sampling = runner, sampling
        self.broken: list[int] = []
        # Where this would be compiled or a graph, or results are read later, all is as it was:
        # with layers with states it never is.
        if not (runner.pad_inputs or runner.cb_config.use_async_batching):
            runner._sample = self

    def __call__(self, scores: Tensor, output_ids: Tensor) -> None:
        """scores: (1, N, V) float32. Writes to output_ids (2, N or more)."""
        runner, logits = self.runner, scores[0]
        broken = set()
        if self.sampling is not None:
            requests = [
                request.state
                for request in runner.inputs_and_outputs.requests_in_batch
                if request.has_new_token
            ]
            samplings = [x.logit_processor_kwargs.get(KEY, self.sampling) for x in requests]
            runner.do_sample = any(sampling.draws for sampling in samplings)
            if not all(sampling.is_plain for sampling in samplings):
                broken = wrong_rows(logits, is_number)  # which nobody could see behind this:
                logits = sampled(logits, samplings, requests)
        by_probabilities = runner.do_sample or runner.return_logprobs
        broken |= wrong_rows(logits, math.isfinite if by_probabilities else is_number)
        self.broken = sorted(broken)
        if self.broken:
            rows = torch.tensor(self.broken, device=logits.device)
            logits = logits.index_fill(0, rows, 0)
        self._write(logits, output_ids)

    def _write(self, logits: Tensor, output_ids: Tensor) -> None:
        """Tokens, and the bits of their logarithmic probabilities where these are wanted."""
        runner = self.runner
        if runner.do_sample or runner.return_logprobs:
            probabilities = logits.softmax(-1)
        tokens = drawn(probabilities) if runner.do_sample else logits.argmax(-1, keepdim=True)
        output_ids[0, : len(tokens)] = tokens[:, 0]
        if runner.return_logprobs:
            logprobs = probabilities.gather(1, tokens)[:, 0].log()
            output_ids[1, : len(tokens)] = logprobs.view(output_ids.dtype)


def wrong_rows(logits: Tensor, is_right: Callable[[float], bool]) -> set[int]:
    """Those whose largest number is not right."""
    return {row for row, x in enumerate(logits.amax(-1).tolist()) if not is_right(x)}


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
