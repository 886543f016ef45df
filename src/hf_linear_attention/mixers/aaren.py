# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Aaren: softmax attention of one learned query per head, as a recurrence with a running maximum.

Source: Feng et al., "Attention as an RNN", arXiv 2405.13956.

Shapes: B batch, T time, C hidden size, H heads, D head dim, N packed sequences.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..fast.linear import project
from ..ops.in_slots import linear_attention_
from ..ops.linear_attention import linear_attention, linear_attention_step_
from ..ops.numerics import accumulation_dtype
from ..ops.slots import read_slots, write_slots_
from ..ops.tokens import Tokens, positions_within, sequence_of_each_token
from ..recurrences.interface import Recurrence, SlotPieces, State, StateSize
from .linear_attention import Heads, LinearAttentionBase
from .parts.tensor_parallel import call, find_head_shard


class AarenInputs(NamedTuple):
    scores: Tensor  # (B, T, H)
    v: Tensor  # (B, T, H, D)


@dataclass(frozen=True)
class AarenRecurrence(Recurrence):
    """y_t = sum of exp(s_j - m_t) v_j over sum of exp(s_j - m_t) + eps, for j <= t.

    m_t is the largest score s_j until t. With exp(s_t - m_t) for phi(k_t), 1 for phi(q_t) and the
    log decay m_(t-1) - m_t this is linear attention, in which no exponent is positive. The state:
    its "kv" (B, H, 1, D) and "z" (B, H, 1), and m, "running_max" (B, H).
    """

    num_heads: int
    head_dim: int
    eps: float

    packs_states: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        H, D = self.num_heads, self.head_dim
        return {
            "kv": StateSize((H, 1, D), is_sum=True),
            "z": StateSize((H, 1), is_sum=True),
            "running_max": StateSize((H,), is_sum=True),
        }

    def start(self, inputs: AarenInputs) -> State:
        scores, v = inputs
        (B, _, H, D), dtype = v.shape, accumulation_dtype(v.dtype)
        return {
            "kv": v.new_zeros(B, H, 1, D, dtype=dtype),
            "z": v.new_zeros(B, H, 1, dtype=dtype),
            "running_max": scores.new_full((B, H), -torch.inf),
        }

    def run(self, inputs: AarenInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        scores, v = inputs
        phi_k, log_decay, running_max = below_maximum(
            scores, state.get("running_max"), tokens.key_mask, tokens.cu_seqlens
        )
        phi_k = phi_k.to(v.dtype)
        y, (kv, z) = linear_attention(
            torch.ones_like(phi_k),
            phi_k,
            v,
            log_decay,
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            initial_state=(state["kv"], state["z"]) if "kv" in state else None,
            return_state=True,
            eps=self.eps,
        )
        assert z is not None
        if v.shape[1] == 0:
            before = state if "running_max" in state else self.start(inputs)
            running_max = before["running_max"][:, None]
        last = running_max[:, -1]
        if tokens.cu_seqlens is not None:
            last = running_max[0, tokens.cu_seqlens[1:].long() - 1]
        return y, {"kv": kv, "z": z, "running_max": last.contiguous()}

    def step_(self, inputs: AarenInputs, state: State, tokens: Tokens) -> Tensor:
        y, running_max = self._step_(inputs, state, state["running_max"], tokens)
        state["running_max"].copy_(running_max)
        return y

    def step_in_slots_(
        self, inputs: AarenInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        before = read_slots(states["running_max"], slots)
        y, running_max = self._step_(inputs, states, before, tokens, slots)
        write_slots_(states["running_max"], slots, running_max)
        return y

    def run_in_slots_(
        self, inputs: AarenInputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        scores, v = inputs
        before = read_slots(states["running_max"], pieces.slots)
        before = before.masked_fill(pieces.is_new[:, None], -torch.inf)
        phi_k, log_decay, running_max = below_maximum(scores, before, None, pieces.cu_seqlens)
        phi_k = phi_k.to(v.dtype)
        y = linear_attention_(
            torch.ones_like(phi_k),
            phi_k,
            v,
            (states["kv"], states["z"]),
            log_decay,
            eps=self.eps,
            cu_seqlens=pieces.cu_seqlens,
            state_indices=pieces.slots,
            is_new=pieces.is_new,
        )
        last = running_max[0, pieces.cu_seqlens[1:].long() - 1]
        write_slots_(states["running_max"], pieces.slots, last)
        return y

    def _step_(
        self,
        inputs: AarenInputs,
        state: State,
        past_max: Tensor,
        tokens: Tokens,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y, with "kv" and "z" changed in place, and the running maximum (B, H), which was past_max
        (B, H) before.
        """
        scores, v = inputs
        phi_k, log_decay, running_max = below_maximum(scores, past_max, tokens.key_mask)
        phi_k = phi_k.to(v.dtype)
        y = linear_attention_step_(
            torch.ones_like(phi_k)[:, 0],
            phi_k[:, 0],
            v[:, 0],
            (state["kv"], state["z"]),
            log_decay[:, 0],
            eps=self.eps,
            key_mask=None if tokens.key_mask is None else tokens.key_mask[:, 0],
            state_indices=slots,
        )
        return y[:, None], running_max[:, 0]

    def combine(self, pieces: dict[str, Tensor]) -> State:
        """Sums of exp(s_j - m) with the largest m of all; -inf, and nothing, for no pieces."""
        maxima = pieces["running_max"].detach()  # (n, B, H)
        largest = torch.cat([torch.full_like(maxima[:1].sum(0), -torch.inf)[None], maxima]).amax(0)
        scale = torch.where(maxima == -torch.inf, 0, (maxima - largest).exp())
        return {
            "kv": (pieces["kv"] * scale[..., None, None]).sum(0),
            "z": (pieces["z"] * scale[..., None]).sum(0),
            "running_max": largest,
        }

    def reset_(self, state: State) -> None:
        super().reset_(state)
        state["running_max"].fill_(-torch.inf)


class LearnedQuery(nn.Module):
    """Scores of one learned query per head: query.k_t / sqrt(D)."""

    has_parameters_per_head = True

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the query; the model's `_init_weights` calls it."""
        init.normal_(self.weight)

    def forward(self, k: Tensor) -> Tensor:
        """k (B, T, H, D) -> (B, T, H), float32, or float64 for float64 keys."""
        dtype = accumulation_dtype(k.dtype)
        # not a matrix product, which autocast would take to half precision
        return (k.to(dtype) * self.weight.to(dtype)).sum(-1) * k.shape[-1] ** -0.5


class Aaren(LinearAttentionBase):
    """Self-attention by that recurrence. Its queries, alike for all tokens, have no position."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        heads = Heads.sharing_queries(config)  # with one query each
        super().__init__(config, config.hidden_size, heads, made=("k", "v"))
        self.layer_idx = layer_idx
        self.query = LearnedQuery(heads.keys, heads.key_dim)
        self.recurrence = AarenRecurrence(
            heads.values, heads.value_dim, config.attention_eps, in_fp64=config.state_in_fp64
        )
        self.add_convolutions(config)

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, which nobody makes."""
        B, T, C = hidden_states.shape
        hidden_states, _, memory = self.begin(hidden_states, tokens, past_key_values)
        k, v = project(self.k_proj, hidden_states), project(self.v_proj, hidden_states)
        shard = find_head_shard(k, self.k_proj, self.heads.keys)
        k, v = self.convolve("k", k, shard, memory), self.convolve("v", v, shard, memory)
        k, v = self.split(k, v)
        y = memory.run(self.recurrence, AarenInputs(call(self.query, shard, k), v))
        memory.write(v.dtype)
        return self.project_out(hidden_states, y.to(v.dtype), shard).view(B, T, C), None


def below_maximum(
    scores: Tensor,
    past_max: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores s (B, T, H) -> exp(s_t - m_t) (B, T, H, 1), and m_(t-1) - m_t and m_t (B, T, H), which
    have no gradient: the output does not depend on m.

    past_max (B, H) is m before them, (N, H) before packed sequences in one row, whose bounds are
    cu_seqlens (N + 1,); key_mask (B, T) is False for padding. All in the dtype of the scores.
    """
    with torch.no_grad():
        if key_mask is not None:
            seen = scores.masked_fill(~key_mask[..., None], -torch.inf)
        else:
            seen = scores
        if cu_seqlens is not None:
            before, now = _running_max_within(seen, cu_seqlens)
            if past_max is not None:
                past = past_max[sequence_of_each_token(cu_seqlens, scores.shape[1])]
                before, now = torch.maximum(before, past), torch.maximum(now, past)
        else:
            if past_max is None:
                past_max = scores.new_full((scores.shape[0], scores.shape[2]), -torch.inf)
            running = torch.cat([past_max[:, None], seen], 1).cummax(1).values
            before, now = running[:, :-1], running[:, 1:]
        # Nothing comes before the first token that is not padding: nothing to forget.
        log_decay = torch.where(before == -torch.inf, 0, before - now)
    weights = scores - now
    if key_mask is not None:
        weights = weights.masked_fill(~key_mask[..., None], -torch.inf)
    return weights.exp()[..., None], log_decay, now


def _running_max_within(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of x (1, T, H) before each token and up to it, in its packed sequence; -inf where
    there is none.
    """
    T = x.shape[1]
    past = positions_within(cu_seqlens, 1, T)[0, :, None]  # tokens of the sequence before each
    now, reach = x, 1
    while reach < T:  # each has the maximum over `reach` tokens; now over twice as many
        now = torch.where(past >= reach, torch.maximum(now, now.roll(reach, 1)), now)
        reach *= 2
    return torch.where(past >= 1, now.roll(1, 1), -torch.inf), now
