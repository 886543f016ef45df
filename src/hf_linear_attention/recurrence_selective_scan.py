# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan as a recurrence: sums whose decays are those of their channel.

Shapes: B batch, T time, H heads of channels, P channels, of a head where there are heads, N sums of
a state for each channel, n pieces of a sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .numerics import accumulation_dtype
from .op_selective_scan import selective_scan, selective_scan_step_
from .recurrence import Inputs, Recurrence, State, StateSize, sum_of_later
from .tokens import Tokens, behind


@dataclass(frozen=True, eq=False)
class SelectiveScanRecurrence(Recurrence):
    """The recurrence of `selective_scan`: inputs x and dt (B, T, P), B and C (B, T, N); its state
    is "kv" (B, P, N). With heads, that each have a B and a C, (B, T, H, P), (B, T, H, N) and
    (B, H, P, N).

    It holds A (P, N) or (H, P, N), and D (P,) or (H, P), of which there is no token's, so that
    tokens that were recorded can be read again.
    """

    A: Tensor
    D: Tensor | None = None

    only_read: ClassVar[tuple[str, ...]] = ("C",)

    def state_sizes(self) -> dict[str, StateSize]:
        return {"kv": StateSize(tuple(self.A.shape), is_sum=True)}

    def start(self, inputs: Inputs) -> State:
        x, *_ = _all_of(inputs)
        return {"kv": x.new_zeros(x.shape[0], *self.A.shape, dtype=accumulation_dtype(x.dtype))}

    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        return self._run(inputs, state, key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        x, dt, B, C = (z[:, 0] for z in _all_of(inputs))
        key_mask, kv = tokens.key_mask, state["kv"]
        if key_mask is not None:
            key_mask = key_mask[:, 0]
        if self.A.dim() == 2:
            y = selective_scan_step_(x, dt, self.A, B, C, self.D, kv, key_mask=key_mask)
            return y[:, None]
        heads = zip(*(z.unbind(1) for z in (x, dt, B, C, kv)), *self._of_heads(), strict=True)
        of_heads = [
            selective_scan_step_(x, dt, A, B, C, D, kv, key_mask=key_mask)
            for x, dt, B, C, kv, A, D in heads
        ]
        return torch.stack(of_heads, 1)[:, None]

    def replay(self, inputs: Inputs, state: State, key_mask: Tensor | None) -> State:
        # nobody reads
        return self._run({**inputs, "C": inputs["B"]}, state, key_mask=key_mask)[1]

    def piece(self, inputs: Inputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "log_decay", as large, by which a piece decays the one before."""
        _, dt, *_ = _all_of(inputs)
        if tokens.key_mask is not None:
            dt = torch.where(behind(tokens.key_mask, dt), dt, 0)
        after = self.run(inputs, {}, tokens)[1]
        return {**after, "log_decay": dt.sum(1)[..., None] * self.A}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        later = sum_of_later(pieces["log_decay"])
        return {"kv": (later.exp() * pieces["kv"]).sum(0)}

    def _run(self, inputs: Inputs, state: State, **where: Any) -> tuple[Tensor, State]:
        """The op from a state, `where` being what it is told of the tokens; head by head."""
        tensors, initial = _all_of(inputs), state.get("kv")
        if self.A.dim() == 2:
            y, kv = _scan(tensors, self.A, self.D, initial, where)
            return y, {"kv": kv}
        initials = [None] * len(self.A) if initial is None else initial.unbind(1)
        of_heads = zip(*(z.unbind(2) for z in tensors), strict=True)
        heads = zip(of_heads, *self._of_heads(), initials, strict=True)
        outputs, states = zip(*(_scan(*head, where) for head in heads), strict=True)
        return torch.stack(outputs, 2), {"kv": torch.stack(states, 1)}

    def _of_heads(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | list[None]]:
        """A and D of each head."""
        return self.A.unbind(0), [None] * len(self.A) if self.D is None else self.D.unbind(0)


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
