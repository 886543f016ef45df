# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny softmax models of Transformers, with random weights so large that a mistake changes the
tokens.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 64
COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
SLIDING = dict(use_sliding_window=True, sliding_window=4)
# name -> model type, and fields of its config
SOFTMAX_MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama_with_biases": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, head_dim=10, rms_norm_eps=0.1, hidden_act="gelu"),
    ),
    "smollm": ("llama", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "mistral": ("mistral", dict(sliding_window=4, head_dim=12)),
    "mistral_of_full_layers": ("mistral", dict(sliding_window=None)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2_sliding": ("qwen2", dict(SLIDING, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=12, tie_word_embeddings=True)),
    "qwen3_sliding": ("qwen3", dict(SLIDING, max_window_layers=2, attention_bias=True)),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2, attention_bias=True)),
    "smollm3_sliding": ("smollm3", dict(SLIDING, no_rope_layer_interval=3, mlp_bias=True)),
    "granite": (
        "granite",
        dict(
            tie_word_embeddings=True,
            embedding_multiplier=3.0,
            attention_multiplier=0.5,
            residual_multiplier=0.22,
            logits_scaling=0.125,
        ),
    ),
    "granite_with_biases": (
        "granite",
        dict(
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            logits_scaling=0.5,
        ),
    ),
    "phi3": ("phi3", dict(partial_rotary_factor=0.5, num_attention_heads=2)),
    "phi3_sliding": ("phi3", dict(sliding_window=4)),
    "phi3_of_long_texts": (
        "phi3",
        dict(
            original_max_position_embeddings=8,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.5, 2.0, 3.0, 4.0],
            ),
        ),
    ),
    "gemma": (
        "gemma",
        dict(head_dim=16, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"),
    ),
}
SOFTMAX_MODELS |= {
    "olmo2": ("olmo2", dict(attention_bias=True)),
    "olmo3": (
        "olmo3",
        dict(
            sliding_window=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="yarn",
                    rope_theta=500.0,
                    factor=4.0,
                    original_max_position_embeddings=16,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=500.0),
            ),
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            head_dim=16,
            query_pre_attn_scalar=5,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=500.0, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
            tie_word_embeddings=True,
        ),
    ),
}
ROTARY = dict(position_embedding_type="rotary", layer_types=["full_attention"] * 3)
SOFTMAX_MODELS |= {
    "ours": ("linear_attention", dict(ROTARY, use_qk_norm=True, attention_bias=True)),
    "ours_as_the_preset": (
        "linear_attention",
        dict(
            ROTARY,
            scale_embeddings=True,
            initializer_range=0.1,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
        ),
    ),
    "ours_of_other_norms": (
        "linear_attention",
        dict(
            ROTARY,
            norms="around",
            use_qk_norm=True,
            qk_norm_of_all_heads=True,
            local_rotary_layers=[True, False, True],
            local_rope_parameters=dict(rope_type="linear", rope_theta=50.0, factor=2.0),
        ),
    ),
    "ours_sliding": (
        "linear_attention",
        dict(
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=4,
            position_embedding_type="learned",
            rotary_layers=None,
        ),
    ),
}
ROPES = {
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "llama3": dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "longrope": dict(
        short_factor=[1.0, 1.2, 1.5, 2.0],
        long_factor=[1.0, 2.0, 3.0, 4.0],
        original_max_position_embeddings=16,
    ),
}
for kind, rope_fields in ROPES.items():
    parameters = dict(rope_type=kind, rope_theta=500.0, **rope_fields)
    lengths = dict(max_position_embeddings=16)  # beyond which "dynamic" ones change
    SOFTMAX_MODELS[f"llama_{kind}"] = ("llama", dict(lengths, rope_parameters=parameters))


def softmax_model(name: str, **fields) -> PreTrainedModel:
    """The model, in float32; every parameter is random, norms and biases too."""
    model_type, own = SOFTMAX_MODELS[name]
    config = AutoConfig.for_model(model_type, **{**COMMON, **own, **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 1:
                x.add_(0.3 * torch.randn_like(x))
    return model


def some_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids but those with a meaning."""
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))
