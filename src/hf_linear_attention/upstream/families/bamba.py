# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bamba: Mamba-2's state space."""

from ..family import Family
from ..replacements import GATE_THEN_NORM, PLAIN_NORM, SSD_LAYER
from ..tiny_models import COMMON, STATE_SPACE

FAMILIES = [
    Family(
        name="bamba",
        replaced={
            "BambaMixer": SSD_LAYER,
            "BambaRMSNormGated": GATE_THEN_NORM,
            "BambaRMSNorm": PLAIN_NORM,
        },
        sizes=dict(COMMON, **STATE_SPACE, attn_layer_indices=[1]),
        model="BambaModel",
        shares_sequences=True,
        layer="BambaDecoderLayer",
        counts_positions=False,  # every token given by itself is at position 0
        attention="BambaAttention",
    )
]
