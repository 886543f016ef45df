# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A token of a whole model for bench_cuda.py: 12 layers x 768 in bfloat16, by one forward."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_linear_attention import LinearAttentionCache
from models import SIZE, SMALLEST, Size, make_model, random_tokens, weight_bytes

ROWS = [1, 8, 32]
PROMPT = 8  # tokens before those that are timed: a cache never grows


def model_size(device: str) -> Size:
    return SIZE if device == "cuda" else SMALLEST


@torch.no_grad()
def a_token(rows: int, device: str) -> tuple[Callable[[], Tensor], int]:
    """What computes one for each row, and the bytes of the weights, which it reads at least."""
    size = model_size(device)
    model = make_model("ours", torch.bfloat16, size).to(device)
    cache = LinearAttentionCache(config=model.config)
    model(random_tokens(size, rows, PROMPT).to(device), past_key_values=cache)
    token = random_tokens(size, rows, 1).to(device)
    return lambda: model(token, past_key_values=cache).logits, weight_bytes(model)
