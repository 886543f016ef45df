# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of Transformers' recurrent families with the settings of a real one, on which a
replacement for a new source is proved.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 64
LINEAR, FULL = "linear_attention", "full_attention"
COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
HYBRID = dict(COMMON, layer_types=[LINEAR, FULL])
MOE = dict(
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_experts=3,
    num_experts_per_tok=2,
)
DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=12,
    linear_value_head_dim=16,
    head_dim=16,
)
# Heads and sizes of the state space, under the names of most models.
STATE_SPACE = dict(
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=12,
    mamba_n_groups=2,
    mamba_chunk_size=8,
    mamba_expand=2,
)

# Multi-head latent attention, and experts.
LATENT = dict(
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    num_key_value_heads=4,
    moe_intermediate_size=24,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=2,
)


def tiny_config(config: PreTrainedConfig, sizes: Mapping[str, Any]) -> PreTrainedConfig:
    """One with all the settings of a text model's config, and tiny sizes."""
    tiny = type(config)(**settings_of(config, sizes), **sizes)
    tiny._attn_implementation = "eager"
    tiny._experts_implementation = "eager"
    return tiny


def settings_of(config: PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config that are no sizes: switches, names of functions, real numbers and limits
    of them, and lengths of convolutions.
    """
    fields = {name: x for name, x in config.to_dict().items() if name not in sizes}
    return {name: x for name, x in fields.items() if _is_setting(name, x)}


NO_SETTINGS = ("dtype", "torch_dtype", "model_type", "transformers_version")


def _is_setting(name: str, x: Any) -> bool:
    if name.startswith("_") or name in NO_SETTINGS:
        return False
    if isinstance(x, (list, tuple)):
        return bool(x) and all(isinstance(one, float) for one in x)
    return isinstance(x, (bool, str, float)) or (isinstance(x, int) and "conv" in name)


def fill_weights(model: nn.Module, generator: torch.Generator) -> None:
    """With random numbers so large that a wrong state changes the answers."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            if weight.dim() > 1 and "A_log" not in name:
                weight.copy_(drawn * (0.4 if "conv" in name else weight.shape[-1] ** -0.5))
            else:
                weight.add_(0.1 * drawn)


def innermost_model(root: nn.Module, layer: nn.Module) -> PreTrainedModel | None:
    """The innermost model of Transformers in a module that holds a layer."""
    innermost = None
    for part in root.modules():
        if isinstance(part, PreTrainedModel) and any(x is layer for x in part.modules()):
            innermost = part
    return innermost
