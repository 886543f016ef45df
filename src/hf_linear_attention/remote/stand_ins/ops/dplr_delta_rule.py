# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7's delta rule as layers ask for it, by PyTorch alone: each token as two of the other,
of which the first erases, and the second writes and reads.
"""

import torch
from torch import Tensor

from ....ops.arguments import DeltaArguments
from ....ops.chunked.delta_rule import chunked_delta_rule
from ....ops.numerics import accumulation_dtype


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence over whole sequences, Peng et al., arXiv 2503.14456: for each head, S_t of
    (K, V),

        S_t = Diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
        y_t = scale S_t^T q_t
    """

    def alternately(first: Tensor, second: Tensor) -> Tensor:
        """(B, T, ...) both -> (B, 2 T, ...)"""
        return torch.stack([first, second], 2).flatten(1, 2)

    erase_key = -a.to(accumulation_dtype(a.dtype))
    arguments = DeltaArguments(
        alternately(torch.zeros_like(q), q),
        alternately(b, k),
        alternately(torch.zeros_like(v), v),
        log_decay=alternately(log_decay, torch.zeros_like(log_decay)),
        key_mask=None if key_mask is None else key_mask.repeat_interleave(2, 1),
        scale=scale,
        erase_key=alternately(erase_key, torch.zeros_like(erase_key)),
    )
    bounds = None if cu_seqlens is None else 2 * cu_seqlens
    y, state = chunked_delta_rule(arguments, bounds, initial_state)
    return y[:, 1::2], state


def dplr_delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    log_decay: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None,
) -> Tensor:
    """One token of it for every row; `state` changes in place."""
    dtype = q.dtype
    q, k, v, a, b = (x.to(state.dtype)[..., None] for x in (q, k, v, a, b))
    decay = log_decay.to(state.dtype).exp().view(*state.shape[:2], -1, 1)  # of all rows, or each
    after = decay * state + b * (a * state).sum(-2, keepdim=True) + k * v.mT
    if key_mask is not None:
        after = torch.where(key_mask[:, None, None, None], after, state)
    state.copy_(after)
    y = scale * (q * after).sum(-2)
    return (y if key_mask is None else torch.where(key_mask[:, None, None], y, 0)).to(dtype)
