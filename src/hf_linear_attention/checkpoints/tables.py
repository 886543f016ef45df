# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The table of families: the model types of flash-linear-attention that load here."""

from .families.delta_rule import (
    COMBA,
    DELTA_NET,
    GATED_DELTANET,
    GATED_DELTAPRODUCT,
    KDA,
    PRECOND_GATED_DELTANET,
    PRECOND_KDA,
)
from .families.linear_attention import GLA, HGRN, HGRN2, LINEAR_ATTN, RETNET
from .families.mamba2 import MAMBA2
from .families.mamba3 import MAMBA3
from .families.mamba_ssm import OF_MAMBA_SSM
from .families.rwkv6 import RWKV6
from .families.rwkv7 import RWKV7
from .families.transformer import TRANSFORMER
from .family import Family, Keys

FAMILIES: dict[str, Family] = {  # by model type
    "linear_attn": LINEAR_ATTN,
    "retnet": RETNET,
    "gla": GLA,
    "hgrn": HGRN,
    "hgrn2": HGRN2,
    "delta_net": DELTA_NET,
    "gated_deltanet": GATED_DELTANET,
    "gated_deltaproduct": GATED_DELTAPRODUCT,
    "comba": COMBA,
    "kda": KDA,
    "precond_gated_deltanet": PRECOND_GATED_DELTANET,
    "precond_kda": PRECOND_KDA,
    "mamba2": MAMBA2,
    "mamba3": MAMBA3,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "transformer": TRANSFORMER,
}
# The other model types of fla 0.6.0, and the parts of them that our mixers do not compute.
NOT_COMPUTED = {
    "abc": "slots of memory",
    "bitnet": "weights of three values",
    "deltaformer": "softmax over a delta rule",
    "forgetting_transformer": "softmax attention that decays",
    "gsa": "slots of memory",
    "lightnet": "normalised keys",
    "log_linear_mamba2": "states in a hierarchy",
    "mamba": "Mamba's state space; Transformers loads it",
    "mesa_net": "a system of equations for each token",
    "mla": "latent attention with positions",
    "mom": "a mixture of memories",
    "nsa": "sparse softmax attention",
    "path_attn": "positions of products",
    "rodimus": "its own gates",
    "samba": "Mamba's state space",
}


def family_of(config: Keys) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: its model type does not load here; the message lists the model types that do.
    """
    model_type = str(config.get("model_type"))
    if model_type == "linear_attention":
        raise ValueError("it is a model of this package, which from_pretrained loads")
    families = FAMILIES | OF_MAMBA_SSM
    if model_type not in families:
        what = NOT_COMPUTED.get(model_type)
        why = "" if what is None else f", whose layers have {what}"
        raise ValueError(
            f"model_type of its config.json must be one of {', '.join(map(repr, FAMILIES))}, got "
            f"{model_type!r}{why}"
        )
    return families[model_type]
