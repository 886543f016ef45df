# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution, token by token.

Shapes: B batch, T time, C channels, S tokens of a state, N packed sequences.
"""

import torch
from torch import Tensor

from ..arguments import IS_SILU, ConvolutionArguments
from ..numerics import accumulation_dtype


def reference_short_convolution(
    arguments: ConvolutionArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; arguments as in `short_convolution`, unchecked.

    Returns y (B, T, C) and the state (B or N, S, C). Computes in float32, or float64 for float64
    inputs. Differentiable any number of times.
    """
    x, weight, bias, key_mask, activation = arguments
    dtype = accumulation_dtype(x.dtype)
    (B, T, C), kernel_size = x.shape, weight.shape[1]
    if cu_seqlens is None:
        sequences = [(b, 0, T) for b in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [(0, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    outputs, states = [], []
    for row, (b, start, end) in enumerate(sequences):
        if initial_state is None:
            state = x.new_zeros(kernel_size - 1, C)
        else:
            state = initial_state[row]
        for t in range(start, end):
            if key_mask is not None and not key_mask[b, t]:  # neither remembered nor answered
                outputs.append(x.new_zeros(C))
                continue
            tokens = torch.cat([state, x[b, t][None]])
            window = tokens[len(tokens) - kernel_size :]
            u = (window.to(dtype) * weight.t().to(dtype)).sum(0)
            if bias is not None:
                u = u + bias.to(dtype)
            y = u * torch.sigmoid(u) if IS_SILU[activation] else u
            outputs.append(y.to(x.dtype))
            state = tokens[1:]
        states.append(state)

    y = torch.stack(outputs) if outputs else x.new_zeros(0, C)
    S = kernel_size - 1 if initial_state is None else initial_state.shape[1]
    state = torch.stack(states) if states else x.new_zeros(0, S, C)
    return y.view(B, T, C), state
