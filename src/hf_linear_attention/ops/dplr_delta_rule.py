# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule with a transition that is diagonal plus low rank (DPLR), RWKV-7's: it erases in
one direction and writes in another.

The delta rule's backends have it, as an erase key and what is added along another direction.

Shapes: B batch, T time, H heads, K key dim, V value dim, N packed sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .arguments import DeltaArguments
from .calls import Implementations, Op, run, step_, through
from .checks import check_key_mask, check_log_decay, check_per_token, check_qkv
from .delta_rule import IMPLEMENTATIONS, check_kv, for_sequences_of


class DPLRArguments(NamedTuple):
    """Of `dplr_delta_rule`."""

    q: Tensor  # (B, T, H, K)
    k: Tensor  # (B, T, H, K)
    v: Tensor  # (B, T, H, V)
    a: Tensor  # (B, T, H, K)
    b: Tensor  # (B, T, H, K)
    log_decay: Tensor | None = None  # (B, T, H) or (B, T, H, K)
    key_mask: Tensor | None = None  # (B, T)
    scale: float = 1.0


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The delta rule with a transition diagonal plus low rank, over whole sequences: for each head,
    S_t of (K, V),

        S_t = Diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
        y_t = scale S_t^T q_t

    a asks the state before it decays. With a = -kappa and b = kappa * rate, channel by channel and
    kappa of norm 1, it is RWKV-7's recurrence. Whether states stay small is up to a and b.

    Args:
        q, k, v: (B, T, H, K), (B, T, H, K), (B, T, H, V), of one dtype: float32, bfloat16, float16
            or float64, of any strides.
        a, b: (B, T, H, K), of any of these dtypes, taken in float32 or better.
        log_decay: (B, T, H), or (B, T, H, K) for one per channel, at most 0.
        scale: of the outputs; by default K ** -0.5. RWKV-7 has 1.
        key_mask, cu_seqlens, initial_state, return_state, backend: as in `delta_rule`.

    Returns:
        y (B, T, H, V) of q's dtype, or (y, state) with `return_state`; the state is (B, H, K, V), N
        rows with `cu_seqlens`, in float32, or float64 for float64 inputs.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: Peng et al., "RWKV-7 Goose", arXiv 2503.14456, equation 17, transposed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = DPLRArguments(q, k, v, a, b, log_decay, key_mask, scale)
    y, state = run(OP, arguments, cu_seqlens, initial_state, backend)
    return (y, state) if return_state else y


def dplr_delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `dplr_delta_rule` for every row, without gradient; `state` changes in place.

    Args:
        q, k, v, a, b: (B, H, K), (B, H, K), (B, H, V), (B, H, K), (B, H, K).
        state: (B, H, K, V), as in `delta_rule_step_`.
        log_decay, key_mask: (B, H) or (B, H, K), and (B,).
        state_indices: (B,) int32, the slot of `state` for each row, as in `linear_attention_step_`.
        The others: as in `dplr_delta_rule`.

    Returns:
        y (B, H, V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `dplr_delta_rule`; RuntimeError also where a gradient would be
            needed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = DPLRArguments(q, k, v, a, b, log_decay, key_mask, scale)
    return step_(OP, arguments, state, state_indices, backend)


def _check_arguments(arguments: DPLRArguments, has_time: bool) -> DPLRArguments:
    q, k, v, a, b, log_decay, key_mask, _ = arguments
    check_qkv(q, k, v, 4 if has_time else 3)
    for name, x in (("k", k), ("v", v)):
        if x.shape[-2] != q.shape[-2]:
            raise ValueError(f"{name} must have q's {q.shape[-2]} heads, got {x.shape[-2]}")
    key_mask = check_key_mask(key_mask, q)
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor of shape {tuple(q.shape)}, got {x!r}")
    a = check_per_token("a", a, q, tuple(q.shape))
    b = check_per_token("b", b, q, tuple(q.shape))
    log_decay = check_log_decay(log_decay, q, v, key_mask)
    return arguments._replace(a=a, b=b, log_decay=log_decay, key_mask=key_mask)


def as_delta_rule(arguments: DPLRArguments) -> DeltaArguments:
    """What the delta rule's backends take."""
    q, k, v, a, b, log_decay, key_mask, scale = arguments
    if a is None or b is None or not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        raise ValueError("a and b must be there, q, k and v must have as many heads")
    return DeltaArguments(q, k, v, None, log_decay, key_mask, scale, erase_key=a, add_along=b)


def _run(
    of_delta_rule: Callable[..., tuple[Tensor, Tensor]],
    arguments: DPLRArguments,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return of_delta_rule(as_delta_rule(arguments), cu_seqlens, state)


def _step_(
    of_delta_rule: Callable[..., Tensor], arguments: DPLRArguments, state: Tensor, *slots: Tensor
) -> Tensor:
    return of_delta_rule(as_delta_rule(arguments), state, *slots)


def _run_in_slots_(
    of_delta_rule: Callable[..., Tensor],
    arguments: DPLRArguments,
    cu_seqlens: Tensor | None,
    state: Tensor,
    *where: Tensor | None,
) -> Tensor:
    return of_delta_rule(as_delta_rule(arguments), cu_seqlens, state, *where)


_IMPLEMENTATIONS = through(IMPLEMENTATIONS, _run, _step_, _run_in_slots_)


def _for_tokens(arguments: DPLRArguments) -> Implementations:
    return _IMPLEMENTATIONS


def _for_sequences(arguments: DPLRArguments) -> Implementations:
    return for_sequences_of(arguments.q, _IMPLEMENTATIONS)


OP = Op("dplr_delta_rule", _check_arguments, check_kv, _for_sequences, _for_tokens)
