# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The softmax attention that a converted layer had, computed by the projections that it still has.

As long as these have not been trained, it computes what the original's layer does.

Shapes: D head dim, G query heads that share a key-value head.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..mixers.softmax import SoftmaxAttention
from ..model.configuration import LinearAttentionConfig
from ..model.modeling import LinearAttentionForCausalLM
from .sources import layer_types_of

LINEAR = "linear_attention"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")


def linear_layers(config: LinearAttentionConfig) -> list[int]:
    """The numbers of the layers that are linear attention."""
    return [i for i, kind in enumerate(config.active_layer_types) if kind == LINEAR]


def attention_of(model: LinearAttentionForCausalLM, layer_idx: int) -> nn.Module:
    """The module of a layer's attention."""
    attention = model.model.layers[layer_idx].self_attn
    assert isinstance(attention, nn.Module)
    return attention


def check_converted(model: nn.Module) -> None:
    """Raises a ValueError for what is no model of this package, or has one inside."""
    has_layers = hasattr(getattr(model, "model", None), "layers")
    if not has_layers or not hasattr(model.config, "active_layer_types"):
        raise ValueError(
            "model must be a LinearAttentionForCausalLM, as convert() gives it, got "
            f"{type(model).__name__}; one with PEFT's adapters comes out of its merge_and_unload()"
        )


def types_before(
    config: LinearAttentionConfig, original: PreTrainedModel | None = None
) -> list[str]:
    """The type that each layer had.

    Raises:
        ValueError: without `original` it can't be known, or it has other layers.
    """
    types = config.active_layer_types
    if original is not None:
        before = layer_types_of(original.config)
        if len(before) != len(types):
            raise ValueError(
                f"original must have the model's {len(types)} layers, got {len(before)}"
            )
    elif config.sliding_window is not None and LINEAR in types:
        raise ValueError(
            "original must be given, the model that was converted: some of its layers had a "
            "sliding window, and the converted one does not say which"
        )
    else:
        before = ["full_attention"] * len(types)
    return [old if new == LINEAR else new for new, old in zip(types, before, strict=True)]


def softmax_forms(
    model: LinearAttentionForCausalLM,
    original: PreTrainedModel | None = None,
    layers: Sequence[int] | None = None,
) -> dict[int, SoftmaxAttention]:
    """For linear layers, by their numbers, the softmax attention that they were. Projections are
    the layer's own modules; keys and values that were repeated for the delta rule are copied once.

    Args:
        original: the model that was converted. It is needed where it has what the converted one
            has not: sliding windows, or norms of q and k that the report lists as left out.
        layers: which of them; by default all.

    Raises:
        ValueError: it is needed, the model is none of this package, or projections are no longer
            those of softmax attention.
    """
    check_converted(model)
    before = copy.deepcopy(model.config)
    before.layer_types = types_before(model.config, original)
    given = {} if original is None else dict(original.named_parameters())
    return {
        i: _form(attention_of(model, i), before, i, given)
        for i in (linear_layers(model.config) if layers is None else layers)
    }


def _form(
    mixer: nn.Module,
    before: LinearAttentionConfig,
    layer_idx: int,
    given: Mapping[str, nn.Parameter],
) -> SoftmaxAttention:
    with torch.device("meta"):
        form = SoftmaxAttention(before, layer_idx)
    for name in PROJECTIONS:
        ours: nn.Linear = getattr(mixer, name)
        G = ours.out_features // getattr(form, name).out_features
        setattr(form, name, ours if G == 1 else _one_of_each(ours, G, form.head_dim, layer_idx))
    for name in NORMS if form.has_qk_norm else ():
        norm = getattr(mixer, name, None)
        if norm is None:
            full_name = f"model.layers.{layer_idx}.self_attn.{name}.weight"
            if full_name not in given:
                raise ValueError(
                    f"original must be given, the model that was converted, and have {full_name}, "
                    "which the converted one has not"
                )
            norm = getattr(form, name)
            weight = given[full_name].detach().to(form.q_proj.weight, copy=True)
            norm.weight = nn.Parameter(weight, requires_grad=False)
        setattr(form, name, norm)
    return form.eval()


def _one_of_each(projection: nn.Linear, G: int, D: int, layer_idx: int) -> nn.Linear:
    """A projection to every G-th head of one whose heads are alike, G times each."""
    heads = {name: x.detach().unflatten(0, (-1, G, D)) for name, x in projection.named_parameters()}
    if not all((x == x[:, :1]).all() for x in heads.values()):
        raise ValueError(
            f"model must have the projections that it was converted with; in layer {layer_idx} "
            "those that were repeated have been trained and differ"
        )
    once = nn.Linear(
        projection.in_features,
        projection.out_features // G,
        bias="bias" in heads,
        device="meta",
    )
    for name, x in heads.items():
        setattr(once, name, nn.Parameter(x[:, 0].flatten(0, 1).clone(), requires_grad=False))
    return once


@contextmanager
def attention_replaced(
    model: LinearAttentionForCausalLM, modules: Mapping[int, nn.Module], layer_types: Sequence[str]
) -> Iterator[None]:
    """The model with these modules for its layers' attention, by their numbers, and these types of
    layers, by which it makes masks, and without a cache; afterwards it is as before.
    """
    layers, config = model.model.layers, model.config
    replaced = {i: attention_of(model, i) for i in modules}
    fields = {name: getattr(config, name) for name in ("layer_types", "use_cache")}
    config.layer_types, config.use_cache = list(layer_types), False
    for i, module in modules.items():
        layers[i].self_attn = module
    try:
        yield
    finally:
        for name, value in fields.items():
            setattr(config, name, value)
        for i, module in replaced.items():
            layers[i].self_attn = module


def restore_softmax(
    model: LinearAttentionForCausalLM,
    layers: Iterable[int],
    original: PreTrainedModel | None = None,
) -> None:
    """Puts linear layers back, in place, to the softmax attention that they were. It is exact as
    long as their projections are those that they were converted with: after attention transfer,
    not after a stage that trains all weights.

    Args:
        layers: their numbers, from 0.
        original: as of `softmax_forms`.

    Raises:
        ValueError: one of them is no linear layer, or as `softmax_forms`.
    """
    check_converted(model)
    layers = sorted(layers)
    linear = linear_layers(model.config)
    wrong = [i for i in layers if i not in linear]
    if wrong:
        raise ValueError(f"layers must be linear ones, of {linear}, got {wrong}")
    before = types_before(model.config, original)
    types = list(model.config.active_layer_types)
    for i, form in softmax_forms(model, original, layers).items():
        model.model.layers[i].self_attn = form.requires_grad_(True).train(model.training)
        types[i] = before[i]
    model.config.layer_types = types
