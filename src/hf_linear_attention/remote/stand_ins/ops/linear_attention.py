# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention as layers ask for it, by PyTorch alone.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim.
"""

from functools import partial

from torch import Tensor

from ....ops.arguments import LinearArguments
from ....ops.chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_
from ....ops.chunked.linear_attention import chunked_linear_attention, chunked_step_
from ....ops.numerics import at_least_float32
from ....ops.sums import (
    LinearState,
    is_plain_attention,
    run_own_heads,
    run_sums,
    run_with_copies,
    step_sums_,
    step_with_copies_,
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    write_strength: Tensor | None = None,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LinearState | None,
    return_state: bool,
    is_causal: bool = True,
) -> tuple[Tensor, LinearState]:
    """Linear attention over whole sequences, Katharopoulos et al., arXiv 2006.16236, with decays
    and write strengths: for each value head, with phi the feature map,

        S_t = exp(log_decay_t) S_{t-1} + write_strength_t phi(k_t) v_t^T
        z_t = exp(log_decay_t) z_{t-1} + write_strength_t phi(k_t)
        y_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + eps)          (the division only with `normalize`)
    """
    log_decay, write_strength = (
        None if x is None else at_least_float32(x) for x in (log_decay, write_strength)
    )
    tensors = q, k, v, log_decay, write_strength, key_mask
    arguments = LinearArguments(*tensors, feature_map, normalize, eps, is_causal)
    run = chunked_linear_attention if is_plain_attention(arguments) else run_general
    return run(arguments, cu_seqlens, initial_state)


def linear_attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    log_decay: Tensor | None,
    *,
    write_strength: Tensor | None = None,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float,
    key_mask: Tensor | None,
) -> Tensor:
    """One token of it for every row; `state` changes in place."""
    log_decay, write_strength = (
        None if x is None else at_least_float32(x) for x in (log_decay, write_strength)
    )
    tensors = q, k, v, log_decay, write_strength, key_mask
    arguments = LinearArguments(*tensors, feature_map, normalize, eps)
    step_ = chunked_step_ if is_plain_attention(arguments) else step_general_
    return step_(arguments, state)


def run_general(
    arguments: LinearArguments, cu_seqlens: Tensor | None, state: LinearState | None
) -> tuple[Tensor, LinearState]:
    if not arguments.is_causal:
        return run_own_heads(chunked_linear_attention, arguments, cu_seqlens, state)
    rule = partial(run_with_copies, chunked_delta_rule)
    return run_sums(rule, arguments, cu_seqlens, state)


def step_general_(arguments: LinearArguments, state: LinearState) -> Tensor:
    return step_sums_(partial(step_with_copies_, chunked_delta_rule_step_), arguments, state)
