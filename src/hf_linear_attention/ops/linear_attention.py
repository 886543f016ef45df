# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention: the public functions, their checks, and what each backend has for them.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, N
packed sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import choose, if_compiled, native_op
from .checks import (
    check_cu_seqlens,
    check_key_mask,
    check_log_decay,
    check_per_token,
    check_qkv,
    is_readable,
    refuse_lost_gradient,
)
from .chunked.linear_attention import chunked_linear_attention
from .delta_rule import IMPLEMENTATIONS as RULES
from .delta_rule import for_sequences_of, run_rule, run_rule_in_slots, runs_in_slots, step_rule_
from .feature_maps import POINTWISE
from .linear_step import (
    check_linear_state,
    check_options,
    check_step,
    step_chunked_,
    step_compiled_,
    step_reference_,
)
from .loops.linear_attention import reference_linear_attention
from .numerics import accumulation_dtype
from .slots import InSlots


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
    y, state = run_linear(
        q,
        k,
        v,
        log_decay,
        write_strength=write_strength,
        feature_map=feature_map,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=initial_state,
        normalize=normalize,
        eps=eps,
        is_causal=is_causal,
        backend=backend,
    )
    return (y, LinearAttentionState(*state)) if return_state else y


def run_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    write_strength: Tensor | None,
    feature_map: str | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: tuple[Tensor, Tensor | None] | None,
    in_slots: InSlots | None = None,
    normalize: bool,
    eps: float,
    is_causal: bool,
    backend: str | None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """y and the last state of `linear_attention`, from a state, or None for zeros; or, where it
    `linear_runs_in_slots`, from checked states in slots, which change in place.
    """
    chosen = choose(IMPLEMENTATIONS, backend, q.device, q.dtype)
    check_qkv(q, k, v, 4)
    rows = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, readable=chosen.reads_cu_seqlens or is_readable(cu_seqlens))
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if state is not None and in_slots is None:
        check_linear_state(state, "initial_state", q, v, rows, normalize)
    key_mask = check_key_mask(key_mask, q)
    log_decay = check_log_decay(log_decay, q, v, key_mask)
    if log_decay is not None and not is_causal:
        raise ValueError(
            "log_decay must be None with is_causal=False, where no token comes before another"
        )
    check_options(feature_map, eps)
    options: dict[str, Any] = {
        "feature_map": feature_map,
        "key_mask": key_mask,
        "cu_seqlens": cu_seqlens,
        "normalize": normalize,
        "eps": eps,
    }
    if not _is_plain(q, k, v, log_decay, write_strength):
        return _run_general(
            *(backend, write_strength, q, k, v, log_decay),
            **options,
            state=state,
            in_slots=in_slots,
            is_causal=is_causal,
        )
    if in_slots is None:
        return chosen.run(q, k, v, log_decay, **options, initial_state=state, is_causal=is_causal)
    assert chosen.run_in_slots is not None and state is not None
    sequences = in_slots._asdict()
    y = chosen.run_in_slots(q, k, v, log_decay, **options, state=state, **sequences)
    return y, state


def linear_runs_in_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    write_strength: Tensor | None,
    backend: str | None,
) -> bool:
    """Whether its kernels find states in their slots themselves."""
    if _is_plain(q, k, v, log_decay, write_strength):
        return choose(IMPLEMENTATIONS, backend, q.device, q.dtype).run_in_slots is not None
    return runs_in_slots(choose(RULES, backend, q.device, q.dtype), q, v)


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
    refuse_lost_gradient("linear_attention", q, k, v, log_decay, write_strength, *state)
    step_ = choose(IMPLEMENTATIONS, backend, q.device, q.dtype).step_
    if not _is_plain(q, k, v, log_decay, write_strength):
        step_ = partial(_step_general_, backend, write_strength)
    return step_(q, k, v, state, log_decay, feature_map, normalize, eps, key_mask, state_indices)


# The delta rule's kernels, without the rule.
JUST_A_SUM: dict[str, Any] = {"scale": 1.0, "normalize_qk": False, "delta": False}
_native = native_op("linear_attention")
_native_in_slots_ = native_op("linear_attention_")


def _is_plain(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, write_strength: Tensor | None
) -> bool:
    """Whether it is what linear attention's own kernels compute: a decay per head, no strengths,
    and as many keys as values, each read by one query head or several.
    """
    Hv = v.shape[-2]
    return (
        write_strength is None
        and (log_decay is None or log_decay.dim() < k.dim())
        and k.shape[-2] == Hv
        and q.shape[-2] >= Hv
    )


def _run_general(
    backend: str | None,
    write_strength: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    feature_map: str | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: tuple[Tensor, Tensor | None] | None,
    in_slots: InSlots | None,
    normalize: bool,
    eps: float,
    is_causal: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """All that is not plain, by the kernels of the delta rule, without the rule. z is a state, too:
    that of values which are 1.
    """
    dtype, Hv = q.dtype, v.shape[2]
    if write_strength is not None:
        write_strength = check_per_token("write_strength", write_strength, q, tuple(v.shape[:3]))
    if normalize or feature_map is not None or not is_causal:
        q, k, v = _mapped(q, k, v, feature_map, key_mask)
    if not is_causal:  # without decays, so that strengths may be part of the keys
        k = k.repeat_interleave(Hv // k.shape[2], 2)
        q = q.repeat_interleave(max(Hv // q.shape[2], 1), 2)
        if write_strength is not None:
            k = k * write_strength[..., None]
        y, state = choose(IMPLEMENTATIONS, backend, q.device, q.dtype).run(
            q,
            k,
            v,
            None,
            feature_map=None,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            normalize=normalize,
            eps=eps,
            is_causal=False,
        )
        return y.to(dtype), state

    def run(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        token = rule, q, k, values, write_strength, log_decay
        options = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, **JUST_A_SUM}
        if in_slots is None:
            return run_rule(*token, initial_state=state, **options)
        assert state is not None
        return run_rule_in_slots(*token, state=state, in_slots=in_slots, **options), state

    rule = choose(for_sequences_of(q), backend, q.device, q.dtype)
    kv, z = (None, None) if state is None else state
    y, kv = run(v, kv)
    if normalize:
        den, z = run(_ones_like(v), None if z is None else z[..., None])
        if key_mask is not None:  # padding has 0 here, and 0 / 0 a gradient
            den = torch.where(key_mask[..., None, None], den, 1)
        y, z = y / (den + eps), z[..., 0]
    return y.to(dtype), (kv, z)


def _step_general_(
    backend: str | None,
    write_strength: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
    state_indices: Tensor | None,
) -> Tensor:
    """One token of _run_general, which also checks its arguments."""
    rule = choose(RULES, backend, q.device, q.dtype)
    is_plain_sum = feature_map is None and not normalize and eps >= 0 and state[1] is None
    if is_plain_sum and rule.step_checks and _is_floating(write_strength):
        try:  # Mamba-2 does this once per layer and token
            return step_rule_(
                rule,
                q,
                k,
                v,
                write_strength,
                log_decay,
                key_mask,
                state[0],
                1.0,
                False,
                False,
                state_indices,
            )
        except (RuntimeError, ValueError):
            pass  # what was refused is explained below
    log_decay, key_mask = check_step(
        q, k, v, state, log_decay, feature_map, normalize, eps, key_mask, state_indices
    )
    dtype = q.dtype
    if write_strength is not None:
        write_strength = check_per_token("write_strength", write_strength, q, tuple(v.shape[:2]))
    if normalize or feature_map is not None:
        q, k, v = _mapped(q, k, v, feature_map, key_mask)
        rule = choose(RULES, backend, q.device, q.dtype)

    def step_(values: Tensor, state: Tensor) -> Tensor:
        return step_rule_(
            rule,
            q,
            k,
            values,
            write_strength,
            log_decay,
            key_mask,
            state,
            1.0,
            False,
            False,
            state_indices,
        )

    kv, z = state
    y = step_(v, kv)
    if z is not None:
        y = y / (step_(_ones_like(v), z[..., None]) + eps)
        if key_mask is not None:
            y = torch.where(key_mask[:, None, None], y, 0)
    return y.to(dtype)


def _is_floating(x: Tensor | None) -> bool:
    return x is None or x.is_floating_point()


def _mapped(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k) and v in the accumulation dtype."""
    phi, dtype = POINTWISE[feature_map or "identity"], accumulation_dtype(q.dtype)
    if key_mask is not None:  # phi of padding has a gradient, which may be NaN
        q, k = (torch.where(key_mask[..., None, None], x, 0) for x in (q, k))
    return phi(q.to(dtype)), phi(k.to(dtype)), v.to(dtype)


def _ones_like(v: Tensor) -> Tensor:
    """Values of one feature, which is 1."""
    return v.new_ones(()).expand(*v.shape[:-1], 1)


class Implementation(NamedTuple):
    """What a backend has for linear attention. `run` is given checked arguments, and returns y and
    the state (kv, z); `step_` checks its own.
    """

    run: Callable[..., tuple[Tensor, tuple[Tensor, Tensor | None]]]
    step_: Callable[..., Tensor]
    reads_cu_seqlens: bool = False  # on the host, so their values may be checked on any device
    run_in_slots: Callable[..., Tensor] | None = None  # as in backends.Implementation


_compiled = Implementation(_native, step_compiled_)
IMPLEMENTATIONS = {
    "cuda": if_compiled(_compiled),
    "cpu": if_compiled(_compiled._replace(run_in_slots=_native_in_slots_)),
    "chunked": Implementation(chunked_linear_attention, step_chunked_, True),
    "reference": Implementation(reference_linear_attention, step_reference_, True),
}
