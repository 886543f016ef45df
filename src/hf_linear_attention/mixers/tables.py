# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The tables of mixers: what a decoder layer mixes its tokens by.

A mixer is a module made of (config, layer_idx). Its forward takes hidden states (B, T, C), the
`Tokens` and the cache, and returns hidden states (B, T, C) and attention weights or None; those of
RWKV's layers (`MixerFacts.block`) are called as these say. One with a cache of fixed size lists
its layer's `recurrences`.
"""

from torch import nn
from transformers import PreTrainedConfig

from .aaren import Aaren
from .comba import Comba
from .delta_product import GatedDeltaProduct
from .delta_rule import DeltaRule
from .facts import MIXERS, REGISTERED_MIXERS, MixerFacts
from .gdn2 import GatedDeltaNet2
from .hgrn import HGRN
from .linear_attention import LinearAttention
from .mamba2 import Mamba2
from .mamba3 import Mamba3
from .preconditioned import PreconditionedDeltaRule
from .rwkv6 import RWKV6, GatedShiftedMLP
from .rwkv7 import RWKV7, ShiftedMLP
from .softmax import LatentAttention, SoftmaxAttention
from .window import WindowedAttention

# By the config's `mixer`, in layers of the type "linear_attention"; `MIXERS` has their facts.
RECURRENT_MIXERS: dict[str, type[nn.Module]] = {
    "linear": LinearAttention,
    "aaren": Aaren,
    "delta_rule": DeltaRule,
    "delta_product": GatedDeltaProduct,
    "comba": Comba,
    "gdn2": GatedDeltaNet2,
    "preconditioned": PreconditionedDeltaRule,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "hgrn": HGRN,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "window": WindowedAttention,
}
SHIFTED_MLPS: dict[str, type[nn.Module]] = {  # in RWKV's layers
    "rwkv6": GatedShiftedMLP,
    "rwkv7": ShiftedMLP,
}
SOFTMAX_MODULES: dict[str, type[nn.Module]] = {  # by its `softmax_mixer`, in layers of other types
    "softmax": SoftmaxAttention,
    "mla": LatentAttention,
}


def build_mixer(config: PreTrainedConfig, layer_idx: int) -> nn.Module:
    """The mixer of one layer."""
    if not config.is_recurrent(layer_idx):
        return SOFTMAX_MODULES[config.softmax_mixer](config, layer_idx)
    return {**REGISTERED_MIXERS, **RECURRENT_MIXERS}[config.mixer](config, layer_idx)


def register_mixer(name: str, mixer: type[nn.Module]) -> None:
    """Makes a module a choice for a config's `mixer`, by that name. Its attribute `facts` says what
    the package is to know of it, its presets and what conversion may make of it among that.

    Saved models hold the name, not the class: whoever loads one registers it before.

    Raises:
        ValueError: the name belongs to the package, or mixer is no module with `facts`.
    """
    if name in MIXERS:
        raise ValueError(f"name must not be one of the package's own mixers, got {name!r}")
    is_mixer = isinstance(mixer, type) and issubclass(mixer, nn.Module)
    if not (is_mixer and isinstance(getattr(mixer, "facts", None), MixerFacts)):
        raise ValueError(
            "mixer must be a subclass of torch.nn.Module with facts, which are a MixerFacts, got "
            f"{mixer!r}"
        )
    REGISTERED_MIXERS[name] = mixer
