# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""GLM-5 Next: Kimi delta attention, and softmax layers whose keys an indexer chooses."""

from ..family import CHOSEN, INDEXED, Family
from ..layers.indexer import PackedIndexer
from ..replacements import (
    EXPERTS,
    KDA_LAYER,
    LATE_ROUNDED_NORM_THEN_GATE,
    PLAIN_NORM,
    Replacement,
)
from ..tiny_models import HYBRID, LATENT

PACKED_INDEXER = Replacement(
    PackedIndexer,
    "indexer of packed sequences",
    {"a6d7941c917e": "5.17", "4c48dba6bf3c": "5.20 to 5.23", "26dc6fea0c90": "5.24"},
    ("Glm5NextTextAttention",),
    is_recurrent=False,
)
EXPERTS_OF_GLM5 = EXPERTS._replace(sources={"ec83af9fb078": "5.17", "cf7bd57fab07": "5.18 to 5.24"})

FAMILIES = [
    Family(
        name="glm5_next",
        replaced={
            "Glm5NextTextLinearAttention": KDA_LAYER,
            "Glm5NextTextIndexer": PACKED_INDEXER,
            "Glm5NextTextRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
            "Glm5NextTextRMSNorm": PLAIN_NORM,
            "Glm5NextTextExperts": EXPERTS_OF_GLM5,
        },
        sizes=dict(
            HYBRID,
            **{**LATENT, "qk_rope_head_dim": 0, "topk_group": 1, "n_group": 1},
            linear_head_dim=12,
            linear_num_heads=4,
            q_lora_rank=16,
            hc_mult=2,
            index_topk=64,
            index_head_dim=8,
            index_n_heads=2,
            index_kpool=1,
            mlp_layer_types=["dense", "dense"],
        ),
        model="Glm5NextTextModel",
        why_no_trees=CHOSEN,
        layer="Glm5NextTextDecoderLayer",
        hands_on="mask",
        indexer="Glm5NextTextIndexer",
        why_not_served=INDEXED,
    )
]
