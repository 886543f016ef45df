# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-2 and Mamba-3 as mamba_ssm saves them, the package of their authors. Layers have the names
of flash-linear-attention's; config.json has other keys, those of layers in `ssm_cfg`, and there may
be MLPs.
"""

import math
from dataclasses import replace
from typing import Any

from ..family import Family, Keys, Rule
from ..kinds import check_kinds, refusal
from .mamba2 import MAMBA2, SKELETON
from .mamba3 import MAMBA3

LAYERS = {"Mamba2": MAMBA2, "Mamba3": MAMBA3}
MODEL_TYPE = "{} of mamba_ssm"
NORM_EPS = 1e-5
# Of published models, by the size of their vocabulary: GPT-NeoX's.
END_OF_TEXT = {50277: 0}
# Keys whose name is another one in flash-linear-attention.
NAMES = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "tie_embeddings": "tie_word_embeddings",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}
DEFAULTS: Keys = {
    **{"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "tie_embeddings": True},
    "pad_vocab_size_multiple": 8,
}
OF_KERNELS = ("use_mem_eff_path", "fused_add_norm", "process_group", "sequence_parallel", "dropout")
OWN: Keys = {  # keys that flash-linear-attention has not
    "d_intermediate": 0,
    "attn_layer_idx": [],
    "rms_norm": True,
    "d_ssm": None,
}


def is_of_mamba_ssm(config: Keys) -> bool:
    """Whether mamba_ssm wrote a config.json."""
    return "model_type" not in config and "d_model" in config and "n_layer" in config


def translated(config: Keys) -> Keys:
    """A config.json of mamba_ssm with one floor, and flash-linear-attention's names.

    Raises:
        ValueError: it is of other layers, or a value of another kind; the message names it.
    """
    layers = config.get("ssm_cfg") or {}
    if not isinstance(layers, dict):
        raise refusal("ssm_cfg", "an object", layers)
    flat = {**DEFAULTS, **config, **layers}
    kind = flat.pop("layer", "Mamba1")
    if kind not in tuple(LAYERS):  # it may be no string
        raise refusal("ssm_cfg['layer']", " or ".join(map(repr, LAYERS)), kind)
    of_layers = LAYERS[kind].defaults
    known = {theirs: of_layers[name] for theirs, name in NAMES.items() if name in of_layers}
    check_kinds({**known, **flat}, {**known, **DEFAULTS})
    multiple = flat.pop("pad_vocab_size_multiple")
    end = END_OF_TEXT.get(flat["vocab_size"])
    for name in ("ssm_cfg", "attn_cfg"):
        flat.pop(name, None)
    return {
        **{NAMES.get(name, name): value for name, value in flat.items()},
        "vocab_size": math.ceil(flat["vocab_size"] / multiple) * multiple,
        "norm_eps": NORM_EPS,
        "model_type": MODEL_TYPE.format(kind),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }


def mlp_width(keys: Keys) -> int:
    """The features of an MLP, a multiple of 128 as in mamba_ssm; 0: there is none."""
    return math.ceil(keys["d_intermediate"] / 128) * 128


def mlp_names(keys: Keys, layer: int) -> list[Rule]:
    if mlp_width(keys) == 0:
        return []
    return [
        Rule("norm2.weight", ("post_attention_layernorm.weight",)),
        Rule("mlp.fc1.weight", ("mlp.up_proj.weight", "mlp.gate_proj.weight")),
        Rule("mlp.fc2.weight", ("mlp.down_proj.weight",)),
    ]


def of_mamba_ssm(family: Family) -> Family:
    """A family of flash-linear-attention's as mamba_ssm saves it."""

    def fields(keys: Keys) -> dict[str, Any]:
        return {**family.fields(keys), "intermediate_size": mlp_width(keys)}

    return replace(
        family,
        keys={**family.keys, **OWN},
        needs={**family.needs, "attn_layer_idx": ([],), "rms_norm": (True,), "d_ssm": (None,)},
        fields=fields,
        names_of_some=mlp_names,
        unused=(*family.unused, *OF_KERNELS),
        skeleton=SKELETON._replace(
            top={**SKELETON.top, "model.embed_tokens.weight": "backbone.embedding.weight"}
        ),
    )


# By model type, as `translated` has it.
OF_MAMBA_SSM = {MODEL_TYPE.format(kind): of_mamba_ssm(x) for kind, x in LAYERS.items()}
