# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba-2."""

from ..drafts import DRAFTS_OF_MAMBA
from ..family import Family
from ..replacements import GATE_THEN_NORM, PLAIN_NORM, SSD_LAYER
from ..tiny_models import COMMON

FAMILIES = [
    Family(
        name="mamba2",
        replaced={
            "Mamba2Mixer": SSD_LAYER,
            "MambaRMSNormGated": GATE_THEN_NORM,
            "Mamba2RMSNorm": PLAIN_NORM,
        },
        sizes=dict(
            COMMON, num_heads=8, head_dim=8, state_size=12, n_groups=2, chunk_size=8, expand=2
        ),
        model="Mamba2Model",
        shares_sequences=True,
        layer="Mamba2Block",
        head="Mamba2ForCausalLM",
        drafts=DRAFTS_OF_MAMBA,
        head_hands_on=False,
    )
]
