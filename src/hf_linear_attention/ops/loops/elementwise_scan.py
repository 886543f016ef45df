# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan, token by token.

Shapes: B batch, T time, C channels, rows of states: as many as there are sequences.
"""

import torch
from torch import Tensor

from ..arguments import ElementwiseArguments
from ..numerics import accumulation_dtype


def reference_elementwise_scan(
    arguments: ElementwiseArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; arguments as in `elementwise_scan`, unchecked.

    Returns y (B, T, C) and the state (rows, C). Computes in float32, or float64 for float64 inputs.
    Differentiable any number of times.
    """
    x, log_decay, key_mask = arguments
    dtype = accumulation_dtype(x.dtype)
    B, T, C = x.shape
    if cu_seqlens is None:
        sequences = [(b, 0, T) for b in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [(0, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    outputs, states = [], []
    for row, (b, start, end) in enumerate(sequences):
        h = x.new_zeros(C, dtype=dtype) if initial_state is None else initial_state[row]
        for t in range(start, end):
            if key_mask is not None and not key_mask[b, t]:  # no write, no forgetting, no answer
                outputs.append(x.new_zeros(C))
                continue
            h = log_decay[b, t].exp() * h + x[b, t].to(dtype)
            outputs.append(h.to(x.dtype))
        states.append(h)

    y = torch.stack(outputs) if outputs else x.new_zeros(0, C)
    state = torch.stack(states) if states else x.new_zeros(0, C, dtype=dtype)
    return y.view(B, T, C), state
