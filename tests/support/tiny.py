# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny models for the tests, with weights so large that a wrong state changes the tokens."""

from collections.abc import Iterable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.model.presets import PAPER, PRESETS, preset_fields

VOCAB_SIZE = 41
HYBRID = ["linear_attention", "full_attention", "sliding_attention"]

# Every axis of the config that no preset has, or not so; the rest of each is the default.
AXES = {
    "paper": {},
    "relu": {"feature_map": "relu", "num_key_value_heads": 2},
    "relu2": {"feature_map": "relu2", "position_embedding_type": "none"},
    "exp": {"feature_map": "exp", "num_key_value_heads": 1},
    "softmax": {
        "feature_map": "softmax",
        "attention_bias": True,
        "mlp_bias": True,
        "norms": "behind",
    },
    "dpfp": {"feature_map": "dpfp", "decay": "per_head"},
    "aaren": {"mixer": "aaren", "feature_map": "exp", "conv_kernel_size": 3},
    "gated": {
        "feature_map": "silu",
        "decay": "per_token",
        "normalizer": "gated_rms_norm",
        "conv_kernel_size": 4,
        "num_key_value_heads": 2,
        "position_embedding_type": "none",
    },
    "per_channel": {
        "feature_map": "elu+1",
        "decay": "gla",
        "expand_k": 0.75,
        "num_key_value_heads": 2,
        "conv_kernel_size": 3,
        "conv_bias": True,
    },
    "window": {
        "mixer": "window",
        "feature_map": "hedgehog",
        "window_size": 3,
        "window_sinks": 2,
        "num_key_value_heads": 2,
        "decay": "per_token",
        "use_qk_norm": True,
        "position_embedding_type": "rotary",
    },
    "learned": {"position_embedding_type": "learned", "tie_word_embeddings": True},
    "hybrid": {
        "layer_types": HYBRID,
        "sliding_window": 5,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "decay": "per_token",
        "conv_kernel_size": 3,
        "position_embedding_type": "rotary",
    },
    "norms_around": {
        "layer_types": HYBRID,
        "sliding_window": 5,
        "norms": "around",
        "use_qk_norm": True,
        "position_embedding_type": "rotary",
        "local_rotary_layers": [True, False, True],
        "local_rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
    },
    "softmax_first": {"layer_types": HYBRID[::-1], "sliding_window": 3},
}

# What is changed of presets: sizes that show mistakes, and axes of the config.
CHANGES = {
    "performer": {"feature_map_kwargs": {"num_features": 6}},
    "t2r": {"num_key_value_heads": 2},
    "based": {"sliding_window": 5},
    "hedgehog": {"conv_kernel_size": 4, "attention_bias": True},
    "lightning": {"head_dim": 6},
    "minimax": {"num_hidden_layers": 8},
    "hgrn2": {"num_key_value_heads": 2, "conv_kernel_size": 3},
    "hgrn": {"expand_k": 1.5, "expand_v": 1.5, "conv_kernel_size": 3},
    "mamba2": {
        **{"linear_num_key_heads": 2, "linear_key_head_dim": 6},
        **{"time_step_min": 0.5, "time_step_max": 2.0},  # at first so large that the state counts
    },
    "gated_deltaproduct": {"linear_num_key_heads": 2, "num_householder": 3},
    "comba": {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
    "precond_gdn": {"linear_num_key_heads": 2, "linear_key_head_dim": 6},
    "precond_kda": {"linear_key_head_dim": 6, "linear_value_head_dim": 10},
    "mamba3": {
        **{"linear_num_key_heads": 2, "linear_key_head_dim": 6},
        **{"time_step_min": 0.2, "time_step_max": 1.0},
    },
    "gdn2": {"linear_key_head_dim": 6, "linear_value_head_dim": 10},
    "rwkv6": {
        **{"linear_key_head_dim": 6, "linear_value_head_dim": 10},
        **{"proj_low_rank_dim": 3, "decay_low_rank_dim": 5},
    },
    "rwkv7": {
        **{"linear_key_head_dim": 6, "linear_value_head_dim": 10},
        **{"decay_low_rank_dim": 5, "a_low_rank_dim": 4, "v_low_rank_dim": 3},
        **{"gate_low_rank_dim": 7, "learn_initial_state": True},
    },
    "sliding": {"sliding_window": 4},
    "hybrid": {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "deltanet": {"linear_allow_neg_eigval": True, "linear_key_head_dim": 5},
    "gated_deltanet": {"linear_num_key_heads": 2, "linear_value_head_dim": 12},
    "kda": {"linear_key_head_dim": 6, "linear_num_key_heads": 2},
    "qwen3_next": {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "kimi_linear": {"num_hidden_layers": 4, "conv_kernel_size": 3},
}
PRESET_VARIANTS = {
    f"preset_{name}": {
        **preset_fields(name, CHANGES.get(name, {}).get("num_hidden_layers", 3)),
        **CHANGES.get(name, {}),
    }
    for name in PRESETS
}
AXES["mamba2_alone"] = {**PRESET_VARIANTS["preset_mamba2"], "intermediate_size": 0}
AXES["mamba2_one_group"] = {**PRESET_VARIANTS["preset_mamba2"], "linear_num_key_heads": 1}
AXES["rwkv7_alone"] = {
    **PRESET_VARIANTS["preset_rwkv7"],
    **{"intermediate_size": 0, "learn_initial_state": False},
}
# katharopoulos and dpfp are "paper" and, but for a decay, "dpfp"
COVERED = ("preset_katharopoulos", "preset_dpfp")
VARIANTS = {
    **AXES,
    **{name: fields for name, fields in PRESET_VARIANTS.items() if name not in COVERED},
}
# Of newer kinds of states those that many tests run over: the delta rule's, with value heads that
# share key heads, and with a decay for every channel beside latent softmax attention; and sums,
# with decays that give the keys, and with write strengths; a window, with sums of what left it;
# RWKV-6's, which are read before they are written, with the tokens before; and RWKV-7's, with
# values that its layers hand on.
NEWER = (
    *("preset_gated_deltanet", "preset_kimi_linear", "preset_hgrn2", "preset_mamba2"),
    *("window", "preset_mamba3", "preset_rwkv6", "preset_rwkv7"),
)


def over_variants(some: Iterable[str], name: str, values: Iterable) -> pytest.MarkDecorator:
    """Parametrizes a test by "variant" and `name`: all variants with the first value, some, one of
    each kind of state and layer, with the others as well.
    """
    first, *others = values
    cases = [(variant, first) for variant in VARIANTS]
    cases += [(variant, value) for value in others for variant in some]
    return pytest.mark.parametrize(("variant", name), cases)


def shallow(variant: str) -> dict:
    """The variant with one layer of each type, for tests that take time for each layer; with two
    of RWKV-7's, of which the second takes values of the first.
    """
    fields = VARIANTS[variant]
    types = list(dict.fromkeys(fields.get("layer_types", ["linear_attention"])))
    types *= 2 if fields.get("mixer") == "rwkv7" else 1
    return {**fields, "layer_types": types, "num_hidden_layers": len(types)}


def tiny_config(**kwargs) -> LinearAttentionConfig:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
    }
    return LinearAttentionConfig(**{**PAPER, **sizes, **kwargs})


def tiny_model(
    model_class=LinearAttentionForCausalLM, dtype=torch.float64, seed=0, **kwargs
) -> LinearAttentionForCausalLM:
    torch.manual_seed(seed)
    model = model_class(tiny_config(**kwargs)).to(dtype).eval()
    if model.config.mixer in ("rwkv6", "rwkv7"):
        draw_all_products(model)
    return model


@torch.no_grad()
def draw_all_products(model: torch.nn.Module) -> None:
    """As they are at first in other models: RWKV's layers begin with products that are 0."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.normal_(std=model.config.initializer_range)
        if getattr(module, "initial_state", None) is not None:
            module.initial_state.normal_()


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids but 0, which the tests take for padding."""
    return torch.randint(1, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def tokenizer_of_letters(pairs: str) -> PreTrainedTokenizerFast:
    """Tokens are letters, and these pairs of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz "
    merges = [(pair[0], pair[1]) for pair in pairs.split("/")]
    vocab = ["<pad>", *letters, *("".join(merge) for merge in merges)]
    ids = {token: index for index, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Equal but for rounding: Transformers' norms compute in float32, even in a float64 model."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# What is done to a cache of two rows, and which of them it then holds.
moves_of_rows = pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "repeat", "select"],
)


class OtherTensor(torch.Tensor):
    """A tensor of somebody else's kind, as a quantised one is."""
