# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""xLSTM: the matrix memory (mLSTM)."""

from ..drafts import DRAFTS_OF_XLSTM
from ..family import IN_OTHER_WAYS, Family
from ..layers.xlstm import MatrixMemoryLayer
from ..norms import LayerNormOfHeads, NormOfXLSTM
from ..replacements import PLAIN_NORM, Replacement
from ..tiny_models import COMMON

MATRIX_MEMORY = Replacement(
    MatrixMemoryLayer,
    "matrix memory",
    {"6a6b7f3017f7": "5.17 to 5.21", "0beb5964bf24": "5.22 to 5.24"},
    (
        "mlstm_chunkwise_native_autograd",
        "mlstm_chunkwise_parallel_fw_H",
        "mlstm_chunkwise_recurrent_fw_C",
        "mlstm_recurrent_sequence_native",
        "mlstm_recurrent_step_native",
        "soft_cap",
        "wrap_chunkwise_arbitrary_sequence_length",
        "wrap_chunkwise_pad_zeros",
        "xLSTMBackend",
    ),
)
NORM_OF_XLSTM = PLAIN_NORM._replace(ours=NormOfXLSTM, sources={"4c801489e13b": "5.17 to 5.24"})
LAYER_NORM_OF_HEADS = PLAIN_NORM._replace(
    ours=LayerNormOfHeads, sources={"c8e662203e5a": "5.17 to 5.24"}
)

FAMILIES = [
    Family(
        name="xlstm",
        replaced={
            "xLSTMLayer": MATRIX_MEMORY,
            "xLSTMMultiHeadLayerNorm": LAYER_NORM_OF_HEADS,
            "xLSTMRMSNorm": NORM_OF_XLSTM,
        },
        sizes=dict(
            COMMON,
            hidden_size=64,
            qk_dim_factor=1.0,  # else the cache has other dims than layers, so small ones
            v_dim_factor=2.0,
            ffn_proj_factor=0.5,
            num_heads=4,
            chunk_size=8,
        ),
        model="xLSTMModel",
        why_no_trees=IN_OTHER_WAYS,
        head="xLSTMForCausalLM",
        drafts=DRAFTS_OF_XLSTM,
        hands_on="state",
    )
]
