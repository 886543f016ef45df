# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Falcon-H1: Mamba-2's state space beside softmax attention."""

from ..family import Family
from ..layers.ssd import SSDOfFalcon
from ..norms import NormOfFalcon
from ..replacements import NORM_THEN_GATE, PLAIN_NORM, SSD_LAYER
from ..tiny_models import COMMON, STATE_SPACE

SSD_OF_FALCON = SSD_LAYER._replace(
    ours=SSDOfFalcon,
    sources={
        "6499622a7f34": "5.17",
        "728bc8a095b3": "5.20",
        "4ed845dc6c84": "5.21 to 5.23",
        "3fd9b7f72efc": "5.24",
    },
)
NORM_OF_FALCON = NORM_THEN_GATE._replace(
    ours=NormOfFalcon, sources={"71372cf4e12c": "5.17 to 5.20", "2f45cd599fdc": "5.21 to 5.24"}
)

FAMILIES = [
    Family(
        name="falcon_h1",
        replaced={
            "FalconH1Mixer": SSD_OF_FALCON,
            "FalconH1RMSNormGated": NORM_OF_FALCON,
            "FalconH1RMSNorm": PLAIN_NORM,
        },
        sizes=dict(COMMON, **STATE_SPACE, mamba_d_ssm=64, head_dim=8),
        model="FalconH1Model",
        shares_sequences=True,
        attention="FalconH1Attention",
    )
]
