# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of Transformers' recurrent families, with the settings of a real one: on these it is
tried whether a replacement answers as a source that nobody has read yet.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 64
LINEAR, FULL = "linear_attention", "full_attention"
CONVOLVED = dict(layer_types=["conv", FULL], conv_L_cache=4)
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

# model of Transformers -> sizes in the config of its text model
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(HYBRID, **DELTA, **MOE),
    "qwen3_5": dict(HYBRID, **DELTA),
    "qwen3_5_moe": dict(HYBRID, **DELTA, **MOE),
    "lara_mini": dict(HYBRID, **DELTA, **MOE),
    "olmo_hybrid": dict(HYBRID, **DELTA),
    "qwen4_exp": dict(
        HYBRID,
        **DELTA,
        **MOE,
        hc_count=2,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=64,
        indexer_compress_ratio=1,
    ),
    "mamba": dict(COMMON, state_size=12, conv_kernel=4, time_step_rank=5),
    "falcon_mamba": dict(COMMON, state_size=12, conv_kernel=4, time_step_rank=5),
    "jamba": dict(
        COMMON,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=12,
        mamba_d_conv=4,
        mamba_dt_rank=5,
        mamba_expand=2,
        num_experts=3,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "zamba": dict(
        COMMON,
        layers_block_type=["linear_attention", "hybrid"],
        mamba_d_state=12,
        mamba_d_conv=4,
        mamba_dt_rank=5,
        mamba_expand=2,
        n_mamba_heads=2,
        attention_head_dim=16,
        attention_hidden_size=64,
    ),
    "mamba2": dict(
        COMMON, num_heads=8, head_dim=8, state_size=12, n_groups=2, chunk_size=8, expand=2
    ),
    "bamba": dict(COMMON, **STATE_SPACE, attn_layer_indices=[1]),
    "granitemoehybrid": dict(
        COMMON,
        **STATE_SPACE,
        layer_types=["mamba", "attention"],
        num_local_experts=3,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
    ),
    "nemotron_h": dict(
        COMMON,
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=12,
        n_groups=2,
        chunk_size=8,
        head_dim=8,
    ),
    "zamba2": dict(
        COMMON,
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=12,
        mamba_headdim=8,
        mamba_ngroups=2,
        chunk_size=8,
        n_mamba_heads=8,
        mamba_expand=2,
        attention_head_dim=16,
    ),
    "falcon_h1": dict(COMMON, **STATE_SPACE, mamba_d_ssm=64, head_dim=8),
    "kimi_linear": dict(HYBRID, **LATENT, linear_head_dim=12, linear_num_heads=4),
    "glm5_next": dict(
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
    "bailing_hybrid": dict(HYBRID, **LATENT, head_dim=12, mlp_layer_types=["dense", "sparse"]),
    "lfm2": dict(COMMON, **CONVOLVED, block_multiple_of=8),
    "lfm2_moe": dict(
        COMMON,
        **CONVOLVED,
        moe_intermediate_size=24,
        num_experts=3,
        num_experts_per_tok=2,
        num_dense_layers=1,
    ),
    "lfm3": dict(COMMON, **CONVOLVED, head_dim=8),
    "inkling": dict(
        INKLING,
        mlp_layer_types=["dense", "sparse"],
        n_shared_experts=1,
        unpadded_vocab_size=VOCAB_SIZE - 2,
        log_scaling_n_floor=32,
    ),
    "inkling2": dict(INKLING, **INKLING2, log_scaling_n_floor=8),
    "inkling2_loop": dict(
        INKLING,
        **INKLING2,
        loop_layer_index_start=1,
        loop_layer_index_end=2,
        loop_num_passes=2,
        loop_gate_rank=4,
        log_scaling_n_floor=8,
    ),
    "recurrent_gemma": dict(
        COMMON, num_hidden_layers=3, lru_width=40, attention_window_size=6, conv1d_width=4
    ),
    # Its cache counts the tokens of its first layer, which must be a softmax one.
    "minimax": dict(
        COMMON,
        layer_types=[FULL, LINEAR],
        block_size=8,
        num_local_experts=3,
        num_experts_per_tok=2,
        head_dim=8,
    ),
}


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
