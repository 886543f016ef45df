# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Jamba: Mamba's state space."""

from ..family import Family
from ..replacements import EXPERTS, MAMBA1_WITH_NORMS, PLAIN_NORM
from ..tiny_models import COMMON

FAMILIES = [
    Family(
        name="jamba",
        replaced={
            "JambaMambaMixer": MAMBA1_WITH_NORMS,
            "JambaRMSNorm": PLAIN_NORM,
            "JambaExperts": EXPERTS,
        },
        sizes=dict(
            COMMON,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=12,
            mamba_d_conv=4,
            mamba_dt_rank=5,
            mamba_expand=2,
            num_experts=3,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
        ),
        model="JambaModel",
        layer="JambaMambaDecoderLayer",
        hands_on="mask",
        attention="JambaAttention",
    )
]
