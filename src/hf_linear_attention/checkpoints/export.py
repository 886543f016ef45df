# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models of ours as checkpoints of flash-linear-attention: work done here is not locked in."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from ..conversion.writing import whole_folder
from ..model.config_checks import unused_fields
from ..model.configuration import LinearAttentionConfig
from ..model.modeling import LinearAttentionForCausalLM
from .families.rwkv7 import RANKS
from .family import LINEAR, OF_ALL, SLIDING, Family, Keys, rules_of, swapped
from .files import CONFIG, check_place
from .report import CheckpointReport
from .tables import FAMILIES

# Fields of our config that change no result of a trained model.
OF_NO_MATTER = (
    *("use_cache", "state_in_fp64", "attention_dropout", "expand_k", "expand_v"),
    *("max_position_embeddings", "time_step_min", "time_step_max", "time_step_floor"),
)
OF_SOFTMAX_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
OF_LINEAR_HEADS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    "linear_value_head_dim",
)
OF_LINEAR_LAYERS = (
    *("mixer", "decay", "feature_map", "normalizer", "value_act", "conv_kernel_size", "conv_bias"),
    *("linear_allow_neg_eigval", "output_norm_eps", *OF_LINEAR_HEADS),
)
OF_GATES = ("gate_act", "low_rank_gate", "gate_bias")
FOLDED = ("scale_embeddings", "output_norm_eps", "gate_bias")  # weights can make up for these
STEP_BY_STEP = "its rows step by step"
EMBEDDINGS = "model.embed_tokens.weight"


class Form(NamedTuple):
    """The model of theirs that computes the same.

    factors: the factors of weights, by the ends of our names for them.
    """

    model_type: str
    family: Family
    keys: Keys
    factors: dict[str, float]


def export_checkpoint(model: LinearAttentionForCausalLM, folder: str | Path) -> CheckpointReport:
    """Writes a model as a folder that flash-linear-attention 0.6.0 loads, completely or not at all,
    and reports on every weight.

    Raises:
        OSError: the folder can't be written, or is not empty.
        ValueError: an argument is of another kind, or no model of theirs computes the same; the
            message has a reason for each.
    """
    check_place("folder", folder)
    if not isinstance(model, LinearAttentionForCausalLM):
        raise ValueError(f"model must be a LinearAttentionForCausalLM, got {type(model).__name__}")
    form = find_form(model.config)
    tensors, report = disassemble(form, model)
    with whole_folder(Path(folder)) as out:
        (out / CONFIG).write_text(json.dumps(described(form, model), indent=2) + "\n", "utf-8")
        save_torch_state_dict(tensors, out)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(out)
    return report


def find_form(config: LinearAttentionConfig) -> Form:
    """The first family whose model computes the same.

    Raises:
        ValueError: there is no such family; the message has a reason for each.
    """
    reasons = []
    for model_type, family in FAMILIES.items():
        try:
            keys = {**family.defaults, **shared_keys(config), **family.back(config)}
            keys = family.read({name: keys[name] for name in family.defaults})
            factors = factors_between(config, family.config_for(keys))
        except ValueError as error:
            reasons.append(f"  {model_type}: {error}")
        else:
            return Form(model_type, family, keys, factors)
    raise ValueError("\n".join(["no model of flash-linear-attention computes the same", *reasons]))


def shared_keys(config: LinearAttentionConfig) -> Keys:
    """The keys that all families set alike."""
    names = OF_ALL.keys() - {"norm_eps", "hidden_act"}
    return {
        **{name: getattr(config, name) for name in names},
        "norm_eps": config.rms_norm_eps,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": config.num_hidden_layers,
    }


def factors_between(ours: LinearAttentionConfig, theirs: LinearAttentionConfig) -> dict[str, float]:
    """The factors of weights that make a model of one config compute what the other does.

    Raises:
        ValueError: no factor makes up for a field; the message names it.
    """
    different = different_fields(ours, theirs)
    for name in different:
        if name not in FOLDED:
            got, expected = getattr(ours, name), getattr(theirs, name)
            raise ValueError(f"{name} must be {expected!r}, got {got!r}")
    factors = {}
    if "scale_embeddings" in different:
        if ours.tie_word_embeddings:
            raise ValueError(
                "scale_embeddings must be False with tie_word_embeddings: the head does not scale"
            )
        factors[EMBEDDINGS] = math.sqrt(ours.hidden_size)
    if "output_norm_eps" in different:
        factors["self_attn.v_proj.weight"] = factor_of_values(ours, theirs)
    if "gate_bias" in different and ours.gate_bias:
        raise ValueError("gate_bias must be False, got True")
    return factors


def factor_of_values(ours: LinearAttentionConfig, theirs: LinearAttentionConfig) -> float:
    """The factor of v_proj that makes up for another epsilon of the output norm: the norm's input
    grows with the values, and x / sqrt(x² + eps) is (f x) / sqrt((f x)² + f² eps).
    """
    eps, other = ours.output_norm_eps, theirs.output_norm_eps
    assert eps is not None and other is not None  # derived
    is_linear = ours.mixer == "linear" and ours.conv_kernel_size == 0 and ours.value_act is None
    if not is_linear or eps == 0:
        raise ValueError(f"output_norm_eps must be {other}, got {eps}")
    return math.sqrt(other / eps)


# Fields that None leaves to others, with the numbers that a family's `back` writes for them.
WRITTEN_IN_NUMBERS = (*RANKS, "proj_low_rank_dim")


def different_fields(ours: LinearAttentionConfig, theirs: LinearAttentionConfig) -> list[str]:
    """The fields by which the two models differ, without fields that neither model uses."""
    kinds = {*ours.active_layer_types}
    ignored = {*OF_NO_MATTER, *WRITTEN_IN_NUMBERS, *unused_fields(ours)}
    if kinds == {LINEAR} and ours.position_embedding_type != "rotary":
        ignored |= {*OF_SOFTMAX_HEADS}
    if ours.mixer == "hgrn":  # whose heads are any shares of its channels
        ignored |= {*OF_LINEAR_HEADS}
    if LINEAR not in kinds:
        ignored |= {*OF_LINEAR_LAYERS, *OF_GATES}
    if kinds == {LINEAR}:
        ignored |= {"use_qk_norm", "attn_output_gate", "softmax_mixer"}
    if not ours.use_qk_norm:
        ignored.add("qk_norm_eps")
    if SLIDING not in kinds:
        ignored.add("sliding_window")
    if ours.conv_kernel_size == 0:
        ignored.add("conv_bias")
    if not ours.is_gated:
        ignored |= {*OF_GATES}
    if ours.intermediate_size == 0:
        ignored |= {"mlp_bias", "hidden_act"}
    names = [name for name in LinearAttentionConfig.__annotations__ if name not in ignored]
    return [name for name in names if _value(ours, name) != _value(theirs, name)]


def _value(config: LinearAttentionConfig, name: str) -> Any:
    """A field's value in a normal form."""
    value = getattr(config, name)
    if name == "layer_types":
        return config.active_layer_types
    if name == "rope_parameters":
        said = {key: x for key, x in (value or {}).items() if x is not None}
        return {"rope_type": "default", "partial_rotary_factor": 1.0, **said}
    if name == "hidden_act":
        return {"swish": "silu"}.get(value, value)
    return value


def disassemble(
    form: Form, model: LinearAttentionForCausalLM
) -> tuple[dict[str, Tensor], CheckpointReport]:
    """Their state dict, and the report on it."""
    report = CheckpointReport(form.model_type, tuple(model.config.active_layer_types))
    state = {name: x.detach() for name, x in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    written = set()
    for theirs, ours, rows in rules_of(form.family, form.keys):
        assert theirs is not None, "norms that are exported have weights"
        if theirs.endswith(".bias") and ours[0] not in state:
            weight = state[ours[0].removesuffix("bias") + "weight"]
            tensors[theirs] = weight.new_zeros(len(weight))
            report.made[theirs] = "zeros, for there is no such bias"
            continue
        written |= {*ours}
        parts = [multiplied(name, state[name], form.factors) for name in ours]
        x = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        tensors[theirs] = x if rows is None else swapped(x, rows[::-1])
        factor = factor_for(ours[0], form.factors)
        if rows is not None:
            report.folded[theirs] = STEP_BY_STEP
        elif len(ours) > 1:
            report.folded[theirs] = "of several, one below the other"
        elif factor is not None:
            report.folded[theirs] = f"times {factor:g}"
        else:
            report.copied[theirs] = ours[0]
    assert written == state.keys(), f"no rule takes {sorted(state.keys() - written)}"
    return tensors, report


def factor_for(name: str, factors: dict[str, float]) -> float | None:
    return next((x for end, x in factors.items() if name.endswith(end)), None)


def multiplied(name: str, x: Tensor, factors: dict[str, float]) -> Tensor:
    factor = factor_for(name, factors)
    return x if factor is None else (x.double() * factor).to(x.dtype)


def described(form: Form, model: LinearAttentionForCausalLM) -> Keys:
    """The entries of the config.json."""
    keys = {name: _writable(form.keys[name]) for name in form.family.defaults}
    return {
        "architectures": [f"{form.family.class_name}ForCausalLM"],
        "model_type": form.model_type,
        **keys,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _writable(value: Any) -> Any:
    """JSON has no infinity: this is Transformers' form of it."""
    if isinstance(value, (list, tuple)):
        return [_writable(x) for x in value]
    return {"__float__": "Infinity"} if value == math.inf else value
