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
    v: Tensor  # (B, T, Hkv, V) of the token that leaves
    features: Tensor  # (B, T, Hkv, F) of it; 0 where none leaves, or a first one, which stays


class WindowInputs(NamedTuple):
    q: Tensor  # (B, T, Hq, K)
    kvf: Tensor  # (B, T, Hkv, K + V + F): keys, values and features


@dataclass(frozen=True)
class WindowRecurrence(Recurrence):
    """`run` gives all of `WindowOutput` in one tensor (B, T, features); `outputs` takes it apart.
    The state: the last W real tokens, "window" (B, W, Hkv, K + V + F), zeros where there were
    fewer; the first N, "sinks" (B, N, Hkv, K + V); and "window_count" (B, 1), how many tokens were
    read, W + N for more.

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
                if tokens.cu_seqlens is None:
                    sinks = after["sinks"]
                else:
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

    def step_(self, inputs: WindowInputs, state: State, tokens: Tokens) -> Tensor:
        q, key_mask = inputs.q, tokens.key_mask
        window, count = state["window"], state["window_count"]
        kvf = inputs.kvf.to(window.dtype)
        W, N, kv = self.window, self.num_sinks, self.key_dim + self.value_dim
        has_left = count - W  # in front of the token, (B, 1)
        leaving = window[:, :1].clone()
        moved = torch.cat([window[:, 1:], kvf], dim=1)  # all that the token sees
        recent, ages = moved[..., :kv], torch.arange(W - 1, -1, -1, device=q.device)
        seen = ages <= count
        is_real = True if key_mask is None else key_mask
        if N > 0:
            number = torch.arange(N, device=q.device)
            is_next = (number == count) & is_real
            sinks = torch.where(is_next[..., None, None], kvf[..., :kv], state["sinks"])
            state["sinks"].copy_(sinks)
            recent = torch.cat([sinks, recent], dim=1)
            seen = torch.cat([number <= has_left, seen], dim=1)
        with without_autocast(q.device.type):
            y, log_size = attention_to(q, recent, seen[:, None])
        out = self._in_one(y, log_size, leaving, has_left[..., None])
        if key_mask is not None:
            moved = torch.where(key_mask[..., None, None], moved, window)
            out = out.masked_fill(~key_mask[..., None], 0)
        window.copy_(moved)
        count.copy_((count + is_real).clamp(max=W + N))
        return out

    def _in_one(self, y: Tensor, log_size: Tensor, leaving: Tensor, has_left: Tensor) -> Tensor:
        """All of `WindowOutput` in one tensor (B, T, features): what leaves the window is given
        (B, T, Hkv, K + V + F), and how many tokens have left it before, (B or 1, T, 1).
        """
        sizes = [self.key_dim, self.value_dim, self.feature_dim]
        _, v, features = leaving.split(sizes, dim=-1)
        features = features.masked_fill((has_left < self.num_sinks)[..., None], 0)
        parts = [y, log_size, v, features]
        return torch.cat([x.flatten(2).to(y.dtype) for x in parts], dim=-1)

    def outputs(self, out: Tensor, num_heads: int) -> WindowOutput:
        """What `run` gave for so many heads of keys and values."""
        V, kept = self.value_dim, num_heads * (self.value_dim + self.feature_dim)
        Hq = (out.shape[-1] - kept) // (V + 1)
        sizes = [Hq * V, Hq, num_heads * V, num_heads * self.feature_dim]
        y, log_size, v, features = out.split(sizes, dim=-1)
        return WindowOutput(
            y.unflatten(-1, (Hq, V)),
            log_size,
            v.unflatten(-1, (num_heads, V)),
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
        extended = torch.cat([state["window"].to(kvf.dtype), kvf], dim=1)
        extended = padding_first(extended, key_mask)
        count = state["window_count"]
        is_new = torch.full_like(count, T) if key_mask is None else key_mask.sum(1, True)
        after = {
            "window": extended[:, T:].clone(memory_format=torch.contiguous_format),
            "window_count": (count + is_new).clamp(max=W + N).to(count.dtype),
        }
        if N == 0:
            return extended, after
        new = padding_first(kvf, key_mask)
        both = torch.cat([state["sinks"].to(kvf.dtype), new[..., : state["sinks"].shape[-1]]], 1)
        number = torch.arange(N, device=kvf.device)[None]
        behind = number - count.long()  # of the new tokens the one that is this sink
        where = torch.where(behind < 0, number, N + (T - is_new.long()) + behind)
        sinks = take_tokens(both, where.clamp(max=both.shape[1] - 1))
        is_there = number < count + is_new
        after["sinks"] = sinks.masked_fill(~is_there[..., None, None], 0)
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
            num_before = num_before + state["window_count"].long()
        return num_before

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
