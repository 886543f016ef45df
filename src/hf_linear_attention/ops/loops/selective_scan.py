# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan, token by token.

Shapes: batch, T time, channels, N sums of a state, rows of states: as many as there are sequences.
"""

import torch
from torch import Tensor

from ..arguments import SelectiveArguments
from ..numerics import accumulation_dtype


def reference_selective_scan(
    arguments: SelectiveArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; arguments as in `selective_scan`, unchecked.

    Returns y (batch, T, channels) and the state (rows, channels, N). Computes in float32, or
    float64 for float64 inputs. Differentiable any number of times.
    """
    x, dt, A, B, C, D, key_mask = arguments
    dtype = accumulation_dtype(x.dtype)
    batch, T, channels = x.shape
    if cu_seqlens is None:
        sequences = [(b, 0, T) for b in range(batch)]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [(0, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    outputs, states = [], []
    for row, (b, start, end) in enumerate(sequences):
        S = A.new_zeros(A.shape) if initial_state is None else initial_state[row]
        for t in range(start, end):
            if key_mask is not None and not key_mask[b, t]:  # no write, no forgetting, no answer
                outputs.append(x.new_zeros(channels))
                continue
            x_t, dt_t = x[b, t].to(dtype), dt[b, t]
            B_t, C_t = B[b, t].to(dtype), C[b, t].to(dtype)
            S = torch.exp(dt_t[:, None] * A) * S + (dt_t * x_t)[:, None] * B_t
            y = (S * C_t).sum(-1)
            if D is not None:
                y = y + D * x_t
            outputs.append(y.to(x.dtype))
        states.append(S)

    y = torch.stack(outputs) if outputs else x.new_zeros(0, channels)
    state = torch.stack(states) if states else A.new_zeros(0, *A.shape)
    return y.view(batch, T, channels), state
