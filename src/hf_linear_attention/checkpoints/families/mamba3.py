# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-3 with one input and output (SISO) as flash-linear-attention has it. in_proj of that model
is split into several modules here.
"""

from typing import Any

from ...model.presets import preset_fields
from ..family import (
    LINEAR,
    OF_ALL,
    Family,
    Keys,
    Rule,
    expect,
    same,
    share_of,
    shared_fields,
    weights,
    whole,
)
from .mamba2 import SKELETON

PROJECTED = ("g", "v", "B", "C", "dt", "A", "trap", "angle")  # in_proj, in this order
# Keys that are fields of ours, by our names.
FIELDS = {
    "linear_num_key_heads": "n_groups",
    "linear_key_head_dim": "state_size",
    "linear_value_head_dim": "head_dim",
    "attention_bias": "use_bias",
    "time_step_min": "dt_min",
    "time_step_max": "dt_max",
    "time_step_floor": "dt_init_floor",
    "rope_fraction": "rope_fraction",
    "A_floor": "A_floor",
}


def mamba3_fields(keys: Keys) -> dict[str, Any]:
    D = whole("hidden_size * expand", keys["hidden_size"] * keys["expand"])
    H = whole("hidden_size * expand / head_dim", D / keys["head_dim"])
    return {
        **preset_fields("mamba3", keys["num_hidden_layers"]),
        "intermediate_size": 0,
        "num_attention_heads": H,
        "head_dim": keys["head_dim"],
        "linear_num_value_heads": H,
        "rms_norm_eps": keys["norm_eps"],
        "scale_embeddings": False,
        **{ours: keys[theirs] for ours, theirs in FIELDS.items()},
    }


def mamba3_keys(config: Any) -> Keys:
    expect(config, mixer="mamba3", intermediate_size=0)
    expect(config, attention_out_bias=config.attention_bias, gate_bias=config.attention_bias)
    if {*config.active_layer_types} != {LINEAR}:
        expect(config, layer_types=[LINEAR] * config.num_hidden_layers)
    D = config.linear_num_value_heads * config.linear_value_head_dim
    return {
        "expand": share_of(D, config.hidden_size),
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "hidden_act": "silu",
    }


def mamba3_names(keys: Keys) -> list[Rule]:
    kinds = ("weight", "bias") if keys["use_bias"] else ("weight",)
    return [
        *same("D", "dt_bias", "B_bias", "C_bias"),
        *weights("B_norm", "C_norm"),
        *(Rule(f"in_proj.{x}", tuple(f"{name}_proj.{x}" for name in PROJECTED)) for x in kinds),
        *(Rule(f"out_proj.{x}", (f"o_proj.{x}",)) for x in kinds),
    ]


MAMBA3 = Family(
    class_name="Mamba3",
    keys={
        **OF_ALL,
        "num_hidden_layers": 48,
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "pad_token_id": 0,
        "expand": 2,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "use_bias": False,
        "rope_fraction": 0.5,
        "A_floor": 1e-4,
        "dt_min": 0.001,
        "dt_max": 0.1,
        "dt_init_floor": 1e-4,
        "is_outproj_norm": False,
        "is_mimo": False,
    },
    needs={"is_outproj_norm": (False,), "is_mimo": (False,), "rope_fraction": (0.5, 1)},
    fields=mamba3_fields,
    back=mamba3_keys,
    names=mamba3_names,
    unused=("num_heads", "mimo_rank"),  # derived from others; of MIMO
    skeleton=SKELETON,
    common={},
    around=shared_fields,
)
