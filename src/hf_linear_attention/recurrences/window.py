# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The last tokens and a few first ones as a recurrence: softmax attention over them, and what
leaves the window, for another attention to read on.

Shapes: B batch, T time, W tokens of the window, N first tokens ("sinks"), Hq query heads, Hkv
key-value heads, K key dim, V value dim, F features that go with a key.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.numerics import accumulation_dtype, without_autocast
from ..ops.tokens import Tokens, positions_within
from ..ops.windowed_flash import flash_window_attention, takes_flash
from ..ops.windowed_softmax import attention_to, join, window_attention
from ..ops.windowed_step import takes_window_step, window_step_
from .interface import (
    Recurrence,
    State,
    StateSize,
    padding_first,
    padding_first_order,
    take_tokens,
)


class WindowOutput(NamedTuple):
    """Of every token: what softmax attention gives it, and the token that it pushes out."""

    y: Tensor  # (B, T, Hq, V), float32 or better
    log_size: Tensor  # (B, T, Hq), the logarithm of its denominator
    v: Tensor  # (B, T, Hkv, V + 1) of the token that leaves, and 1
    features: Tensor  # (B, T, Hkv, F) of it; 0 where none leaves, or a first one, which stays


class WindowInputs(NamedTuple):
    q: Tensor  # (B, T, Hq, K)
    kvf: Tensor  # (B, T, Hkv, K + V + F): keys, values and features


@dataclass(frozen=True)
class WindowRecurrence(Recurrence):
    """`run` gives all of `WindowOutput` in one tensor (B, T, features); `outputs` takes it apart.
    The state: "window" (B, W, Hkv, K + V + F), a ring of the last W real tokens, or zeros; "sinks"
    (B, N, Hkv, K + V), the first N; and "window_count" (B, 1), n + (W + N + 1) i for n tokens that
    were read, W + N for more, and a ring whose token i is the oldest.

    learns_keys: whether keys and values may have gradients. Those of features don't tell, since
    they are in one tensor: without, that of softmax attention is not computed for nothing.
    """

    num_heads: int  # of keys and values
    key_dim: int
    value_dim: int
    feature_dim: int
    window: int
    num_sinks: int
    learns_keys: bool = True

    only_read: ClassVar[tuple[str, ...]] = ("q",)

    def state_sizes(self) -> dict[str, StateSize]:
        H, kv = self.num_heads, self.key_dim + self.value_dim
        sizes = {
            "window": StateSize((self.window, H, kv + self.feature_dim), is_sum=False),
            "sinks": StateSize((self.num_sinks, H, kv), is_sum=False),
            "window_count": StateSize((1,), is_sum=True),
        }
        return {name: size for name, size in sizes.items() if 0 not in size.shape}

    def start(self, inputs: WindowInputs) -> State:
        kvf = inputs.kvf
        B, _, H, features = kvf.shape
        state = {
            "window": kvf.new_zeros(B, self.window, H, features),
            "window_count": kvf.new_zeros(B, 1, dtype=accumulation_dtype(kvf.dtype)),
        }
        if self.num_sinks > 0:
            state["sinks"] = kvf.new_zeros(B, self.num_sinks, H, features - self.feature_dim)
        return state

    def run(self, inputs: WindowInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        q, kvf = inputs
        T, K, kv = kvf.shape[1], self.key_dim, self.key_dim + self.value_dim
        order = None if tokens.key_mask is None else padding_first_order(tokens.key_mask)
        if order is not None:
            q = take_tokens(q, order)
        extended, after = self._read(kvf, state, tokens.key_mask)
        num_before = self._num_before(state, tokens, T, q.device)
        seen_by_softmax = extended if self.learns_keys else extended.detach()
        with without_autocast(q.device.type):
            qkv = q, seen_by_softmax[..., :K], seen_by_softmax[..., K:kv]
            attend = flash_window_attention if takes_flash(*qkv) else window_attention
            y, log_size = attend(*qkv, num_before, self.window)
            has_left = num_before[..., None] - self.window  # in front of each token, (B or 1, T, 1)
            if self.num_sinks > 0:
                sinks = after["sinks"]
                if tokens.cu_seqlens is not None:
                    sinks = self._sinks_of_each(kvf, num_before)
                if not self.learns_keys:
                    sinks = sinks.detach()
                seen = has_left >= torch.arange(self.num_sinks, device=q.device)
                of_sinks = attention_to(q, sinks, seen)
                # logaddexp's second derivative is NaN where one of them is of no tokens.
                both = torch.stack([log_size, of_sinks[1]])
                y, log_size = join(y, log_size, *of_sinks), both.logsumexp(0)
        out = self._in_one(y, log_size, extended[:, :T], has_left)
        if order is not None:
            assert tokens.key_mask is not None
            out = take_tokens(out, order.argsort(dim=1))
            out = out.masked_fill(~tokens.key_mask[..., None], 0)
        return out, after

    def step_in_slots_(
        self, inputs: WindowInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        if takes_window_step(inputs.q, states["window"], self.num_sinks):
            return self.step_(inputs, states, tokens, slots)
        return super().step_in_slots_(inputs, states, slots, tokens)

    def step_(
        self, inputs: WindowInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        (q, kvf), key_mask = inputs, tokens.key_mask
        window, sinks, place = state["window"], state.get("sinks"), state["window_count"]
        W, N, kv = self.window, self.num_sinks, self.key_dim + self.value_dim
        kvf, counts = kvf.to(window.dtype), W + N + 1
        if takes_window_step(q, window, N):
            return window_step_(q, kvf, window, sinks, place, key_mask, self.value_dim, slots)
        if W * counts > 2**24:  # which float32 can't tell apart
            return super().step_(inputs, state, tokens)
        oldest, count = self._oldest_and_count(state)
        is_real = torch.ones_like(oldest) > 0 if key_mask is None else key_mask
        leaving = take_tokens(window, oldest)
        token = torch.where(is_real[..., None, None], kvf, leaving)
        window.scatter_(1, oldest[..., None, None].expand_as(token), token)
        recent, ages = window[..., :kv], (oldest - torch.arange(W, device=q.device)) % W
        seen = ages <= count
        if sinks is not None:
            number = torch.arange(N, device=q.device)
            is_new = (number == count) & is_real
            sinks.copy_(torch.where(is_new[..., None, None], kvf[..., :kv], sinks))
            recent = torch.cat([sinks, recent], dim=1)
            seen = torch.cat([number <= count - W, seen], dim=1)
        with without_autocast(q.device.type):
            y, log_size = attention_to(q, recent, seen[:, None])
        out = self._in_one(y, log_size, leaving, count[..., None] - W)
        after = (oldest + 1) % W * counts + (count + 1).clamp(max=W + N)
        place.copy_(torch.where(is_real, after, place))
        return out.masked_fill(~is_real[..., None], 0)

    def _in_one(self, y: Tensor, log_size: Tensor, leaving: Tensor, has_left: Tensor) -> Tensor:
        """All of `WindowOutput` in one tensor (B, T, features): what leaves the window is given
        (B, T, Hkv, K + V + F), and how many tokens have left it before, (B or 1, T, 1).
        """
        _, v, features = leaving.split([self.key_dim, self.value_dim, self.feature_dim], dim=-1)
        features = features.masked_fill((has_left < self.num_sinks)[..., None], 0)
        parts = [y, log_size, F.pad(v, (0, 1), value=1.0), features]
        return torch.cat([x.flatten(2).to(y.dtype) for x in parts], dim=-1)

    def outputs(self, out: Tensor, num_heads: int) -> WindowOutput:
        """What `run` gave for so many heads of keys and values."""
        V, kept = self.value_dim, num_heads * (self.value_dim + 1 + self.feature_dim)
        Hq = (out.shape[-1] - kept) // (V + 1)
        sizes = [Hq * V, Hq, num_heads * (V + 1), num_heads * self.feature_dim]
        y, log_size, v, features = out.split(sizes, dim=-1)
        return WindowOutput(
            y.unflatten(-1, (Hq, V)),
            log_size,
            v.unflatten(-1, (num_heads, V + 1)),
            features.unflatten(-1, (num_heads, self.feature_dim)),
        )

    def replay(self, inputs: WindowInputs, state: State, key_mask: Tensor | None) -> State:
        return self._read(inputs.kvf, state, key_mask)[1]

    def _read(self, kvf: Tensor, state: State, key_mask: Tensor | None) -> tuple[Tensor, State]:
        """The window and the tokens behind it (B, W + T, Hkv, K + V + F), padding moved to the
        front, and the state after them.
        """
        T, W, N = kvf.shape[1], self.window, self.num_sinks
        if "window" not in state:
            state = self.start(WindowInputs(kvf, kvf))
        window = state["window"]
        oldest, count = self._oldest_and_count(state)
        order = torch.arange(window.shape[0] * W, device=kvf.device).view(-1, W)
        order = order - order % W + (order + oldest) % W  # of all rows; `gather` is slow
        window = window.flatten(0, 1).index_select(0, order.flatten()).view_as(window)
        extended = padding_first(torch.cat([window.to(kvf.dtype), kvf], dim=1), key_mask)
        is_new = torch.full_like(count, T) if key_mask is None else key_mask.sum(1, True)
        after = {
            "window": extended[:, T:].clone(memory_format=torch.contiguous_format),
            "window_count": (count + is_new).clamp(max=W + N).to(state["window_count"].dtype),
        }
        if N == 0:
            return extended, after
        new = padding_first(kvf, key_mask)
        both = torch.cat([state["sinks"].to(kvf.dtype), new[..., : state["sinks"].shape[-1]]], 1)
        number = torch.arange(N, device=kvf.device)[None]
        behind = number - count  # of the new tokens the one that is this sink
        where = torch.where(behind < 0, number, N + (T - is_new) + behind)
        sinks = take_tokens(both, where.clamp(max=both.shape[1] - 1))
        after["sinks"] = sinks.masked_fill((number >= count + is_new)[..., None, None], 0)
        return extended, after

    def _num_before(self, state: State, tokens: Tokens, T: int, device: torch.device) -> Tensor:
        """How many real tokens come before each, (B or 1, T), padding being in front."""
        if tokens.cu_seqlens is not None:
            return positions_within(tokens.cu_seqlens, 1, T)
        num_before = torch.arange(T, device=device)[None]
        if tokens.key_mask is not None:
            padding = T - tokens.key_mask.sum(1, keepdim=True)
            num_before = (num_before - padding).clamp(min=0)
        if "window_count" in state:
            num_before = num_before + self._oldest_and_count(state)[1]
        return num_before

    def _oldest_and_count(self, state: State) -> tuple[Tensor, Tensor]:
        place, counts = state["window_count"].long(), self.window + self.num_sinks + 1
        return place // counts, place % counts

    def _sinks_of_each(self, kvf: Tensor, positions: Tensor) -> Tensor:
        """The first tokens of each token's packed sequence, (1, T, N, Hkv, K + V)."""
        T = kvf.shape[1]
        first = torch.arange(T, device=kvf.device) - positions[0]
        where = first[:, None] + torch.arange(self.num_sinks, device=kvf.device)
        return kvf[:, where.clamp(max=T - 1), :, : self.key_dim + self.value_dim]

    def piece(self, inputs: WindowInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state; with every token of it 1 where it is real, else 0."""
        kvf = inputs.kvf
        after = self._read(kvf, {}, tokens.key_mask)[1]
        count = after["window_count"]
        n = torch.full_like(count, kvf.shape[1])
        if tokens.key_mask is not None:
            n = tokens.key_mask.sum(1, keepdim=True)
        numbers = torch.arange(max(self.window, self.num_sinks), device=kvf.device)[None]
        piece = {"window_count": count}
        is_real = {"window": numbers[:, : self.window].flip(1) < n}
        is_real["sinks"] = numbers[:, : self.num_sinks] < n
        for name in after.keys() - {"window_count"}:
            flags = is_real[name].to(count.dtype)[..., None]
            piece[name] = torch.cat([after[name].flatten(2).to(count.dtype), flags], dim=-1)
        return piece

    def combine(self, pieces: dict[str, Tensor]) -> State:
        most = self.window + self.num_sinks
        state = {"window_count": pieces["window_count"].sum(0).clamp(max=most)}
        for name, size in self.state_sizes().items():
            if name == "window_count":
                continue
            x = pieces[name].transpose(0, 1).flatten(1, 2)  # all tokens, in order
            length, _, features = size.shape
            x = F.pad(x, (0, 0, length, length))  # as many as are wanted, were there none
            is_real = x[..., -1] != 0
            if name == "window":
                x = padding_first(x, is_real)[:, x.shape[1] - length :]
            else:
                x = take_tokens(x, (~is_real).int().argsort(dim=1, stable=True))[:, :length]
            state[name] = x[..., :-1].unflatten(-1, (-1, features))
        return state
