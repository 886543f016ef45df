# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Qwen's: three kinds with the gated delta rule, and Qwen4's."""

from ..family import CHOSEN, INDEXED, Family
from ..layers.gated_delta import GatedDeltaOfQwen3Next
from ..norms import OneMoreNormOfGroups
from ..replacements import EXPERTS, GATED_DELTA, NORM_THEN_GATE, ONE_MORE_NORM, PLAIN_NORM
from ..tiny_models import DELTA, HYBRID, MOE

GATED_DELTA_OF_QWEN3_NEXT = GATED_DELTA._replace(
    ours=GatedDeltaOfQwen3Next,
    sources={
        "80b4815c9e55": "5.17 to 5.20",
        "a30c4c97f167": "5.21 to 5.22",
        "644a61655baf": "5.23",
        "c58106a3cba5": "5.24",
    },
)
ONE_MORE_NORM_OF_GROUPS = PLAIN_NORM._replace(
    ours=OneMoreNormOfGroups, sources={"e89686c5e50a": "5.17 to 5.24"}
)

FAMILIES = [
    Family(
        name="qwen3_next",
        replaced={
            "Qwen3NextGatedDeltaNet": GATED_DELTA_OF_QWEN3_NEXT,
            "Qwen3NextRMSNormGated": NORM_THEN_GATE,
            "Qwen3NextRMSNorm": ONE_MORE_NORM,
            "Qwen3NextExperts": EXPERTS,
        },
        sizes=dict(HYBRID, **DELTA, **MOE),
        model="Qwen3NextModel",
        shares_sequences=True,
        layer="Qwen3NextDecoderLayer",
        attention="Qwen3NextAttention",
    ),
    Family(
        name="qwen3_5",
        replaced={
            "Qwen3_5GatedDeltaNet": GATED_DELTA,
            "Qwen3_5RMSNormGated": NORM_THEN_GATE,
            "Qwen3_5RMSNorm": ONE_MORE_NORM,
        },
        sizes=dict(HYBRID, **DELTA),
        model="Qwen3_5TextModel",
        shares_sequences=True,
        layer="Qwen3_5DecoderLayer",
        attention="Qwen3_5Attention",
    ),
    Family(
        name="qwen3_5_moe",
        replaced={
            "Qwen3_5MoeGatedDeltaNet": GATED_DELTA,
            "Qwen3_5MoeRMSNormGated": NORM_THEN_GATE,
            "Qwen3_5MoeRMSNorm": ONE_MORE_NORM,
            "Qwen3_5MoeExperts": EXPERTS,
        },
        sizes=dict(HYBRID, **DELTA, **MOE),
        model="Qwen3_5MoeTextModel",
        shares_sequences=True,
        layer="Qwen3_5MoeDecoderLayer",
        attention="Qwen3_5MoeAttention",
    ),
    Family(
        name="qwen4_exp",
        replaced={
            "Qwen4ExpTextGatedDeltaNet": GATED_DELTA,
            "Qwen4ExpTextRMSNormGated": NORM_THEN_GATE,
            "Qwen4ExpTextRMSNorm": ONE_MORE_NORM_OF_GROUPS,
            "Qwen4ExpTextExperts": EXPERTS,
        },
        sizes=dict(
            HYBRID,
            **DELTA,
            **MOE,
            hc_count=2,
            hc_lowrank=8,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=64,
            indexer_compress_ratio=1,
        ),
        model="Qwen4ExpTextModel",
        why_no_trees=CHOSEN,
        layer="Qwen4ExpTextDecoderLayer",
        why_not_served=INDEXED,
    ),
]
