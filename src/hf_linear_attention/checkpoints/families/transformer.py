# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The transformer of flash-linear-attention: Llama's, with a window for all layers or for none."""

from typing import Any

from ..family import COMMON, FULL, SLIDING, Family, Keys, Rule, expect, head_fields, rotary_fields

QK_NORM_EPS = 1e-5  # fla's layer does not pass norm_eps to these norms


def transformer_fields(keys: Keys) -> dict[str, Any]:
    kind = FULL if keys["window_size"] is None else SLIDING
    return {
        **head_fields(keys["hidden_size"], keys["num_heads"], keys["num_kv_heads"]),
        **rotary_fields(keys["rope_theta"]),
        "attention_bias": keys["qkv_bias"],
        "attention_out_bias": False,
        "layer_types": [kind] * keys["num_hidden_layers"],
        "sliding_window": keys["window_size"],
        **({"use_qk_norm": True, "qk_norm_eps": QK_NORM_EPS} if keys["qk_norm"] else {}),
    }


def transformer_keys(config: Any) -> Keys:
    kinds = {*config.active_layer_types}
    if kinds not in ({FULL}, {SLIDING}):
        expect(config, layer_types=[FULL] * config.num_hidden_layers)
    expect(config, softmax_mixer="softmax", attn_output_gate=False)
    expect(config, position_embedding_type="rotary", attention_out_bias=False)
    return {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "qkv_bias": config.attention_bias,
        "qk_norm": config.use_qk_norm,
        "window_size": config.sliding_window if kinds == {SLIDING} else None,
        "rope_theta": config.rope_parameters["rope_theta"],
    }


def no_names(keys: Keys) -> list[Rule]:
    raise AssertionError("it has no recurrent layers")


TRANSFORMER = Family(
    class_name="Transformer",
    keys={
        "num_hidden_layers": 24,
        "num_heads": 32,
        "num_kv_heads": None,
        "qkv_bias": False,
        "qk_norm": False,
        "window_size": None,
        "rope_theta": 10000.0,
    },
    fields=transformer_fields,
    back=transformer_keys,
    names=no_names,
    unused=("elementwise_affine",),
    common={name: value for name, value in COMMON.items() if name != "attn"},
)
