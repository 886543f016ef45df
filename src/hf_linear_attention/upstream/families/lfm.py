# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""LFM2 and LFM3: short convolutions."""

from ..family import Family
from ..replacements import EXPERTS, GATED_CONVOLUTION, PLAIN_NORM
from ..tiny_models import COMMON, FULL

CONVOLVED = dict(layer_types=["conv", FULL], conv_L_cache=4)

FAMILIES = [
    Family(
        name="lfm2",
        replaced={"Lfm2ShortConv": GATED_CONVOLUTION, "Lfm2RMSNorm": PLAIN_NORM},
        sizes=dict(COMMON, **CONVOLVED, block_multiple_of=8),
        model="Lfm2Model",
        layer="Lfm2DecoderLayer",
        hands_on="seq_idx",
        attention="Lfm2Attention",
    ),
    Family(
        name="lfm2_moe",
        replaced={
            "Lfm2MoeShortConv": GATED_CONVOLUTION,
            "Lfm2MoeRMSNorm": PLAIN_NORM,
            "Lfm2MoeExperts": EXPERTS,
        },
        sizes=dict(
            COMMON,
            **CONVOLVED,
            moe_intermediate_size=24,
            num_experts=3,
            num_experts_per_tok=2,
            num_dense_layers=1,
        ),
        model="Lfm2MoeModel",
        layer="Lfm2MoeDecoderLayer",
        hands_on="seq_idx",
        attention="Lfm2MoeAttention",
    ),
    Family(
        name="lfm3",
        replaced={"Lfm3ShortConv": GATED_CONVOLUTION, "Lfm3RMSNorm": PLAIN_NORM},
        sizes=dict(COMMON, **CONVOLVED, head_dim=8),
        model="Lfm3Model",
        layer="Lfm3DecoderLayer",
        attention="Lfm3Attention",
    ),
]
