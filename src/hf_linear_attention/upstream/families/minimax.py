# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""MiniMax: lightning attention."""

from ..drafts import DraftsOfMiniMax
from ..family import Family
from ..layers.lightning import Lightning
from ..replacements import EXPERTS, PLAIN_NORM, Replacement
from ..tiny_models import COMMON, FULL, LINEAR

LIGHTNING = Replacement(
    Lightning,
    "lightning attention",
    {"c85696f6fdd9": "5.17", "9e144d179b29": "5.20 to 5.23", "b68b0915c82e": "5.24"},
    ("apply_mask_to_padding_states", "MiniMaxCache"),
)

FAMILIES = [
    Family(
        name="minimax",
        replaced={
            "MiniMaxLightningAttention": LIGHTNING,
            "MiniMaxRMSNorm": PLAIN_NORM,
            "MiniMaxExperts": EXPERTS,
        },
        sizes=dict(
            COMMON,
            layer_types=[FULL, LINEAR],
            block_size=8,
            num_local_experts=3,
            num_experts_per_tok=2,
            head_dim=8,
        ),
        model="MiniMaxModel",
        shares_sequences=True,
        head="MiniMaxForCausalLM",
        drafts=DraftsOfMiniMax,
        attention="MiniMaxAttention",
        never_with="sliding_window",
    )
]
