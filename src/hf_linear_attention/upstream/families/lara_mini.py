# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""LaraMini: the gated delta rule."""

from ..family import Family
from ..replacements import (
    EXPERTS,
    GATED_DELTA,
    LATE_ROUNDED_NORM,
    LATE_ROUNDED_NORM_THEN_GATE,
)
from ..tiny_models import DELTA, HYBRID, MOE

FAMILIES = [
    Family(
        name="lara_mini",
        replaced={
            "LaraMiniGatedDeltaNet": GATED_DELTA,
            "LaraMiniRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
            "LaraMiniRMSNorm": LATE_ROUNDED_NORM,
            "LaraMiniExperts": EXPERTS,
        },
        sizes=dict(HYBRID, **DELTA, **MOE),
        model="LaraMiniModel",
        shares_sequences=True,
        layer="LaraMiniDecoderLayer",
        attention="LaraMiniAttention",
    )
]
