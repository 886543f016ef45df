# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention: the public functions, their checks, and what each backend has for them.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, N
packed sequences.
"""

from typing import NamedTuple

from torch import Tensor

from .arguments import LinearArguments
from .backends import Implementation, kernels
from .calls import Implementations, Op, run, step_, step_by, through
from .checks import (
    DTYPES,
    check_key_mask,
    check_log_decay,
    check_per_token,
    check_qkv,
    check_state,
)
from .chunked.linear_attention import chunked_linear_attention, chunked_step_
from .delta_rule import IMPLEMENTATIONS as RULES
from .delta_rule import WITH_COPIES, for_sequences_of
from .feature_maps import POINTWISE, UNMAPPED
from .loops.linear_attention import reference_linear_attention
from .slots import check_slots
from .sums import is_plain_attention, run_own_heads, run_sums, run_sums_in_slots_, step_sums_


class LinearAttentionState(NamedTuple):
    """All that linear attention remembers: kv (B, Hv, K, V) and z (B, Hv, K).

    float32, or float64 for float64 inputs. B is N with `cu_seqlens`. z is None when not normalised.
    """

    kv: Tensor
    z: Tensor | None


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    write_strength: Tensor | None = None,
    feature_map: str | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LinearAttentionState | tuple[Tensor, Tensor | None] | None = None,
    return_state: bool = False,
    normalize: bool = True,
    eps: float = 1e-6,
    is_causal: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention over whole sequences: for each value head, with phi the feature map,

        S_t = exp(log_decay_t) S_{t-1} + write_strength_t phi(k_t) v_t^T
        z_t = exp(log_decay_t) z_{t-1} + write_strength_t phi(k_t)
        y_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + eps)          (the division only with `normalize`)

    Args:
        q, k, v: (B, T, Hq, K), (B, T, Hk, K), (B, T, Hv, V), of one dtype: float32, bfloat16,
            float16 or float64, of any strides. Hk divides Hv: value head h is written under key
            head h // (Hv // Hk). Hq is a multiple of Hv or divides it, and heads meet likewise. On
            CUDA a NaN or an infinity in v can reach outputs a little before its token, as tensor
            cores multiply it by the zeros that keep later tokens out.
        log_decay: (B, T, Hv), or (B, T, Hv, K) for one per channel of a key, at most 0; -inf
            forgets everything. Only with `is_causal`. On CUDA its sign is not checked, because
            looking would wait for the device. With it, what the compiled kernels compute on x86
            below the smallest normal number becomes 0.
        write_strength: (B, T, Hv), or None for 1; kept in float32 or better.
        feature_map: name of a pointwise phi, or None where q and k are mapped already.
        key_mask: (B, T), bool or 0/1, false for padding: such a token is neither written nor
            forgotten, its output and all its gradients are 0, and whatever its inputs hold (NaN,
            too) reaches nothing.
        cu_seqlens: (N + 1,) int32 or int64, bounds of N sequences packed in one row (B = 1): 0,
            ..., T. No state crosses a bound. On CUDA its values are not checked, either.
        initial_state: state to continue from, (kv, z) of shapes (B, Hv, K, V) and (B, Hv, K), N
            rows with `cu_seqlens`; float32, or float64 for float64 inputs; z is None without
            `normalize`.
        return_state: also return the state after the last token.
        is_causal: False reads, at every token, the sum over the whole sequence.
        backend: "cuda", "cpu", "chunked" or "reference"; None takes the first of `BACKENDS` that
            runs on q's device, or the one that the environment variable HF_LINEAR_ATTENTION_BACKEND
            named when this was imported.

    Returns:
        y (B, T, max(Hq, Hv), V) of q's dtype, or (y, LinearAttentionState) with `return_state`.
        Sums, states and denominators are kept in float32, or float64 for float64 inputs.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236; decays as in RetNet,
    arXiv 2307.08621, and per channel as in GLA, arXiv 2312.06635; write strengths and shared keys
    as in Mamba-2, arXiv 2405.21060.
    """
    if not eps >= 0:
        refuse_eps(eps)
    arguments = LinearArguments(
        q, k, v, log_decay, write_strength, key_mask, feature_map, normalize, eps, is_causal
    )
    y, state = run(OP, arguments, cu_seqlens, initial_state, backend)
    return (y, LinearAttentionState(*state)) if return_state else y


def linear_attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState | tuple[Tensor, Tensor | None],
    log_decay: Tensor | None = None,
    *,
    write_strength: Tensor | None = None,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `linear_attention` for every row, without gradient; `state` changes in place.

    Args:
        q, k, v: (B, Hq, K), (B, Hk, K), (B, Hv, V).
        state: kv (B, Hv, K, V) and z (B, Hv, K), float32, or float64 for float64 inputs; z is None
            without `normalize`. Each row is contiguous, and rows are as far apart as they like. No
            other argument may share memory with it.
        log_decay, write_strength, key_mask: (B, Hv) or (B, Hv, K), (B, Hv), and (B,).
        state_indices: (B,) int32, with states of as many slots as there may be in the place of B
            rows: which slot has the state of each row, no one twice. A row whose index is -1 has
            none: its output is 0, and its token changes nothing. Slots that are not named are
            neither read nor written. On CUDA the values are not checked, because looking would wait
            for the device; its kernel answers an index that is no slot's with NaN.
        The others: as in `linear_attention`.

    Returns:
        y (B, max(Hq, Hv), V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `linear_attention`; RuntimeError also where a gradient would be
            needed.
    """
    if not eps >= 0:
        refuse_eps(eps)
    arguments = LinearArguments(
        q, k, v, log_decay, write_strength, key_mask, feature_map, normalize, eps
    )
    return step_(OP, arguments, state, state_indices, backend)


def refuse_eps(eps: float) -> None:
    """One below 0, or NaN, which the kernels take."""
    raise ValueError(f"eps must be at least 0, got {eps}")


def _check_arguments(arguments: LinearArguments, has_time: bool) -> LinearArguments:
    q, k, v, log_decay, write_strength, key_mask, feature_map, *_, is_causal = arguments
    check_qkv(q, k, v, 4 if has_time else 3)
    key_mask = check_key_mask(key_mask, q)
    log_decay = check_log_decay(log_decay, q, v, key_mask)
    if log_decay is not None and not is_causal:
        raise ValueError(
            "log_decay must be None with is_causal=False, where no token comes before another"
        )
    if write_strength is not None:
        write_strength = check_per_token("write_strength", write_strength, q, tuple(v.shape[:-1]))
    if feature_map is not None and feature_map not in POINTWISE:
        raise ValueError(
            f"feature_map must be None or one of {', '.join(map(repr, POINTWISE))} "
            f"(other maps are applied to q and k before), got {feature_map!r}"
        )
    return arguments._replace(log_decay=log_decay, write_strength=write_strength, key_mask=key_mask)


def _check_state(
    name: str,
    state: tuple[Tensor, Tensor | None],
    arguments: LinearArguments,
    rows: int,
    in_place: bool = False,
) -> None:
    if isinstance(state, Tensor) or len(state) != 2:
        raise ValueError(f"{name} must be a state (kv, z), got {type(state).__name__}")
    q, _, v, *_ = arguments
    kv, z = state
    if arguments.normalize and z is None:
        raise ValueError(f"{name}.z must be a tensor with normalize=True, got None")
    if not arguments.normalize and z is not None:
        raise ValueError(
            f"{name}.z must be None with normalize=False, got a tensor of shape {tuple(z.shape)}"
        )
    shape = (rows, v.shape[-2], q.shape[-1], v.shape[-1])
    for part, x, expected in (("kv", kv, shape), ("z", z, shape[:-1])):
        if x is not None:
            check_state(f"{name}.{part}", x, q, expected)
            if in_place:
                check_slots(f"{name}.{part}", x)


IMPLEMENTATIONS: Implementations = {
    "cuda": kernels("linear_attention"),
    "cpu": kernels("linear_attention", find_slots=True),
    "chunked": Implementation(chunked_linear_attention, chunked_step_, reads_cu_seqlens=True),
    "reference": Implementation(
        reference_linear_attention, step_by(reference_linear_attention), reads_cu_seqlens=True
    ),
}
# What is not plain, and what of that PyTorch works on before a kernel, which Python checks then.
SUMS = through(RULES, run_sums, step_sums_, run_sums_in_slots_)
MAPPED_SUMS = through(RULES, run_sums, step_sums_, run_sums_in_slots_, checks=False)
SUMS_WITH_COPIES = through(WITH_COPIES, run_sums, step_sums_)
OWN_HEADS = through(IMPLEMENTATIONS, run_own_heads, step_sums_, checks=False)


def is_whole_behind_map(arguments: LinearArguments) -> bool:
    """Whether a kernel sees all there is to check in q, k and v with the feature map applied."""
    q, k, v, feature_map = arguments.q, arguments.k, arguments.v, arguments.feature_map
    is_plain = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and feature_map in POINTWISE
    return feature_map in UNMAPPED or is_plain


def _for_tokens(arguments: LinearArguments) -> Implementations:
    """By decays, strengths and the grouping of heads."""
    if is_plain_attention(arguments):
        return IMPLEMENTATIONS
    if not arguments.is_causal:
        return OWN_HEADS
    if arguments.q.shape[-2] > arguments.v.shape[-2]:
        return SUMS_WITH_COPIES
    return MAPPED_SUMS if arguments.normalize or not is_whole_behind_map(arguments) else SUMS


def _for_sequences(arguments: LinearArguments) -> Implementations:
    table = _for_tokens(arguments)
    if table is IMPLEMENTATIONS or table is OWN_HEADS:
        return table
    return for_sequences_of(arguments.q, table)


OP = Op("linear_attention", _check_arguments, _check_state, _for_sequences, _for_tokens)
