# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan as a recurrence: sums whose decays are those of their channel.

Shapes: B batch, T time, H heads of channels, P channels, of a head where there are heads, N sums of
a state for each channel, n pieces of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.numerics import accumulation_dtype, rates_of
from ..ops.selective_scan import selective_scan, selective_scan_step_
from ..ops.tokens import Tokens, behind
from .interface import Inputs, Recurrence, State, StateSize, sum_of_later


@dataclass(frozen=True, eq=False)
class SelectiveScanRecurrence(Recurrence):
    """The recurrence of `selective_scan`: inputs x and dt (B, T, P), B and C (B, T, N); its state
    is "kv" (B, P, N). With heads, that each have a B and a C, (B, T, H, P), (B, T, H, N) and
    (B, H, P, N).

    It holds a layer's A_log (P, N) or (H, P, N), of which A = -exp(A_log), and D (P,) or (H, P),
    so that tokens that were recorded can be read again: the parameters, which cost no memory, and
    not what is made of them for each forward.
    """

    A_log: Tensor
    D: Tensor | None = None

    only_read: ClassVar[tuple[str, ...]] = ("C",)
    packs_states: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return {"kv": StateSize(tuple(self.A_log.shape), is_sum=True)}

    def start(self, inputs: Inputs) -> State:
        x, *_ = _all_of(inputs)
        return {"kv": x.new_zeros(x.shape[0], *self.A_log.shape, dtype=accumulation_dtype(x.dtype))}

    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        return self._run(inputs, state, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        return self._step_(inputs, state, tokens, None)

    def step_in_slots_(
        self, inputs: Inputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self._step_(inputs, states, tokens, slots)

    def _step_(
        self, inputs: Inputs, state: State, tokens: Tokens, state_indices: Tensor | None
    ) -> Tensor:
        x, dt, B, C = (z[:, 0] for z in _all_of(inputs))
        key_mask, kv = tokens.key_mask, state["kv"]
        if key_mask is not None:
            key_mask = key_mask[:, 0]
        rows: dict[str, Any] = {"key_mask": key_mask, "state_indices": state_indices}
        A, D = self._weights(x)
        if A.dim() == 2:
            return selective_scan_step_(x, dt, A, B, C, D, kv, **rows)[:, None]
        heads = zip(*(z.unbind(1) for z in (x, dt, B, C, kv)), *_of_heads(A, D), strict=True)
        of_heads = [
            selective_scan_step_(x, dt, A, B, C, D, kv, **rows) for x, dt, B, C, kv, A, D in heads
        ]
        return torch.stack(of_heads, 1)[:, None]

    def replay(self, inputs: Inputs, state: State, key_mask: Tensor | None) -> State:
        # nobody reads
        return self._run({**inputs, "C": inputs["B"]}, state, key_mask=key_mask)[1]

    def piece(self, inputs: Inputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "log_decay", as large, by which a piece decays the one before."""
        x, dt, *_ = _all_of(inputs)
        if tokens.key_mask is not None:
            dt = torch.where(behind(tokens.key_mask, dt), dt, 0)
        after = self.run(inputs, {}, tokens)[1]
        return {**after, "log_decay": dt.sum(1)[..., None] * self._weights(x)[0]}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        later = sum_of_later(pieces["log_decay"])
        return {"kv": (later.exp() * pieces["kv"]).sum(0)}

    def _run(self, inputs: Inputs, state: State, **where: Any) -> tuple[Tensor, State]:
        """The op from a state, `where` being what it is told of the tokens; head by head."""
        tensors, initial = _all_of(inputs), state.get("kv")
        A, D = self._weights(tensors[0])
        if A.dim() == 2:
            y, kv = _scan(tensors, A, D, initial, where)
            return y, {"kv": kv}
        initials = [None] * len(A) if initial is None else initial.unbind(1)
        of_heads = zip(*(z.unbind(2) for z in tensors), strict=True)
        heads = zip(of_heads, *_of_heads(A, D), initials, strict=True)
        outputs, states = zip(*(_scan(*head, where) for head in heads), strict=True)
        return torch.stack(outputs, 2), {"kv": torch.stack(states, 1)}

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


def _all_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, dt, B, C = inputs["x"], inputs["dt"], inputs["B"], inputs["C"]
    assert x is not None and dt is not None and B is not None and C is not None
    return x, dt, B, C
