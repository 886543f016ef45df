# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Normalizers by name: the norm, and the gate if there is one, between a layer's heads and its last
projection.

The config reads this table; output_norm.py has the modules.
"""

from typing import NamedTuple


class Normalizer(NamedTuple):
    """over: what is brought to unit mean square: every "head", the heads that share a key
    ("group"), "all" heads at once, or None: nothing.
    """

    over: str | None
    is_gated: bool = True
    gate_is_first: bool = False  # the norm is of what the gate has let through


# By the config's `normalizer`; None: attention is divided by its own sum of weights.
NORMALIZERS: dict[str, Normalizer | None] = {
    "z": None,
    "layer_norm": None,  # RWKV, whose own it is
    "rms_norm": Normalizer("head", is_gated=False),  # DeltaNet
    "gated_rms_norm": Normalizer("head"),  # RetNet, GLA, Gated DeltaNet
    "gated_rms_norm_of_all_heads": Normalizer("all"),  # MiniMax
    "rms_norm_of_all_heads": Normalizer("all", is_gated=False),  # HGRN2
    "gate": Normalizer(None),  # Mamba-3
    "rms_norm_of_gated": Normalizer("group", gate_is_first=True),  # Mamba-2
}
