# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7 as flash-linear-attention and the package rwkv7-hf have it, whose names are the same."""

from typing import Any

from ...mixers.rwkv7 import low_rank_sizes
from ...model.presets import preset_fields
from ..family import (
    COMMON,
    LINEAR,
    Family,
    Keys,
    Rule,
    Skeleton,
    expect,
    in_steps_of,
    same,
    weights,
)
from ..kinds import is_whole, refusal

RANKS = ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
LORAS = {  # of low rank, by the parts of a name there and here
    "lora.0.weight": "a_proj.weight",
    "lora.2.weight": "b_proj.weight",
    "lora.2.bias": "bias",
}
BLOCK = {  # RWKV's norms
    **{f"input_layernorm.{x}": f"attn_norm.{x}" for x in ("weight", "bias")},
    **{f"post_attention_layernorm.{x}": f"ffn_norm.{x}" for x in ("weight", "bias")},
}
# What all RWKVs of theirs read, and need.
COMMON_KEYS = {name: x for name, x in COMMON.items() if name != "attnres_block_size"}
NEEDS: dict[str, tuple[Any, ...]] = {
    "attn": (None,),
    "hidden_act": ("sqrelu",),
    "norm_first": (True,),
    "norm_bias": (True,),
}


def around_mixers(block: dict[str, str]) -> Skeleton:
    """Of RWKV's models, whose layers have these names."""
    return Skeleton(
        "model.layers.{}.",
        "attn.",
        {
            "model.embed_tokens.weight": "model.embeddings.weight",
            "model.norm.weight": "model.norm.weight",
            "model.norm.bias": "model.norm.bias",
            "lm_head.weight": "lm_head.weight",
        },
        block,
    )


SKELETON = around_mixers(
    {
        **BLOCK,
        "mlp.x_k": "ffn.x_k",
        "mlp.up_proj.weight": "ffn.key.weight",
        "mlp.down_proj.weight": "ffn.value.weight",
    }
)


def rwkv7_fields(keys: Keys) -> dict[str, Any]:
    H, K = heads_of(keys)
    L, V = keys["num_hidden_layers"], keys["value_dim"]
    widths = V if isinstance(V, list) else [H * K if V is None else V] * L
    are_alike = len(widths) == L and widths == widths[:1] * L and is_whole(widths[0], 1)
    if not are_alike or widths[0] % H != 0:
        raise refusal("value_dim", f"the same multiple of {H} heads in all {L} layers", V)
    return {
        **preset_fields("rwkv7", keys["num_hidden_layers"]),
        "intermediate_size": mlp_width(keys),
        "num_attention_heads": H,
        "head_dim": K,
        "linear_value_head_dim": widths[0] // H,
        "rms_norm_eps": keys["norm_eps"],
        **{name: keys[name] for name in RANKS},
    }


def heads_of(keys: Keys) -> tuple[int, int]:
    """How many, and the features of a key."""
    width = keys["attention_hidden_size"] or keys["hidden_size"]
    H, K = keys["num_heads"], keys["head_dim"]
    if H is None and K is None:
        raise refusal("head_dim", "a number, or num_heads", None)
    H = width // K if H is None else H
    K = width // H if K is None else K
    if H * K != width:
        raise refusal("head_dim", f"such that {H} heads have {width} features", K)
    return H, K


def mlp_width(keys: Keys, default_ratio: float = 4) -> int:
    """Features of an MLP: those given, or a multiple of 32."""
    if keys["intermediate_size"] is not None:
        return keys["intermediate_size"]
    ratio = default_ratio if keys["hidden_ratio"] is None else keys["hidden_ratio"]
    return in_steps_of(32, keys["hidden_size"] * ratio)


def expect_block(config: Any, mixer: str) -> None:
    """Raises a ValueError where theirs have no layers like these, with that mixer."""
    expect(config, mixer=mixer, hidden_act="relu2")
    expect(config, attention_bias=False, attention_out_bias=False, mlp_bias=False)
    expect(config, layer_types=[LINEAR] * config.num_hidden_layers)
    if config.intermediate_size == 0:
        raise ValueError("intermediate_size must be more than 0, got 0")


def rwkv7_keys(config: Any) -> Keys:
    expect_block(config, "rwkv7")
    expect(config, learn_initial_state=False)
    H, K, V = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    if H * K != config.hidden_size:
        raise ValueError(f"{H} heads must have hidden_size={config.hidden_size}, got {K} each")
    return {
        "num_heads": H,
        "head_dim": K,
        "value_dim": [H * V] * config.num_hidden_layers,
        "hidden_act": "sqrelu",
        **low_rank_sizes(config),
    }


def rwkv7_names(keys: Keys) -> list[Rule]:
    return [
        *same(*(f"x_{name}" for name in "rwkvag"), "k_k", "k_a", "r_k"),
        *weights("r_proj", "k_proj", "v_proj", "o_proj", "g_norm"),
        *same("g_norm.bias"),
        *(rule for name in "wa" for rule in lora_names(f"{name}_lora.")),
        *lora_names("g_lora.")[:2],  # which has no bias
    ]


def lora_names(theirs: str, ours: str | None = None) -> list[Rule]:
    return [Rule(theirs + x, ((ours or theirs) + y,)) for x, y in LORAS.items()]


def names_of_some(keys: Keys, layer: int) -> list[Rule]:
    """The first layer alone has a norm of embeddings, all others mix their values with its own."""
    if layer == 0:
        return same("pre_norm.weight", "pre_norm.bias")
    return lora_names("attn.v_lora.", "self_attn.v_lora.")


RWKV7 = Family(
    class_name="RWKV7",
    keys={
        "num_hidden_layers": 24,
        "hidden_act": "sqrelu",
        "norm_eps": 1e-5,
        "head_dim": 64,
        "num_heads": None,
        "attention_hidden_size": None,
        "value_dim": None,
        "decay_low_rank_dim": 64,
        "gate_low_rank_dim": 128,
        "a_low_rank_dim": 64,
        "v_low_rank_dim": 16,
        "norm_first": True,
        "norm_bias": True,
    },
    needs=NEEDS,
    fields=rwkv7_fields,
    back=rwkv7_keys,
    names=rwkv7_names,
    names_of_some=names_of_some,
    nullable=("head_dim", *RANKS),
    unused=("num_attention_heads",),  # of rwkv7-hf, num_heads again
    left_out={
        r"model\.layers\.0\.attn\.v_lora\..*": "the first layer's values are mixed with no others"
    },
    skeleton=SKELETON,
    common=COMMON_KEYS,
)
