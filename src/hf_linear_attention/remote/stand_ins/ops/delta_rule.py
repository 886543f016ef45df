# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule as layers ask for it, by PyTorch alone."""

from torch import Tensor

from ....ops.arguments import DeltaArguments
from ....ops.chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    *,
    normalize_qk: bool,
    erase_key: Tensor | None = None,
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
    scale = q.shape[-1] ** -0.5
    arguments = DeltaArguments(q, k, v, beta, log_decay, key_mask, scale, normalize_qk)
    if erase_key is not None:
        erase_key = erase_key.repeat_interleave(v.shape[2] // erase_key.shape[2], 2)
        arguments = arguments._replace(erase_key=erase_key)
    return chunked_delta_rule(arguments, cu_seqlens, initial_state)


def delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    *,
    normalize_qk: bool,
    erase_key: Tensor | None = None,
    key_mask: Tensor | None,
) -> Tensor:
    """One token of it for every row; `state` changes in place."""
    scale = q.shape[-1] ** -0.5
    arguments = DeltaArguments(q, k, v, beta, log_decay, key_mask, scale, normalize_qk)
    if erase_key is not None:
        erase_key = erase_key.repeat_interleave(v.shape[1] // erase_key.shape[1], 1)
        arguments = arguments._replace(erase_key=erase_key)
    return chunked_delta_rule_step_(arguments, state)
