# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The floor that the rest of a model sets for its attention. For any version of the package."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def identity_attention(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile, the model is without attention, and so are others with the same mixers: by their
    classes, for generated tokens of a module with a `forward` of its own are not recorded.
    """
    with ExitStack() as stack:
        for mixer in {type(block.self_attn) for block in model.model.layers}:
            stack.enter_context(mock.patch.object(mixer, "forward", _only_projections))
        yield


def remove_attention(model: PreTrainedModel) -> None:
    """From now on, our model's layers project in and out, and answer v in between: no convolution,
    no decay, no op, no state. What is left is the cost of the model around attention.

    It knows a layer's projections by their names in a checkpoint, and nothing else of it.
    """
    for block in model.model.layers:
        block.self_attn.forward = partial(_only_projections, block.self_attn)


def _only_projections(layer: nn.Module, hidden_states: Tensor, *args, **kwargs):
    layer.q_proj(hidden_states)
    layer.k_proj(hidden_states)
    return layer.o_proj(layer.v_proj(hidden_states)), None
