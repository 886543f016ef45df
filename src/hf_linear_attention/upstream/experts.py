# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The experts of mixtures in Transformers' recurrent models, without gradients.

Each token is multiplied by a few of many experts, whose weights are most of what it reads, and each
expert has few of the tokens, in prompts, too. Transformers multiplies by one expert after another;
the compiled product is that of all at once.

Shapes: T tokens, E experts, C hidden size, F features of an expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations import moe

from ..fast.linear import MAX_ROWS, are_plain
from ..ops.backends import has_compiled, native_op

expert_product = native_op("expert_linear")
IS_COMPILED = has_compiled()


# Transformers' own ways to multiply, whose answers ours are. "eager" is that of its classes.
STOCK_WAYS = {
    None: None,
    "eager": None,
    "grouped_mm": getattr(moe, "grouped_mm_experts_forward", None),
    "batched_mm": getattr(moe, "batched_mm_experts_forward", None),
}


def is_stock(implementation: str | None) -> bool:
    """Whether a config asks for one of these, and no other function stands in its place."""
    registered = moe.ALL_EXPERTS_FUNCTIONS.get(implementation)
    return implementation in STOCK_WAYS and registered is STOCK_WAYS[implementation]


class Experts(nn.Module):
    """The sum of the chosen experts' answers to a token, each times its weight. Rounded as by
    Transformers' `grouped_mm`, its default.
    """

    config: PreTrainedConfig
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    # Instances have their own, the first from Transformers 5.20 on, the second from 5.18.
    has_post_expert_norm: bool = False
    _is_expert_parallel: bool = False
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: nn.Module
    gate_up_proj: nn.Parameter  # (E, 2 F, C); without a gate:
    up_proj: nn.Parameter  # (E, F, C)
    down_proj: nn.Parameter  # (E, C, F)
    # With `has_bias` these have biases (E, ...), of the same names and "_bias".

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, C), (T, experts of a token) int64, and their weights in a floating dtype -> (T, C).
        The index E is no expert.
        """
        if not self.is_ours(hidden_states, top_k_index):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        experts, order = torch.sort(top_k_index.flatten())
        x = hidden_states[order // top_k_index.shape[1]]
        if self.has_gate:
            y = self._apply_gate(self._multiplied(x, "gate_up_proj", experts))
        else:
            y = self.act_fn(self._multiplied(x, "up_proj", experts))
        y = self._multiplied(y, "down_proj", experts)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten()[order, None]
        by_token = torch.empty_like(y).index_copy_(0, order, y)
        return by_token.view(*top_k_index.shape, y.shape[-1]).sum(dim=1).to(hidden_states.dtype)

    def is_ours(self, x: Tensor, top_k_index: Tensor) -> bool:
        """Whether the compiled product takes x (T, C): if experts have as few rows on average as
        `Linear` gives to its own.
        """
        first = self.gate_up_proj if self.has_gate else self.up_proj
        num_experts = self.down_proj.shape[0]
        return (
            IS_COMPILED
            and is_stock(getattr(self.config, "_experts_implementation", None))
            and not (self.is_transposed or self._is_expert_parallel)
            and all(
                are_plain(x, weight, None) and weight.is_cpu and weight.dtype is x.dtype
                for weight in (first, self.down_proj)
            )
            and top_k_index.numel() <= MAX_ROWS.get(x.dtype, 0) * num_experts
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def _multiplied(self, x: Tensor, name: str, experts: Tensor) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return expert_product(x, getattr(self, name), experts, bias)
