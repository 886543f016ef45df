# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What convert_report.py measures of a model: held-out text, recall by generation, speed, memory.

Shapes: B rows, T tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hf_linear_attention import LinearAttentionCache, LinearAttentionConfig
from hf_linear_attention.extras.bounded_caches import BoundedCache
from recall_texts import Questions

TOKENS_AT_ONCE, ROWS_OF_STEPS = 4096, 128
PROMPT = 1000  # tokens that are really read before a longer context is timed
STEPS, SAMPLES = 8, 5  # tokens of a sample of decoding, of which the fastest counts


@dataclass(frozen=True)
class Contender:
    """A model with the cache that it reads with.

    new_cache: makes one that keeps some of the keys alone; None: the model's own. With a bounded
        one tokens are read one by one, as each is to see what is kept, and no more.
    """

    model: PreTrainedModel
    new_cache: Callable[[], BoundedCache] | None = None

    def cache(self) -> Cache:
        if self.new_cache is not None:
            return self.new_cache()
        config = self.model.config
        if isinstance(config, LinearAttentionConfig):
            return LinearAttentionCache(config)
        return DynamicCache(config=config)

    def read(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Tokens (B, T) that follow those in the cache -> the last one's logits (B, V)."""
        pieces = tokens.split(tokens.shape[1] if self.new_cache is None else 1, dim=1)
        for piece in pieces:
            output = self.model(
                piece.to(self.model.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]

    def rows(self, length: int) -> int:
        """How many rows of so many tokens are read at once: token by token, the more the faster."""
        return max(TOKENS_AT_ONCE // length, 1) if self.new_cache is None else ROWS_OF_STEPS


@torch.no_grad()
def nats_per_token(contender: Contender, blocks: Tensor) -> Tensor:
    """-log p of every token but the first of blocks (B, T) -> (B, T - 1), float32."""
    return torch.cat(
        [_nats(contender, part) for part in blocks.split(contender.rows(len(blocks[0])))]
    )


def _nats(contender: Contender, blocks: Tensor) -> Tensor:
    targets = blocks[:, 1:]
    if contender.new_cache is None:
        logits = contender.model(blocks.to(contender.model.device), use_cache=False).logits[:, :-1]
        nats = F.cross_entropy(
            logits.flatten(0, 1).float().cpu(), targets.flatten(), reduction="none"
        )
        return nats.view_as(targets)
    cache, steps = contender.cache(), []
    for token, target in zip(blocks[:, :-1].unbind(1), targets.unbind(1), strict=True):
        logits = contender.read(token[:, None], cache)
        steps.append(F.cross_entropy(logits.float().cpu(), target, reduction="none"))
    return torch.stack(steps, dim=1)


@torch.no_grad()
def recall(contender: Contender, questions: Questions) -> float:
    """The share of answers that greedy decoding gives in full. A row's questions come one after
    the other; between them stands what the model answered.
    """
    num_right, num_tokens = 0, questions.answers.shape[-1]
    rows = contender.rows(questions.contexts.shape[1])
    for contexts, asked, answers in zip(*(x.split(rows) for x in questions), strict=True):
        cache = contender.cache()
        unread = contexts
        for question, answer in zip(asked.unbind(1), answers.unbind(1), strict=True):
            unread = torch.cat([unread, question], dim=1)
            given = []
            for _ in range(num_tokens):
                unread = contender.read(unread, cache).argmax(-1, keepdim=True).cpu()
                given.append(unread)
            num_right += (torch.cat(given, dim=1) == answer).all(1).sum().item()
    return num_right / questions.answers.shape[:2].numel()


@torch.no_grad()
def speed_and_memory(contender: Contender, context: int) -> dict[str, float]:
    """Tokens per second of one row after so many tokens, and bytes of what is remembered of them.

    Of a longer context than PROMPT, keys and values of softmax layers are random numbers: reading
    it would take the square of its length, and its content changes no time.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = contender.model.config.vocab_size
    tokens = torch.randint(vocab_size, (1, min(context, PROMPT) + 1), generator=generator)
    cache = contender.cache()
    contender.read(tokens[:, :-1], cache)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and not layer.is_sliding:
            _fill(layer, context)
    num_bytes = cache_bytes(cache)

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            contender.read(tokens[:, -1:], cache)
        return time.perf_counter() - start

    sample()
    seconds = min(sample() for _ in range(SAMPLES)) / STEPS
    return {"tokens_per_second": 1 / seconds, "cache_bytes": num_bytes}


def _fill(layer: DynamicLayer, length: int) -> None:
    """Random keys and values, so that a layer has so many tokens."""
    B, H, n, _ = layer.keys.shape
    if n < length:
        keys, values = (
            torch.randn(B, H, length - n, x.shape[-1], dtype=x.dtype, device=x.device)
            for x in (layer.keys, layer.values)
        )
        layer.update(keys, values)


def cache_bytes(cache: Any) -> int:
    """Of all that a cache remembers."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
