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
from .files import Weights, check_place, read_config, read_generation_config
from .kinds import refusal
from .report import CheckpointReport
from .rwkv_file import RwkvFile, is_file
from .tables import family_of

OF_HUB = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"),
    "token",
)
ONES = "ones, for its norms have no weights"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # that we compute in
NAMES_OF_FLOATS = ", ".join(str(x).removeprefix("torch.") for x in FLOATS)
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
        dtype: of the model; "auto": the checkpoint's. torch_dtype, its older name, will do, too.
        kwargs: as of `from_pretrained`: revision, token, device_map and others.

    Raises:
        OSError: there is no such checkpoint, or a file of it is missing.
        ValueError: an argument is of another kind, the config has a value that we do not compute,
            or weights are missing, unknown or of another shape. The message names it.
    """
    return load_checkpoint(name_or_folder, dtype, **kwargs).model


def load_checkpoint(name: str, dtype: str | torch.dtype = "auto", **kwargs: Any) -> Loaded:
    """As `from_checkpoint`, with a report on every weight."""
    check_place("name_or_folder", name)
    older = kwargs.pop("torch_dtype", None)
    asked = asked_dtype(older if dtype == "auto" and older is not None else dtype)
    hub = {key: kwargs.pop(key) for key in OF_HUB if key in kwargs}
    try:
        config, open_weights, generation = read_checkpoint(name, hub)
        family = family_of(config)
        keys = family.read(config)
        weights = open_weights()
        if keys["num_hidden_layers"] > len(weights):  # before anything is built for each of them
            at_most = f"at most {len(weights)}, the number of its weights"
            raise refusal("num_hidden_layers", at_most, keys["num_hidden_layers"])
        if keys["tie_word_embeddings"] and has_own_head(family, weights):  # reads both
            keys["tie_word_embeddings"] = False
        ours = family.config_for(keys)
        state, report = assemble(family, keys, ours, weights)
        asked = asked or stored_dtype(config, state)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{name}: {error}") from error
    report.model_type = config["model_type"]
    report.not_read = tuple(family.not_read(config))
    read = {name: x.dtype for name, x in state.items() if name not in report.made}
    model = LinearAttentionForCausalLM.from_pretrained(
        None, config=ours, state_dict=state, dtype=asked, **kwargs
    )
    report.cast = casts_between(read, model)
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
    names = top["lm_head.weight"], top["model.embed_tokens.weight"]
    if any(name not in weights for name in names):
        return False
    head, embeddings = (weights[name] for name in names)
    for name, x in zip(names, (head, embeddings), strict=True):
        check_numbers(name, x)
    return head.dtype != embeddings.dtype or not head.equal(embeddings)


def assemble(
    family: Family, keys: Keys, config: LinearAttentionConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], CheckpointReport]:
    """Our state dict, made of views of their weights where these are contiguous, as fast products
    take them.

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
        x = weights[theirs].contiguous()
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
    check_numbers(name, x)
    expected = (sum(shape[0] for shape in parts), *parts[0][1:])
    if x.shape != expected:
        raise ValueError(
            f"{name} must have the shape {expected}, as its config.json says, got {tuple(x.shape)}"
        )


def check_numbers(name: str, x: Tensor) -> None:
    """Raises a ValueError where a weight is of no dtype that we compute in."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must hold floating numbers ({NAMES_OF_FLOATS}), got {x.dtype}")


def as_float(dtype: Any) -> torch.dtype | None:
    """A dtype that we compute in, given by itself or by its name; None: it is none."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) and found in FLOATS else None


def asked_dtype(dtype: Any) -> torch.dtype | None:
    """The argument's; None for "auto".

    Raises:
        ValueError: it is of another kind.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return None
    found = as_float(dtype)
    if found is None:
        expected = f"'auto', a floating torch.dtype or its name ({NAMES_OF_FLOATS})"
        raise ValueError(f"dtype must be {expected}, got {dtype!r}")
    return found


def stored_dtype(config: Keys, state: Mapping[str, Tensor]) -> torch.dtype:
    """The config.json's, or that of most weights.

    Raises:
        ValueError: the config.json's is none that we compute in.
    """
    for key in ("dtype", "torch_dtype"):
        said = config.get(key)
        if said is not None:
            found = as_float(said)
            if found is None:
                raise refusal(key, f"one of {NAMES_OF_FLOATS}", said)
            return found
    sizes: Counter[torch.dtype] = Counter()
    for x in state.values():
        sizes[x.dtype] += x.numel()
    return sizes.most_common(1)[0][0]


def casts_between(
    read: Mapping[str, torch.dtype], model: LinearAttentionForCausalLM
) -> dict[str, str]:
    """From which dtype to which, by the names of the parameters that do not have the one read."""
    return {
        name: f"from {read[name]} to {x.dtype}".replace("torch.", "")
        for name, x in model.named_parameters()
        if name in read and read[name] != x.dtype
    }


def _some(names: list[Any], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
