# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Step sizes and what they forget, on the CPU: the compiled op and its fake."""

import torch
from torch import Tensor

from .library import ops, register_fake

_decay_steps = ops.decay_steps.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def decay_steps(x: Tensor, bias: Tensor, A_log: Tensor, rounds: bool) -> tuple[Tensor, Tensor]:
    """softplus(x + bias) and -exp(A_log) times that, on the CPU, without gradient.

    Args:
        x: (B, T, C) of float32, bfloat16 or float16.
        bias: (C,) of x's dtype or float32.
        A_log: (H,), alike; C / H columns share a number.
        rounds: whether bias, sums and steps are rounded to x's dtype.

    Returns:
        Steps and log decays, (B, T, C) float32.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    B, T, _ = x.shape
    are_rows = x.stride(2) == 1 and (B == 1 or T == 1 or x.stride(0) == T * x.stride(1))
    return _decay_steps(x if are_rows else x.contiguous(), bias, A_log, rounds)


@register_fake("decay_steps", _registrations)
def _fake_decay_steps(x, bias, A_log, rounds):
    return tuple(x.new_empty(x.shape, dtype=torch.float32) for _ in range(2))
