# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""For tests with vLLM: models, engines, and what they are to answer."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tiny import VARIANTS, random_ids, tiny_model

LONGEST = 400
NEW_TOKENS = 12
START = random_ids(70, seed=7).tolist()  # that three of the prompts share
PROMPTS = [random_ids(n, seed=n).tolist() for n in (5, 17, 1, 40, 9, 300, 2, 33, 1)] + [
    START + random_ids(n, seed=100 + n).tolist() for n in (8, 9, 3)
]


def make_model(variant: str, **changes: Any):
    fields = {**VARIANTS[variant], "max_position_embeddings": LONGEST, **changes}
    return tiny_model(dtype=torch.float32, **fields)


def alone(model, prompt: list[int]) -> list[int]:
    """What generate() answers."""
    tokens = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return tokens[0, len(prompt) :].tolist()


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[LLM]:
    settings = {
        "dtype": "float32",
        "max_model_len": LONGEST,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        **settings,
    }
    llm = LLM(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def outputs(llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list:
    """Of all prompts at once, in order."""
    settings = SamplingParams(
        temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(requests, settings, use_tqdm=False)


def tokens_of(outputs: list) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: LLM, name: str) -> float:
    """One of vLLM's counters."""
    (value,) = [metric.value for metric in llm.get_metrics() if metric.name == name]
    return value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
