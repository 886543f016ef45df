# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Comba as a layer of a model: Gated DeltaNet whose state is asked before it decays, and whose
queries are corrected by the keys.

Source: Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", arXiv 2506.02475, as
the kernels of flash-linear-attention compute it.

Shapes: B batch, T time, Hk heads of queries and keys, Hv heads of values and states, K key dim, V
value dim.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from ..cache.layer_state import LayerMemory
from ..ops.numerics import at_least_float32, l2_normed
from ..recurrences.dplr_delta_rule import DPLRInputs, DPLRRecurrence
from .delta_rule import DeltaRule
from .parts.tensor_parallel import HeadShard


class Comba(DeltaRule):
    """For each head S_t of (K, V), with keys k_t, p_t = k_t sigmoid(inner_decay) and what queries
    are after their correction, q_t - D p_t, all three divided by their norms,

    S_t = exp(log_decay_t) S_(t-1) + beta_t k_t (v_t - S_(t-1)^T p_t)^T,  y_t = K^(-1/2) S_t^T q_t

    As only its direction is left, p_t is k_t but for the epsilon of the norms.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.heads
        self.inner_decay = nn.Parameter(torch.empty(heads.keys))
        self.D = nn.Parameter(torch.empty(heads.keys))
        self.recurrence = DPLRRecurrence(
            heads.values, heads.key_dim, heads.value_dim, in_fp64=config.state_in_fp64
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes inner_decay and D; the model's `_init_weights` calls it."""
        init.ones_(self.inner_decay)
        init.ones_(self.D)

    def inputs(
        self, hidden_states: Tensor, shard: HeadShard | None, memory: LayerMemory, *qkv: Tensor
    ) -> DPLRInputs:
        """The recurrence's: what is found under -beta p is added along k."""
        q, k, v, beta, log_decay = super().inputs(hidden_states, shard, memory, *qkv)
        inner_decay, D = (at_least_float32(x)[:, None] for x in (self.inner_decay, self.D))
        if shard is not None:
            inner_decay, D = shard.take(inner_decay, 0), shard.take(D, 0)
        k = at_least_float32(k)
        p = k * inner_decay.sigmoid()
        qkp = l2_normed(at_least_float32(q) - D * p), l2_normed(k), l2_normed(p)
        q, k, p = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in qkp)
        q, beta = q * self.heads.key_dim**-0.5, beta[..., None]
        return DPLRInputs(
            q.to(v.dtype), k.to(v.dtype), (beta * v).to(v.dtype), -beta * p, k, log_decay
        )
