# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Granite 4: Mamba-2's state space."""

from ..family import Family
from ..replacements import EXPERTS, GATE_THEN_NORM, PLAIN_NORM, SSD_LAYER
from ..tiny_models import COMMON, STATE_SPACE

FAMILIES = [
    Family(
        name="granitemoehybrid",
        replaced={
            "GraniteMoeHybridMambaLayer": SSD_LAYER,
            "GraniteMoeHybridRMSNormGated": GATE_THEN_NORM,
            "GraniteMoeHybridRMSNorm": PLAIN_NORM,
            "GraniteMoeHybridExperts": EXPERTS,
        },
        sizes=dict(
            COMMON,
            **STATE_SPACE,
            layer_types=["mamba", "attention"],
            num_local_experts=3,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
        ),
        model="GraniteMoeHybridModel",
        shares_sequences=True,
        layer="GraniteMoeHybridDecoderLayer",
        masks_by_position=False,
        attention="GraniteMoeHybridAttention",
    )
]
