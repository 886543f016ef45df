# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models of linear attention, with decays or without: the linear transformer, RetNet, GLA, HGRN and
HGRN2.

fla scales queries by K ** -0.5 and normalises each head's output. A norm of outputs / sqrt(K) is a
norm of the outputs with an epsilon K times as large. We load that as output_norm_eps and change no
weight: q_proj / sqrt(K) would not be exact in half precision.
"""

from typing import Any

from ..family import (
    Family,
    Keys,
    Rule,
    attention_fields,
    attention_keys,
    convolutions,
    expect,
    gate_fields,
    renamed,
    rotary_fields,
    share_of,
    weights,
    whole,
)

FEATURE_MAPS = {"elu": "elu+1", "relu": "relu", "identity": "identity"}
HGRN2_EPS = 1e-5  # fla's layer does not pass norm_eps to the kernel of its output norm
NOT_CONVOLVED = {"use_short_conv": (False,)}
UNBOUNDED = {r"lower_bounds": "only layers behind the first have bounds"}  # where there is no rule


def linear_fields(keys: Keys) -> dict[str, Any]:
    """The fields that the linear transformer, RetNet and GLA set alike."""
    C, H = keys["hidden_size"], keys["num_heads"]
    K = whole("hidden_size * expand_k / num_heads", C * keys["expand_k"] / H)
    return {
        "mixer": "linear",
        "linear_num_value_heads": H,
        "linear_num_key_heads": kv_heads(keys),
        "linear_key_head_dim": K,
        "linear_value_head_dim": whole(
            "hidden_size * expand_v / num_heads", C * keys["expand_v"] / H
        ),
        "output_norm_eps": keys["norm_eps"] * K,
        "conv_kernel_size": keys["conv_size"] if keys.get("use_short_conv") else 0,
        **attention_fields(
            keys, num_attention_heads=H, num_key_value_heads=kv_heads(keys), head_dim=K
        ),
    }


def kv_heads(keys: Keys) -> int:
    given = keys["num_kv_heads"]
    return keys["num_heads"] if given is None else given


def linear_keys(config: Any, decay: str) -> Keys:
    expect(config, mixer="linear", decay=decay, value_act=None, attention_bias=False)
    H, C = config.linear_num_value_heads, config.hidden_size
    return {
        "num_heads": H,
        "num_kv_heads": config.linear_num_key_heads,
        "expand_k": share_of(H * config.linear_key_head_dim, C),
        "expand_v": share_of(H * config.linear_value_head_dim, C),
        "attn": attention_keys(config),
        "elementwise_affine": True,
    }


def gated_keys(config: Any) -> Keys:
    """The keys that RetNet and GLA set alike."""
    if config.is_gated:
        expect(config, gate_act="silu", low_rank_gate=False)
    maps = {ours: theirs for theirs, ours in GATED_MAPS.items()}
    if config.feature_map not in maps:
        expect(config, feature_map="identity")
    return {"use_output_gate": config.is_gated, "feature_map": maps[config.feature_map]}


def norm_names(keys: Keys, theirs: str, ours: str = "o_norm.weight") -> list[Rule]:
    return [Rule(f"{theirs}.weight" if keys["elementwise_affine"] else None, (ours,))]


def gated_norm_names(keys: Keys) -> list[Rule]:
    """The rules for RetNet's and GLA's norm, whose name depends on fuse_norm, and for the gate."""
    if not keys["use_output_gate"]:
        return norm_names(keys, "g_norm")
    name = "g_norm_swish_gate" if keys["fuse_norm"] else "g_norm"
    return [*norm_names(keys, name), *weights("g_proj")]


GATED_MAPS = {None: "identity", "relu": "relu", "silu": "silu", "swish": "silu"}


# ---- the linear transformer ----


def linear_attn_fields(keys: Keys) -> dict[str, Any]:
    return {
        "decay": "none",
        "feature_map": FEATURE_MAPS[keys["feature_map"]],
        "normalizer": "rms_norm",
        **linear_fields(keys),
    }


def linear_attn_keys(config: Any) -> Keys:
    maps = {ours: theirs for theirs, ours in FEATURE_MAPS.items()}
    if config.feature_map not in maps:
        raise ValueError(f"feature_map must be one of {', '.join(map(repr, maps))} for fla")
    expect(config, normalizer="rms_norm", conv_kernel_size=0)
    return {**linear_keys(config, "none"), "feature_map": maps[config.feature_map]}


def linear_attn_names(keys: Keys) -> list[Rule]:
    return [*weights("q_proj", "k_proj", "v_proj", "o_proj"), *norm_names(keys, "norm")]


LINEAR_ATTN = Family(
    class_name="LinearAttention",
    keys={
        "num_hidden_layers": 24,
        "elementwise_affine": True,
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "feature_map": "elementwise_product",
        "tie_feature_map_qk": False,
        "norm_q": False,
        "norm_k": False,
        "norm_feature_map": False,
    },
    needs={
        "feature_map": tuple(FEATURE_MAPS),
        "norm_q": (False,),
        "norm_k": (False,),
        "norm_feature_map": (False,),
    },
    fields=linear_attn_fields,
    back=linear_attn_keys,
    names=linear_attn_names,
)


# ---- RetNet ----


def retnet_fields(keys: Keys) -> dict[str, Any]:
    if kv_heads(keys) != keys["num_heads"]:
        expected = f"num_heads={keys['num_heads']}: in RetNet heads that share keys forget apart"
        raise ValueError(
            f"num_kv_heads of its config.json must be {expected}, got {keys['num_kv_heads']}"
        )
    fields = {
        "decay": "retnet",
        "feature_map": GATED_MAPS[keys["feature_map"]],
        **gate_fields(keys["use_output_gate"], "silu"),
        **linear_fields(keys),
        "linear_rotary": True,
    }
    if "rope_parameters" not in fields:
        return {**fields, **rotary_fields(10000.0)}
    theta, K = fields["rope_parameters"]["rope_theta"], fields["linear_key_head_dim"]
    if theta != 10000.0 or K != fields["head_dim"]:
        raise ValueError(
            "attn of its config.json must have the positions of RetNet's layers, rope_theta=10000 "
            f"and heads of {K} features, got rope_theta={theta} and {fields['head_dim']}"
        )
    return fields


def retnet_keys(config: Any) -> Keys:
    expect(config, position_embedding_type="rotary", linear_rotary=True, conv_kernel_size=0)
    return {**linear_keys(config, "retnet"), **gated_keys(config)}


def retnet_names(keys: Keys) -> list[Rule]:
    return [*weights("q_proj", "k_proj", "v_proj", "o_proj"), *gated_norm_names(keys)]


RETNET = Family(
    class_name="RetNet",
    keys={
        "num_hidden_layers": 24,
        "elementwise_affine": True,
        "hidden_ratio": 2,
        "num_heads": 8,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "feature_map": None,
        "use_output_gate": True,
        "fuse_norm": True,
    },
    needs={"feature_map": (None,)},
    fields=retnet_fields,
    back=retnet_keys,
    names=retnet_names,
    unused=("use_short_conv", "conv_size"),  # fla's blocks do not pass them on
)


# ---- GLA ----


def gla_fields(keys: Keys) -> dict[str, Any]:
    return {
        "decay": "gla",
        "feature_map": GATED_MAPS[keys["feature_map"]],
        **gate_fields(keys["use_output_gate"], "silu"),
        **linear_fields(keys),
    }


def gla_keys(config: Any) -> Keys:
    return {
        **linear_keys(config, "gla"),
        **gated_keys(config),
        "use_short_conv": config.conv_kernel_size > 0,
        "conv_size": config.conv_kernel_size or 4,
    }


def gla_names(keys: Keys) -> list[Rule]:
    return [
        *weights("q_proj", "k_proj", "v_proj", "o_proj"),
        *convolutions(keys, "q", "k", "v"),
        *(
            Rule(f"gk_proj.{name}", (f"decay.gk_proj.{name}",))
            for name in ("0.weight", "1.weight", "1.bias")
        ),
        *gated_norm_names(keys),
    ]


GLA = Family(
    class_name="GLA",
    keys={
        "num_hidden_layers": 24,
        "elementwise_affine": True,
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "feature_map": None,
        "use_short_conv": False,
        "conv_size": 4,
        "use_output_gate": True,
        "clamp_min": None,
        "fuse_norm": True,
    },
    needs={"feature_map": tuple(GATED_MAPS), "clamp_min": (None,)},
    fields=gla_fields,
    back=gla_keys,
    names=gla_names,
    unused=("use_gk", "use_gv"),
)


# ---- HGRN2 ----


def hgrn2_fields(keys: Keys) -> dict[str, Any]:
    C, K = keys["hidden_size"], keys["expand_ratio"]
    if K is None:  # fla's layer reads num_heads only then
        if keys["num_heads"] is None:
            raise ValueError("expand_ratio or num_heads of its config.json must be given")
        K = whole("hidden_size / num_heads", C / keys["num_heads"])
    K = whole("expand_ratio", K)
    H = whole("hidden_size / expand_ratio", C / K)
    return {
        "mixer": "linear",
        "decay": "hgrn2",
        "feature_map": "silu",
        "normalizer": "rms_norm_of_all_heads",
        "linear_num_key_heads": H,
        "linear_num_value_heads": H,
        "linear_key_head_dim": K,
        "linear_value_head_dim": K,
        "output_norm_eps": HGRN2_EPS * K,
        "conv_kernel_size": 0,
        **attention_fields(keys, num_attention_heads=H, head_dim=K),
    }


def hgrn2_keys(config: Any) -> Keys:
    expect(config, feature_map="silu", conv_kernel_size=0)
    keys = linear_keys(config, "hgrn2")
    H, K = config.linear_num_key_heads, config.linear_key_head_dim
    expect(config, linear_num_value_heads=H, normalizer="rms_norm_of_all_heads")
    expect(config, linear_value_head_dim=K)
    return {name: keys[name] for name in ("attn", "elementwise_affine")} | {
        "num_heads": H,
        "expand_ratio": K,
    }


def hgrn2_names(keys: Keys) -> list[Rule]:
    return [
        *weights("q_proj", "o_proj"),
        *renamed(k_proj="f_proj", v_proj="i_proj"),
        *norm_names(keys, "g_norm"),
    ]


HGRN2 = Family(
    class_name="HGRN2",
    keys={
        "num_hidden_layers": 24,
        "elementwise_affine": True,
        "num_heads": None,
        "expand_ratio": 128,
        "use_lower_bound": True,
        "use_short_conv": False,
        "conv_size": 4,
    },
    needs={**NOT_CONVOLVED, "use_lower_bound": (True,)},
    nullable=("expand_ratio",),
    fields=hgrn2_fields,
    back=hgrn2_keys,
    names=hgrn2_names,
    left_out=UNBOUNDED,
    has_lower_bounds=True,
)


# ---- HGRN ----


def hgrn_fields(keys: Keys) -> dict[str, Any]:
    C = keys["hidden_size"]
    D = whole("hidden_size * expand_ratio", C * keys["expand_ratio"])
    # HGRN has no heads; ours are any equal shares of its channels.
    H = D // 64 if D % 64 == 0 else 1
    return {
        "mixer": "hgrn",
        "decay": "hgrn2",
        "feature_map": "identity",
        "value_act": "silu",
        "normalizer": "gated_rms_norm_of_all_heads",
        "gate_act": "silu",
        "linear_num_key_heads": H,
        "linear_num_value_heads": H,
        "linear_key_head_dim": D // H,
        "linear_value_head_dim": D // H,
        "conv_kernel_size": 0,
        **attention_fields(keys, num_attention_heads=H, head_dim=D // H),
    }


def hgrn_keys(config: Any) -> Keys:
    expect(config, mixer="hgrn", value_act="silu", conv_kernel_size=0, low_rank_gate=False)
    expect(config, normalizer="gated_rms_norm_of_all_heads", gate_act="silu")
    D = config.linear_num_value_heads * config.linear_value_head_dim
    return {
        "expand_ratio": share_of(D, config.hidden_size),
        "attn": attention_keys(config),
        "elementwise_affine": True,
    }


def hgrn_names(keys: Keys) -> list[Rule]:
    return [
        *weights("g_proj", "o_proj"),
        *renamed(k_proj="f_proj", v_proj="i_proj"),
        *norm_names(keys, "g_norm"),
    ]


HGRN = Family(
    class_name="HGRN",
    keys={
        "num_hidden_layers": 24,
        "elementwise_affine": True,
        "expand_ratio": 1,
        "use_lower_bound": True,
        "use_short_conv": False,
        "conv_size": 4,
    },
    needs={**NOT_CONVOLVED, "use_lower_bound": (True,)},
    fields=hgrn_fields,
    back=hgrn_keys,
    names=hgrn_names,
    left_out=UNBOUNDED,
    has_lower_bounds=True,
)
