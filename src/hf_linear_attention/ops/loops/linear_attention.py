# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention, token by token.

Shapes: B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed
sequences.
"""

import torch
from torch import Tensor

from ..arguments import LinearArguments
from ..feature_maps import POINTWISE
from ..numerics import accumulation_dtype


def reference_linear_attention(
    arguments: LinearArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The recurrence, token by token; arguments as in `linear_attention`, unchecked.

    Returns y and the state, (kv, z). Computes in float32, or float64 for float64 inputs.
    Differentiable any number of times.
    """
    q, k, v, log_decay, _, key_mask, feature_map, normalize, eps, is_causal = arguments
    dtype = accumulation_dtype(q.dtype)
    phi = POINTWISE[feature_map or "identity"]
    if key_mask is None:
        key_mask = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    if log_decay is None:
        log_decay = torch.zeros(k.shape[:3], dtype=dtype, device=q.device)
    if cu_seqlens is None:
        sequences = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [(0, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    rows = len(sequences)
    (Hkv, K), V = k.shape[2:], v.shape[3]
    group = q.shape[2] // Hkv
    kv, z = (None, None) if initial_state is None else initial_state
    kv = q.new_zeros(rows, Hkv, K, V, dtype=dtype) if kv is None else kv.to(dtype)
    z = q.new_zeros(rows, Hkv, K, dtype=dtype) if z is None else z.to(dtype)

    outputs, final_kv, final_z = [], [], []
    for row, (b, start, end) in enumerate(sequences):
        S, s = kv[row], z[row]
        seen = []  # the state after each token
        for t in range(start, end):
            if key_mask[b, t]:  # padding neither writes nor forgets
                phi_k, value = phi(k[b, t].to(dtype)), v[b, t].to(dtype)
                remember = log_decay[b, t].to(dtype).exp()
                S = remember[:, None, None] * S + phi_k[:, :, None] * value[:, None, :]
                s = remember[:, None] * s + phi_k
            seen.append((S, s))
        for t in range(start, end):
            if not key_mask[b, t]:  # nor reads
                outputs.append(q.new_zeros(q.shape[2], V))
                continue
            S_t, s_t = seen[t - start] if is_causal else (S, s)
            phi_q = phi(q[b, t].to(dtype)).view(
                Hkv, group, K
            )  # query head h reads key-value head h // group
            y = (phi_q[..., None] * S_t[:, None]).sum(2)
            if normalize:
                y = y / ((phi_q * s_t[:, None]).sum(2, keepdim=True) + eps)
            outputs.append(y.reshape(-1, V).to(q.dtype))
        final_kv.append(S)
        final_z.append(s)

    y = torch.stack(outputs) if outputs else q.new_zeros(0, q.shape[2], V)
    state_kv = torch.stack(final_kv) if rows else kv.clone()
    state_z = torch.stack(final_z) if rows else z.clone()
    return y.view(*q.shape[:3], V), (state_kv, state_z if normalize else None)
