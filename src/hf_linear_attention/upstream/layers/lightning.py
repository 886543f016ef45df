# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Lightning attention in Transformers: MiniMax.

Shapes: B batch, T time, C hidden size, H heads, D head dim of queries, keys and values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...cache.layer_state import LayerMemory
from ...cache.rollback import Recorded
from ...cache.slots import SlotCache
from ...ops.numerics import accumulation_dtype, at_least_float32
from ...recurrences.interface import Recurrence, State
from ...recurrences.linear_attention import LinearInputs, LinearRecurrence
from .parts import ReplacedLayer, memory_in_slots, take_cache, tokens_of


class MiniMaxLayer:
    """One layer of MiniMax's cache, as LayerMemory reads and writes it: "kv" (B, H, D, D). It
    records where that is a CroppableMiniMaxCache that is to.
    """

    def __init__(self, cache: Cache, layer_idx: int, dtype: torch.dtype):
        self.cache, self.layer_idx = cache, layer_idx
        self.dtype = accumulation_dtype(dtype)
        recording_of = getattr(cache, "recording_of", None)
        self.recording = None if recording_of is None else recording_of(layer_idx, self.read())

    @property
    def may_change(self) -> bool:
        return self.recording is None

    def read(self) -> State:
        kv = self.cache.get_linear_cache(self.layer_idx)
        if not isinstance(kv, Tensor):  # None or [], before the first token
            return {}
        return {"kv": kv.to(self.dtype, copy=torch.is_grad_enabled()).contiguous()}

    def write(self, state: State, read: Recorded, dtype: torch.dtype) -> None:
        self.cache.set_linear_cache(self.layer_idx, state["kv"])


class Lightning(ReplacedLayer):
    """S_t = exp(-slope) S_(t-1) + k_t v_t^T,  y_t = S_t^T q_t, of q, k and v behind an activation;
    then a norm over all heads, and a gate.
    """

    state_in_fp64 = False
    qkv_proj: nn.Module
    act_fn: nn.Module
    norm: nn.Module
    output_gate: nn.Module
    out_proj: nn.Module
    slope_rate: Tensor
    layer_idx: int
    num_attention_heads: int
    head_dim: int

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, T, C) -> (B, T, C), and the state (B, H, D, D) after the last token, of
        each sequence where several are packed; None where states are in slots.
        """
        B, T, _ = hidden_states.shape
        hidden_states, memory = self.begin(hidden_states, cache, attention_mask, kwargs)

        H, D = self.num_attention_heads, self.head_dim
        qkv = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (H, 3 * D))
        q, k, v = qkv.split(D, dim=-1)
        log_decay = -at_least_float32(self.slope_rate).view(1, 1, H).expand(qkv.shape[:3])
        y = memory.run(self.recurrence, LinearInputs(q, k, v, log_decay))
        memory.write(y.dtype)

        y = self.norm(y.flatten(2))
        y = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * y)
        return y.view(B, T, -1), memory.state.get("kv")

    @property
    def recurrence(self) -> LinearRecurrence:
        D = self.head_dim
        return LinearRecurrence(
            self.num_attention_heads, D, D, normalize=False, in_fp64=self.state_in_fp64
        )

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers."""
        return [self.recurrence]

    def begin(
        self,
        hidden_states: Tensor,
        cache: Cache | SlotCache | None,
        attention_mask: Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[Tensor, LayerMemory]:
        cache, kwargs = take_cache(cache, kwargs)
        if isinstance(cache, SlotCache):
            return hidden_states, memory_in_slots(self.layer_idx, hidden_states, cache)
        tokens = tokens_of(hidden_states, cache, attention_mask, kwargs)
        stored = None
        if cache is not None:
            dtype = torch.float64 if self.state_in_fp64 else hidden_states.dtype
            stored = MiniMaxLayer(cache, self.layer_idx, dtype)
        T = hidden_states.shape[1]
        hidden_states, _ = tokens.one_row(hidden_states)
        return hidden_states, LayerMemory(stored, tokens, T)
