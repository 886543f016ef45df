# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule as a recurrence: a token corrects what the state holds under its key.

Shapes: B batch, T time, Hk heads of keys and queries, Hv heads of values and states, K key dim, V
value dim, n pieces of a sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.delta_rule import delta_rule, delta_rule_step_
from ..ops.in_slots import delta_rule_
from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens
from .interface import Recurrence, SlotPieces, State, StateSize


class DeltaInputs(NamedTuple):  # arguments of `delta_rule`
    q: Tensor  # (B, T, Hk, K)
    k: Tensor
    v: Tensor  # (B, T, Hv, V)
    beta: Tensor  # (B, T, Hv)
    log_decay: Tensor | None = None  # (B, T, Hv) or with K


@dataclass(frozen=True)
class DeltaRecurrence(Recurrence):
    """The recurrence of `delta_rule`, of q and k divided by their norms. Its state is "kv" (B, Hv,
    K, V).
    """

    num_heads: int  # of values and states
    key_dim: int
    value_dim: int

    only_read: ClassVar[tuple[str, ...]] = ("q",)
    state_is_first_piece: ClassVar[bool] = True
    packs_states: ClassVar[bool] = True
    normalizes_qk: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return {"kv": StateSize((self.num_heads, self.key_dim, self.value_dim), is_sum=True)}

    def start(self, inputs: DeltaInputs) -> State:
        k, v = inputs.k, inputs.v
        B, _, Hv, V = v.shape
        return {"kv": v.new_zeros(B, Hv, k.shape[-1], V, dtype=accumulation_dtype(v.dtype))}

    def run(self, inputs: Any, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        y, kv = delta_rule(
            **inputs._asdict(),
            normalize_qk=self.normalizes_qk,
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            initial_state=state.get("kv"),
            return_state=True,
        )
        return y, {"kv": kv}

    def run_in_slots_(
        self, inputs: Any, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        return delta_rule_(
            **inputs._asdict(),
            state=states["kv"],
            normalize_qk=self.normalizes_qk,
            cu_seqlens=pieces.cu_seqlens,
            state_indices=pieces.slots,
            is_new=pieces.is_new,
        )

    def step_in_slots_(
        self, inputs: DeltaInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self.step_(inputs, states, tokens, slots)

    def step_(
        self, inputs: Any, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        key_mask = tokens.key_mask
        of_token: dict[str, Any] = {
            name: None if x is None else x[:, 0] for name, x in inputs._asdict().items()
        }
        y = delta_rule_step_(
            **of_token,
            state=state["kv"],
            normalize_qk=self.normalizes_qk,
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=slots,
        )
        return y[:, None]

    def replay(self, inputs: DeltaInputs, state: State, key_mask: Tensor | None) -> State:
        return super().replay(inputs._replace(q=inputs.k), state, key_mask)  # nobody reads

    def piece(self, inputs: DeltaInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "transition" (B, Hv, K, K), by which a piece multiplies the state that it
        begins with.

        Columns of a state know nothing of each other, so one run makes both: to the columns of the
        values, from nothing, come K that write nothing, from the unit matrix.
        """
        k, v = inputs.k, inputs.v
        (B, _, Hv, V), K = v.shape, k.shape[-1]
        one = torch.eye(K, dtype=accumulation_dtype(v.dtype), device=v.device)
        start = F.pad(one, (V, 0)).expand(B, Hv, K, V + K)
        wider = inputs._replace(q=k.detach(), v=F.pad(v, (0, K)))
        _, after = self.run(wider, {"kv": start.contiguous()}, tokens)
        state, transition = after["kv"].split([V, K], dim=-1)
        return {"kv": state, "transition": transition}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        kv, transition = pieces["kv"], pieces["transition"]
        state = kv[:0].sum(0)  # nothing, with a gradient
        for i in range(len(kv)):
            state = transition[i] @ state + kv[i]
        return {"kv": state}


class ErasingInputs(NamedTuple):  # arguments of `delta_rule`
    q: Tensor  # (B, T, Hk, K)
    k: Tensor
    v: Tensor  # (B, T, Hv, V)
    beta: Tensor  # (B, T, Hv)
    log_decay: Tensor  # (B, T, Hv) or with K
    erase_key: Tensor  # (B, T, Hk, K) or of Hv


@dataclass(frozen=True)
class ErasingRecurrence(DeltaRecurrence):
    """The same of `ErasingInputs`, q and k as they are."""

    normalizes_qk: ClassVar[bool] = False
