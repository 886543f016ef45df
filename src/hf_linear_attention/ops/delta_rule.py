# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule: the public functions, their checks, and what each backend has for it.

The same kernels sum without the rule (`delta=False`); linear attention takes them where its decay
is one per channel, its writes have strengths, or its value heads share key heads.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, N
packed sequences.
"""

import torch
from torch import Tensor

from .backends import (
    Implementation,
    Missing,
    choose,
    if_compiled,
    native_op,
)
from .checks import (
    check_cu_seqlens,
    check_key_mask,
    check_log_decay,
    check_per_token,
    check_qkv,
    check_state,
    is_readable,
    refuse_lost_gradient,
    to_dtype,
)
from .chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_
from .loops.delta_rule import reference_delta_rule
from .slots import (
    InSlots,
    check_slots,
    check_state_indices,
    num_slots,
    rows_with_a_slot,
    step_on_slots_,
)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences: for each value head, S_t of (K, V),

        S' = exp(log_decay_t) S_{t-1}                     (a number, or one for each row of S)
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
        y_t = scale S_t^T q_t

    A state is asked for what it holds under a key, and changed by a part beta of what that lacks of
    the value. beta = 1 with keys of norm 1 replaces the value; beta in (1, 2) makes eigenvalues of
    the transition I - beta k k^T negative, which lets a state follow parity.

    Args:
        q, k, v: (B, T, Hq, K), (B, T, Hk, K), (B, T, Hv, V), of one dtype: float32, bfloat16,
            float16 or float64, of any strides. Hk divides Hv: value head h is written under key
            head h // (Hv // Hk). Hq divides Hv or is a multiple of it, and heads meet likewise.
        beta: (B, T, Hv), how much of the difference is written.
        log_decay: (B, T, Hv), or (B, T, Hv, K) for one per channel, at most 0; -inf forgets
            everything. On CUDA its sign is not checked, because looking would wait for the device.
            With it, what the compiled kernels compute on x86 below the smallest normal number
            becomes 0.
        scale: of the outputs; by default K ** -0.5.
        normalize_qk: divides q and k by their norms, as x / sqrt(sum(x^2) + 1e-6). The rule needs
            keys of norm 1 or less, or beta that makes up for it: otherwise states grow without end.
        key_mask: (B, T), bool or 0/1, false for padding: such a token is neither written nor
            forgotten, its output and all its gradients are 0, and whatever its inputs hold (NaN,
            too) reaches nothing.
        cu_seqlens: (N + 1,) int32 or int64, bounds of N sequences packed in one row (B = 1): 0,
            ..., T. No state crosses a bound.
        initial_state: (B, Hv, K, V), N rows with `cu_seqlens`; float32, or float64 for float64
            inputs.
        return_state: also return the state after the last token.
        backend: "cuda", "cpu", "chunked" or "reference"; None takes the first that runs on q's
            device, or the one that the environment variable HF_LINEAR_ATTENTION_BACKEND named when
            this was imported.

    Returns:
        y (B, T, max(Hq, Hv), V) of q's dtype, or (y, state) with `return_state`, the state as
        initial_state. Sums and states are kept in float32, or float64 for float64 inputs.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: Schlag et al., arXiv 2102.11174 (the rule), Yang et al., "Gated Delta Networks",
    arXiv 2412.06464 (a decay per head), Kimi Team, "Kimi Linear", arXiv 2510.26692 (one per
    channel), Grazzi et al., arXiv 2411.12537 (negative eigenvalues).
    """
    chosen = choose(for_sequences_of(q), backend, q.device, q.dtype)
    check_qkv(q, k, v, 4)
    rows = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, readable=chosen.reads_cu_seqlens or is_readable(cu_seqlens))
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if initial_state is not None:
        check_state("initial_state", initial_state, q, (rows, v.shape[2], q.shape[3], v.shape[3]))
    key_mask = check_key_mask(key_mask, q)
    y, state = run_rule(
        chosen,
        q,
        k,
        v,
        check_per_token("beta", beta, q, tuple(v.shape[:-1])),
        check_log_decay(log_decay, q, v, key_mask),
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        normalize_qk=normalize_qk,
        delta=True,
    )
    return (y, state) if return_state else y


def delta_rule_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    key_mask: Tensor | None = None,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `delta_rule` for every row, without gradient; `state` changes in place.

    Args:
        q, k, v: (B, Hq, K), (B, Hk, K), (B, Hv, V).
        beta: (B, Hv).
        state: (B, Hv, K, V), float32, or float64 for float64 inputs. Each row is contiguous, and
            rows are as far apart as they like. No other argument may share memory with it.
        log_decay, key_mask: (B, Hv) or (B, Hv, K), and (B,).
        state_indices: (B,) int32, the slot of `state` for each row, as in `linear_attention_step_`.
        The others: as in `delta_rule`.

    Returns:
        y (B, max(Hq, Hv), V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `delta_rule`; RuntimeError also where a gradient would be
            needed.
    """
    refuse_lost_gradient("delta_rule", q, k, v, beta, log_decay, state)
    chosen = choose(IMPLEMENTATIONS, backend, q.device, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return step_rule_(
        chosen,
        q,
        k,
        v,
        beta,
        log_decay,
        key_mask,
        state,
        scale,
        normalize_qk,
        delta=True,
        state_indices=state_indices,
    )


def run_rule_in_slots(
    implementation: Implementation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    *,
    state: Tensor,
    in_slots: InSlots,
    **options,
) -> Tensor:
    """y of `run_rule` from states in slots, which change in place, where it `runs_in_slots`."""
    assert implementation.run_in_slots is not None
    sequences = in_slots._asdict()
    return implementation.run_in_slots(
        q, k, v, beta, log_decay, state=state, **sequences, **options
    )


def runs_in_slots(implementation: Implementation, q: Tensor, v: Tensor) -> bool:
    """Several queries of a state, Hq > Hv, get copies of it in `run_rule`."""
    return implementation.run_in_slots is not None and q.shape[2] <= v.shape[2]


def run_rule(
    implementation: Implementation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    *,
    initial_state: Tensor | None,
    **options,
) -> tuple[Tensor, Tensor]:
    """A backend's rule for any grouping of heads; arguments checked, options as it takes them."""
    Hq, Hv = q.shape[2], v.shape[2]
    if Hq <= Hv:
        return implementation.run(q, k, v, beta, log_decay, initial_state=initial_state, **options)
    # Backends read a state by one query head: several get copies of it.
    G = Hq // Hv
    v = v.repeat_interleave(G, 2)
    beta, log_decay = (None if x is None else x.repeat_interleave(G, 2) for x in (beta, log_decay))
    if initial_state is not None:
        initial_state = initial_state.repeat_interleave(G, 1)
    y, state = implementation.run(q, k, v, beta, log_decay, initial_state=initial_state, **options)
    return y, state[:, ::G].contiguous()


def step_rule_(
    implementation: Implementation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    scale: float,
    normalize_qk: bool,
    delta: bool,
    state_indices: Tensor | None,
) -> Tensor:
    """A backend's step for any grouping of heads; it checks the arguments."""
    Hq, Hv = q.shape[1], v.shape[1]
    if Hq <= Hv and implementation.step_checks:
        return implementation.step_(
            q, k, v, beta, log_decay, key_mask, state, scale, normalize_qk, delta, state_indices
        )
    beta, log_decay, key_mask = _check_step(
        q, k, v, beta, log_decay, key_mask, state, state_indices
    )
    G = max(Hq // Hv, 1)
    if G > 1:  # as in run_rule
        v = v.repeat_interleave(G, 1)
        beta, log_decay = (
            None if x is None else x.repeat_interleave(G, 1) for x in (beta, log_decay)
        )

    def step_(rows: Tensor) -> Tensor:
        own = rows.repeat_interleave(G, 1) if G > 1 else rows
        y = implementation.step_(
            q, k, v, beta, log_decay, key_mask, own, scale, normalize_qk, delta
        )
        if G > 1:
            rows.copy_(own[:, ::G])
        return y

    return step_on_slots_(step_, (state,), state_indices)


def _check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Everything about one token's arguments; beta, log_decay and key_mask in the dtypes that
    backends take, the last without the rows that have no slot.
    """
    check_qkv(q, k, v, 3)
    slots = num_slots(state, state_indices, q.shape[0])
    check_state("state", state, q, (slots, v.shape[1], q.shape[2], v.shape[2]))
    check_slots("state", state)
    if beta is not None:
        beta = check_per_token("beta", beta, q, tuple(v.shape[:-1]))
    key_mask = check_key_mask(key_mask, q)
    if state_indices is not None:
        check_state_indices(state_indices, q.shape[0], slots, q)
        key_mask = rows_with_a_slot(state_indices, key_mask)
    return beta, check_log_decay(log_decay, q, v, key_mask), key_mask


_native = native_op("delta_rule")
_native_step_ = native_op("delta_rule_step_")
_native_in_slots_ = native_op("delta_rule_")


def _step_compiled_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    scale: float,
    normalize_qk: bool,
    delta: bool,
    state_indices: Tensor | None = None,
) -> Tensor:
    # This runs once per layer and token: what the kernel refuses is explained only afterwards.
    try:
        if beta is not None:
            beta = to_dtype(beta, state.dtype)
        if log_decay is not None:
            log_decay = to_dtype(log_decay, state.dtype)
        if key_mask is not None and key_mask.dtype is not torch.bool:
            key_mask = check_key_mask(key_mask, q)
        token = q, k, v, beta, log_decay, key_mask, state, scale, normalize_qk, delta
        return _native_step_(*token, state_indices)
    except RuntimeError:
        _check_step(q, k, v, beta, log_decay, key_mask, state, state_indices)
        raise


def _step_reference_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    scale: float,
    normalize_qk: bool,
    delta: bool,
) -> Tensor:
    beta, log_decay, key_mask = (
        None if x is None else x[:, None] for x in (beta, log_decay, key_mask)
    )
    y, after = reference_delta_rule(
        q[:, None],
        k[:, None],
        v[:, None],
        beta,
        log_decay,
        key_mask=key_mask,
        initial_state=state,
        scale=scale,
        normalize_qk=normalize_qk,
        delta=delta,
    )
    state.copy_(after)
    return y[:, 0]


_compiled = Implementation(_native, _step_compiled_, step_checks=True)
IMPLEMENTATIONS = {
    "cuda": if_compiled(_compiled),
    "cpu": if_compiled(_compiled._replace(run_in_slots=_native_in_slots_)),
    "chunked": Implementation(chunked_delta_rule, chunked_delta_rule_step_, reads_cu_seqlens=True),
    "reference": Implementation(reference_delta_rule, _step_reference_, reads_cu_seqlens=True),
}

# A block of the CUDA kernels has all rows of a state in shared memory: so many everywhere.
MOST_KEY_DIM_ON_CUDA = 256
_WITH_LARGE_KEYS = IMPLEMENTATIONS | {
    "cuda": Missing(
        f"over sequences its kernels take keys of up to {MOST_KEY_DIM_ON_CUDA} features"
    )
}


def for_sequences_of(q: Tensor) -> dict[str, Implementation | Missing]:
    """The implementations for sequences with heads of q's size."""
    large = q.dim() > 0 and q.shape[-1] > MOST_KEY_DIM_ON_CUDA
    return _WITH_LARGE_KEYS if large else IMPLEMENTATIONS
