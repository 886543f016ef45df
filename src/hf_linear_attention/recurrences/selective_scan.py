# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan as a recurrence: sums whose decays are those of their channel.

Shapes: B batch, T time, H heads of channels, P channels, of a head where there are heads, N sums of
a state for each channel, n pieces of a sequence.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.numerics import accumulation_dtype, rates_of
from ..ops.selective_scan import selective_scan, selective_scan_step_
from ..ops.tokens import Tokens, behind
from .interface import Recurrence, State, StateSize, sum_of_later


class SelectiveInputs(NamedTuple):
    """As of `selective_scan`; with heads, that each have a B and a C, (B, T, H, P) and (B, T, H,
    N).
    """

    x: Tensor  # (B, T, P)
    dt: Tensor
    B: Tensor  # (B, T, N)
    C: Tensor


@dataclass(frozen=True, eq=False)
class SelectiveScanRecurrence(Recurrence):
    """The recurrence of `selective_scan`; its state is "kv" (B, P, N), with heads (B, H, P, N).

    It holds a layer's A_log (P, N) or (H, P, N), of which A = -exp(A_log), and D (P,) or (H, P),
    so that tokens that were recorded can be read again: the parameters, which cost no memory, and
    not what is made of them for each forward.
    """

    A_log: Tensor
    D: Tensor | None = None

    only_read: ClassVar[tuple[str, ...]] = ("C",)
    packs_states: ClassVar[bool] = True
    state_is_first_piece: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return {"kv": StateSize(tuple(self.A_log.shape), is_sum=True)}

    def start(self, inputs: SelectiveInputs) -> State:
        x = inputs.x
        return {"kv": x.new_zeros(x.shape[0], *self.A_log.shape, dtype=accumulation_dtype(x.dtype))}

    def run(self, inputs: SelectiveInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        """Head by head."""
        (A, D), initial = self._weights(inputs.x), state.get("kv")
        where = {"key_mask": tokens.key_mask, "cu_seqlens": tokens.cu_seqlens}
        if A.dim() == 2:
            y, kv = _scan(inputs, A, D, initial, where)
            return y, {"kv": kv}
        initials = [None] * len(A) if initial is None else initial.unbind(1)
        of_heads = zip(*(z.unbind(2) for z in inputs), strict=True)
        heads = zip(of_heads, *_of_heads(A, D), initials, strict=True)
        outputs, states = zip(*(_scan(*head, where) for head in heads), strict=True)
        return torch.stack(outputs, 2), {"kv": torch.stack(states, 1)}

    def step_in_slots_(
        self, inputs: SelectiveInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self.step_(inputs, states, tokens, slots)

    def step_(
        self, inputs: SelectiveInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        x, dt, B, C = (z[:, 0] for z in inputs)
        key_mask, kv = tokens.key_mask, state["kv"]
        if key_mask is not None:
            key_mask = key_mask[:, 0]
        step_ = functools.partial(selective_scan_step_, key_mask=key_mask, state_indices=slots)
        A, D = self._weights(x)
        if A.dim() == 2:
            return step_(x, dt, A, B, C, D, kv)[:, None]
        heads = zip(*(z.unbind(1) for z in (x, dt, B, C, kv)), *_of_heads(A, D), strict=True)
        of_heads = [step_(x, dt, A, B, C, D, kv) for x, dt, B, C, kv, A, D in heads]
        return torch.stack(of_heads, 1)[:, None]

    def replay(self, inputs: SelectiveInputs, state: State, key_mask: Tensor | None) -> State:
        return super().replay(inputs._replace(C=inputs.B), state, key_mask)  # nobody reads

    def piece(self, inputs: SelectiveInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "log_decay", as large, by which a piece decays the one before."""
        dt = inputs.dt
        if tokens.key_mask is not None:
            dt = torch.where(behind(tokens.key_mask, dt), dt, 0)
        after = self.run(inputs, {}, tokens)[1]
        return {**after, "log_decay": dt.sum(1)[..., None] * self._weights(inputs.x)[0]}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        later = sum_of_later(pieces["log_decay"])
        return {"kv": (later.exp() * pieces["kv"]).sum(0)}

    def _weights(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A and D, in the dtype of x's sums."""
        dtype = accumulation_dtype(x.dtype)
        return rates_of(self.A_log.to(dtype)), None if self.D is None else self.D.to(dtype)


def _of_heads(A: Tensor, D: Tensor | None) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    return A.unbind(0), [None] * len(A) if D is None else D.unbind(0)


def _scan(
    tensors: tuple[Tensor, ...],
    A: Tensor,
    D: Tensor | None,
    initial: Tensor | None,
    where: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    x, dt, B, C = tensors
    y, state = selective_scan(x, dt, A, B, C, D, initial_state=initial, return_state=True, **where)
    return y, state
