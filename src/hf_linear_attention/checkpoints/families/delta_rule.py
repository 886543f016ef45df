# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule's models: DeltaNet, Gated DeltaNet, Gated DeltaProduct, Comba, Kimi Delta
Attention, and preconditioned ones.
"""

from typing import Any

from ..family import (
    COMMON,
    Family,
    Keys,
    Rule,
    attention_fields,
    attention_keys,
    convolutions,
    expect,
    gate_fields,
    renamed,
    share_of,
    weights,
    whole,
)
from ..kinds import refusal

GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
CONVOLVED = {"use_short_conv": (True,)}  # without, fla keeps the SiLU, and we have none


def delta_fields(keys: Keys) -> dict[str, Any]:
    """The fields that all delta-rule models set alike."""
    return {
        "mixer": "delta_rule",
        "feature_map": "identity",
        "conv_kernel_size": keys["conv_size"],
        "linear_allow_neg_eigval": keys.get("allow_neg_eigval", False),
    }


def delta_keys(config: Any, decay: str, mixer: str = "delta_rule") -> Keys:
    """The keys that all delta-rule models set alike; a ValueError for other layers."""
    expect(config, mixer=mixer, decay=decay, conv_bias=False, attention_bias=False)
    return {
        "use_short_conv": config.conv_kernel_size > 0,
        "conv_size": config.conv_kernel_size or 4,
        "allow_neg_eigval": config.linear_allow_neg_eigval,
        "attn": attention_keys(config),
    }


def delta_names(keys: Keys) -> list[Rule]:
    return [
        *weights("q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "o_norm"),
        *convolutions(keys, "q", "k", "v"),
    ]


# Keys of models whose values share keys, but for Kimi Delta Attention.
GROUPED: Keys = {
    "num_hidden_layers": 21,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "use_short_conv": True,
    "conv_size": 4,
}


def grouped_fields(keys: Keys) -> dict[str, Any]:
    """The fields for heads of values that share keys. fla's head_dim is the size of a key."""
    H, K = keys["num_heads"], keys["head_dim"]
    return {
        "linear_num_key_heads": H,
        "linear_num_value_heads": H if keys["num_v_heads"] is None else keys["num_v_heads"],
        "linear_key_head_dim": K,
        "linear_value_head_dim": whole("head_dim * expand_v", K * keys["expand_v"]),
        **attention_fields(keys, num_attention_heads=H, head_dim=K),
    }


def grouped_keys(config: Any) -> Keys:
    return {
        "num_heads": config.linear_num_key_heads,
        "num_v_heads": config.linear_num_value_heads,
        "head_dim": config.linear_key_head_dim,
        "expand_v": share_of(config.linear_value_head_dim, config.linear_key_head_dim),
    }


# ---- DeltaNet ----


def delta_net_fields(keys: Keys) -> dict[str, Any]:
    C, H = keys["hidden_size"], keys["num_heads"]
    K = whole("hidden_size * expand_k / num_heads", C * keys["expand_k"] / H)
    return {
        "decay": "none",
        **delta_fields(keys),
        **gate_fields(keys["use_gate"], "silu"),
        "linear_num_key_heads": H,
        "linear_num_value_heads": H,
        "linear_key_head_dim": K,
        "linear_value_head_dim": whole(
            "hidden_size * expand_v / num_heads", C * keys["expand_v"] / H
        ),
        **attention_fields(keys, num_attention_heads=H, head_dim=K),
    }


def delta_net_keys(config: Any) -> Keys:
    H = config.linear_num_key_heads
    expect(config, linear_num_value_heads=H)
    return {
        **delta_keys(config, "none"),
        "use_gate": config.is_gated,
        "num_heads": H,
        "expand_k": share_of(H * config.linear_key_head_dim, config.hidden_size),
        "expand_v": share_of(H * config.linear_value_head_dim, config.hidden_size),
    }


def delta_net_names(keys: Keys) -> list[Rule]:
    return [*delta_names(keys), *(weights("g_proj") if keys["use_gate"] else [])]


DELTA_NET = Family(
    class_name="DeltaNet",
    keys={
        "num_hidden_layers": 24,
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "use_gate": False,
        "use_beta": True,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "qk_norm": "l2",
        "qk_activation": "silu",
    },
    needs={**CONVOLVED, "use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)},
    fields=delta_net_fields,
    back=delta_net_keys,
    names=delta_net_names,
    unused=("use_output_norm",),  # there is a norm whatever it says
)


# ---- Gated DeltaNet ----


def gated_deltanet_fields(keys: Keys) -> dict[str, Any]:
    return {
        "decay": "per_token",
        **delta_fields(keys),
        **gate_fields(keys["use_gate"], GATES[keys["output_gate_activation"]]),
        **grouped_fields(keys),
    }


def gated_deltanet_keys(config: Any, mixer: str = "delta_rule") -> Keys:
    return {
        **delta_keys(config, "per_token", mixer),
        **grouped_keys(config),
        "use_gate": config.is_gated,
        "output_gate_activation": config.gate_act if config.is_gated else "swish",
    }


def decay_names() -> list[Rule]:
    """Rules for a decay for each head and token."""
    return [
        *renamed(decay__dt_proj="a_proj"),
        *(Rule(name, (f"decay.{name}",)) for name in ("A_log", "dt_bias")),
    ]


def gated_deltanet_names(keys: Keys) -> list[Rule]:
    return [*delta_net_names(keys), *decay_names()]


GATED_DELTANET = Family(
    class_name="GatedDeltaNet",
    keys={
        **GROUPED,
        "use_gate": True,
        "output_gate_activation": "swish",
        "allow_neg_eigval": False,
    },
    needs={**CONVOLVED, "output_gate_activation": tuple(GATES)},
    fields=gated_deltanet_fields,
    back=gated_deltanet_keys,
    names=gated_deltanet_names,
    left_out={r"attn\.D": "early releases of fla wrote it, and multiplied by it nowhere"},
)


# ---- Gated DeltaProduct ----


def product_fields(keys: Keys) -> dict[str, Any]:
    return {
        **delta_fields(keys),
        "mixer": "delta_product",
        "num_householder": keys["num_householder"],
        "decay": "per_token" if keys["use_forget_gate"] else "none",
        **gate_fields(keys["use_output_gate"], "silu"),
        **grouped_fields({**keys, "num_v_heads": None}),
    }


def product_keys(config: Any) -> Keys:
    decay = "none" if config.decay == "none" else "per_token"
    keys = grouped_keys(config)
    expect(config, linear_num_value_heads=keys["num_heads"])
    return {
        **delta_keys(config, decay, "delta_product"),
        **keys,
        "num_householder": config.num_householder,
        "use_forget_gate": decay == "per_token",
        "use_output_gate": config.is_gated,
    }


def product_names(keys: Keys) -> list[Rule]:
    rows = keys["num_householder"], keys["num_heads"]
    of_steps = {f"{x}_{kind}.weight" for x in "kv" for kind in ("proj", "conv1d")}
    of_steps.add("b_proj.weight")
    return [
        *(x._replace(rows=rows) if x.theirs in of_steps else x for x in delta_names(keys)),
        *(weights("g_proj") if keys["use_output_gate"] else []),
        *(decay_names() if keys["use_forget_gate"] else []),
    ]


GATED_DELTAPRODUCT = Family(
    class_name="GatedDeltaProduct",
    keys={
        **{name: x for name, x in GROUPED.items() if name != "num_v_heads"},
        "use_output_gate": True,
        "use_forget_gate": False,
        "allow_neg_eigval": False,
        "num_householder": 1,
    },
    needs=CONVOLVED,
    fields=product_fields,
    back=product_keys,
    names=product_names,
)


# ---- Comba ----


def comba_fields(keys: Keys) -> dict[str, Any]:
    return {
        **delta_fields(keys),
        "mixer": "comba",
        "decay": "per_token",
        **gate_fields(keys["use_output_gate"], "sigmoid"),
        **grouped_fields(keys),
    }


def comba_keys(config: Any) -> Keys:
    return {
        **delta_keys(config, "per_token", "comba"),
        **grouped_keys(config),
        "use_output_gate": config.is_gated,
    }


def comba_names(keys: Keys) -> list[Rule]:
    return [
        *delta_names(keys),
        *(weights("g_proj") if keys["use_output_gate"] else []),
        *decay_names(),
        *(Rule("decay", ("inner_decay",)), Rule("D", ("D",))),
    ]


COMBA = Family(
    class_name="Comba",
    keys={
        **GROUPED,
        "use_output_gate": True,
    },
    needs=CONVOLVED,
    fields=comba_fields,
    back=comba_keys,
    names=comba_names,
    # fla's model hands them to no layer: all its layers have both, and begin with factors of 1
    unused=("use_output_correction", "use_inner_decay", "correction_factor"),
)


# ---- Kimi Delta Attention ----


def kda_fields(keys: Keys) -> dict[str, Any]:
    bound = keys["lower_bound"]
    if (bound is not None) != keys["safe_gate"]:
        raise refusal("lower_bound", "null without safe_gate, and given with it", bound)
    is_bounded = {"decay": "kda_bounded", "decay_lower_bound": bound}
    return {
        **({"decay": "kda"} if bound is None else is_bounded),
        **delta_fields(keys),
        **gate_fields(True, "sigmoid"),
        "low_rank_gate": True,
        "gate_bias": True,
        **grouped_fields(keys),
    }


def kda_keys(config: Any, mixer: str = "delta_rule") -> Keys:
    is_bounded = config.decay == "kda_bounded"
    return {
        **delta_keys(config, config.decay if is_bounded else "kda", mixer),
        **grouped_keys(config),
        "safe_gate": is_bounded,
        "lower_bound": config.decay_lower_bound if is_bounded else None,
    }


def kda_names(keys: Keys) -> list[Rule]:
    return [
        *delta_names(keys),
        *renamed(decay__f_a_proj="f_proj.0", decay__f_b_proj="f_proj.1"),
        *renamed(g_a_proj="g_proj.0", g_b_proj="g_proj.1"),
        Rule("g_proj.1.bias", ("g_b_proj.bias",)),
        *(Rule(name, (f"decay.{name}",)) for name in ("A_log", "dt_bias")),
    ]


KDA = Family(
    class_name="KDA",
    keys={
        "num_hidden_layers": 24,
        "num_heads": 16,
        "num_v_heads": None,
        "head_dim": 128,
        "expand_v": 1.0,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "safe_gate": False,
        "lower_bound": None,
    },
    needs=CONVOLVED,
    fields=kda_fields,
    back=kda_keys,
    names=kda_names,
)


# ---- preconditioned ones ----

SQUASH: Keys = {"squash_x": 1.5, "squash_eps": 1e-6}
OF_FIRST_VALUES = ("log_atk_scale_init", "a_log_init_lower")
WITHOUT_RESIDUALS = {name: x for name, x in COMMON.items() if name != "attnres_block_size"}


def squash_fields(keys: Keys) -> dict[str, Any]:
    return {"mixer": "preconditioned", **{name: keys[name] for name in SQUASH}}


def with_squash(config: Any, keys: Keys) -> Keys:
    """The keys, whose `attn` these models take as an object alone, and the preconditioner's."""
    if isinstance(keys["attn"], list):
        raise ValueError("layer_types must hold one kind of softmax layers, got two")
    return {**keys, **{name: getattr(config, name) for name in SQUASH}}


def preconditioner_names(dt_proj: str) -> list[Rule]:
    return [
        *renamed(preconditioner__dt_proj=dt_proj, preconditioner__b_proj="b_atk_proj"),
        Rule("A_log_atk", ("preconditioner.A_log",)),
        Rule("dt_bias_atk", ("preconditioner.dt_bias",)),
        Rule("log_atk_scale", ("preconditioner.center",)),
    ]


def precond_gated_deltanet_fields(keys: Keys) -> dict[str, Any]:
    keys = {**keys, "output_gate_activation": "silu"}
    return {**gated_deltanet_fields(keys), **squash_fields(keys)}


def precond_gated_deltanet_keys(config: Any) -> Keys:
    keys = gated_deltanet_keys(config, "preconditioned")
    del keys["output_gate_activation"]
    return with_squash(config, keys)


def precond_gated_deltanet_names(keys: Keys) -> list[Rule]:
    return [*gated_deltanet_names(keys), *preconditioner_names("a_atk_proj")]


PRECOND_GATED_DELTANET = Family(
    class_name="PrecondGatedDeltaNet",
    keys={
        **GROUPED,
        "use_gate": True,
        "allow_neg_eigval": False,
        **SQUASH,
    },
    needs=CONVOLVED,
    fields=precond_gated_deltanet_fields,
    back=precond_gated_deltanet_keys,
    names=precond_gated_deltanet_names,
    unused=OF_FIRST_VALUES,
    common=WITHOUT_RESIDUALS,
)


def precond_kda_fields(keys: Keys) -> dict[str, Any]:
    if keys["num_v_heads"] not in (None, keys["num_heads"]):  # of which others write alike
        raise refusal("num_v_heads", f"null or num_heads={keys['num_heads']}", keys["num_v_heads"])
    return {**kda_fields(keys), **squash_fields(keys)}


def precond_kda_keys(config: Any) -> Keys:
    expect(config, linear_num_value_heads=config.linear_num_key_heads)
    return with_squash(config, kda_keys(config, "preconditioned"))


def precond_kda_names(keys: Keys) -> list[Rule]:
    return [*kda_names(keys), *preconditioner_names("a_proj")]


PRECOND_KDA = Family(
    class_name="PrecondKDA",
    keys={**KDA.keys, **SQUASH},
    needs=CONVOLVED,
    fields=precond_kda_fields,
    back=precond_kda_keys,
    names=precond_kda_names,
    unused=OF_FIRST_VALUES,
    common=WITHOUT_RESIDUALS,
)
