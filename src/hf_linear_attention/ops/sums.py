# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention with decays by channel, write strengths or shared heads, by the kernels of the
delta rule, without the rule. And the rule for any grouping of heads.

Each takes what runs, a backend's function of (arguments, cu_seqlens, initial_state), or of
(arguments, state) for one token.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .arguments import DeltaArguments, LinearArguments
from .feature_maps import POINTWISE, UNMAPPED
from .numerics import accumulation_dtype
from .tokens import behind

Run = Callable[..., tuple[Tensor, Any]]
Step = Callable[..., Tensor]
LinearState = tuple[Tensor, Tensor | None]  # kv (B, Hv, K, V) and z (B, Hv, K)


def is_plain_attention(arguments: LinearArguments) -> bool:
    """Whether it is what linear attention's own kernels compute: a decay per head, no strengths,
    and as many keys as values, each read by one query head or several.
    """
    q, k, v, log_decay, write_strength, _, _, _, _, _ = arguments
    return (
        write_strength is None
        and (log_decay is None or log_decay.dim() < k.dim())
        and k.shape[-2] == v.shape[-2] <= q.shape[-2]
    )


def run_sums(
    run: Run, arguments: LinearArguments, cu_seqlens: Tensor | None, state: LinearState | None
) -> tuple[Tensor, LinearState]:
    """Linear attention by a backend's delta rule. z is one more column of kv: that of values which
    are 1.
    """
    dtype = arguments.q.dtype
    kv, z = (None, None) if state is None else state
    if z is not None and not arguments.normalize:
        raise ValueError("z must be None without normalize")
    arguments = mapped(arguments)
    rule = as_sums(arguments)
    if not arguments.normalize:
        y, kv = run(rule, cu_seqlens, kv)
        return y.to(dtype), (kv, None)
    V = rule.v.shape[-1]
    rule = rule._replace(v=torch.cat([rule.v, ones_for(rule.v)], -1))
    if kv is not None and z is not None:
        kv = torch.cat([kv, z[..., None]], -1)
    y, kv = run(rule, cu_seqlens, kv)
    y = divided(y[..., :V], y[..., V:], arguments)
    return y.to(dtype), (kv[..., :V].contiguous(), kv[..., V].contiguous())


def step_sums_(
    step_: Step,
    arguments: LinearArguments,
    state: LinearState,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of it; `state` changes in place. To put z next to kv and back would take longer
    than the step does, so z has a step of its own.
    """
    kv, z = state
    if (z is not None) is not arguments.normalize:
        raise ValueError("z must be given with normalize, and None without")
    slots = () if state_indices is None else (state_indices,)
    dtype, arguments = arguments.q.dtype, mapped(arguments)
    rule = as_sums(arguments)
    y = step_(rule, kv, *slots)
    if z is not None:
        den = step_(rule._replace(v=ones_for(rule.v)), z[..., None], *slots)
        y = divided(y, den, arguments)
    return y if y.dtype is dtype else y.to(dtype)


def run_sums_in_slots_(
    run_in_slots: Callable[..., Tensor],
    arguments: LinearArguments,
    cu_seqlens: Tensor | None,
    state: LinearState,
    *slots: Tensor | None,
) -> Tensor:
    """`run_sums` from a state that changes in its slots, where z has a run of its own, as in a
    step.
    """
    kv, z = state
    dtype, arguments = arguments.q.dtype, mapped(arguments)
    rule = as_sums(arguments)
    y = run_in_slots(rule, cu_seqlens, kv, *slots)
    if z is not None:
        of_ones = rule._replace(v=ones_for(rule.v))
        den = run_in_slots(of_ones, cu_seqlens, z[..., None], *slots)
        y = divided(y, den, arguments)
    return y.to(dtype)


def ones_for(v: Tensor) -> Tensor:
    """Values of one feature, which is 1, for each of v's heads."""
    return v.new_ones(()).expand(*v.shape[:-1], 1)


def divided(y: Tensor, den: Tensor, arguments: LinearArguments) -> Tensor:
    """y by its denominators; where padding has 0 in both, 0."""
    den = den + arguments.eps
    if arguments.key_mask is not None:  # 0 / 0 would have a gradient, too
        den = torch.where(behind(arguments.key_mask, den), den, 1)
    return y / den


def copied(x: Tensor, dim: int, heads: int) -> Tensor:
    """x with so many heads in that dimension, each next to its copies."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def run_own_heads(
    run: Run, arguments: LinearArguments, cu_seqlens: Tensor | None, state: LinearState | None
) -> tuple[Tensor, LinearState]:
    """Linear attention that is not causal, and so without decays, by what takes it where it is
    plain: heads get copies of the keys and queries that they share, and strengths become part of
    the keys.
    """
    dtype, Hv = arguments.q.dtype, arguments.v.shape[2]
    q, k, v, _, write_strength, key_mask, _, normalize, eps, _ = mapped(arguments)
    k = copied(k, 2, Hv)
    q = copied(q, 2, max(Hv, q.shape[2]))
    if write_strength is not None:
        k = k * write_strength[..., None]
    plain = LinearArguments(q, k, v, None, None, key_mask, None, normalize, eps, False)
    y, state = run(plain, cu_seqlens, state)
    return y.to(dtype), state


def mapped(arguments: LinearArguments) -> LinearArguments:
    """With phi(q), phi(k) and v in the accumulation dtype; as it is where q and k are only summed
    up.
    """
    q, k, v, _, _, key_mask, feature_map, normalize, _, is_causal = arguments
    if feature_map in UNMAPPED and not normalize and is_causal:
        return arguments._replace(feature_map=None)
    phi, dtype = POINTWISE[feature_map or "identity"], accumulation_dtype(q.dtype)
    if key_mask is not None:  # phi of padding has a gradient, which may be NaN
        q, k = (torch.where(behind(key_mask, x), x, 0) for x in (q, k))
    return arguments._replace(
        q=phi(q.to(dtype)), k=phi(k.to(dtype)), v=v.to(dtype), feature_map=None
    )


def as_sums(arguments: LinearArguments) -> DeltaArguments:
    """What of it the delta rule's kernels sum up, without the rule."""
    q, k, v, log_decay, write_strength, key_mask, _, _, _, _ = arguments
    return DeltaArguments(q, k, v, write_strength, log_decay, key_mask, 1.0, False, False)


def run_with_copies(
    run: Run, arguments: DeltaArguments, cu_seqlens: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The delta rule for any grouping of heads. Backends read a state by one query head: several
    get copies of it.
    """
    G = arguments.q.shape[2] // arguments.v.shape[2]
    if G <= 1:
        return run(arguments, cu_seqlens, state)
    if state is not None:
        state = state.repeat_interleave(G, 1)
    y, after = run(with_copies(arguments, G), cu_seqlens, state)
    return y, after[:, ::G].contiguous()


def step_with_copies_(step_: Step, arguments: DeltaArguments, state: Tensor) -> Tensor:
    """One token of it; `state` changes in place."""
    G = arguments.q.shape[1] // arguments.v.shape[1]
    if G <= 1:
        return step_(arguments, state)
    copies = state.repeat_interleave(G, 1)
    y = step_(with_copies(arguments, G), copies)
    state.copy_(copies[:, ::G])
    return y


def with_copies(arguments: DeltaArguments, G: int) -> DeltaArguments:
    """With G copies of each value head, beta, decays and erase keys."""
    dim = arguments.v.dim() - 2
    v = arguments.v.repeat_interleave(G, dim)
    of_heads = ("beta", "log_decay", "erase_key", "add_along")
    copies = {
        name: x.repeat_interleave(G, dim)
        for name in of_heads
        if (x := getattr(arguments, name)) is not None
    }
    return arguments._replace(v=v, **copies)
