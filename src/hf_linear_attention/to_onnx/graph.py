# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A model as one ONNX graph, for prompts, pieces of them and tokens, of any batch.

The model's own code is traced, by torch.onnx: projections, decays, feature maps, positions and
norms are written down once, there. Only what a layer remembers has a form of its own
(`operators.py`), which a cache for graphs (`states.py`) puts in the place of recurrences.

Shapes: B batch, T time, P tokens that were read before.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..conversion.quiet import quietly
from ..fast.linear import project
from ..mixers.parts import rotary
from ..model.auto import functions_in_module
from ..model.modeling import LinearAttentionForCausalLM
from ..recurrences.sequence_parallel import rope_by_length
from .operators import FORMS, ROTATION, Order, shared_keys, take
from .states import PAST, GraphCache, State, full_mask, window_mask
from .stock import StockCache, check_stock, logits_of

OPSET = 23  # the first with an operator for softmax attention
BATCH, TIME, TOTAL = "batch_size", "sequence_length", "total_sequence_length"
KEPT, NUM_KEPT = "num_logits", "num_logits_to_keep"  # a dimension, and the input that says it


def check_exports(model: nn.Module) -> None:
    """Raises a ValueError that names the field for which there is no graph of a model."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "model must be a LinearAttentionForCausalLM, or a causal language model of "
            f"Transformers, got a {type(model).__name__}"
        )
    config: Any = model.config
    is_ours = isinstance(model, LinearAttentionForCausalLM)
    if not is_ours:
        check_stock(model)
    if model.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"model must be in float32 or float16, got {model.dtype}")
    if model.training:
        raise ValueError("model must be in eval mode, got training=True: call eval() first")
    if model.device.type != "cpu":
        raise ValueError(f"model must be on the CPU, got one on {model.device}")
    if getattr(model, "is_quantized", False):
        raise ValueError("model must have weights that are not quantised: graphs round them anew")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            "attn_implementation must be 'sdpa' or 'eager' for ONNX, got "
            f"{config._attn_implementation!r}"
        )
    if (kind := rope_by_length(config)) is not None:
        raise ValueError(
            "rope_type must be one whose angles do not depend on how long the sequence is, for "
            f"ONNX, got {kind!r}"
        )
    for name, value in config.to_dict().items():
        if name.endswith(("eps", "epsilon")) and value and value <= 1e-8:
            raise ValueError(
                f"{name} must be above 1e-8 for ONNX, got {value}: onnxscript would leave it out"
            )
    if not is_ours:
        return
    for name in ("state_in_fp64", "add_cross_attention"):
        if getattr(config, name):
            raise ValueError(f"{name} must be False for ONNX, got True")
    for layer in model.model.layers:
        for recurrence in getattr(layer.self_attn, "recurrences", ()):
            if type(recurrence) not in FORMS:
                raise ValueError(
                    f"mixer must be one whose recurrence ONNX's operators compute, got "
                    f"{config.mixer!r}, which needs a {type(recurrence).__name__}"
                )


class Graph(nn.Module):
    """The model as a function of tensors."""

    def __init__(self, model: Any):
        super().__init__()
        check_exports(model)
        self.model = model
        self.is_ours = isinstance(model, LinearAttentionForCausalLM)
        config = model.config
        types = getattr(config, "layer_types", None) or []
        self.layer_types: list[str] = list(types[: config.num_hidden_layers])
        self.windows = {  # by layer, tokens that it sees before the present one
            layer: config.sliding_window - 1
            for layer, layer_type in enumerate(self.layer_types)
            if layer_type == "sliding_attention"
        }
        nothing = torch.zeros(1, 2, dtype=torch.long)
        cache = self._read(nothing, nothing + 1, nothing, nothing[0, 0], None)[1]
        self.states = list(cache.states.values())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        num_logits_to_keep: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """input_ids and position_ids (B, T), attention_mask (B, P + T), num_logits_to_keep (), all
        int64, and states -> logits (B, T, vocab_size), those of the last num_logits_to_keep tokens,
        for 0 of all, and states.
        """
        names = [state.past for state in self.states]
        before = dict(zip(names, past, strict=True))
        inputs = input_ids, attention_mask, position_ids, num_logits_to_keep
        logits, cache = self._read(*inputs, before)
        return logits, [cache.present[state.present] for state in self.states]

    def _read(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        num_kept: Tensor,
        past: dict[str, Tensor] | None,
    ) -> tuple[Tensor, GraphCache]:
        """Logits, and the cache with the states that there are then."""
        T = ids.shape[1]
        order = Order.of(mask.narrow(1, mask.shape[1] - T, T))
        masks = {"full_attention": full_mask(order, mask)}
        if self.windows:
            masks["sliding_attention"] = window_mask(order, mask, max(self.windows.values()))
        least = torch.finfo(self.model.dtype).min  # of what is added to scores
        zero = torch.zeros((), dtype=self.model.dtype)
        masks = {kind: torch.where(seen, zero, least) for kind, seen in masks.items()}
        masks["linear_attention"] = order.is_real
        ids, positions = take(ids, order.column), take(positions, order.column)
        if self.is_ours:
            cache = GraphCache(order, self.windows, past)
            with shared_keys(), functions_in_module(rotary, ROTATION):
                outputs = self.model.model(ids, masks, positions, past_key_values=cache)
            y = last(take(outputs.last_hidden_state, order.place), num_kept)
            return project(self.model.lm_head, y), cache
        stock = StockCache(order, self.windows, past)
        inputs = {"input_ids": ids, "attention_mask": order.is_real, "position_ids": positions}
        head = self.model.get_output_embeddings()
        of_head = head.register_forward_pre_hook(
            lambda head, given: last(take(given[0], order.place), num_kept)
        )
        with of_head, shared_keys(), stock.in_place_of_functions(self.model, masks):
            return logits_of(self.model, stock, **inputs), stock

    def example(self) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Arguments of sizes that nothing takes for fixed ones."""
        B, P, T = 2, 7, 5
        ids = torch.zeros(B, T, dtype=torch.long)
        mask = torch.ones(B, P + T, dtype=torch.long)
        past = []
        for state in self.states:
            sizes = [P if isinstance(size, str) else size for size in state.shape]
            past.append(torch.zeros(B, *sizes, dtype=state.dtype))
        positions = torch.arange(P, P + T).expand(B, T).contiguous()
        return ids, mask, positions, torch.tensor(0), past


def last(x: Tensor, num_kept: Tensor) -> Tensor:
    """The last num_kept () of x (B, T, C), for 0 all. torch.export has no such length: it is told
    that there are T.
    """
    end, time = torch.tensor([torch.iinfo(torch.int64).max]), torch.tensor([1])
    args = x, -num_kept.reshape(1), end, time
    return torch.onnx.ops.symbolic("Slice", args, dtype=x.dtype, shape=x.shape, version=OPSET)


def rename_kept(graph: Any) -> None:
    """Behind that, the dimension of an onnx_ir.Graph has a name of its own: runtimes plan memory by
    what is said of shapes.
    """
    reached = [x for x in graph.inputs if x.name == NUM_KEPT]
    for value in reached:
        if value.shape is not None:
            sizes = [getattr(size, "value", size) for size in value.shape]
            value.shape = type(value.shape)([KEPT if size == TIME else size for size in sizes])
        after = [y for node, _ in value.uses() for y in node.outputs]
        reached += [y for y in after if y not in reached]


class Written(NamedTuple):
    graph: Any  # an onnx_ir.Model whose weights are the model's own
    states: list[State]


@torch.no_grad()
def graph_of(model: PreTrainedModel) -> Written:
    """The graph of a model in eval mode, and its states.

    Raises:
        ValueError: there is none; the message names the field.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    from .fusions import norms_in_one_dtype
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
                *("input_ids", "attention_mask", "position_ids", NUM_KEPT),
                *(state.past for state in graph.states),
            ],
            output_names=["logits", *(state.present for state in graph.states)],
            dynamic_shapes=(tokens, {0: BATCH, 1: TOTAL}, tokens, None, kept),
            verbose=False,
        )
    assert program is not None
    rename_kept(program.model.graph)
    norms_in_one_dtype(program.model)
    ClearMetadataAndDocStringPass()(
        program.model
    )  # where in this machine's files each node is from
    return Written(program.model, graph.states)
