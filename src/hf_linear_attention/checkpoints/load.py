# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of flash-linear-attention as models of ours."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import GenerationConfig

from ..model.configuration import LinearAttentionConfig
from ..model.modeling import LinearAttentionForCausalLM
from .families.mamba_ssm import is_of_mamba_ssm, translated
from .family import Family, Keys, Rule, rules_of, swapped
from .files import Weights, read_config, read_generation_config
from .report import CheckpointReport
from .rwkv_file import RwkvFile, is_file
from .tables import family_of

OF_HUB = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"),
    "token",
)
ONES = "ones, for its norms have no weights"
TIED = "the head is the embeddings"
HEAD_BY_HEAD = "its rows head by head"
ROTATION = "the config gives it"
# Patterns of tensors that any checkpoint may hold and no model needs.
LEFT_OUT = {r"rotary\.inv_freq|rotary_emb\.inv_freq": ROTATION}


class Loaded(NamedTuple):
    model: LinearAttentionForCausalLM
    report: CheckpointReport


def from_checkpoint(
    name_or_folder: str, dtype: str | torch.dtype = "auto", **kwargs: Any
) -> LinearAttentionForCausalLM:
    """A checkpoint of flash-linear-attention, mamba_ssm or RWKV-7's authors as a model of this
    package.

    Args:
        name_or_folder: a folder with config.json and weights, or a name on the Hub; or a file of
            RWKV-7's authors, .pth.
        dtype: of the model; "auto": the checkpoint's.
        kwargs: as of `from_pretrained`: revision, token, device_map and others.

    Raises:
        OSError: there is no such checkpoint, or a file of it is missing.
        ValueError: the config has a value that we do not compute, or weights are missing, unknown
            or of another shape. The message names the value or the weights.
    """
    return load_checkpoint(name_or_folder, dtype, **kwargs).model


def load_checkpoint(name: str, dtype: str | torch.dtype = "auto", **kwargs: Any) -> Loaded:
    """As `from_checkpoint`, with a report on every weight."""
    hub = {key: kwargs.pop(key) for key in OF_HUB if key in kwargs}
    try:
        config, open_weights, generation = read_checkpoint(name, hub)
        family = family_of(config)
        keys = family.read(config)
        weights = open_weights()
        if keys["tie_word_embeddings"] and has_own_head(family, weights):  # reads both
            keys["tie_word_embeddings"] = False
        ours = family.config_for(keys)
        state, report = assemble(family, keys, ours, weights)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{name}: {error}") from error
    report.model_type = config["model_type"]
    report.not_read = tuple(family.not_read(config))
    model = LinearAttentionForCausalLM.from_pretrained(
        None, config=ours, state_dict=state, dtype=dtype_of(dtype, config, state), **kwargs
    )
    if generation is not None:
        model.generation_config = generation
    return Loaded(model, report)


def read_checkpoint(
    name: str, hub: dict[str, Any]
) -> tuple[Keys, Callable[[], Mapping[str, Tensor]], GenerationConfig | None]:
    """Its config.json, what opens its weights, and how it generates."""
    if is_file(name):
        file = RwkvFile(Path(name))
        return file.config(), lambda: file, None
    config = read_config(str(name), hub)
    if is_of_mamba_ssm(config):
        config = translated(config)
    generation = read_generation_config(str(name), hub)
    return config, partial(Weights, str(name), hub), generation


def has_own_head(family: Family, weights: Mapping[str, Tensor]) -> bool:
    """Whether there is a head with other numbers than the embeddings, whatever a config.json says:
    Transformers does not tie them either.
    """
    top = family.skeleton.top
    head, embeddings = top["lm_head.weight"], top["model.embed_tokens.weight"]
    if head not in weights or embeddings not in weights:
        return False
    return not weights[head].equal(weights[embeddings])


def assemble(
    family: Family, keys: Keys, config: LinearAttentionConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], CheckpointReport]:
    """Our state dict, made of views of their weights.

    Raises:
        ValueError: weights are missing, unknown or of another shape; the message names them.
    """
    rules = with_joined_mlps(rules_of(family, keys), weights)
    report = CheckpointReport("", tuple(config.active_layer_types))
    report.left_out = left_out(family, keys, rules, weights)
    missing = [rule.theirs for rule in rules if rule.theirs and rule.theirs not in weights]
    if missing:
        raise ValueError(f"it must have the weights {_some(missing)}, and has not")
    shapes = shapes_of(config)
    state: dict[str, Tensor] = {}
    for theirs, ours, rows in rules:
        if theirs is None:
            state.update((name, torch.ones(shapes[name])) for name in ours)
            report.made.update(dict.fromkeys(ours, ONES))
            continue
        x = weights[theirs]
        check_weight(theirs, x, [shapes[name] for name in ours])
        x = x if rows is None else swapped(x, rows)
        state.update(zip(ours, x.split([shapes[name][0] for name in ours]), strict=True))
        if rows is not None:
            report.folded[theirs] = HEAD_BY_HEAD
        elif len(ours) == 1:
            report.copied[theirs] = ours[0]
        else:
            report.folded[theirs] = "each into its parts"
    without = sorted(shapes.keys() - state.keys())
    assert not without, f"no rule gives {without}"
    return state, report


def with_joined_mlps(rules: list[Rule], weights: Mapping[str, Tensor]) -> list[Rule]:
    """The rules for folders of fla's releases of 2024, which have no up_proj: its rows are in
    gate_proj, below gate_proj's own.
    """
    joined = {}
    for theirs, ours, _ in rules:
        if theirs is not None and theirs.endswith("mlp.up_proj.weight") and theirs not in weights:
            joined[theirs] = ours
    changed = []
    for rule in rules:
        above = (rule.theirs or "").replace("gate_proj", "up_proj")
        if rule.theirs not in joined:
            changed.append(rule._replace(ours=rule.ours + joined.get(above, ())))
    return changed


def left_out(
    family: Family, keys: Keys, rules: list[Rule], weights: Mapping[str, Tensor]
) -> dict[str, str]:
    """The weights without a rule, with the reason why no model needs them.

    Raises:
        ValueError: for some weights there is no such reason.
    """
    patterns = {**LEFT_OUT, **family.left_out}
    if keys["tie_word_embeddings"]:
        patterns[r"lm_head\.weight"] = TIED
    reasons, unknown = {}, []
    for name in sorted(weights.keys() - {rule.theirs for rule in rules}):
        matching = (why for x, why in patterns.items() if re.search(rf"(^|\.)({x})$", name))
        reason = next(matching, None)
        if reason is None:
            unknown.append(name)
        else:
            reasons[name] = reason
    if unknown:
        raise ValueError(f"no layer of its config takes the weights {_some(unknown)}")
    return reasons


def shapes_of(config: LinearAttentionConfig) -> dict[str, torch.Size]:
    """The shapes of all parameters of a model."""
    with torch.device("meta"):
        model = LinearAttentionForCausalLM(config)
    return {name: x.shape for name, x in model.named_parameters()}


def check_weight(name: str, x: Tensor, parts: list[torch.Size]) -> None:
    """Raises a ValueError where x has not the parts, one below the other, or is quantised."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must hold floating numbers, got {x.dtype}")
    expected = (sum(shape[0] for shape in parts), *parts[0][1:])
    if x.shape != expected:
        raise ValueError(
            f"{name} must have the shape {expected}, as its config.json says, got {tuple(x.shape)}"
        )


def dtype_of(dtype: Any, config: Keys, state: Mapping[str, Tensor]) -> Any:
    """The dtype asked for; for "auto" the config.json's, or that of most weights."""
    if dtype != "auto":
        return dtype
    said = config.get("dtype") or config.get("torch_dtype")
    if isinstance(said, str) and isinstance(getattr(torch, said, None), torch.dtype):
        return getattr(torch, said)
    sizes: Counter[torch.dtype] = Counter()
    for x in state.values():
        sizes[x.dtype] += x.numel()
    return sizes.most_common(1)[0][0]


def _some(names: list[Any], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
