# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""ZAYA: convolutions of queries and keys, and delayed values, before softmax attention."""

from ..family import CONVOLVED, Family
from ..layers.compressed_projection import CompressedProjection
from ..replacements import CACHE, PLAIN_NORM, Replacement
from ..tiny_models import COMMON

COMPRESSED_PROJECTION = Replacement(
    CompressedProjection,
    "compressed projection",
    {"3a61067ef703": "5.17 to 5.20", "d69ca827fb48": "5.21 to 5.23", "7085dcb6c11b": "5.24"},
    ("repeat_kv", *CACHE),
)

FAMILIES = [
    Family(
        name="zaya",
        replaced={"ZayaCCAProjection": COMPRESSED_PROJECTION, "ZayaRMSNorm": PLAIN_NORM},
        sizes=dict(
            COMMON,
            layer_types=["hybrid", "hybrid"],
            head_dim=8,
            num_experts=3,
            num_experts_per_tok=1,
            moe_intermediate_size=24,
            router_hidden_size=16,
            cca_time0=3,
        ),
        model="ZayaModel",
        hands_on="mask",
        why_not_served=CONVOLVED,
    )
]
