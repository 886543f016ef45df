# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7's delta rule as layers ask for it, by PyTorch alone."""

from torch import Tensor

from ....ops.arguments import DeltaArguments
from ....ops.chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_
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
    arguments = _as_delta_rule(q, k, v, a, b, log_decay, key_mask, scale)
    return chunked_delta_rule(arguments, cu_seqlens, initial_state)


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
    arguments = _as_delta_rule(q, k, v, a, b, log_decay, key_mask, scale)
    return chunked_delta_rule_step_(arguments, state)


def _as_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None,
    scale: float,
) -> DeltaArguments:
    dtype = accumulation_dtype(q.dtype)
    erase, along = a.to(dtype), b.to(dtype)
    return DeltaArguments(
        q, k, v, None, log_decay, key_mask, scale, erase_key=erase, add_along=along
    )
