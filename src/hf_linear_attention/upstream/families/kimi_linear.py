# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Kimi Linear: Kimi delta attention."""

from ..family import Family
from ..replacements import EXPERTS, KDA_LAYER, LATE_ROUNDED_NORM_THEN_GATE, PLAIN_NORM
from ..tiny_models import HYBRID, LATENT

FAMILIES = [
    Family(
        name="kimi_linear",
        replaced={
            "KimiLinearDeltaAttention": KDA_LAYER,
            "KimiLinearRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
            "KimiLinearRMSNorm": PLAIN_NORM,
            "KimiLinearExperts": EXPERTS,
        },
        sizes=dict(HYBRID, **LATENT, linear_head_dim=12, linear_num_heads=4),
        model="KimiLinearModel",
        shares_sequences=True,
        layer="KimiLinearDecoderLayer",
        attention="KimiLinearAttention",
        is_latent=True,
    )
]
