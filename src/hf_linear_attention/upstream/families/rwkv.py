# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-4."""

from ..family import IN_OTHER_WAYS, Family
from ..heads import ListsStates
from ..layers.wkv import WKV, GatedShift
from ..replacements import Replacement
from ..tiny_models import COMMON

MEANS = Replacement(
    WKV,
    "WKV",
    {"8fc47c48f5d4": "5.17 to 5.24"},
    ("rwkv_linear_attention", "rwkv_linear_attention_cpu"),
)
GATED_SHIFT = Replacement(GatedShift, "token shift", {"adff0add2184": "5.17 to 5.24"})
# Why continuous batching can't serve it.
LISTED = "its model keeps the states of all layers in one list, a row for each sequence"

FAMILIES = [
    Family(
        name="rwkv",
        replaced={"RwkvSelfAttention": MEANS, "RwkvFeedForward": GATED_SHIFT},
        sizes=dict(COMMON, context_length=256),
        model="RwkvModel",
        why_no_trees=IN_OTHER_WAYS,
        head="RwkvForCausalLM",
        beams=ListsStates,
        head_hands_on=False,
        hands_on="states",
        why_not_served=LISTED,
    )
]
