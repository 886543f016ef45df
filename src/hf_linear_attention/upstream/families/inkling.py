# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Inkling's: short convolutions beside softmax attention."""

from ..family import BY_PLACE, CONVOLVED, Family
from ..layers.residual_convolution import (
    ConvolutionOfTokens,
    EarlierScaledConvolution,
    ResidualConvolution,
    ScaledConvolution,
)
from ..replacements import (
    CACHE,
    EXPERTS,
    GATED_CONVOLUTION,
    LATE_ROUNDED_NORM,
    PLAIN_NORM,
    Replacement,
)
from ..tiny_models import COMMON, VOCAB_SIZE

# A sliding and a full layer, each with four convolutions, and experts.
INKLING = dict(
    COMMON,
    layer_types=["hybrid_sliding", "hybrid"],
    head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_head_dim=8,
    sliding_window_size=6,
    d_rel=4,
    rel_extent=16,
    moe_intermediate_size=24,
    n_routed_experts=3,
    num_experts_per_tok=2,
)
INKLING2 = dict(unpadded_vocab_size=VOCAB_SIZE - 2, n_layers_per_attn_res_block=1)
RESIDUAL_CONVOLUTION = GATED_CONVOLUTION._replace(
    ours=ResidualConvolution, sources={"98aef4d4520d": "5.21 to 5.23", "f78fa1fb9aad": "5.24"}
)
EARLIER_SCALED_CONVOLUTION = GATED_CONVOLUTION._replace(
    ours=EarlierScaledConvolution, sources={"2e0f132603f9": "5.23"}
)
SCALED_CONVOLUTION = GATED_CONVOLUTION._replace(
    ours=ScaledConvolution, sources={"cf0557968c17": "5.24"}, earlier=EARLIER_SCALED_CONVOLUTION
)
CONVOLUTION_OF_TOKENS = Replacement(
    ConvolutionOfTokens,
    "short convolution",
    {"7d87bb668adf": "5.23", "ae9ba3eb5778": "5.24"},
    ("apply_mask_to_padding_states", *CACHE),
)
EXPERTS_OF_INKLING2 = EXPERTS._replace(sources={"9b059a60b9f7": "5.23 to 5.24"})

FAMILIES = [
    Family(
        name="inkling",
        replaced={
            "InklingShortConvolution": RESIDUAL_CONVOLUTION,
            "InklingRMSNorm": PLAIN_NORM,
            "InklingExperts": EXPERTS,
        },
        sizes=dict(
            INKLING,
            mlp_layer_types=["dense", "sparse"],
            n_shared_experts=1,
            unpadded_vocab_size=VOCAB_SIZE - 2,
            log_scaling_n_floor=32,
        ),
        model="InklingTextModel",
        why_no_trees=BY_PLACE,
        hands_on="mask",
        longest_row="log_scaling_n_floor",
        why_not_served=CONVOLVED,
    ),
    Family(
        name="inkling2",
        replaced={
            "Inkling2ShortConvolution": SCALED_CONVOLUTION,
            "Inkling2DynamicShortConvolution": CONVOLUTION_OF_TOKENS,
            "Inkling2RMSNorm": LATE_ROUNDED_NORM,
            "Inkling2Experts": EXPERTS_OF_INKLING2,
        },
        sizes=dict(INKLING, **INKLING2, log_scaling_n_floor=8),
        model="Inkling2TextModel",
        why_no_trees=BY_PLACE,
        hands_on="mask",
        why_not_served=CONVOLVED,
    ),
    Family(
        name="inkling2_loop",
        replaced={
            "Inkling2LoopShortConvolution": SCALED_CONVOLUTION,
            "Inkling2LoopDynamicShortConvolution": CONVOLUTION_OF_TOKENS,
            "Inkling2LoopRMSNorm": LATE_ROUNDED_NORM,
            "Inkling2LoopExperts": EXPERTS_OF_INKLING2,
        },
        sizes=dict(
            INKLING,
            **INKLING2,
            loop_layer_index_start=1,
            loop_layer_index_end=2,
            loop_num_passes=2,
            loop_gate_rank=4,
            log_scaling_n_floor=8,
        ),
        model="Inkling2LoopTextModel",
        why_no_trees=BY_PLACE,
        hands_on="mask",
        why_not_served=CONVOLVED,
    ),
]
