# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of Transformers' own recurrent families, with random weights so large that a wrong
state changes the tokens.
"""

import inspect

import torch
import transformers
from packaging.version import Version
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from hf_linear_attention.releases import CACHE_NAMES

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

# model type -> its config's fields
OF_ALL_MODELS = {
    "qwen3_next": dict(HYBRID, **DELTA, **MOE),
    "qwen3_5_text": dict(HYBRID, **DELTA),
    "qwen3_5_moe_text": dict(HYBRID, **DELTA, **MOE),
    "lara_mini": dict(HYBRID, **DELTA, **MOE),
    "olmo_hybrid": dict(HYBRID, **DELTA, linear_allow_neg_eigval=True),
    "qwen4_exp_text": dict(
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
        text_config=dict(
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
        vision_config=dict(
            depth=1,
            hidden_size=16,
            num_heads=2,
            intermediate_size=16,
            out_hidden_size=32,
            projection_intermediate_size=16,
            image_size=28,
        ),
        image_token_id=60,
        video_token_id=61,
        image_start_token_id=62,
        image_end_token_id=62,
        video_start_token_id=63,
        video_end_token_id=63,
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
        conv_bias=True,
    ),
    "lfm3": dict(COMMON, **CONVOLVED, head_dim=8),
    "inkling_text": dict(
        INKLING,
        mlp_layer_types=["dense", "sparse"],
        n_shared_experts=1,
        unpadded_vocab_size=VOCAB_SIZE - 2,
        log_scaling_n_floor=32,
    ),
    "inkling2_text": dict(
        INKLING,
        unpadded_vocab_size=VOCAB_SIZE - 2,
        n_layers_per_attn_res_block=1,
        log_scaling_n_floor=8,
    ),
    "inkling2_loop_text": dict(
        INKLING,
        num_hidden_layers=3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        loop_num_passes=2,
        loop_gate_rank=4,
        unpadded_vocab_size=VOCAB_SIZE - 2,
        n_layers_per_attn_res_block=1,
        log_scaling_n_floor=8,
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

# Models whose states are on their modules, and not in a cache.
ON_MODULES = {
    "recurrent_gemma": dict(
        COMMON, num_hidden_layers=3, lru_width=40, attention_window_size=6, conv1d_width=4
    ),
}

# Models and classes that the oldest Transformers lacks, or is left alone with, and since when not.
SINCE = {
    "bailing_hybrid": "5.20",
    "inkling": "5.21",  # before, its own drafts and beams fail
    "inkling_text": "5.21",
    "inkling2": "5.23",
    "inkling2_text": "5.23",
    "inkling2_loop": "5.24",
    "inkling2_loop_text": "5.24",
    "lara_mini": "5.24",
    "lfm3": "5.23",
    "NemotronHRMSNormGated": "5.20",
}


def is_here(name: str) -> bool:
    """Whether the installed Transformers has this model or class."""
    return Version(transformers.__version__) >= Version(SINCE.get(name, "5.17"))


CONFIGS = {name: config for name, config in OF_ALL_MODELS.items() if is_here(name)}
# One model of each family of recurrent layers.
ONE_OF_EACH = ("qwen3_5_text", "kimi_linear", "mamba2", "minimax", "lfm2", "mamba")


def tiny_upstream(model_type: str, **changes) -> torch.nn.Module:
    """In evaluation mode; the same weights each time."""
    config = AutoConfig.for_model(model_type, **{**(CONFIGS | ON_MODULES)[model_type], **changes})
    auto_class = AutoModelForCausalLM if type(config) in CAUSAL else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto_class.from_config(config, experts_implementation="eager").eval()  # any dtype
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "A_log" not in name:
                weight.normal_(std=0.4 if "conv" in name else weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
        for name, weight in model.named_buffers():
            assert weight.isfinite().all(), name
    return model


def cache_name(model: torch.nn.Module) -> str:
    """What the installed release calls a cache, among a model's arguments and in its outputs."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in a dtype, as from_pretrained makes it: some models keep parts in float32."""
    kept = model._keep_in_fp32_modules_strict or ()
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, x in tensors:
            if x.is_floating_point() and not any(part in name for part in kept):
                x.data = x.data.to(dtype)
    return model
