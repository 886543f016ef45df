# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sampling of each request by its own settings. Over HTTP, Transformers' server would give the
engine the first request's for all.

Shapes: N rows of logits, V size of the vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
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
# Of the logits of one token and of all tokens before it.
BY_HISTORY = {
    "bad_words_ids": NoBadWordsLogitsProcessor,
    "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "sequence_bias": SequenceBiasLogitsProcessor,
    "suppress_tokens": SuppressTokensLogitsProcessor,
}
KEY = "sampling of HTTP"  # of a Sampling among a request's logit_processor_kwargs


class Sampling:
    """Of a request. Nothing changes it, but a seed's generator.

    config: its settings of WARPERS, where tokens are drawn, and of BY_HISTORY.
    penalties: what each time that a token was generated takes from its logit, and what the first
    time does.
    seed: of the numbers by which tokens are drawn; without, they are those of PyTorch's generator.

    Raises:
        ValueError: a setting is out of its range; of drawing only where tokens are drawn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: GenerationConfig,
        penalties: tuple[float, float] = (0.0, 0.0),
        seed: int | None = None,
    ):
        self.draws = bool(config.do_sample)
        self.settings = tuple(getattr(config, name, None) for name in WARPERS if self.draws)
        for name, value in zip(WARPERS, self.settings, strict=False):
            if value is not None and (name, value) != ("top_k", 0):  # which stands for none
                check_range(name, value)
        config = copy.copy(config)
        ends = config.eos_token_id  # which Transformers looks for where generate() has put them
        config._eos_token_tensor = None if ends is None else torch.tensor(ends).view(-1)
        made = model._get_logits_processor(config, input_ids_seq_length=1)  # there is a prompt
        self.warpers, self.by_history = (
            LogitsProcessorList(x for x in made if isinstance(x, tuple(table.values())))
            for table in (WARPERS, BY_HISTORY)
        )
        self.penalties = penalties
        self.generator: torch.Generator | None = None
        if self.draws and seed is not None:
            self.generator = torch.Generator(model.device).manual_seed(seed)
        if self.by_history:  # which look at tokens' numbers when they first see logits
            token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            vocab_size = model.config.get_text_config().vocab_size
            self.by_history(token, torch.zeros(1, vocab_size, device=model.device))

    def __deepcopy__(self, memo: Any) -> "Sampling":
        return self

    @property
    def reads_history(self) -> bool:
        return bool(self.by_history) or any(self.penalties)

    @property
    def is_plain(self) -> bool:
        """Whether its token is that of the largest logit."""
        return not (self.draws or self.reads_history)

    def like(self) -> tuple:
        """Equal for samplings by which rows of logits may be changed together."""
        return self.draws, *self.settings, self.generator and id(self.generator)

    def after(self, request: RequestState, logits: Tensor) -> Tensor:
        """Logits (1, V), changed by the tokens that a request has."""
        if self.by_history:
            tokens = request.initial_tokens + request.generated_tokens
            logits = self.by_history(torch.tensor([tokens], device=logits.device), logits)
        if any(self.penalties):
            # A request that had lost its memory has read its own tokens again.
            length = request._true_initial_tokens or len(request.initial_tokens)
            generated = request.initial_tokens[length:] + request.generated_tokens
            counts = torch.bincount(
                torch.tensor(generated, dtype=torch.int64, device=logits.device),
                minlength=logits.shape[-1],
            )
            frequency, presence = self.penalties
            logits = logits - frequency * counts - presence * (counts > 0)
        return logits

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (n, V) to draw from."""
        if not self.draws:
            return only(logits.argmax(-1, keepdim=True), logits)
        logits = self.warpers(None, logits)
        if self.generator is None or not math.isfinite(logits.amax()):  # which give no token
            return logits
        return only(drawn(logits.softmax(-1), self.generator), logits)


def only(tokens: Tensor, logits: Tensor) -> Tensor:
    """Logits by which these tokens (n, 1) are sure to be drawn."""
    return torch.full_like(logits, -torch.inf).scatter(1, tokens, 0)


BLOCK = 512  # tokens


def drawn(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Tokens (N, 1) by probabilities (N, V): first a block of the vocabulary, then one of its
    tokens. `torch.multinomial` draws a number for each token, which takes as long as a small model.
    """
    padded = pad(probabilities, (0, -probabilities.shape[-1] % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    sums = torch.float32 if blocks.device.type == "mps" else torch.float64  # which that has not
    upto = blocks.sum(-1).cumsum(-1, dtype=sums)
    number = torch.rand(len(upto), 1, dtype=upto.dtype, device=upto.device, generator=generator)
    number = below(number * upto[:, -1:], upto)
    block = torch.searchsorted(upto, number, right=True)
    before = pad(upto, (1, 0)).gather(1, block)
    within = blocks.take_along_dim(block[..., None], 1)[:, 0].cumsum(-1, dtype=upto.dtype)
    token = torch.searchsorted(within, below(number - before, within), right=True)
    return block * BLOCK + token


def below(number: Tensor, upto: Tensor) -> Tensor:
    """Numbers (N, 1) that are not rounded to the sums' last, behind which nothing is."""
    last = upto[:, -1:]
    return torch.minimum(number, last.nextafter(torch.zeros_like(last)))


def sampled(
    logits: Tensor, samplings: Sequence[Sampling], requests: Sequence[RequestState]
) -> Tensor:
    """Logits (N, V), of which the first rows are of these requests, with such samplings."""
    rows_of: dict[tuple, list[int]] = {}
    changed = logits.clone()
    for row, (sampling, request) in enumerate(zip(samplings, requests, strict=True)):
        rows_of.setdefault(sampling.like(), []).append(row)
        if sampling.reads_history:
            changed[row] = sampling.after(request, changed[row, None])[0]
    for rows in rows_of.values():
        index = torch.tensor(rows, device=logits.device)
        changed[index] = samplings[rows[0]](changed[index])
    return changed


def without_sampling(config: GenerationConfig) -> GenerationConfig:
    """The same for an engine whose requests have settings of their own."""
    config = copy.deepcopy(config)
    config.num_return_sequences = None
    for name in (*WARPERS, *BY_HISTORY, "stop_strings"):
        setattr(config, name, None)
    return config
