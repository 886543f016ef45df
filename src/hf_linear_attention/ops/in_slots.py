# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ops over whole sequences with states by slot: what a server calls on pieces of prompts.

These are functions of their own, and not options of `linear_attention`, `delta_rule` and
`short_convolution`, because they promise something else: a state changes in place, where those take
and return values; there is no gradient; and there may be room that no sequence fills, which a batch
of one size for all CUDA graphs needs. As of PyTorch's own, the names end in _.

The CPU's kernels of linear attention and the delta rule find states in their slots. Elsewhere these
are copied out of their slots before the op and back behind it: a quarter of the op's time for
pieces of 64 tokens, and more than the op itself for single ones.

Shapes: B batch, T time, N sequences: as many as `cu_seqlens` bounds, else B.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import convolution, delta_rule, linear_attention
from .arguments import ConvolutionArguments, DeltaArguments, LinearArguments
from .backends import choose
from .calls import Arguments, Op, State, refuse_lost_gradient
from .checks import check_cu_seqlens, check_key_mask, is_readable
from .linear_attention import LinearAttentionState
from .slots import (
    check_state_indices,
    clear_rows_,
    map_state,
    num_slots,
    read_slots,
    write_slots_,
)
from .tokens import sequence_of_each_token


def linear_attention_(
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
    cu_seqlens: Tensor | None = None,
    state_indices: Tensor | None = None,
    is_new: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`linear_attention` that goes on from `state` and leaves the state after the last token there,
    without gradient.

    Args:
        state: kv (slots, Hv, K, V) and z (slots, Hv, K), as in `linear_attention_step_`.
        cu_seqlens: (N + 1,) int32 or int64, bounds of N sequences packed in one row (B = 1): 0,
            ..., at most T. A sequence may be empty: its state is what it was, or zero if it is new.
            Tokens behind the last bound belong to no sequence: their outputs are 0, and what they
            hold reaches nothing.
        state_indices: (N,) int32, the slot of each sequence, no one twice. A sequence whose index
            is -1 has none: its outputs are 0, and its tokens change nothing. Slots that are not
            named stay as they are. None: there are N slots, in order.
        is_new: (N,) bool, true where a sequence begins from zero, whatever its slot holds (NaN,
            too). None: all go on from what is there.
        The others: as in `linear_attention`, which is causal here. On CUDA the values of cu_seqlens
            and state_indices are not checked.

    Returns:
        y (B, T, max(Hq, Hv), V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `linear_attention`; RuntimeError also where a gradient would be
            needed. Then no state has changed.
    """
    if not eps >= 0:
        linear_attention.refuse_eps(eps)
    arguments = LinearArguments(
        q, k, v, log_decay, write_strength, key_mask, feature_map, normalize, eps
    )
    where = _Packed(cu_seqlens, state_indices, is_new)
    return _run_in_slots_(linear_attention.OP, arguments, state, where, backend)


def delta_rule_(
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
    cu_seqlens: Tensor | None = None,
    state_indices: Tensor | None = None,
    is_new: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`delta_rule` that goes on from `state` and leaves the state after the last token there,
    without gradient.

    Args:
        state: (slots, Hv, K, V), as in `delta_rule_step_`.
        cu_seqlens, state_indices, is_new: as in `linear_attention_`.
        The others: as in `delta_rule`.

    Returns:
        y (B, T, max(Hq, Hv), V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `delta_rule`; RuntimeError also where a gradient would be
            needed. Then no state has changed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = DeltaArguments(q, k, v, beta, log_decay, key_mask, scale, normalize_qk)
    if erase_key is not None:
        arguments = delta_rule.with_erase_key(arguments, erase_key)
    where = _Packed(cu_seqlens, state_indices, is_new)
    return _run_in_slots_(delta_rule.OP, arguments, state, where, backend)


def short_convolution_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None = "silu",
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_indices: Tensor | None = None,
    is_new: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`short_convolution` that goes on from `state` and leaves the last tokens there, without
    gradient.

    Args:
        state: (slots, S, C), as in `short_convolution_step_`.
        cu_seqlens, state_indices, is_new: as in `linear_attention_`.
        The others: as in `short_convolution`.

    Returns:
        y (B, T, C) of x's dtype.

    Raises:
        ValueError, RuntimeError: as `short_convolution`; RuntimeError also where a gradient would
            be needed. Then no state has changed.
    """
    arguments = ConvolutionArguments(x, weight, bias, key_mask, activation)
    where = _Packed(cu_seqlens, state_indices, is_new)
    return _run_in_slots_(convolution.OP, arguments, state, where, backend)


class _Packed(NamedTuple):
    """Of a batch of sequences, as it comes: their bounds, their slots, and which begin anew."""

    cu_seqlens: Tensor | None
    state_indices: Tensor | None
    is_new: Tensor | None


def _run_in_slots_(
    op: Op,
    arguments: Arguments,
    state: State,
    where: _Packed,
    backend: str | None,
) -> Tensor:
    """y of whole sequences, for every op; the state changes in its slots."""
    if torch.is_grad_enabled():
        refuse_lost_gradient(op.function, "_", arguments, state)
    q = arguments[0]
    if q.dim() < 3:
        op.check_arguments(arguments, True)  # refuses it
    batch = _sequences(arguments, where, state)
    arguments = arguments._replace(key_mask=batch.key_mask)
    checked = op.check_arguments(arguments, True)
    op.check_state("state", state, arguments, batch.slots, in_place=True)
    chosen = choose(op.for_sequences(arguments), backend, q.device, q.dtype)
    if chosen.run_in_slots is not None:
        indices, from_zero = batch.state_indices, batch.from_zero
        return chosen.run_in_slots(checked, batch.cu_seqlens, state, indices, from_zero)
    y, after = chosen.run(checked, batch.cu_seqlens, map_state(batch.read, state))
    map_state(batch.write_, state, after)
    return y


class _Sequences(NamedTuple):
    """The sequences of a batch as the ops take them, and where their states are.

    Where there are tokens of no sequence, behind the last bound, they are one more sequence, and it
    has no slot. What has no slot is padding, whose state is zero.
    """

    slots: int  # in a state
    cu_seqlens: Tensor | None  # (N + 1,) int32, from 0 to T
    key_mask: Tensor | None  # (B, T)
    state_indices: Tensor  # (N,) int32
    from_zero: Tensor | None  # (N,) bool

    def read(self, state: Tensor) -> Tensor:
        """The state (N, ...) that each sequence goes on from."""
        rows = read_slots(state, self.state_indices)
        if self.from_zero is not None:
            clear_rows_(rows, self.from_zero)
        return rows

    def write_(self, state: Tensor, rows: Tensor) -> None:
        write_slots_(state, self.state_indices, rows)


def _sequences(arguments: Arguments, where: _Packed, state: State) -> _Sequences:
    """All that is said of sequences, checked."""
    q, of = arguments[0], arguments._fields[0]
    B, T = q.shape[:2]
    key_mask = check_key_mask(arguments.key_mask, q, of, features=q.dim() - 2)
    cu_seqlens, state_indices, is_new = where
    N = B
    if cu_seqlens is not None:
        readable = is_readable(cu_seqlens)
        check_cu_seqlens(cu_seqlens, q, readable, of, may_end_early=True)
        N = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    slots = num_slots(state, state_indices, N)
    if state_indices is None:
        state_indices = torch.arange(N, dtype=torch.int32, device=q.device)
    check_state_indices(state_indices, N, slots, q, of)
    if is_new is not None:
        _check_is_new(is_new, N, q, of)
    if _all_have_a_slot(cu_seqlens, state_indices, T):
        return _Sequences(slots, cu_seqlens, key_mask, state_indices, is_new)

    if cu_seqlens is not None:
        cu_seqlens = F.pad(cu_seqlens, (0, 1), value=T)
        state_indices = F.pad(state_indices, (0, 1), value=-1)
        is_new = None if is_new is None else F.pad(is_new, (0, 1))
    has_slot = state_indices >= 0
    from_zero = ~has_slot if is_new is None else ~has_slot | is_new
    if cu_seqlens is None:
        keep = has_slot[:, None].expand(B, T)
    else:
        keep = has_slot[sequence_of_each_token(cu_seqlens, T)][None]
    key_mask = keep if key_mask is None else keep & key_mask
    return _Sequences(slots, cu_seqlens, key_mask, state_indices, from_zero)


def _all_have_a_slot(cu_seqlens: Tensor | None, state_indices: Tensor, T: int) -> bool:
    """Whether every token has one, as far as it can be seen without waiting for a device."""
    if not is_readable(state_indices) or bool((state_indices < 0).any()):
        return False
    return cu_seqlens is None or int(cu_seqlens[-1]) == T


def _check_is_new(is_new: Tensor, N: int, q: Tensor, of: str) -> None:
    if tuple(is_new.shape) != (N,):
        raise ValueError(f"is_new must have shape {(N,)}, got {tuple(is_new.shape)}")
    if is_new.dtype != torch.bool:
        raise ValueError(f"is_new must be torch.bool, got {is_new.dtype}")
    if is_new.device != q.device:
        raise ValueError(f"is_new must be on {of}'s device {q.device}, got {is_new.device}")
