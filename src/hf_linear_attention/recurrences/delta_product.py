# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule with several steps for each token as a recurrence. Everybody else counts tokens;
here alone each becomes as many tokens of the delta rule as it takes steps.

Source: Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
Products", arXiv 2502.10297.

Shapes: B batch, T time, n steps of a token, Hk heads of keys and queries, Hv heads of values and
states, K key dim, V value dim.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ..ops.tokens import Tokens
from .delta_rule import DeltaInputs, DeltaRecurrence
from .interface import Recurrence, SlotPieces, State, StateSize


class ProductInputs(NamedTuple):
    q: Tensor | None  # (B, T, Hk, K); None where nobody reads
    k: Tensor  # (B, T, n, Hk, K)
    v: Tensor  # (B, T, n, Hv, V)
    beta: Tensor  # (B, T, n, Hv)
    log_decay: Tensor | None = None  # (B, T, Hv) or with K

    @property
    def num_steps(self) -> int:
        return self.k.shape[2]

    def steps(self) -> DeltaInputs:
        """n T tokens of the delta rule: the first of each n forgets, all of them are asked."""
        q, k, v, beta, log_decay = self
        n = self.num_steps
        if log_decay is not None:  # the others forget nothing
            none = [0, 0] * (log_decay.dim() - 2)
            log_decay = F.pad(log_decay[:, :, None], (*none, 0, n - 1)).flatten(1, 2)
        q = k if q is None else q[:, :, None].expand_as(k)
        q, k, v, beta = (x.flatten(1, 2) for x in (q, k, v, beta))
        return DeltaInputs(q, k, v, beta, log_decay)


def of_steps(tokens: Tokens, n: int) -> Tokens:
    """What is known of tokens, for the n steps that each takes."""
    mask, bounds = tokens.key_mask, tokens.cu_seqlens
    return tokens._replace(
        key_mask=None if mask is None else mask.repeat_interleave(n, 1),
        cu_seqlens=None if bounds is None else n * bounds,
    )


@dataclass(frozen=True)
class ProductRecurrence(Recurrence):
    """The recurrence of `rule`, n times for each token: it decays before the first step, and is
    read after the last. The state is the rule's.
    """

    rule: DeltaRecurrence

    only_read: ClassVar[tuple[str, ...]] = ("q",)
    state_is_first_piece: ClassVar[bool] = True
    packs_states: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        return self.rule.state_sizes()

    def start(self, inputs: ProductInputs) -> State:
        return self.rule.start(inputs.steps())

    def run(self, inputs: ProductInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        n = inputs.num_steps
        y, after = self.rule.run(inputs.steps(), state, of_steps(tokens, n))
        return y[:, n - 1 :: n], after

    def run_in_slots_(
        self, inputs: ProductInputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        n = inputs.num_steps
        pieces = pieces._replace(cu_seqlens=n * pieces.cu_seqlens)
        y = self.rule.run_in_slots_(inputs.steps(), states, pieces, of_steps(tokens, n))
        return y[:, n - 1 :: n]

    def step_in_slots_(
        self, inputs: ProductInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self.step_(inputs, states, tokens, slots)

    def step_(
        self, inputs: ProductInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        steps = inputs.steps()
        for i in range(inputs.num_steps):
            step = DeltaInputs._make(None if x is None else x[:, i : i + 1] for x in steps)
            y = self.rule.step_(step, state, tokens, slots=slots)
        return y

    def piece(self, inputs: ProductInputs, tokens: Tokens) -> dict[str, Tensor]:
        return self.rule.piece(inputs.steps(), of_steps(tokens, inputs.num_steps))

    def combine(self, pieces: dict[str, Tensor]) -> State:
        return self.rule.combine(pieces)
