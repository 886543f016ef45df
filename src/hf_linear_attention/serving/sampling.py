# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sampling of each request by its own settings. Over HTTP, Transformers' server would give the
engine the first request's for all.

Shapes: N rows of logits, V size of the vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .admission import check_range

# Of the logits of one token alone, by settings of these names.
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_h": TopHLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
KEY = "sampling of HTTP"  # of a Sampling among a request's logit_processor_kwargs


class Sampling:
    """Of a request. Nothing changes it.

    Raises:
        ValueError: a setting is out of its range; only where tokens are drawn is it looked at.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig):
        self.draws = bool(config.do_sample)
        self.settings = tuple(getattr(config, name, None) for name in WARPERS if self.draws)
        made = []
        if self.draws:
            for name, value in zip(WARPERS, self.settings, strict=True):
                if value is not None and (name, value) != ("top_k", 0):  # which stands for none
                    check_range(name, value)
            made = model._get_logits_processor(config)
        classes = tuple(WARPERS.values())
        self.warpers = LogitsProcessorList(x for x in made if isinstance(x, classes))

    def __deepcopy__(self, memo: Any) -> "Sampling":
        return self

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (n, V) to draw from."""
        if self.draws:
            return self.warpers(None, logits)
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(1, best, 0)


def sampled(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits (N, V), of which the first rows are of requests with such samplings."""
    rows_of: dict[tuple, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows_of.setdefault((sampling.draws, *sampling.settings), []).append(row)
    changed = logits.clone()
    for rows in rows_of.values():
        index = torch.tensor(rows, device=logits.device)
        changed[index] = samplings[rows[0]](logits[index])
    return changed


def without_sampling(config: GenerationConfig) -> GenerationConfig:
    """The same for an engine whose requests have settings of their own."""
    config = copy.deepcopy(config)
    config.num_return_sequences = None
    for name in WARPERS:
        setattr(config, name, None)
    return config
