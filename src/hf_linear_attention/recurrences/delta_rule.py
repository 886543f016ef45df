# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule as a recurrence: a token corrects what the state holds under its key.

Shapes: B batch, T time, Hk heads of keys and queries, Hv heads of values and states, K key dim, V
value dim, n pieces of a sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.delta_rule import delta_rule, delta_rule_step_
from ..ops.in_slots import delta_rule_
from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens
from .interface import Inputs, Recurrence, SlotPieces, State, StateSize


@dataclass(frozen=True)
class DeltaRecurrence(Recurrence):
    """The recurrence of `delta_rule`, whose arguments q, k, v, beta and log_decay are its inputs;
    it divides q and k by their norms. Its state is "kv" (B, Hv, K, V).
    """

    num_heads: int  # of values and states
    key_dim: int
    value_dim: int

    only_read: ClassVar[tuple[str, ...]] = ("q",)

    def state_sizes(self) -> dict[str, StateSize]:
        return {"kv": StateSize((self.num_heads, self.key_dim, self.value_dim), is_sum=True)}

    def start(self, inputs: Inputs) -> State:
        _, k, v, _, _ = _all_of(inputs)
        B, _, Hv, V = v.shape
        return {"kv": v.new_zeros(B, Hv, k.shape[-1], V, dtype=accumulation_dtype(v.dtype))}

    def run(self, inputs: Inputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        return _run(inputs, state.get("kv"), key_mask=tokens.key_mask, cu_seqlens=tokens.cu_seqlens)

    def step_(self, inputs: Inputs, state: State, tokens: Tokens) -> Tensor:
        return self._step_(inputs, state, tokens, None)

    def step_in_slots_(
        self, inputs: Inputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self._step_(inputs, states, tokens, slots)

    def run_in_slots_(
        self, inputs: Inputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        q, k, v, beta, log_decay = _all_of(inputs)
        return delta_rule_(
            q,
            k,
            v,
            beta,
            states["kv"],
            log_decay,
            normalize_qk=True,
            cu_seqlens=pieces.cu_seqlens,
            state_indices=pieces.slots,
            is_new=pieces.is_new,
        )

    def _step_(
        self, inputs: Inputs, state: State, tokens: Tokens, state_indices: Tensor | None
    ) -> Tensor:
        q, k, v, beta, log_decay = _all_of(inputs)
        key_mask = tokens.key_mask
        y = delta_rule_step_(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            beta[:, 0],
            state["kv"],
            None if log_decay is None else log_decay[:, 0],
            normalize_qk=True,
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=state_indices,
        )
        return y[:, None]

    def replay(self, inputs: Inputs, state: State, key_mask: Tensor | None) -> State:
        # nobody reads
        return _run({**inputs, "q": inputs["k"]}, state.get("kv"), key_mask=key_mask)[1]

    def piece(self, inputs: Inputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "transition" (B, Hv, K, K), by which a piece multiplies the state that it
        begins with.

        Columns of a state know nothing of each other, so one run makes both: to the columns of the
        values, from nothing, come K that write nothing, from the unit matrix.
        """
        _, k, v, _, _ = _all_of(inputs)
        (B, _, Hv, V), K = v.shape, k.shape[-1]
        one = torch.eye(K, dtype=accumulation_dtype(v.dtype), device=v.device)
        start = F.pad(one, (V, 0)).expand(B, Hv, K, V + K)
        wider = {**inputs, "q": k.detach(), "v": F.pad(v, (0, K))}
        _, after = _run(wider, start.contiguous(), key_mask=tokens.key_mask)
        state, transition = after["kv"].split([V, K], dim=-1)
        return {"kv": state, "transition": transition}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        kv, transition = pieces["kv"], pieces["transition"]
        state = kv[:0].sum(0)  # nothing, with a gradient
        for i in range(len(kv)):
            state = transition[i] @ state + kv[i]
        return {"kv": state}


def _run(inputs: Inputs, state: Tensor | None, **where: Any) -> tuple[Tensor, State]:
    """The op from a state, `where` being what it is told of the tokens."""
    y, kv = delta_rule(
        *_all_of(inputs), normalize_qk=True, initial_state=state, return_state=True, **where
    )
    return y, {"kv": kv}


def _all_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, beta = inputs["q"], inputs["k"], inputs["v"], inputs["beta"]
    assert q is not None and k is not None and v is not None and beta is not None
    return q, k, v, beta, inputs["log_decay"]
