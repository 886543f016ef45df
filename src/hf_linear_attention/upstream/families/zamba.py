# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Zamba, with Mamba's state space, and Zamba2, with Mamba-2's."""

from ..family import Family
from ..layers.mamba1 import Mamba1OfZamba
from ..replacements import GATE_THEN_NORM, MAMBA1_LAYER, PLAIN_NORM, SSD_LAYER
from ..tiny_models import COMMON

# Why continuous batching can't serve them.
SHARED = "its softmax layers are one module, and pages are found by a module's number"
MAMBA1_OF_ZAMBA = MAMBA1_LAYER._replace(
    ours=Mamba1OfZamba,
    sources={
        "a6f1a6cd9171": "5.17",
        "91663e2dcaf8": "5.20",
        "1075f7cf5ed1": "5.21 to 5.23",
        "b28fa86fc771": "5.24",
    },
)

FAMILIES = [
    Family(
        name="zamba",
        replaced={"ZambaMambaMixer": MAMBA1_OF_ZAMBA, "ZambaRMSNorm": PLAIN_NORM},
        sizes=dict(
            COMMON,
            layers_block_type=["linear_attention", "hybrid"],
            mamba_d_state=12,
            mamba_d_conv=4,
            mamba_dt_rank=5,
            mamba_expand=2,
            n_mamba_heads=2,
            attention_head_dim=16,
            attention_hidden_size=64,
        ),
        model="ZambaModel",
        layer="ZambaMambaDecoderLayer",
        why_not_served=SHARED,
    ),
    Family(
        name="zamba2",
        replaced={
            "Zamba2MambaMixer": SSD_LAYER,
            "Zamba2RMSNormGated": GATE_THEN_NORM,
            "Zamba2RMSNorm": PLAIN_NORM,
        },
        sizes=dict(
            COMMON,
            layers_block_type=["mamba", "hybrid"],
            mamba_d_state=12,
            mamba_headdim=8,
            mamba_ngroups=2,
            chunk_size=8,
            n_mamba_heads=8,
            mamba_expand=2,
            attention_head_dim=16,
        ),
        model="Zamba2Model",
        shares_sequences=True,
        layer="Zamba2MambaDecoderLayer",
        why_not_served=SHARED,
    ),
]
