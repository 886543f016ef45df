# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""xLSTM's matrix memory (mLSTM) as a recurrence: linear attention with exponential gates.

Sums are kept divided by exp(m_t), the largest weight that any token of the past has, so that no
exponential is over 1, whatever the gates are.

Source: Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv 2405.04517, section 2.3.

Shapes: B batch, T time, H heads, K key dim, V value dim, N sequences.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.linear_attention import linear_attention, linear_attention_step_
from ..ops.numerics import accumulation_dtype, without_excess
from ..ops.tokens import Tokens, behind
from .interface import Recurrence, State, StateSize, sum_of_later


class MatrixInputs(NamedTuple):
    q: Tensor  # (B, T, H, K)
    k: Tensor
    v: Tensor  # (B, T, H, V)
    log_write: Tensor  # (B, T, H), i below
    log_decay: Tensor  # log f <= 0


@dataclass(frozen=True)
class MatrixMemory(Recurrence):
    """With m_t = max(log f_t + m_(t-1), i_t), for each head:

        S_t = exp(log f_t + m_(t-1) - m_t) S_(t-1) + exp(i_t - m_t) k_t v_t^T
        z_t = exp(log f_t + m_(t-1) - m_t) z_(t-1) + exp(i_t - m_t) k_t
        y_t = S_t^T q_t / (max(|z_t^T q_t|, exp(-m_t)) + eps)

    The state is "kv" (B, H, K, V), "z" (B, H, K) and "m" (B, H, 1), all of them 0 before the first
    token.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    eps: float = 1e-6

    only_read: ClassVar[tuple[str, ...]] = ("q",)
    packs_states: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        H, K, V = self.num_heads, self.key_dim, self.value_dim
        shapes = {"kv": (H, K, V), "z": (H, K), "m": (H, 1)}
        return {name: StateSize(shape, is_sum=True) for name, shape in shapes.items()}

    def start(self, inputs: MatrixInputs) -> State:
        return self._zeros(inputs.v, inputs.v.shape[0])

    def _zeros(self, like: Tensor, rows: int) -> State:
        dtype = accumulation_dtype(like.dtype)
        return {
            name: like.new_zeros(rows, *size.shape, dtype=dtype)
            for name, size in self.state_sizes().items()
        }

    def run(self, inputs: MatrixInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        q, k, v, _, _ = inputs
        bounds = tokens.cu_seqlens
        rows = v.shape[0] if bounds is None else bounds.shape[0] - 1
        before = state or self._zeros(v, rows)
        gates = self._gates(inputs, before["m"], tokens)
        y, (kv, _) = linear_attention(
            q,
            k,
            torch.cat([v, torch.ones_like(v[..., :1])], -1),  # whose sum is z
            gates.log_decay,
            write_strength=gates.strength,
            normalize=False,
            key_mask=tokens.key_mask,
            cu_seqlens=bounds,
            initial_state=(torch.cat([before["kv"], before["z"][..., None]], -1), None),
            return_state=True,
        )
        m = gates.largest
        last = m[:, -1] if bounds is None else m[0, bounds[1:].long() - 1]
        kv, z = (x.contiguous() for x in (kv[..., :-1], kv[..., -1]))
        after = {"kv": kv, "z": z, "m": last[..., None].to(kv.dtype)}
        return self._normalized(y[..., :-1], y[..., -1:], m[..., None]), after

    def step_(self, inputs: MatrixInputs, state: State, tokens: Tokens) -> Tensor:
        q, k, v = (x[:, 0] for x in (inputs.q, inputs.k, inputs.v))
        kv, z, m = (state[name] for name in self.state_sizes())
        gates = self._gates(inputs, m, tokens)
        mask = None if tokens.key_mask is None else tokens.key_mask[:, 0]
        num, den = (
            linear_attention_step_(
                *(q, k, x, (sums, None), gates.log_decay[:, 0]),
                write_strength=gates.strength[:, 0],
                normalize=False,
                key_mask=mask,
            )
            for x, sums in ((v, kv), (torch.ones_like(v[..., :1]), z[..., None]))
        )
        largest = gates.largest[:, 0, :, None]
        m.copy_(largest)
        return self._normalized(num, den, largest)[:, None]

    def replay(self, inputs: MatrixInputs, state: State, key_mask: Tensor | None) -> State:
        return super().replay(inputs._replace(q=inputs.k), state, key_mask)  # nobody reads

    def _normalized(self, num: Tensor, den: Tensor, m: Tensor) -> Tensor:
        den, least = den.to(accumulation_dtype(den.dtype)), torch.exp(-m)
        return (num / (torch.maximum(den.abs(), least.to(den.dtype)) + self.eps)).to(num.dtype)

    def _gates(self, inputs: MatrixInputs, before: Tensor, tokens: Tokens) -> "Gates":
        """From m (N, H, 1) before the first tokens."""
        log_write, log_decay = inputs.log_write, inputs.log_decay
        if tokens.key_mask is not None:
            is_padding = ~behind(tokens.key_mask, log_decay)
            log_write = log_write.masked_fill(is_padding, -torch.inf)
            log_decay = log_decay.masked_fill(is_padding, 0)
        if tokens.cu_seqlens is None:
            return Gates.of(log_write, log_decay, before[..., 0])
        lengths = tokens.cu_seqlens.diff().tolist()
        pieces = zip(*(x.split(lengths, 1) for x in (log_write, log_decay)), before, strict=True)
        found = [Gates.of(write, decay, m[None, :, 0]) for write, decay, m in pieces]
        return Gates(*(torch.cat(x, 1) for x in zip(*found, strict=True)))

    def piece(self, inputs: MatrixInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and "log_decay" (B, H, 1), the sum over the piece."""
        log_decay, state = inputs.log_decay, self.run(inputs, {}, tokens)[1]
        if tokens.key_mask is not None:
            log_decay = log_decay.masked_fill(~behind(tokens.key_mask, log_decay), 0)
        return state | {"log_decay": log_decay.to(state["m"].dtype).sum(1)[..., None]}

    def combine(self, pieces: dict[str, Tensor]) -> State:
        weights = pieces["m"] + sum_of_later(pieces["log_decay"])  # (n, B, H, 1)
        of_nothing = pieces["log_decay"].sum(0)
        m = torch.cat([of_nothing[None], weights]).amax(0)
        remember = (weights - m).exp()
        kv, z = (remember[..., None] * pieces["kv"]).sum(0), (remember * pieces["z"]).sum(0)
        return {"kv": kv, "z": z, "m": m}


class Gates(NamedTuple):
    """(B, T, H) each."""

    largest: Tensor  # m, in float64
    log_decay: Tensor
    strength: Tensor

    @classmethod
    def of(cls, log_write: Tensor, log_decay: Tensor, before: Tensor) -> "Gates":
        """As of rows whose m is (B, H) before them. Sums over many tokens lose digits, which only
        float64 has to spare. Outputs are the same whatever m is, but for eps: it has no gradient.
        """
        dtype = accumulation_dtype(log_write.dtype)
        i, log_f, m = (x.double() for x in (log_write, log_decay, before[:, None]))
        with torch.no_grad():
            total = log_f.cumsum(1)
            largest = total + torch.maximum(m, (i - total).cummax(1).values)
        m = torch.cat([m, largest[:, :-1]], 1)
        decay = without_excess(log_f + m - largest)
        return cls(largest, decay.to(dtype), (i - largest).to(dtype).exp())


def gates_of(input_gate: Tensor, forget_gate: Tensor) -> tuple[Tensor, Tensor]:
    """`log_write` and `log_decay` of what is before the activations, in float32 or better."""
    dtype = accumulation_dtype(input_gate.dtype)
    return input_gate.to(dtype), F.logsigmoid(forget_gate.to(dtype))
