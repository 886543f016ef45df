# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""For tests of continuous batching: running engines, their answers, and that memory comes back."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tiny import random_ids

# of 1 to 100 tokens
PROMPTS = [random_ids(length, seed=length).tolist() for length in (5, 17, 1, 40, 9, 100, 2, 33)]
NEW_TOKENS = 8
GREEDY = {"do_sample": False, "eos_token_id": -1}


def alone(model, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """What generate() answers."""
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


@contextmanager
def engine(
    model, settings: dict | None = None, start: bool = True, **generation: Any
) -> Iterator[Any]:
    """A manager that runs, unless the test is to start it. At its end all memory has come back."""
    settings = {"page_size": 8, "num_blocks": 400, **(settings or {})}
    manager = model.init_continuous_batching(
        GenerationConfig(**{"max_new_tokens": NEW_TOKENS, **GREEDY, **generation}),
        ContinuousBatchingConfig(**settings),
    )
    manager.warmup()
    if start:
        manager.start()
    try:
        yield manager
        wait_until(lambda: not manager.batch_processor.has_pending_requests())
        cache = manager.batch_processor.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1
        assert not any(allocator.block_table for allocator in cache.cache_allocators.values())
        assert not manager.output_router.result_handlers
    finally:
        manager.stop(hard_stop=True)


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def results(manager, ids: Iterable[str]) -> list:
    """The last output of each request, in order."""
    ids, outputs = list(ids), {}
    while len(outputs) < len(ids):
        output = manager.get_result(timeout=60)
        assert output is not None and manager.is_running()
        if output.is_finished():
            outputs[output.request_id] = output
    return [outputs[request_id] for request_id in ids]


def tokens_of(outputs: list) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs]
