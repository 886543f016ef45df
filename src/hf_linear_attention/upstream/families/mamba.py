# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Mamba and Falcon-Mamba."""

from ..drafts import DRAFTS_OF_MAMBA
from ..family import Family
from ..replacements import MAMBA1_LAYER, MAMBA1_WITH_NORMS, PLAIN_NORM
from ..tiny_models import COMMON

FAMILIES = [
    Family(
        name="mamba",
        replaced={"MambaMixer": MAMBA1_LAYER, "MambaRMSNorm": PLAIN_NORM},
        sizes=dict(COMMON, state_size=12, conv_kernel=4, time_step_rank=5),
        model="MambaModel",
        layer="MambaBlock",
        head="MambaForCausalLM",
        drafts=DRAFTS_OF_MAMBA,
        head_hands_on=False,
        hands_on="mask",
    ),
    Family(
        name="falcon_mamba",
        replaced={"FalconMambaMixer": MAMBA1_WITH_NORMS, "FalconMambaRMSNorm": PLAIN_NORM},
        sizes=dict(COMMON, state_size=12, conv_kernel=4, time_step_rank=5),
        model="FalconMambaModel",
        layer="FalconMambaBlock",
        head="FalconMambaForCausalLM",
        drafts=DRAFTS_OF_MAMBA,
        head_hands_on=False,
        hands_on="mask",
    ),
]
