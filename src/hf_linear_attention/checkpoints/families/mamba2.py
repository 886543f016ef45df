# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-2 as flash-linear-attention has it: Transformers' names, but other keys in its config.json.
in_proj and conv1d of that model are split into several modules here.
"""

import math
from typing import Any

from ..family import (
    LINEAR,
    OF_ALL,
    Family,
    Keys,
    Rule,
    Skeleton,
    expect,
    renamed,
    same,
    share_of,
    shared_fields,
    whole,
)

SKELETON = Skeleton(
    "backbone.layers.{}.",
    "mixer.",
    {
        "model.embed_tokens.weight": "backbone.embeddings.weight",
        "model.norm.weight": "backbone.norm_f.weight",
        "lm_head.weight": "lm_head.weight",
    },
    {"input_layernorm.weight": "norm.weight"},
)
PROJECTED = ("g_proj", "v_proj", "B_proj", "C_proj", "dt_proj")  # in_proj, in this order
CONVOLVED = ("v_conv1d", "B_conv1d", "C_conv1d")


# Keys of Mamba-2 and Mamba-3, and those that are fields of ours, by our names.
KEYS: Keys = {
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
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init_floor": 1e-4,
}
FIELDS = {
    "linear_num_key_heads": "n_groups",
    "linear_key_head_dim": "state_size",
    "linear_value_head_dim": "head_dim",
    "attention_bias": "use_bias",
    "time_step_min": "dt_min",
    "time_step_max": "dt_max",
    "time_step_floor": "dt_init_floor",
}


def mamba_fields(keys: Keys) -> dict[str, Any]:
    """The fields that both set alike."""
    D = whole("hidden_size * expand", keys["hidden_size"] * keys["expand"])
    H = whole("hidden_size * expand / head_dim", D / keys["head_dim"])
    return {
        "intermediate_size": 0,
        "num_attention_heads": H,
        "head_dim": keys["head_dim"],
        "linear_num_value_heads": H,
        **{ours: keys[theirs] for ours, theirs in FIELDS.items()},
    }


def mamba_keys(config: Any, mixer: str) -> Keys:
    """The keys that both set alike; a ValueError for other layers."""
    expect(config, mixer=mixer, intermediate_size=0)
    expect(config, attention_out_bias=config.attention_bias, gate_bias=config.attention_bias)
    if {*config.active_layer_types} != {LINEAR}:
        expect(config, layer_types=[LINEAR] * config.num_hidden_layers)
    D = config.linear_num_value_heads * config.linear_value_head_dim
    return {
        "expand": share_of(D, config.hidden_size),
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "hidden_act": "silu",
    }


def mamba2_fields(keys: Keys) -> dict[str, Any]:
    low, high = keys["dt_limit"]
    return {
        **mamba_fields(keys),
        "mixer": "mamba2",
        "decay": "none",
        "feature_map": "identity",
        "normalizer": "rms_norm_of_gated",
        "gate_act": "silu",
        "conv_kernel_size": keys["conv_kernel"],
        "conv_bias": keys["use_conv_bias"],
        "time_step_limit": None if (low, high) == (0.0, math.inf) else [low, high],
        "position_embedding_type": "none",
    }


def mamba2_keys(config: Any) -> Keys:
    return {
        **mamba_keys(config, "mamba2"),
        "num_heads": config.linear_num_value_heads,
        "conv_kernel": config.conv_kernel_size,
        "use_conv_bias": config.conv_bias,
        "dt_limit": list(config.time_step_limit or (0.0, math.inf)),
    }


def mamba2_names(keys: Keys) -> list[Rule]:
    biases = {"in_proj": PROJECTED, "conv1d": CONVOLVED, "out_proj": ("o_proj",)}
    has_bias = {"conv1d": keys["use_conv_bias"]}
    return [
        *same("A_log", "D", "dt_bias"),
        *renamed(o_norm="norm"),
        *(
            Rule(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours))
            for theirs, ours in biases.items()
            for kind in ("weight", "bias")
            if kind == "weight" or has_bias.get(theirs, keys["use_bias"])
        ),
    ]


MAMBA2 = Family(
    class_name="Mamba2",
    keys={
        **KEYS,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "dt_limit": (0.0, math.inf),
        "D_has_hdim": False,
        "rmsnorm": True,
        "norm_before_gate": False,
    },
    needs={"D_has_hdim": (False,), "rmsnorm": (True,), "norm_before_gate": (False,)},
    fields=mamba2_fields,
    back=mamba2_keys,
    names=mamba2_names,
    unused=("num_heads", "A_init_range", "conv_init"),  # derived from others; initialisation
    others={"layer_norm_epsilon": "of Transformers, which loads it; use_kernels runs it"},
    skeleton=SKELETON,
    common={},
    around=shared_fields,
)
