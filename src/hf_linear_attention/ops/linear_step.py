# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""One token of linear attention: what each backend does with it, and what it may be given.

Shapes: B batch, Hq query heads, Hkv key and value heads, K key dim, V value dim.
"""

import torch
from torch import Tensor

from .backends import native_op
from .checks import (
    check_key_mask,
    check_log_decay,
    check_qkv,
    check_state,
    to_dtype,
)
from .chunked.linear_attention import chunked_step_
from .feature_maps import POINTWISE
from .loops.linear_attention import reference_linear_attention
from .slots import (
    check_slots,
    check_state_indices,
    num_slots,
    rows_with_a_slot,
    step_on_slots_,
)

native_step_ = native_op("linear_attention_step_")


def step_compiled_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor | None],
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
    state_indices: Tensor | None,
) -> Tensor:
    """By the kernels of the CPU or of CUDA. This runs once per layer and token: what they refuse is
    explained only afterwards.
    """
    kv, z = state
    if not eps >= 0:  # the kernel takes any
        check_options(feature_map, eps)
    try:
        if log_decay is not None:
            log_decay = to_dtype(log_decay, kv.dtype)
        if key_mask is not None and key_mask.dtype is not torch.bool:
            key_mask = check_key_mask(key_mask, q)
        token = q, k, v, log_decay, key_mask, kv, z, feature_map, normalize, eps
        return native_step_(*token, state_indices)
    except (RuntimeError, KeyError):
        check_step(q, k, v, state, log_decay, feature_map, normalize, eps, key_mask, state_indices)
        raise


def step_chunked_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor | None],
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
    state_indices: Tensor | None,
) -> Tensor:
    """In PyTorch."""
    log_decay, key_mask = check_step(
        q, k, v, state, log_decay, feature_map, normalize, eps, key_mask, state_indices
    )

    def step_(kv: Tensor, z: Tensor | None) -> Tensor:
        return chunked_step_(
            q, k, v, (kv, z), log_decay, feature_map=feature_map, eps=eps, key_mask=key_mask
        )

    return step_on_slots_(step_, tuple(state), state_indices)


def step_reference_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor | None],
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
    state_indices: Tensor | None,
) -> Tensor:
    """By the loop."""
    log_decay, key_mask = check_step(
        q, k, v, state, log_decay, feature_map, normalize, eps, key_mask, state_indices
    )

    def step_(kv: Tensor, z: Tensor | None) -> Tensor:
        y, states = reference_linear_attention(
            q[:, None],
            k[:, None],
            v[:, None],
            None if log_decay is None else log_decay[:, None],
            feature_map=feature_map,
            key_mask=None if key_mask is None else key_mask[:, None],
            initial_state=(kv, z),
            normalize=normalize,
            eps=eps,
        )
        for state, after in zip((kv, z), states, strict=True):
            if state is not None and after is not None:
                state.copy_(after)
        return y[:, 0]

    return step_on_slots_(step_, tuple(state), state_indices)


def check_linear_state(
    state: tuple[Tensor, Tensor | None], name: str, q: Tensor, v: Tensor, rows: int, normalize: bool
) -> None:
    """Both tensors of a state, called `name`, of so many rows or slots."""
    if isinstance(state, Tensor) or len(state) != 2:
        raise ValueError(f"{name} must be a state (kv, z), got {type(state).__name__}")
    kv, z = state
    if normalize and z is None:
        raise ValueError(f"{name}.z must be a tensor with normalize=True, got None")
    if not normalize and z is not None:
        raise ValueError(
            f"{name}.z must be None with normalize=False, got a tensor of shape {tuple(z.shape)}"
        )
    shape = (rows, v.shape[-2], q.shape[-1], v.shape[-1])
    check_state(f"{name}.kv", kv, q, shape)
    if z is not None:
        check_state(f"{name}.z", z, q, shape[:-1])


def check_options(feature_map: str | None, eps: float) -> None:
    """What is no tensor."""
    if feature_map is not None and feature_map not in POINTWISE:
        raise ValueError(
            f"feature_map must be None or one of {', '.join(map(repr, POINTWISE))} "
            f"(other maps are applied to q and k before), got {feature_map!r}"
        )
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")


def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor | None],
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
    state_indices: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Everything about one token's arguments; returns log_decay and key_mask in the dtypes that
    backends take, the latter without the rows that have no slot.
    """
    check_qkv(q, k, v, 3)
    slots = num_slots(state[0], state_indices, q.shape[0])
    check_linear_state(state, "state", q, v, slots, normalize)
    for name, x in zip(("kv", "z"), state, strict=True):
        if x is not None:
            check_slots(f"state.{name}", x)
    key_mask = check_key_mask(key_mask, q)
    if state_indices is not None:
        check_state_indices(state_indices, q.shape[0], slots, q)
        key_mask = rows_with_a_slot(state_indices, key_mask)
    log_decay = check_log_decay(log_decay, q, v, key_mask)
    check_options(feature_map, eps)
    return log_decay, key_mask
