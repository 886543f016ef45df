# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule as layers ask for it, by PyTorch alone.

Shapes: as in ops/chunked/delta_rule.py.
"""

from torch import Tensor

from ....ops.chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_
from ....ops.numerics import at_least_float32


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    *,
    normalize_qk: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences, Schlag et al., arXiv 2102.11174, Yang et al.,
    arXiv 2412.06464: for each value head, S_t of (K, V),

        S' = exp(log_decay_t) S_{t-1}                     (a number, or one for each row of S)
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,  y_t = S_t^T q_t / sqrt(K)
    """
    return chunked_delta_rule(
        q,
        k,
        v,
        at_least_float32(beta),
        None if log_decay is None else at_least_float32(log_decay),
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        scale=q.shape[-1] ** -0.5,
        normalize_qk=normalize_qk,
    )


def delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    *,
    normalize_qk: bool,
    key_mask: Tensor | None,
    state_indices: None,
) -> Tensor:
    """One token of it for every row; `state` changes in place."""
    if log_decay is not None:
        log_decay = at_least_float32(log_decay)
    token = q, k, v, at_least_float32(beta), log_decay, key_mask, state
    return chunked_delta_rule_step_(*token, q.shape[-1] ** -0.5, normalize_qk, True)
