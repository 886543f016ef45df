# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention: what calls its compiled ops, their fakes and their gradients.

Shapes: B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed
sequences.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..arguments import LinearArguments
from ..numerics import accumulation_dtype
from .gradients import register_gradient
from .library import as_bounds, as_dtype, as_mask, contiguous, feature_maps, ops, register_fake

FEATURE_MAPS = feature_maps()  # the ops take the position in it; everybody else names them
_INDEX: dict[str | None, int] = {None: 0, **{name: i for i, name in enumerate(FEATURE_MAPS)}}

_forward = ops.linear_attention.default
_backward = ops.linear_attention_backward.default
_step_ = ops.linear_attention_step_.default
_forward_in_slots_ = ops.linear_attention_.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def forward(
    arguments: LinearArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """Linear attention over whole sequences, differentiable once; arguments as in
    `linear_attention`, but plain: Hk = Hv divides Hq, decays are per head, no write strengths.

    Returns:
        y (B, T, Hq, V) and the state, as initial_state.

    Raises:
        RuntimeError: an argument is wrong; it says which and how. KeyError: feature_map is.
    """
    q, k, v, log_decay, _, key_mask, feature_map, normalize, eps, is_causal = arguments
    kv, z = (None, None) if initial_state is None else initial_state
    y, _, kv, z, _ = _forward(
        q,
        k,
        v,
        as_dtype(log_decay, accumulation_dtype(q.dtype)),
        as_mask(key_mask, q),
        as_bounds(cu_seqlens),
        contiguous(kv),
        contiguous(z),
        _INDEX[feature_map],
        normalize,
        eps,
        is_causal,
    )
    return y, (kv, z if normalize else None)


def step_(
    arguments: LinearArguments,
    state: tuple[Tensor, Tensor | None],
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token for every row; the state is updated in place. It has no gradient.

    Args:
        arguments: as in `linear_attention_step_`, but plain, as in `forward`.
        state: kv (B, Hkv, K, V), z (B, Hkv, K) in the accumulation dtype, each row contiguous; z is
            None without `normalize`.
        state_indices: (B,) int32, all different: which slot of kv and z, of any number of them, has
            the state of each row. -1: none, y is 0. On CUDA an index that is no slot's gives NaN.

    Returns:
        y (B, Hq, V).

    Raises:
        RuntimeError: an argument is wrong; it says which and how. KeyError: feature_map is.
    """
    q, k, v, log_decay, _, key_mask, feature_map, normalize, eps, _ = arguments
    kv, z = state
    if log_decay is not None and log_decay.dtype is not kv.dtype:
        log_decay = as_dtype(log_decay, kv.dtype)
    if key_mask is not None:
        key_mask = as_mask(key_mask, q)
    if state_indices is not None:
        state_indices = state_indices.contiguous()
    options = _INDEX[feature_map], normalize, eps
    y = _step_(q, k, v, log_decay, key_mask, kv, z, *options, state_indices)
    # Lets autograd notice when a backward pass still needs the state as it was.
    increment_version((kv,) if z is None else (kv, z))
    return y


def forward_in_slots_(
    arguments: LinearArguments,
    cu_seqlens: Tensor | None,
    state: tuple[Tensor, Tensor | None],
    state_indices: Tensor,
    is_new: Tensor | None,
) -> Tensor:
    """`forward`, causal, from states in slots, which change in place. It has no gradient.

    Args:
        state: kv and z as in `step_`, of any number of slots.
        cu_seqlens: (N + 1,) int32; tokens behind the last bound are no one's, and y is 0 there.
        state_indices: (B or N,) int32, all different: the slot of each sequence. -1: none, y is 0.
        is_new: (B or N,) bool: begins from zero, whatever the slot holds; None: none does.

    Returns:
        y (B, T, Hq, V).

    Raises:
        RuntimeError: an argument is wrong; it says which and how. KeyError: feature_map is.
    """
    q, k, v, log_decay, _, key_mask, feature_map, normalize, eps, _ = arguments
    kv, z = state
    y = _forward_in_slots_(
        *(q, k, v, as_dtype(log_decay, accumulation_dtype(q.dtype)), as_mask(key_mask, q)),
        as_bounds(cu_seqlens),
        *(kv, z, state_indices.contiguous(), contiguous(is_new)),
        *(_INDEX[feature_map], normalize, eps),
    )
    increment_version((kv,) if z is None else (kv, z))
    return y


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


@register_fake("linear_attention", _registrations)
def _fake_forward(
    q,
    k,
    v,
    log_decay,
    key_mask,
    cu_seqlens,
    initial_kv,
    initial_z,
    feature_map,
    normalize,
    eps,
    is_causal,
):
    B, T, Hq, K = q.shape
    Hkv, V = v.shape[2:]
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    acc = accumulation_dtype(q.dtype)
    y = q.new_empty(B, T, Hq, V)
    den = q.new_empty((B, T, Hq) if normalize else (0,), dtype=acc)
    kv = q.new_empty(rows, Hkv, K, V, dtype=acc)
    z = q.new_empty((rows, Hkv, K) if normalize else (0,), dtype=acc)
    states = _room_for_pieces(q, v, cu_seqlens, is_causal) if q.device.type == "cuda" else 0
    piece_states = q.new_empty(states * Hkv * (K * V + (K if normalize else 0)), dtype=acc)
    return y, den, kv, z, piece_states


def _room_for_pieces(q, v, cu_seqlens, is_causal):
    """As room_for_pieces in csrc/kernels/linear_attention.h; without a branch on a size, so that
    torch.compile need not know which are small.
    """
    B, T, Hq, _ = q.shape
    blocks = B * Hq * ((v.shape[3] + 63) // 64)
    each = torch.sym_min(320 // torch.sym_max(blocks, 1), T // 256)
    each = each * torch.sym_min(each // 2, 1)  # one is no cut
    if not is_causal:
        return 0
    if cu_seqlens is None:
        return B * each
    return each + torch.sym_min(cu_seqlens.shape[0] - 1, each)


@register_fake("linear_attention_backward", _registrations)
def _fake_backward(
    dy, dkv, dz, q, k, v, log_decay, key_mask, cu_seqlens, initial_kv, initial_z, *others
):
    acc = accumulation_dtype(q.dtype)

    def gradient_of(x):
        return q.new_empty(0, dtype=acc) if x is None else x.new_empty(x.shape)

    return tuple(map(gradient_of, (q, k, v, log_decay, initial_kv, initial_z)))


@register_fake("linear_attention_step_", _registrations)
def _fake_step_(
    q, k, v, log_decay, key_mask, kv, z, feature_map, normalize, eps, state_indices=None
):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@register_fake("linear_attention_", _registrations)
def _fake_forward_in_slots_(q, k, v, *others):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    *tensors, feature_map, normalize, eps, is_causal = inputs
    _, den, _, z, piece_states = output
    ctx.options = feature_map, normalize, eps, is_causal
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(den, piece_states, *(() if normalize else (z,)))


def _differentiate(ctx, dy, dden, dkv, dz, dpiece_states):
    *of_tokens, dinitial_kv, dinitial_z = _backward(
        dy, contiguous(dkv), contiguous(dz), *ctx.saved_tensors, *ctx.options
    )
    return *of_tokens, None, None, dinitial_kv, dinitial_z


register_gradient(
    _registrations, "linear_attention", "linear attention", _keep_for_backward, _differentiate
)
