# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Nemotron-H: Mamba-2's state space."""

from ..family import Family
from ..replacements import EXPERTS, GATE_THEN_NORM, LATE_ROUNDED_NORM, SSD_LAYER
from ..tiny_models import COMMON

NORM_OF_NEMOTRON = LATE_ROUNDED_NORM._replace(
    sources={**LATE_ROUNDED_NORM.sources, "78ed4555aca3": "5.17"}  # which was a plain one
)
EXPERTS_OF_NEMOTRON = EXPERTS._replace(
    sources={"efab15fa11e2": "5.17", "b7b77eedb3e1": "5.18 to 5.24"}
)

FAMILIES = [
    Family(
        name="nemotron_h",
        replaced={
            "NemotronHMamba2Mixer": SSD_LAYER,
            "NemotronHRMSNormGated": GATE_THEN_NORM,
            "NemotronHRMSNorm": NORM_OF_NEMOTRON,
            "NemotronHExperts": EXPERTS_OF_NEMOTRON,
        },
        sizes=dict(
            COMMON,
            layers_block_type=["mamba", "attention"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=12,
            n_groups=2,
            chunk_size=8,
            head_dim=8,
        ),
        model="NemotronHModel",
        shares_sequences=True,
        layer="NemotronHBlock",
        attention="NemotronHAttention",
    )
]
