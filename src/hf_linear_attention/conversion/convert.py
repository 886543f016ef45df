# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Conversion of a softmax model of Transformers into a model of this package that keeps its
weights.

Shapes: C hidden size, D head dim, G query heads that share a key-value head.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..mixers.facts import all_facts, facts_of
from ..model.configuration import LinearAttentionConfig
from ..model.modeling import LinearAttentionForCausalLM
from ..model.presets import PAPER
from .quiet import quietly
from .report import ConversionReport
from .sources import Source, check_model, fields_of, layer_types_of

CONFIG = LinearAttentionConfig
LINEAR, SLIDING = "linear_attention", "sliding_attention"
KEPT = "none, all, a number n for every n-th layer, or a list of layers that stay softmax"


def forms() -> dict[str, dict[str, Any]]:
    """What linear layers may become, by name: fields of the config."""
    return {
        name: {"mixer": mixer, **fields}
        for mixer, facts in all_facts().items()
        for name, fields in facts.conversions.items()
    }


class Conversion(NamedTuple):
    """The model, and what became of each parameter."""

    model: LinearAttentionForCausalLM
    report: ConversionReport


def convert(
    model: PreTrainedModel,
    mixer: str = "window",
    *,
    softmax_layers: str | int | Sequence[int] = "none",
    layer_types: Sequence[str] | None = None,
    **overrides: Any,
) -> Conversion:
    """A model of this package with the weights of a softmax model, whose layers become linear, or
    stay as they are.

    With every layer as it was it computes what the original does. A linear layer starts from the
    projections of the softmax layer, and has to be trained. Weights are copies: `model` is left as
    it is. The result is on its device, in its dtype and its mode.

    Args:
        model: a Llama (SmolLM is one), Mistral, Qwen2, Qwen3, SmolLM3, Gemma (3 too), OLMo 2 or 3,
            Phi-3 or Granite with a language head, or a model of this package whose layers are all
            softmax attention; neither quantised nor sharded.
        mixer: what linear layers are, by name: those that `forms` has.
        softmax_layers: which layers stay what they are: "none", "all", every n-th (n: layers
            n - 1, 2 n - 1, ...), or a list of their numbers, from 0.
        layer_types: the same layer by layer: "linear_attention", or the type that a layer has.
        overrides: fields of the config that win over those of the mixer.

    Raises:
        ValueError: the model is none that can be converted, or an argument is wrong.
    """
    source = check_model(model)
    overrides = {"tie_word_embeddings": _is_tied(model), **overrides}
    config = config_for(
        model.config, mixer, softmax_layers=softmax_layers, layer_types=layer_types, **overrides
    )
    with torch.device("meta"):
        target = LinearAttentionForCausalLM(config)
    weights, report = transfer(model, target, config, source)
    del target
    with quietly():  # Transformers' report of weights that are new: ours has them
        converted = LinearAttentionForCausalLM.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
        )
    converted.generation_config = copy.deepcopy(model.generation_config)
    return Conversion(converted.to(model.device).train(model.training), report)


def config_for(
    original: Any,
    mixer: str = "window",
    *,
    softmax_layers: str | int | Sequence[int] = "none",
    layer_types: Sequence[str] | None = None,
    **overrides: Any,
) -> LinearAttentionConfig:
    """The config of the model that `convert` makes of one with the config `original`.

    Raises:
        ValueError: as `convert`.
    """
    if not isinstance(mixer, str) or mixer not in forms():
        raise ValueError(f"mixer must be one of {', '.join(map(repr, forms()))}, got {mixer!r}")
    fields = {**fields_of(original), **forms()[mixer]}
    facts = facts_of(fields["mixer"])
    known = {*(field.name for field in dataclasses.fields(CONFIG)), *facts.fields}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"overrides must be fields of {CONFIG.__name__}, got {unknown}")
    if not facts.queries_share_keys:
        fields["linear_num_key_heads"] = original.num_attention_heads
    types = layer_types_of(original)
    if layer_types is None:
        kept = _kept_layers(softmax_layers, len(types))
        layer_types = [kind if i in kept else LINEAR for i, kind in enumerate(types)]
    elif softmax_layers != "none":
        raise ValueError(
            f"softmax_layers and layer_types say the same: give one, got {softmax_layers!r} and "
            f"{list(layer_types)}"
        )
    _check_layer_types(layer_types, types)
    config = CONFIG(**{**PAPER, **fields, **overrides}, layer_types=list(layer_types))
    slid = any(
        old == SLIDING and new == LINEAR for old, new in zip(types, layer_types, strict=True)
    )
    has_window = "window_size" in facts_of(config.mixer).fields
    if slid and has_window:  # short texts shall get the original's logits
        limit = original.sliding_window
        if "window_size" not in overrides:
            config.window_size = min(config.window_size, limit)
        if config.window_size > limit:
            raise ValueError(
                f"window_size must be at most {limit}, the sliding_window of layers that become "
                f"linear, got {config.window_size}"
            )
    return config


def _kept_layers(softmax_layers: str | int | Sequence[int], L: int) -> set[int]:
    """The numbers of those of L layers that stay softmax."""
    if softmax_layers == "none":
        return set()
    if softmax_layers == "all":
        return set(range(L))
    if isinstance(softmax_layers, int) and softmax_layers is not True:
        if softmax_layers < 1:
            raise ValueError(f"softmax_layers={softmax_layers} must be at least 1 ({KEPT})")
        return set(range(softmax_layers - 1, L, softmax_layers))
    if (
        isinstance(softmax_layers, (str, int))
        or not isinstance(softmax_layers, Iterable)
        or not all(type(i) is int for i in softmax_layers)
    ):
        raise ValueError(f"softmax_layers must be {KEPT}, got {softmax_layers!r}")
    wrong = [i for i in softmax_layers if not 0 <= i < L]
    if wrong:
        raise ValueError(f"softmax_layers must be from 0 to {L - 1}, got {wrong}")
    return set(softmax_layers)


def _check_layer_types(layer_types: Sequence[str], types: Sequence[str]) -> None:
    """Raises a ValueError where a layer would be another softmax layer than it was."""
    if len(layer_types) != len(types):
        raise ValueError(
            f"layer_types must have an entry for each of {len(types)} layers, got "
            f"{len(layer_types)}"
        )
    for i, (new, old) in enumerate(zip(layer_types, types, strict=True)):
        if new not in (LINEAR, old):
            raise ValueError(
                f"layer_types[{i}] must be {LINEAR!r} or {old!r}, as it was; got {new!r}"
            )


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether embeddings and the language head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


# ---- weights ----


def transfer(
    model: PreTrainedModel,
    target: LinearAttentionForCausalLM,
    config: LinearAttentionConfig,
    source: Source,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """The weights that `target`, on whatever device, takes of `model`, by name.

    Raises:
        ValueError: a parameter has another shape than its place; one is left over, or none is
            there, where it is not a linear layer's.
    """
    wanted = dict(target.named_parameters())
    given = {
        name: part
        for whole, x in model.named_parameters()
        for name, part in _parts(whole, x.detach(), config, source).items()
    }
    factors = source.factors(model.config, _is_tied(model))
    weights, copied, changed = {}, [], {}
    for name, (y, how) in given.items():
        if name not in wanted:
            continue
        hows = [how] if how else []
        for change in _changes(name, config, source, factors):
            y = change.of(y)
            hows.append(change.how)
        if y.shape != wanted[name].shape:
            raise ValueError(
                f"{name} must have the shape {tuple(wanted[name].shape)} that the config says, got "
                f"{tuple(y.shape)}"
            )
        weights[name] = y.clone()
        if hows:
            changed[name] = ", ".join(hows)
        else:
            copied.append(name)
    new = [name for name in wanted if name not in given]
    left_out = [name for name in given if name not in wanted]
    for what, names in (("has no", new), ("has a", left_out)):
        for name in names:
            if not _is_of_linear_layer(name, config):
                raise ValueError(f"model {what} {name}, as no {type(model).__name__} should")
    return weights, ConversionReport(
        tuple(config.active_layer_types), tuple(copied), changed, tuple(new), tuple(left_out)
    )


def _parts(name: str, x: Tensor, config: Any, source: Source) -> dict[str, tuple[Tensor, str]]:
    """What a parameter is made of, by the names that ours have, and how these were had from it."""
    *path, module, kind = name.split(".")
    if module not in source.fused:
        return {name: (x, "")}
    keys = config.head_dim * config.num_key_value_heads
    rows = {"q_proj": config.head_dim * config.num_attention_heads, "k_proj": keys, "v_proj": keys}
    names = source.fused[module]
    parts = x.split([rows.get(part, config.intermediate_size) for part in names])
    return {
        ".".join([*path, part, kind]): (y, f"rows of {module}")
        for part, y in zip(names, parts, strict=True)
    }


class Change(NamedTuple):
    """of: a function of a parameter; how: that in words."""

    how: str
    of: Callable[[Tensor], Tensor]


def _changes(
    name: str, config: LinearAttentionConfig, source: Source, factors: Mapping[str, float]
) -> Iterator[Change]:
    """How a parameter is to be changed, in turn."""
    module, _ = name.rsplit(".", 1)
    if source.norms_add_1 and module.endswith("norm"):
        yield Change("1 + weight, as norms multiply by it", lambda x: (1 + x.float()).to(x.dtype))
    factor = math.prod(factor for end, factor in factors.items() if module.endswith(end))
    if factor != 1:
        yield Change(f"times {factor:.6g}", lambda x: (x.double() * factor).to(x.dtype))
    G = config.num_attention_heads // (config.num_key_value_heads or 1)
    is_shared = module.endswith(("k_proj", "v_proj")) and _is_of_linear_layer(name, config)
    if is_shared and G > 1 and not facts_of(config.mixer).queries_share_keys:

        def repeat(x: Tensor) -> Tensor:
            """(Hkv D, ...) -> (Hq D, ...)"""
            return x.unflatten(0, (-1, config.head_dim)).repeat_interleave(G, 0).flatten(0, 1)

        yield Change(f"each head {G} times, for every query head that shared it", repeat)


def _is_of_linear_layer(name: str, config: LinearAttentionConfig) -> bool:
    """Whether a parameter belongs to the attention of a layer that becomes linear."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or parts[3] != "self_attn":
        return False
    return config.active_layer_types[int(parts[2])] == LINEAR
