# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A model as one ONNX graph, for prompts, pieces of them and tokens, of any batch.

The model's own code is traced, by torch.onnx: projections, decays, feature maps, positions and
norms are written down once, there. Only what a layer remembers has a form of its own
(`operators.py`), which a cache for graphs (`states.py`) puts in the place of recurrences.

Shapes: B batch, T time, P tokens that were read before.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..fast.linear import project
from ..mixers.softmax import SoftmaxAttention
from ..model.modeling import LinearAttentionForCausalLM
from .operators import FORMS, Order, take
from .states import PAST, GraphCache, State, full_mask, recurrences_of, states_of, window_mask

OPSET = 18  # that torch.onnx writes in, of which others are made
OF_ANY_LENGTH = ("dynamic", "longrope")  # rotary positions that others follow from
BATCH, TIME, TOTAL = "batch_size", "sequence_length", "total_sequence_length"


def check_exports(model: nn.Module) -> None:
    """Raises a ValueError that names the field for which there is no graph of a model."""
    if not isinstance(model, LinearAttentionForCausalLM):
        raise ValueError(
            f"model must be a LinearAttentionForCausalLM, got a {type(model).__name__}"
        )
    config = model.config
    if model.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"model must be in float32 or float16, got {model.dtype}")
    for name in ("state_in_fp64", "add_cross_attention"):
        if getattr(config, name):
            raise ValueError(f"{name} must be False for ONNX, got True")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if config.position_embedding_type == "rotary" and rope in OF_ANY_LENGTH:
        raise ValueError(
            "rope_parameters['rope_type'] must be one whose angles do not depend on how long the "
            f"sequence is, for ONNX, got {rope!r}"
        )
    for layer in model.model.layers:
        for recurrence in recurrences_of(layer.self_attn):
            if type(recurrence) not in FORMS:
                raise ValueError(
                    f"mixer must be one whose recurrence ONNX's operators compute, got "
                    f"{config.mixer!r}, which needs a {type(recurrence).__name__}"
                )


class Graph(nn.Module):
    """The model as a function of tensors."""

    def __init__(self, model: LinearAttentionForCausalLM):
        super().__init__()
        check_exports(model)
        self.model = model
        mixers = [layer.self_attn for layer in model.model.layers]
        self.states: list[State] = []
        self.windows: dict[int, int] = {}  # by layer, tokens that it sees before the present one
        for number, mixer in enumerate(mixers):
            self.states += states_of(mixer, number, model.dtype)
            if isinstance(mixer, SoftmaxAttention) and mixer.sliding_window is not None:
                self.windows[number] = mixer.sliding_window - 1

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """input_ids and position_ids (B, T), attention_mask (B, P + T), all int64, and states ->
        logits (B, T, vocab_size), and states.
        """
        T = input_ids.shape[1]
        order = Order.of(attention_mask.narrow(1, attention_mask.shape[1] - T, T))
        names = [state.past for state in self.states]
        cache = GraphCache(dict(zip(names, past, strict=True)), order, self.windows)
        hidden_states = self.model.model(
            input_ids=take(input_ids, order.column),
            attention_mask=self._masks(order, attention_mask),
            position_ids=take(position_ids, order.column),
            past_key_values=cache,
        ).last_hidden_state
        logits = project(self.model.lm_head, take(hidden_states, order.place))
        return logits, [cache.present[state.present] for state in self.states]

    def _masks(self, order: Order, mask: Tensor) -> dict[str, Tensor]:
        """For each type of layer."""
        types = set(self.model.config.active_layer_types)
        masks = {"linear_attention": order.is_real}
        if "full_attention" in types:
            masks["full_attention"] = full_mask(order, mask)
        if "sliding_attention" in types:
            masks["sliding_attention"] = window_mask(order, mask, max(self.windows.values()))
        return masks

    def example(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Arguments of sizes that nothing takes for fixed ones."""
        B, P, T = 2, 7, 5
        ids = torch.zeros(B, T, dtype=torch.long)
        mask = torch.ones(B, P + T, dtype=torch.long)
        past = []
        for state in self.states:
            sizes = [P if isinstance(size, str) else size for size in state.shape]
            past.append(torch.zeros(B, *sizes, dtype=state.dtype))
        return ids, mask, torch.arange(P, P + T).expand(B, T).contiguous(), past


@torch.no_grad()
def graph_of(model: LinearAttentionForCausalLM) -> Any:
    """The graph of a model in eval mode, an onnx_ir.Model whose weights are the model's own.

    Raises:
        ValueError: there is none; the message names the field.
    """
    from .translations import TRANSLATIONS

    graph = Graph(model).eval()
    kept: list[dict[int, Any]] = []
    for state in graph.states:
        sizes = enumerate(state.shape, start=1)
        kept.append({0: BATCH, **{place: PAST for place, size in sizes if size == PAST}})
    tokens = {0: BATCH, 1: TIME}
    with quietly():
        program = torch.onnx.export(
            graph,
            graph.example(),
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            input_names=[
                *("input_ids", "attention_mask", "position_ids"),
                *(state.past for state in graph.states),
            ],
            output_names=["logits", *(state.present for state in graph.states)],
            dynamic_shapes=(tokens, {0: BATCH, 1: TOTAL}, tokens, kept),
            verbose=False,
        )
    assert program is not None
    return program.model


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what torch.onnx says of itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
