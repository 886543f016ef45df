# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule, token by token, and with `delta=False` linear attention with a decay per channel.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, N
packed sequences.
"""

import torch
from torch import Tensor

from ..arguments import DeltaArguments
from ..numerics import accumulation_dtype, l2_normed


def reference_delta_rule(
    arguments: DeltaArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; arguments as in `delta_rule`, unchecked.

    Hq and Hk divide Hv. Without `delta` a value is written as it is, times beta (None: 1).
    Returns y (B, T, Hv, V) and the state (B or N, Hv, K, V). Computes in float32, or float64 for
    float64 inputs. Differentiable any number of times.
    """
    q, k, v, beta, log_decay, key_mask, scale, normalize_qk, delta, *_ = arguments
    erase_key, add_along = arguments.erase_key, arguments.add_along
    dtype = accumulation_dtype(q.dtype)
    Hv, V = v.shape[2:]
    K = k.shape[3]
    if cu_seqlens is None:
        sequences = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [(0, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def of_every_head(x: Tensor) -> Tensor:
        """(heads, K) -> (Hv, K): value head h reads head h // (Hv / heads)."""
        x = x.to(dtype)
        if normalize_qk:
            x = l2_normed(x)
        return x.repeat_interleave(Hv // x.shape[0], 0)

    outputs, states = [], []
    for row, (b, start, end) in enumerate(sequences):
        S = q.new_zeros(Hv, K, V, dtype=dtype) if initial_state is None else initial_state[row]
        for t in range(start, end):
            if key_mask is not None and not key_mask[b, t]:  # neither writes, forgets nor reads
                outputs.append(q.new_zeros(Hv, V))
                continue
            key, value = of_every_head(k[b, t]), v[b, t].to(dtype)
            asking = key if erase_key is None else erase_key[b, t].to(dtype)
            if add_along is not None:
                found = (S * asking[:, :, None]).sum(1)
            if log_decay is not None:
                remember = log_decay[b, t].exp()  # (Hv,) or (Hv, K)
                S = remember.view(Hv, -1, 1) * S
            if delta and add_along is None:
                value = value - (S * asking[:, :, None]).sum(1)
            if beta is not None:
                value = beta[b, t][:, None] * value
            S = S + key[:, :, None] * value[:, None, :]
            if add_along is not None:
                S = S + add_along[b, t].to(dtype)[:, :, None] * found[:, None, :]
            y = scale * (S * of_every_head(q[b, t])[:, :, None]).sum(1)
            outputs.append(y.to(q.dtype))
        states.append(S)

    y = torch.stack(outputs) if outputs else q.new_zeros(0, Hv, V)
    if states:
        state = torch.stack(states)
    else:
        state = q.new_zeros(0, Hv, K, V, dtype=dtype)
    return y.view(*q.shape[:2], Hv, V), state
