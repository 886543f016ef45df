# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-6 as flash-linear-attention has it."""

from typing import Any

from ...mixers.rwkv6 import sizes_between
from ...model.presets import preset_fields
from ..family import Family, Keys, Rule, same, share_of, weights, whole
from .rwkv7 import BLOCK, COMMON_KEYS, NEEDS, around_mixers, expect_block, lora_names, mlp_width

SKELETON = around_mixers(
    {
        **BLOCK,
        "mlp.x_k": "ffn.key.mu",
        "mlp.x_r": "ffn.receptance.mu",
        "mlp.up_proj.weight": "ffn.key.linear.weight",
        "mlp.r_proj.weight": "ffn.receptance.linear.weight",
        "mlp.down_proj.weight": "ffn.value.weight",
    }
)


def rwkv6_fields(keys: Keys) -> dict[str, Any]:
    H, C = keys["num_heads"], keys["hidden_size"]
    sizes = {}
    for name in ("expand_k", "expand_v"):
        width = whole(f"hidden_size * {name}", C * keys[name])
        sizes[name] = whole(f"hidden_size * {name} / num_heads", width / H)
    return {
        **preset_fields("rwkv6", keys["num_hidden_layers"]),
        "intermediate_size": mlp_width(keys, 3.5),
        "num_attention_heads": H,
        "head_dim": sizes["expand_k"],
        "linear_value_head_dim": sizes["expand_v"],
        "rms_norm_eps": keys["norm_eps"],
        "proj_low_rank_dim": keys["proj_low_rank_dim"],
        "decay_low_rank_dim": keys["gate_low_rank_dim"],  # whose name there is a gate's
    }


def rwkv6_keys(config: Any) -> Keys:
    expect_block(config, "rwkv6")
    H, C, sizes = config.linear_num_value_heads, config.hidden_size, sizes_between(config)
    return {
        "num_heads": H,
        "expand_k": share_of(H * config.linear_key_head_dim, C),
        "expand_v": share_of(H * config.linear_value_head_dim, C),
        "hidden_act": "sqrelu",
        "proj_low_rank_dim": sizes["proj_low_rank_dim"],
        "gate_low_rank_dim": sizes["decay_low_rank_dim"],
    }


def rwkv6_names(keys: Keys) -> list[Rule]:
    return [
        Rule("x_proj.0.mu", ("x_mix.mu",)),
        Rule("x_proj.0.linear.weight", ("x_mix.a_proj.weight",)),
        Rule("x_proj.2.weight", ("x_mix.b",)),
        Rule("x_bias", ("x_mix.bias",)),
        *(Rule(f"{x}_proj.linear.weight", (f"{x}_proj.weight",)) for x in "rkvg"),
        *lora_names("w_proj.linear.", "w_lora."),
        *weights("o_proj", "g_norm"),
        *same("bonus", "g_norm.bias"),
    ]


def names_of_some(keys: Keys, layer: int) -> list[Rule]:
    """The first layer alone has a norm of embeddings."""
    return same("pre_norm.weight", "pre_norm.bias") if layer == 0 else []


RWKV6 = Family(
    class_name="RWKV6",
    keys={
        "num_hidden_layers": 24,
        "hidden_act": "sqrelu",
        "hidden_ratio": 3.5,
        "norm_eps": 1e-5,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        "proj_low_rank_dim": 32,
        "gate_low_rank_dim": 64,
        "norm_first": True,
        "norm_bias": True,
    },
    needs=NEEDS,
    fields=rwkv6_fields,
    back=rwkv6_keys,
    names=rwkv6_names,
    names_of_some=names_of_some,
    skeleton=SKELETON,
    common=COMMON_KEYS,
)
