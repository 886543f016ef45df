# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""xLSTM's mLSTM layers in Transformers.

Their model hands nothing on to them but a state, so what else they are to know comes with it (see
upstream/told_states.py).

Shapes: B batch, T time, C hidden size, H heads, K key dim, V value dim, N packed sequences.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.layer_state import LayerMemory
from ...cache.rollback import Recorded, Recording
from ...cache.slots import SlotLayer
from ...ops.numerics import accumulation_dtype
from ...ops.tokens import Tokens
from ...recurrences.interface import Recurrence, State
from ...recurrences.matrix_memory import MatrixInputs, MatrixMemory, gates_of
from ..bounds import MaskAndBounds
from .parts import ReplacedLayer, tokens_of

NAMES = ("kv", "z", "m")  # of what is in a state


class LayerState(tuple):
    """What xLSTMModel hands on to a layer as its state: (kv, z, m), or nothing, and what comes with
    it.
    """

    is_new = False  # nothing was read before: the numbers are zeros
    may_change = False  # whether a token may change it in place
    mask: Tensor | None = None  # (B, T) of this forward, false for padding
    bounds: Tensor | None = None  # (N + 1,) of packed sequences
    recording: Recording | None = None
    slots: SlotLayer | None = None
    num_read = 0  # tokens of this forward, of which the model may hand on some after others

    @classmethod
    def told(cls, state: Iterable[Tensor] = (), **fields: Any) -> "LayerState":
        made = cls(state)
        vars(made).update(fields)
        return made

    def mask_of(self, T: int) -> MaskAndBounds | Tensor | None:
        """Of the next T tokens."""
        mask = self.mask
        if mask is not None and mask.shape[1] != T:
            mask = mask[:, self.num_read : self.num_read + T]
            self.num_read += T
        return mask if self.bounds is None else MaskAndBounds(mask, self.bounds)


class StoredState:
    """The same, as LayerMemory reads and writes it; the model itself keeps what it is given."""

    def __init__(self, state: LayerState, dtype: torch.dtype):
        self.state, self.dtype = state, accumulation_dtype(dtype)
        self.recording = state.recording

    @property
    def may_change(self) -> bool:
        return self.state.may_change and all(x.dtype == self.dtype for x in self.state)

    def read(self) -> State:
        if torch.is_grad_enabled():  # a gradient may need what will be written over
            return {} if self.state.is_new else self._named(torch.clone)
        return self._named(lambda x: x)

    def _named(self, function: Any) -> State:
        read = (function(x.to(self.dtype)) for x in self.state)
        return dict(zip(NAMES, read, strict=True))

    def write(self, state: State, read: Recorded, dtype: torch.dtype) -> None:
        """Nothing is left to do."""


class MatrixMemoryLayer(ReplacedLayer):
    """Projections, their gates behind a soft cap, the matrix memory, a norm of each head, and a
    gate.
    """

    config: Any
    qk_dim: int
    v_dim: int
    multihead_norm: nn.Module
    out_proj: nn.Module
    ogate_act_fn: nn.Module
    # of weight_mode "single"
    q: nn.Module
    k: nn.Module
    v: nn.Module
    ogate_preact: nn.Module
    igate_preact: nn.Module
    fgate_preact: nn.Module
    # of "fused"
    qkv_opreact: nn.Module
    ifgate_preact: nn.Module

    @property
    def mended(self) -> set[str]:
        """Transformers reads padding as text, and mixes dtypes where nothing is cached."""
        return {"padding", "half precision without a cache"}

    def forward(self, x: Tensor, state: tuple | None = None) -> tuple[Tensor, tuple]:
        """x (B, T, C), and what was read before -> (B, T, C), and the state after it."""
        B, T, _ = x.shape
        x, memory = self.begin(x, state)
        q, k, v, gate, write, decay = self.project(x)
        q, k, v = (one.unflatten(-1, (self.config.num_heads, -1)) for one in (q, k, v))
        inputs = MatrixInputs(q * q.shape[-1] ** -0.5, k, v, *gates_of(write, decay))
        y = memory.run(self.recurrence, inputs)
        memory.write(y.dtype)
        y = self.multihead_norm(y).view(*x.shape[:2], -1)
        y = self.out_proj(self.ogate_act_fn(gate) * y)
        return y.view(B, T, -1), tuple(memory.state[name] for name in NAMES if memory.state)

    def begin(self, x: Tensor, state: tuple | None) -> tuple[Tensor, LayerMemory]:
        T, stored, told = x.shape[1], None, None
        if isinstance(state, LayerState):
            if state.slots is not None:
                return x, LayerMemory(state.slots, Tokens(is_causal=True), T)
            told = state.mask_of(T)
        elif state is not None:
            state = LayerState(state)
        if state:
            stored = StoredState(state, x.dtype)
        tokens = tokens_of(x, None, told, {})
        x, _ = tokens.one_row(x)
        return x, LayerMemory(stored, tokens, T)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values, the gate of outputs, and those of writing and forgetting."""
        if self.config.weight_mode == "single":
            names = (self.q, self.k, self.v, self.ogate_preact, self.igate_preact)
            *projected, write, decay = (one(x) for one in (*names, self.fgate_preact))
        else:
            sizes = [self.qk_dim, self.qk_dim, self.v_dim, self.v_dim]
            projected = list(self.qkv_opreact(x).split(sizes, -1))
            write, decay = self.ifgate_preact(x).split(self.config.num_heads, -1)
        return (*projected, *map(self.soft_capped, (write, decay)))

    def soft_capped(self, x: Tensor) -> Tensor:
        cap = self.config.gate_soft_cap
        return x if cap is None else cap * torch.tanh(x / cap)

    @property
    def recurrence(self) -> MatrixMemory:
        H = self.config.num_heads
        return MatrixMemory(H, self.qk_dim // H, self.v_dim // H, self.config.eps)

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        return [self.recurrence]
