# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule: the public functions, their checks, and what each backend has for it.

The same kernels sum without the rule (`delta=False`); linear attention takes them where its decay
is one per channel, its writes have strengths, or its value heads share key heads.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, N
packed sequences.
"""

from typing import Any

from torch import Tensor

from .arguments import DeltaArguments
from .backends import Implementation, Missing, kernels
from .calls import Implementations, Op, run, step_, step_by, through
from .checks import (
    check_key_mask,
    check_log_decay,
    check_per_token,
    check_qkv,
    check_state,
)
from .chunked.delta_rule import chunked_delta_rule, chunked_delta_rule_step_
from .loops.delta_rule import reference_delta_rule
from .slots import check_slots
from .sums import run_with_copies, step_with_copies_


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    erase_key: Tensor | None = None,
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

    or with an erase key p_t, S' + beta_t k_t (v_t - S'^T p_t)^T.

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
        erase_key: (B, T, Hk, K) or (B, T, Hv, K), under which states are asked, where that is not
            the key under which they are written. It is not normalised.
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
    channel), Grazzi et al., arXiv 2411.12537 (negative eigenvalues); the erase key is that of Gated
    DeltaNet-2 (p = b * k, channel by channel) and of other systems that write and erase apart.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = DeltaArguments(q, k, v, beta, log_decay, key_mask, scale, normalize_qk)
    if erase_key is not None:
        arguments = with_erase_key(arguments, erase_key)
    y, state = run(OP, arguments, cu_seqlens, initial_state, backend)
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
    erase_key: Tensor | None = None,
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
        erase_key: (B, Hk, K) or (B, Hv, K).
        state_indices: (B,) int32, the slot of `state` for each row, as in `linear_attention_step_`.
        The others: as in `delta_rule`.

    Returns:
        y (B, max(Hq, Hv), V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `delta_rule`; RuntimeError also where a gradient would be
            needed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = DeltaArguments(q, k, v, beta, log_decay, key_mask, scale, normalize_qk)
    if erase_key is not None:
        arguments = with_erase_key(arguments, erase_key, has_time=False)
    return step_(OP, arguments, state, state_indices, backend)


def with_erase_key(
    arguments: DeltaArguments, erase_key: Tensor, has_time: bool = True
) -> DeltaArguments:
    """With one for every value head."""
    try:
        k, v = arguments.k, arguments.v
        shapes = {(*v.shape[:-2], x.shape[-2], k.shape[-1]) for x in (k, v)}
        erase_key = check_per_token("erase_key", erase_key, arguments.q, *sorted(shapes))
        if erase_key.shape[-2] != v.shape[-2]:
            erase_key = erase_key.repeat_interleave(v.shape[-2] // k.shape[-2], -2)
        return arguments._replace(erase_key=erase_key)
    except Exception:  # raised again, unless the checks name the argument that is wrong
        _check_arguments(arguments, has_time)
        raise


def _check_arguments(arguments: DeltaArguments, has_time: bool) -> DeltaArguments:
    q, k, v, beta, log_decay, key_mask, *_, erase_key, _ = arguments
    check_qkv(q, k, v, 4 if has_time else 3)
    key_mask = check_key_mask(key_mask, q)
    if beta is not None:
        beta = check_per_token("beta", beta, q, tuple(v.shape[:-1]))
    log_decay = check_log_decay(log_decay, q, v, key_mask)
    if erase_key is not None:
        shape = (*v.shape[:-1], q.shape[-1])
        erase_key = check_per_token("erase_key", erase_key, q, shape)
    return arguments._replace(
        beta=beta, log_decay=log_decay, key_mask=key_mask, erase_key=erase_key
    )


def check_kv(name: str, state: Tensor, arguments: Any, rows: int, in_place: bool = False) -> None:
    """Of any delta rule, whose arguments begin with q, k and v."""
    q, _, v, *_ = arguments
    check_state(name, state, q, (rows, v.shape[-2], q.shape[-1], v.shape[-1]))
    if in_place:
        check_slots(name, state)


IMPLEMENTATIONS: Implementations = {
    "cuda": kernels("delta_rule"),
    "cpu": kernels("delta_rule", find_slots=True),
    "chunked": Implementation(chunked_delta_rule, chunked_delta_rule_step_, reads_cu_seqlens=True),
    "reference": Implementation(
        reference_delta_rule, step_by(reference_delta_rule), reads_cu_seqlens=True
    ),
}


def with_copies(implementations: Implementations) -> Implementations:
    """For several queries of a state, Hq > Hv."""
    return through(
        implementations, run_with_copies, step_with_copies_, checks=False, finds_slots=False
    )


WITH_COPIES = with_copies(IMPLEMENTATIONS)


def _for_tokens(arguments: DeltaArguments) -> Implementations:
    return WITH_COPIES if arguments.q.shape[-2] > arguments.v.shape[-2] else IMPLEMENTATIONS


def _for_sequences(arguments: DeltaArguments) -> Implementations:
    return for_sequences_of(arguments.q, _for_tokens(arguments))


# A block of the CUDA kernels has all rows of a state in shared memory: so many everywhere.
MOST_KEY_DIM_ON_CUDA = 256
_NOT_ON_CUDA = Missing(
    f"over sequences its kernels take keys of up to {MOST_KEY_DIM_ON_CUDA} features"
)


def for_sequences_of(q: Tensor, implementations: Implementations) -> Implementations:
    """These, for sequences with heads of q's size."""
    large = q.shape[-1] > MOST_KEY_DIM_ON_CUDA
    return {**implementations, "cuda": _NOT_ON_CUDA} if large else implementations


OP = Op("delta_rule", _check_arguments, check_kv, _for_sequences, _for_tokens)
