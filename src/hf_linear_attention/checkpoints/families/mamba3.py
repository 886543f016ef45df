# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-3 with one input and output (SISO) as flash-linear-attention has it. in_proj of that model
is split into several modules here.
"""

from typing import Any

from ...model.presets import preset_fields
from ..family import Family, Keys, Rule, same, shared_fields, weights
from .mamba2 import KEYS, SKELETON, mamba_fields, mamba_keys

PROJECTED = ("g", "v", "B", "C", "dt", "A", "trap", "angle")  # in_proj, in this order
OWN = ("rope_fraction", "A_floor")  # keys that are fields of ours of the same name


def mamba3_fields(keys: Keys) -> dict[str, Any]:
    return {
        **preset_fields("mamba3", keys["num_hidden_layers"]),
        **mamba_fields(keys),
        "rms_norm_eps": keys["norm_eps"],
        "scale_embeddings": False,
        **{name: keys[name] for name in OWN},
    }


def mamba3_keys(config: Any) -> Keys:
    return {**mamba_keys(config, "mamba3"), **{name: getattr(config, name) for name in OWN}}


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
        **KEYS,
        "rope_fraction": 0.5,
        "A_floor": 1e-4,
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
