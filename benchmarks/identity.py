# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The floor that the rest of a model sets for its attention. For any version of the package."""

import copy

from torch import Tensor, nn
from transformers import PreTrainedModel


def without_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of our model whose layers project in and out, and answer v in between: no convolution,
    no decay, no op, no state. What is left is the cost of the model around attention.

    It knows a layer's projections by their names in a checkpoint, and nothing else of it. Mixers
    have classes of their own, of the same modules: so tokens are recorded as the model's are.
    """
    model = copy.deepcopy(model)
    for block in model.model.layers:
        mixer = type(block.self_attn)
        members = {"forward": _only_projections, "__module__": mixer.__module__}
        block.self_attn.__class__ = type(mixer.__name__, (mixer,), members)
    return model


def _only_projections(layer: nn.Module, hidden_states: Tensor, *args, **kwargs):
    q, k, v = (proj(hidden_states) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    unused = q[..., :1] + k[..., :1]  # or recorded tokens would leave their products out
    return layer.o_proj(v + unused.clamp(0, 0)), None
