# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""OLMo Hybrid: the gated delta rule."""

from ..family import Family
from ..layers.gated_delta import GatedDeltaOfOlmo
from ..replacements import GATED_DELTA, LATE_ROUNDED_NORM, NORM_THEN_GATE
from ..tiny_models import DELTA, HYBRID

GATED_DELTA_OF_OLMO = GATED_DELTA._replace(
    ours=GatedDeltaOfOlmo,
    sources={
        "278eb4ca725d": "5.17 to 5.20",
        "4b5ba2da5026": "5.21 to 5.22",
        "07b7e99af4a8": "5.23",
        "ee274c947b79": "5.24",
    },
)

FAMILIES = [
    Family(
        name="olmo_hybrid",
        replaced={
            "OlmoHybridGatedDeltaNet": GATED_DELTA_OF_OLMO,
            "OlmoHybridRMSNormGated": NORM_THEN_GATE,
            "OlmoHybridRMSNorm": LATE_ROUNDED_NORM,
        },
        sizes=dict(HYBRID, **DELTA),
        model="OlmoHybridModel",
        shares_sequences=True,
        layer="OlmoHybridLinearAttentionDecoderLayer",
        attention="OlmoHybridAttention",
    )
]
