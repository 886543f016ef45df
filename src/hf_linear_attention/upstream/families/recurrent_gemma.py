# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RecurrentGemma: the RG-LRU."""

from ..family import IN_OTHER_WAYS, Family
from ..heads import KeepsStatesOnModules
from ..layers.rg_lru import GatedUnit, RecurrentBlock
from ..replacements import ONE_MORE_NORM, Replacement
from ..tiny_models import COMMON

RG_LRU = Replacement(GatedUnit, "RG-LRU", {"71f2fa348778": "5.17 to 5.24"})
BLOCK_OF_RG_LRU = Replacement(RecurrentBlock, "short convolution", {"293cf2e4cdc4": "5.17 to 5.24"})
# Why continuous batching can't serve it.
ON_MODULES = "the states of its recurrent layers are on its modules, a row for each sequence"

FAMILIES = [
    Family(
        name="recurrent_gemma",
        replaced={
            "RecurrentGemmaRecurrentBlock": BLOCK_OF_RG_LRU,
            "RecurrentGemmaRglru": RG_LRU,
            "RecurrentGemmaRMSNorm": ONE_MORE_NORM,
        },
        sizes=dict(
            COMMON, num_hidden_layers=3, lru_width=40, attention_window_size=6, conv1d_width=4
        ),
        model="RecurrentGemmaModel",
        why_no_trees=IN_OTHER_WAYS,
        head="RecurrentGemmaForCausalLM",
        beams=KeepsStatesOnModules,
        why_not_served=ON_MODULES,
    )
]
