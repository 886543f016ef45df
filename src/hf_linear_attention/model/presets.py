# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The field's linear attentions, and the softmax they replace, as fields of a config, by name.

`LinearAttentionConfig.from_preset(name, **overrides)` reads this table. A preset says how
attention works; sizes are the user's, and the rest of the model, pre-norm layers with RMSNorm and a
gated MLP over scaled embeddings, is the same for all but RWKV's, so that they can be compared.
`differs` says where attention itself is not as in the source.
"""

import copy
from typing import Any, NamedTuple

from ..mixers.facts import REGISTERED_MIXERS

# Where neither a preset nor a saved config says otherwise: the attention of Transformers are RNNs,
# which was the config's default in version 0.1.
PAPER = {
    "mixer": "linear",
    "feature_map": "elu+1",
    "decay": "none",
    "normalizer": "z",
    "gate_act": "sigmoid",
    "expand_v": 1,
    "conv_kernel_size": 0,
    "position_embedding_type": "sinusoidal",
    "scale_embeddings": None,
}
# The delta rule's layers: keys and values after convolutions, and no position.
DELTA_RULE = {
    "mixer": "delta_rule",
    "feature_map": "identity",
    "conv_kernel_size": 4,
    "position_embedding_type": "none",
    "scale_embeddings": True,
}
GATED_DELTA_RULE = {
    **DELTA_RULE,
    "decay": "per_token",
    "normalizer": "gated_rms_norm",
    "gate_act": "silu",
}
KIMI_DELTA_RULE = {
    **DELTA_RULE,
    "decay": "kda",
    "normalizer": "gated_rms_norm",
    "low_rank_gate": True,
}
RWKV = {
    "feature_map": "identity",
    "normalizer": "layer_norm",
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "position_embedding_type": "none",
    "scale_embeddings": False,
}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


class Preset(NamedTuple):
    """One system.

    fields: of the config, where they are not the paper's.
    layer_pattern: types of layers, repeated over the model's.
    """

    source: str
    fields: dict[str, Any]
    layer_pattern: tuple[str, ...] = (LINEAR,)
    differs: str = ""


PRESETS: dict[str, Preset] = {
    "katharopoulos": Preset(
        "Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236",
        {"feature_map": "elu+1"},
    ),
    "performer": Preset(
        "Choromanski et al., Rethinking Attention with Performers, arXiv 2009.14794",
        {"feature_map": "favor+"},
        differs="num_features is head_dim unless given; `redraw_features()` redraws on request",
    ),
    "t2r": Preset(
        "Kasai et al., Finetuning Pretrained Transformers into RNNs, arXiv 2103.13076",
        {"feature_map": "t2r"},
        differs="trained from the start, not from a softmax model",
    ),
    "dpfp": Preset(
        "Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers, arXiv 2102.11174",
        {"feature_map": "dpfp"},
        differs="sums, as all here, and no delta rule",
    ),
    "polynomial": Preset(
        "Kacham et al., PolySketchFormer, arXiv 2310.01655",
        {"feature_map": "polynomial2"},
        differs="the exact kernel of degree 2, not a sketch of degree 4; no norm on q and k",
    ),
    "based": Preset(
        "Arora et al., Simple linear attention language models (Based), arXiv 2402.18668",
        {
            "feature_map": "taylor",
            "conv_kernel_size": 3,
            "position_embedding_type": "rotary",
            "scale_embeddings": True,
            "sliding_window": 64,
        },
        (LINEAR, SLIDING),
        "the convolutions are on q, k and v, not layers of their own; head_dim is 16 there, and "
        "features grow as its square",
    ),
    "hedgehog": Preset(
        "Zhang et al., The Hedgehog & the Porcupine, arXiv 2402.04347",
        {"feature_map": "hedgehog"},
        differs="trained from the start, not to mimic a softmax model",
    ),
    "retnet": Preset(
        "Sun et al., Retentive Network, arXiv 2307.08621",
        {
            "feature_map": "identity",
            "decay": "retnet",
            "expand_v": 2,
            "normalizer": "gated_rms_norm",
            "gate_act": "silu",
            "position_embedding_type": "rotary",
            "scale_embeddings": True,
        },
    ),
    "lightning": Preset(
        "MiniMax, MiniMax-01: Scaling Foundation Models with Lightning Attention, arXiv 2501.08313",
        {
            "feature_map": "silu",
            "value_act": "silu",
            "decay": "lightning",
            "normalizer": "gated_rms_norm_of_all_heads",
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
    ),
    "minimax": Preset(
        "MiniMax, MiniMax-01: Scaling Foundation Models with Lightning Attention, arXiv 2501.08313",
        {
            "feature_map": "silu",
            "value_act": "silu",
            "decay": "lightning",
            "normalizer": "gated_rms_norm_of_all_heads",
            "position_embedding_type": "rotary",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "linear_rotary": False,
            "scale_embeddings": True,
        },
        (*[LINEAR] * 7, FULL),
    ),
    "gla": Preset(
        "Yang et al., Gated Linear Attention, arXiv 2312.06635",
        {
            "feature_map": "identity",
            "decay": "gla",
            "expand_k": 0.5,
            "normalizer": "gated_rms_norm",
            "gate_act": "silu",
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
    ),
    "hgrn2": Preset(
        "Qin et al., HGRN2: Gated Linear RNNs with State Expansion, arXiv 2404.07904",
        {
            "feature_map": "silu",
            "decay": "hgrn2",
            "normalizer": "rms_norm_of_all_heads",
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
    ),
    "hgrn": Preset(
        "Qin et al., Hierarchically Gated Recurrent Neural Network (HGRN), arXiv 2311.04823",
        {
            "mixer": "hgrn",
            "feature_map": "identity",
            "value_act": "silu",
            "decay": "hgrn2",
            "normalizer": "gated_rms_norm_of_all_heads",
            "gate_act": "silu",
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
        differs="forget gates are real, without a phase, as in flash-linear-attention",
    ),
    "mamba2": Preset(
        "Dao and Gu, Transformers are SSMs (Mamba-2), arXiv 2405.21060",
        {
            "mixer": "mamba2",
            "feature_map": "identity",
            "expand_v": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 128,
            "normalizer": "rms_norm_of_gated",
            "gate_act": "silu",
            "conv_kernel_size": 4,
            "conv_bias": True,
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
    ),
    "mamba3": Preset(
        "Lahoti et al., Mamba-3, arXiv 2603.15569",
        {
            "mixer": "mamba3",
            "feature_map": "identity",
            "expand_v": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 128,
            "normalizer": "gate",
            "gate_act": "silu",
            "rms_norm_eps": 1e-5,
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
        differs="one input and output (SISO), as in flash-linear-attention by default",
    ),
    "deltanet": Preset(
        "Yang et al., Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484",
        {**DELTA_RULE, "normalizer": "rms_norm"},
    ),
    "gated_deltanet": Preset(
        "Yang et al., Gated Delta Networks, arXiv 2412.06464",
        {**GATED_DELTA_RULE, "expand_v": 2},
    ),
    "gated_deltaproduct": Preset(
        "Siems et al., DeltaProduct, arXiv 2502.10297",
        {
            **GATED_DELTA_RULE,
            "mixer": "delta_product",
            "num_householder": 2,
            "linear_allow_neg_eigval": True,
            "expand_v": 2,
        },
    ),
    "comba": Preset(
        "Hu et al., Comba: Improving Bilinear RNNs with Closed-loop Control, arXiv 2506.02475",
        {**GATED_DELTA_RULE, "mixer": "comba", "gate_act": "sigmoid", "expand_v": 2},
    ),
    "kda": Preset(
        "Kimi Team, Kimi Linear (Kimi Delta Attention), arXiv 2510.26692",
        KIMI_DELTA_RULE,
    ),
    "gdn2": Preset(
        "Hatamizadeh et al., Gated DeltaNet-2, arXiv 2605.22791",
        {**KIMI_DELTA_RULE, "mixer": "gdn2"},
    ),
    "precond_gdn": Preset(
        "Tumma et al., Preconditioned DeltaNet, arXiv 2604.21100",
        {**GATED_DELTA_RULE, "mixer": "preconditioned", "expand_v": 2},
    ),
    "precond_kda": Preset(
        "Tumma et al., Preconditioned DeltaNet, arXiv 2604.21100",
        {**KIMI_DELTA_RULE, "mixer": "preconditioned"},
    ),
    "rwkv6": Preset(
        "Peng et al., Eagle and Finch (RWKV-6), arXiv 2404.05892",
        {"mixer": "rwkv6", **RWKV},
        differs="embeddings and the head start as those of the other systems here; the norm of "
        "outputs has the epsilon of the other norms, as in flash-linear-attention",
    ),
    "rwkv7": Preset(
        "Peng et al., RWKV-7 Goose with Expressive Dynamic State Evolution, arXiv 2503.14456",
        {"mixer": "rwkv7", **RWKV},
        differs="embeddings and the head start as those of the other systems here",
    ),
    "aaren": Preset(
        "Feng et al., Attention as an RNN, arXiv 2405.13956",
        {"mixer": "aaren", "feature_map": "exp", "attention_eps": 0.0},
        differs="the query is learned as it is, without a projection",
    ),
    "softmax": Preset(
        "Vaswani et al., Attention Is All You Need, arXiv 1706.03762, as in Llama, 2302.13971",
        {"position_embedding_type": "rotary", "scale_embeddings": True},
        (FULL,),
    ),
    "sliding": Preset(
        "Jiang et al., Mistral 7B, arXiv 2310.06825",
        {
            "position_embedding_type": "rotary",
            "scale_embeddings": True,
            "sliding_window": 256,
        },
        (SLIDING,),
    ),
    "qwen3_next": Preset(
        "Qwen Team, Qwen3-Next: Gated DeltaNet, arXiv 2412.06464, with Gated Attention, arXiv "
        "2505.06708",
        {
            **GATED_DELTA_RULE,
            "position_embedding_type": "rotary",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
            },
            "use_qk_norm": True,
            "attn_output_gate": True,
        },
        (LINEAR, LINEAR, LINEAR, FULL),
    ),
    "kimi_linear": Preset(
        "Kimi Team, Kimi Linear, arXiv 2510.26692",
        {**KIMI_DELTA_RULE, "softmax_mixer": "mla"},
        (LINEAR, LINEAR, LINEAR, FULL),
    ),
    "hybrid": Preset(
        "Kimi Team, Kimi Linear, arXiv 2510.26692, for the ratio and for no positions",
        {
            "feature_map": "identity",
            "decay": "per_token",
            "normalizer": "gated_rms_norm",
            "conv_kernel_size": 4,
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
        (LINEAR, LINEAR, LINEAR, FULL),
        "the decay is one per head and token, and there is no delta rule",
    ),
}


def all_presets() -> dict[str, Preset]:
    """Those here, and those of users' mixers."""
    of_users = (mixer.facts.presets for mixer in REGISTERED_MIXERS.values())
    return dict(item for presets in (PRESETS, *of_users) for item in presets.items())


def preset_fields(name: str, num_hidden_layers: int) -> dict[str, Any]:
    """The fields of a preset for a model of so many layers.

    Raises:
        ValueError: there is no such preset, or that is no number of layers, or too few for its
            pattern.
    """
    presets = all_presets()
    if name not in presets:
        raise ValueError(f"preset must be one of {', '.join(map(repr, presets))}, got {name!r}")
    if not isinstance(num_hidden_layers, int):
        raise ValueError(f"num_hidden_layers must be an integer, got {num_hidden_layers!r}")
    preset = presets[name]
    period = len(preset.layer_pattern)
    if num_hidden_layers < period:
        raise ValueError(
            f"num_hidden_layers must be at least {period} with preset {name!r}, whose layer types "
            f"repeat {', '.join(preset.layer_pattern)}, got {num_hidden_layers}"
        )
    if set(preset.layer_pattern) == {LINEAR}:  # the default, which follows num_hidden_layers
        return {**PAPER, **copy.deepcopy(preset.fields)}
    layer_types = [preset.layer_pattern[layer % period] for layer in range(num_hidden_layers)]
    return {**PAPER, **copy.deepcopy(preset.fields), "layer_types": layer_types}
