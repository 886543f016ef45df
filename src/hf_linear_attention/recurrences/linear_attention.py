# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention as a recurrence: a running sum, which may decay.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hkv value heads, which states have one each,
G = Hq / Hkv, K key dim, V value dim.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..ops.feature_maps import POINTWISE
from ..ops.in_slots import linear_attention_
from ..ops.linear_attention import linear_attention, linear_attention_step_
from ..ops.numerics import accumulation_dtype, without_autocast
from ..ops.tokens import Tokens, behind
from .interface import Recurrence, SlotPieces, State, StateSize, sum_of_later


class LinearInputs(NamedTuple):  # arguments of `linear_attention`
    q: Tensor  # (B, T, Hq, K)
    k: Tensor  # (B, T, Hk, K)
    v: Tensor  # (B, T, Hkv, V)
    log_decay: Tensor | None = None  # (B, T, Hkv) or with K
    write_strength: Tensor | None = None  # (B, T, Hkv)


@dataclass(frozen=True)
class LinearRecurrence(Recurrence):
    """The recurrence of `linear_attention`.

    Its state is "kv" (B, Hkv, K, V), and "z" (B, Hkv, K) where outputs are normalised by it.
    """

    num_heads: int  # of values, hence of states
    key_dim: int
    value_dim: int
    feature_map: str | None = None  # a pointwise one; None where q and k are mapped already
    normalize: bool = True
    eps: float = 1e-6

    only_read: ClassVar[tuple[str, ...]] = ("q",)
    packs_states: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = True
    state_is_first_piece: ClassVar[bool] = True

    def state_sizes(self) -> dict[str, StateSize]:
        sizes = {"kv": StateSize((self.num_heads, self.key_dim, self.value_dim), is_sum=True)}
        if self.normalize:
            sizes["z"] = StateSize((self.num_heads, self.key_dim), is_sum=True)
        return sizes

    def start(self, inputs: LinearInputs) -> State:
        k, v = inputs.k, inputs.v
        (B, _, Hkv, V), K, dtype = v.shape, k.shape[-1], accumulation_dtype(v.dtype)
        kv = k.new_zeros(B, Hkv, K, V, dtype=dtype)
        return self._named(kv, k.new_zeros(B, Hkv, K, dtype=dtype) if self.normalize else None)

    def run(self, inputs: LinearInputs, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        y, (kv, z) = linear_attention(
            *inputs[:4],
            write_strength=inputs.write_strength,
            key_mask=tokens.key_mask,
            cu_seqlens=tokens.cu_seqlens,
            is_causal=tokens.is_causal,
            initial_state=(state["kv"], state.get("z")) if "kv" in state else None,
            return_state=True,
            feature_map=self.feature_map,
            normalize=self.normalize,
            eps=self.eps,
        )
        return y, self._named(kv, z)

    def run_in_slots_(
        self, inputs: LinearInputs, states: State, pieces: SlotPieces, tokens: Tokens
    ) -> Tensor:
        q, k, v, log_decay, write_strength = inputs
        return linear_attention_(
            q,
            k,
            v,
            (states["kv"], states.get("z")),
            log_decay,
            write_strength=write_strength,
            feature_map=self.feature_map,
            normalize=self.normalize,
            eps=self.eps,
            cu_seqlens=pieces.cu_seqlens,
            state_indices=pieces.slots,
            is_new=pieces.is_new,
        )

    def step_in_slots_(
        self, inputs: LinearInputs, states: State, slots: Tensor, tokens: Tokens
    ) -> Tensor:
        return self.step_(inputs, states, tokens, slots)

    def step_(
        self, inputs: LinearInputs, state: State, tokens: Tokens, slots: Tensor | None = None
    ) -> Tensor:
        q, k, v, log_decay, write_strength = inputs
        key_mask = tokens.key_mask
        y = linear_attention_step_(
            q.select(1, 0),  # which takes less time than indexing
            k.select(1, 0),
            v.select(1, 0),
            (state["kv"], state.get("z")),
            None if log_decay is None else log_decay[:, 0],
            write_strength=None if write_strength is None else write_strength[:, 0],
            feature_map=self.feature_map,
            normalize=self.normalize,
            eps=self.eps,
            key_mask=None if key_mask is None else key_mask[:, 0],
            state_indices=slots,
        )
        return y.unsqueeze(1)

    def replay(self, inputs: LinearInputs, state: State, key_mask: Tensor | None) -> State:
        return super().replay(inputs._replace(q=inputs.k), state, key_mask)  # nobody reads

    def piece(self, inputs: LinearInputs, tokens: Tokens) -> dict[str, Tensor]:
        """The state, and with a decay "log_decay" (B, Hkv) or (B, Hkv, K), the sum over the
        piece.
        """
        unread, log_decay = inputs._replace(q=inputs.k.detach()), inputs.log_decay
        _, piece = self.run(unread, {}, tokens._replace(is_causal=True))
        if log_decay is not None:
            if tokens.key_mask is not None:
                log_decay = log_decay.masked_fill(~behind(tokens.key_mask, log_decay), 0)
            piece["log_decay"] = log_decay.to(piece["kv"].dtype).sum(1)
        return piece

    def combine(self, pieces: dict[str, Tensor]) -> State:
        states = {name: pieces[name] for name in self.state_sizes()}
        if "log_decay" in pieces:  # pieces are forgotten as all later ones say
            remember = sum_of_later(pieces["log_decay"]).exp()  # (n, B, Hkv) or with K
            states = {name: x * behind(remember, x) for name, x in states.items()}
        return {name: x.sum(0) for name, x in states.items()}

    # A memory of M tokens that is read, and not written, by any number of queries: cross attention.

    def fold(self, phi_k: Tensor, v: Tensor) -> State:
        """The state of phi(k) (B, M, Hkv, K), in the dtype of sums, and v (B, M, Hkv, V), without
        decay.
        """
        with without_autocast(phi_k.device.type):
            kv = phi_k.permute(0, 2, 3, 1) @ v.to(phi_k.dtype).transpose(1, 2)
        return self._named(kv, phi_k.sum(1) if self.normalize else None)

    def read(self, phi_q: Tensor, state: State) -> Tensor:
        """phi(q)^T S / (phi(q)^T z + eps), the division only with z: for phi(q) (B, T, Hq, K), in
        the dtype of sums, (B, T, Hq, V).

        A head of S serves its G query heads by one product.
        """
        (T, Hq), Hkv = phi_q.shape[1:3], state["kv"].shape[1]
        phi_q = phi_q.unflatten(2, (Hkv, Hq // Hkv)).transpose(1, 2).flatten(2, 3)
        with without_autocast(phi_q.device.type):  # phi_q: (B, Hkv, T G, K)
            y = phi_q @ state["kv"]
            if self.normalize:
                y = y / (phi_q @ state["z"][..., None] + self.eps)
        return y.unflatten(2, (T, -1)).transpose(1, 2).flatten(2, 3)

    def mapped(self, x: Tensor) -> Tensor:
        """phi(x) in the dtype of sums, of the pointwise phi."""
        return POINTWISE[self.feature_map or "identity"](x.to(accumulation_dtype(x.dtype)))

    def _named(self, kv: Tensor, z: Tensor | None) -> State:
        return {"kv": kv} if z is None else {"kv": kv, "z": z}
