# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Gated DeltaProduct as a layer of a model: Gated DeltaNet that takes several steps of the delta
rule for each token, each with a key, a value and a beta of its own.

Source: Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
Products", arXiv 2502.10297, as flash-linear-attention's GatedDeltaProduct.

Shapes: B batch, T time, C hidden size, n steps of a token, Hk heads of keys and queries, Hv heads
of values and states, K key dim, V value dim.
"""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..cache.layer_state import LayerMemory
from ..recurrences.delta_product import ProductInputs, ProductRecurrence
from ..recurrences.delta_rule import DeltaRecurrence
from .delta_rule import DeltaRule
from .parts.tensor_parallel import HeadShard


class GatedDeltaProduct(DeltaRule):
    """For each head S_t of (K, V), with k_i and q of norm 1, what a token adds over i = 1 ... n,

        S' = exp(log_decay) S_(t-1), then n times S' <- S' + beta_i k_i (v_i - S'^T k_i)^T
        S_t = S',  y_t = K^(-1/2) S_t^T q_t

    Features of what is projected are of heads first, each with its n steps: ranks that share heads
    have whole ones.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads, C, n = self.heads, config.hidden_size, config.num_householder
        self.num_steps = n
        for name in ("k", "v"):
            self.sizes[name] *= n
            linear = nn.Linear(C, self.sizes[name], bias=config.attention_bias)
            self.add_module(f"{name}_proj", linear)
        self.b_proj = nn.Linear(C, heads.values * n, bias=False)
        rule = DeltaRecurrence(
            heads.values, heads.key_dim, heads.value_dim, in_fp64=config.state_in_fp64
        )
        self.recurrence = ProductRecurrence(rule, in_fp64=config.state_in_fp64)
        self.add_convolutions(config)

    def inputs(
        self, hidden_states: Tensor, shard: HeadShard | None, memory: LayerMemory, *qkv: Tensor
    ) -> ProductInputs:
        """The recurrence's, of keys and values (B, T, heads n, K or V)."""
        q, k, v, beta, log_decay = super().inputs(hidden_states, shard, memory, *qkv)
        k, v, beta = (self.by_steps(x) for x in (k, v, beta))
        return ProductInputs(q, k, v, beta, log_decay)

    def by_steps(self, x: Tensor) -> Tensor:
        """(B, T, heads n, ...) -> (B, T, n, heads, ...)"""
        return x.unflatten(2, (-1, self.num_steps)).transpose(2, 3)
