# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule with a transition of its own, diagonal plus low rank, as a recurrence: RWKV-7's.

Shapes: B batch, T time, H heads, K key dim, V value dim, n pieces of a sequence.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.dplr_delta_rule import dplr_delta_rule, dplr_delta_rule_step_
from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens
from .interface import Inputs, Recurrence, State, StateSize


class DPLRInputs(NamedTuple):  # arguments of `dplr_delta_rule`
    q: Tensor  # (B, T, H, K)
    k: Tensor
    v: Tensor  # (B, T, H, V)
    a: Tensor  # (B, T, H, K)
    b: Tensor
    log_decay: Tensor
    first_state: Tensor | None = None  # (H, K, V)


@dataclass(frozen=True)
class DPLRRecurrence(Recurrence):
    """The recurrence of `dplr_delta_rule`, of queries that are not scaled. Its state is "kv" (B, H,
    K, V).

    has_first_state: whether sequences begin with a state that is given with the inputs. As a state
        of zeros may be what is kept of no tokens, "has_begun" (B, 1) then says, by 0 or 1, whether
        it is in "kv".
    """

    num_heads: int
    key_dim: int
    value_dim: int
    has_first_state: bool = False

    only_read: ClassVar[tuple[str, ...]] = ("q",)
    parameters: ClassVar[tuple[str, ...]] = ("first_state",)
    packs_states: ClassVar[bool] = True
    state_is_first_piece: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        shape = self.num_heads, self.key_dim, self.value_dim
        sizes = {"kv": StateSize(shape, is_sum=True)}
        return sizes | ({"has_begun": StateSize((1,), is_sum=True)} if self.has_first_state else {})

    def start(self, inputs: DPLRInputs) -> State:
        rows, v = inputs.k.shape[0], inputs.v
        dtype = accumulation_dtype(v.dtype)
        return {
            name: v.new_zeros(rows, *size.shape, dtype=dtype)
            for name, size in self._sizes_of(inputs).items()
        }

    def _sizes_of(self, inputs: DPLRInputs) -> dict[str, StateSize]:
        """For heads as those of the inputs: ranks have shares of them."""
        return replace(self, num_heads=inputs.k.shape[2]).state_sizes()

    def run(self, inputs: DPLRInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        *of_op, first_state = inputs
        before, after = state.get("kv"), {}
        if first_state is not None:
            rows = inputs.k.shape[0] if tokens.cu_seqlens is None else len(tokens.cu_seqlens) - 1
            dtype = accumulation_dtype(inputs.v.dtype)
            before = self._begun(state, first_state.to(dtype), rows)
            after = {"has_begun": before.new_ones(rows, 1)}
        y, kv = dplr_delta_rule(
            *of_op,
            scale=1.0,
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            initial_state=before,
            return_state=True,
        )
        return y, {"kv": kv, **after}

    @staticmethod
    def _begun(state: State, first_state: Tensor, rows: int) -> Tensor:
        """ "kv" of rows that have begun, from one of any."""
        if "kv" not in state:
            return first_state.expand(rows, *first_state.shape).contiguous()
        return state["kv"] + (1 - state["has_begun"])[..., None, None] * first_state

    def step_in_slots_(
        self, inputs: DPLRInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self.step_(inputs, states, tokens, slots)

    def step_(
        self, inputs: DPLRInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        q, k, v, a, b, log_decay = (x[:, 0] for x in inputs[:6])
        key_mask = tokens.key_mask
        if inputs.first_state is not None and slots is None:  # a step in slots goes on
            state["kv"].copy_(self._begun(state, inputs.first_state.to(state["kv"].dtype), len(q)))
            state["has_begun"].fill_(1)
        y = dplr_delta_rule_step_(
            *(q, k, v, a, b, state["kv"], log_decay),
            scale=1.0,
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=slots,
        )
        return y[:, None]

    def recorded(self, inputs: Inputs) -> Inputs:
        # and the first state, with which one of no tokens begins again
        return inputs._replace(**dict.fromkeys(self.only_read))

    def replay(self, inputs: DPLRInputs, state: State, key_mask: Tensor | None) -> State:
        return super().replay(inputs._replace(q=inputs.k), state, key_mask)  # nobody reads

    def piece(self, inputs: DPLRInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, "transition" (B, H, K, K), by which a piece multiplies the one that it begins
        with, and "first_state" where there is one.

        Columns of a state know nothing of each other, so one run makes both: to the columns of the
        values, from nothing, come K that write nothing, from the unit matrix.
        """
        k, v = inputs.k, inputs.v
        (B, _, H, K), V = k.shape, v.shape[-1]
        one = torch.eye(K, dtype=accumulation_dtype(v.dtype), device=v.device)
        start = F.pad(one, (V, 0)).expand(B, H, K, V + K)
        wider = inputs._replace(q=k.detach(), v=F.pad(v, (0, K)), first_state=None)
        _, after = self.run(wider, {"kv": start.contiguous()}, tokens)
        state, transition = after["kv"].split([V, K], dim=-1)
        piece = {"kv": state, "transition": transition}
        if inputs.first_state is not None:
            piece["first_state"] = inputs.first_state.to(state.dtype).expand(B, -1, -1, -1)
        return piece

    def combine(self, pieces: dict[str, Tensor]) -> State:
        kv, transition = pieces["kv"], pieces["transition"]
        state = kv[:0].sum(0)  # nothing, with a gradient
        if "first_state" in pieces:
            state = state + pieces["first_state"][:1].sum(0)
        for i in range(len(kv)):
            state = transition[i] @ state + kv[i]
        if "first_state" not in pieces:
            return {"kv": state}
        return {"kv": state, "has_begun": state.new_full((len(state), 1), min(len(kv), 1))}
