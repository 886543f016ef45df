# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The field's linear attentions, and the softmax they replace, as fields of a config, by name.

`LinearAttentionConfig.from_preset(name, **overrides)` reads this table. A preset says how
attention works; sizes are the user's, and the rest of the model, pre-norm layers with RMSNorm and a
gated MLP over scaled embeddings, is the same for all, so that they can be compared. `differs` says
where attention itself is not as in the source.
"""

from typing import Any, NamedTuple

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


class Preset(NamedTuple):
    """One system.

    fields: of the config, where they are not its defaults.
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
            "normalizer": "gated_rms_norm",
            "gate_act": "silu",
            "position_embedding_type": "rotary",
            "scale_embeddings": True,
        },
        differs="values are as wide as keys",
    ),
    "lightning": Preset(
        "MiniMax, MiniMax-01: Scaling Foundation Models with Lightning Attention, arXiv 2501.08313",
        {
            "feature_map": "silu",
            "value_act": "silu",
            "decay": "lightning",
            "normalizer": "gated_rms_norm",
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
        differs="all layers are linear (there every eighth is softmax); the norm is one per head",
    ),
    "gla": Preset(
        "Yang et al., Gated Linear Attention, arXiv 2312.06635",
        {
            "feature_map": "identity",
            "decay": "per_token",
            "normalizer": "gated_rms_norm",
            "gate_act": "silu",
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
        differs="the simple form: one decay per head and token, not one per feature",
    ),
    "mamba2": Preset(
        "Dao and Gu, Transformers are SSMs (Mamba-2), arXiv 2405.21060",
        {
            "feature_map": "identity",
            "decay": "per_token",
            "normalizer": "gated_rms_norm",
            "gate_act": "silu",
            "conv_kernel_size": 4,
            "position_embedding_type": "none",
            "scale_embeddings": True,
        },
        differs="in Llama's block, with an MLP; q and k of every head; the step size scales the "
        "decay only, and nothing skips the state",
    ),
    "aaren": Preset(
        "Feng et al., Attention as an RNN, arXiv 2405.13956",
        {"feature_map": "exp", "decay": "aaren", "attention_eps": 0.0},
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


def preset_fields(name: str, num_hidden_layers: int) -> dict[str, Any]:
    """The fields of a preset for a model of so many layers.

    Raises:
        ValueError: there is no such preset, or there are too few layers for its pattern.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, PRESETS))}, got {name!r}")
    preset = PRESETS[name]
    period = len(preset.layer_pattern)
    if num_hidden_layers < period:
        raise ValueError(
            f"num_hidden_layers must be at least {period} with preset {name!r}, whose layer types "
            f"repeat {', '.join(preset.layer_pattern)}, got {num_hidden_layers}"
        )
    if set(preset.layer_pattern) == {LINEAR}:  # the default, which follows num_hidden_layers
        return dict(preset.fields)
    layer_types = [preset.layer_pattern[layer % period] for layer in range(num_hidden_layers)]
    return {**preset.fields, "layer_types": layer_types}
