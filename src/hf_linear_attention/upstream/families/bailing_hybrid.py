# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bailing's hybrid: Kimi delta attention."""

from ..family import Family
from ..layers.kda import KDAOfBailing
from ..replacements import EXPERTS, KDA_LAYER, LATE_ROUNDED_NORM_THEN_GATE, PLAIN_NORM
from ..tiny_models import HYBRID, LATENT

KDA_OF_BAILING = KDA_LAYER._replace(
    ours=KDAOfBailing,
    sources={"0328b9beefc7": "5.20", "571943191a51": "5.21 to 5.23", "62c5b75db11b": "5.24"},
)

FAMILIES = [
    Family(
        name="bailing_hybrid",
        replaced={
            "BailingHybridDeltaAttention": KDA_OF_BAILING,
            "BailingHybridRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
            "BailingHybridRMSNorm": PLAIN_NORM,
            "BailingHybridExperts": EXPERTS,
        },
        sizes=dict(HYBRID, **LATENT, head_dim=12, mlp_layer_types=["dense", "sparse"]),
        model="BailingHybridModel",
        shares_sequences=True,
        layer="BailingHybridDecoderLayer",
        attention="BailingHybridAttention",
        is_latent=True,
    )
]
