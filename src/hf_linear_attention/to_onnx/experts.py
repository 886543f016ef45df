# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mixtures of experts in Transformers' models, by ONNX Runtime's operator.

Shapes: T tokens, k experts of a token, E experts, C hidden size, F features of an expert.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .operators import MICROSOFT

NOT_CHOSEN = -1e4  # the score of an expert, of which the softmax is 0, in float16, too


def by_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The operator MoE, (T, C), (T, k) int64 and (T, k) -> (T, C).

    It chooses experts by scores, and weighs them by the softmax of those. By logarithms of the
    weights these are the model's, up to their sum, however it found them.
    """
    E = experts.down_proj.shape[0]
    weights = top_k_weights.float()
    scores = weights.new_full((hidden_states.shape[0], E), NOT_CHOSEN)
    scores = scores.scatter(1, top_k_index, weights.log().clamp(min=NOT_CHOSEN))
    # The operator has gates and what they gate in turn.
    gate_up = experts.gate_up_proj.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    y = torch.onnx.ops.symbolic(
        f"{MICROSOFT}::MoE",
        (hidden_states, scores.to(hidden_states.dtype), gate_up, None, experts.down_proj),
        {
            "k": top_k_index.shape[1],
            "activation_type": "swiglu",
            "activation_alpha": 1.0,
            "activation_beta": 0.0,
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
        },
        dtype=hidden_states.dtype,
        shape=tuple(hidden_states.shape),
        version=1,
    )
    return y * weights.sum(1, keepdim=True).to(hidden_states.dtype)


def is_mixture(module: nn.Module) -> bool:
    """Whether it is one whose function Transformers takes from its config."""
    return hasattr(module, "has_gate") and hasattr(module, "down_proj")


@torch.no_grad()
def check_experts(experts: Any) -> None:
    """Raises a ValueError where the operator does not compute what they do."""
    has_more = experts.has_bias or getattr(experts, "has_post_expert_norm", False)
    if experts.has_gate and not experts.is_transposed and not has_more:
        gate_up = experts.gate_up_proj[0, :, :1].T
        gate, up = gate_up.chunk(2, -1)
        if torch.equal(experts._apply_gate(gate_up), F.silu(gate) * up):
            return
    raise ValueError(
        "experts must be products without biases and transposition whose gates are silu, for ONNX, "
        f"got {type(experts).__name__}"
    )
