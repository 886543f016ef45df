# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The configuration of a linear-attention language model, validated when it is made."""

import sys
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import RopeParameters

from .decays import check_decay
from .feature_maps import check_feature_map
from .presets import preset_fields

LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
NORMALIZERS = ("z", "gated_rms_norm")
GATE_ACTIVATIONS = ("sigmoid", "silu")
VALUE_ACTIVATIONS = (None, "silu")
POSITION_EMBEDDING_TYPES = ("sinusoidal", "none", "learned", "rotary")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "cross_attention_hidden_size",
)
AAREN_NEEDS = {  # by the definition of that attention
    "feature_map": "exp",
    "normalizer": "z",
    "value_act": None,
}
DERIVED = {  # fields that None leaves to the others
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "scale_embeddings": lambda config: config.position_embedding_type == "sinusoidal",
    "layer_types": lambda config: ["linear_attention"] * config.num_hidden_layers,
}
DERIVED_FROM = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "position_embedding_type",
)


@strict
class LinearAttentionConfig(PreTrainedConfig):
    """Everything that decides what a linear-attention model computes.

    The default is the attention of *Transformers are RNNs* (arXiv 2006.16236) in a pre-norm
    decoder: feature map elu(x) + 1, division by z, eps 1e-6, sinusoidal positions. `from_preset`
    gives other systems by name.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
        hidden_act, rms_norm_eps, initializer_range, attention_bias, mlp_bias, rope_parameters,
        tie_word_embeddings, use_cache: as in Llama.
        num_key_value_heads: heads of keys, values and states; divides num_attention_heads, its
            default.
        head_dim: features of a head; by default hidden_size // num_attention_heads.
        max_position_embeddings: rows of the table of learned positions; other kinds of positions
            have no limit.
        attention_dropout: on the softmax layers' attention weights; linear attention has none.
        feature_map: phi, by name: a pointwise one, which the kernels apply, or a module, which
            runs before them (`feature_maps.py`), or one registered by `register_feature_map`.
        feature_map_kwargs: options of that module.
        value_act: activation of v, None or "silu".
        decay: how linear attention forgets, by name (`decays.py`), or one registered by
            `register_decay`. "aaren" is softmax attention of one learned query per head, and takes
            feature_map="exp", normalizer="z" and as many key-value heads as heads.
        normalizer: "z" divides by phi(q) z + attention_eps; "gated_rms_norm" instead brings every
            head's output to unit mean square and multiplies it by a gate.
        gate_act: activation of that gate, "sigmoid" or "silu".
        attention_eps: added to the denominator of normalizer="z".
        conv_kernel_size: tokens that a causal depthwise convolution on q, k and v sees; 0: none.
        position_embedding_type: "sinusoidal" (added to the embeddings: arXiv 1706.03762, section
            3.5), "learned" (added, too), "rotary" (on q and k, before the feature map) or "none".
        scale_embeddings: whether embeddings are multiplied by sqrt(hidden_size) (section 3.4
            there). Without, the outputs of gated_rms_norm, large from the start, outweigh them. By
            default with sinusoidal positions only.
        layer_types: for every layer "linear_attention" (the default), "full_attention" or
            "sliding_attention".
        sliding_window: tokens that a "sliding_attention" layer sees, itself included.
        is_causal: False for a bidirectional encoder, which neither generates nor decays.
        add_cross_attention: whether every layer also attends, linearly and without decay, to a
            memory: the `encoder_hidden_states` that a forward may be given.
        cross_attention_hidden_size: features of that memory, where not hidden_size.

    Raises:
        ValueError: a value is none of its choices, which are listed, or values exclude each other.
    """

    model_type = "linear_attention"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.g_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.cross_attn.q_proj": "colwise",
        "layers.*.cross_attn.k_proj": "colwise",
        "layers.*.cross_attn.v_proj": "colwise",
        "layers.*.cross_attn.g_proj": "colwise",
        "layers.*.cross_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: int | float = 0.0
    rope_parameters: RopeParameters | dict | None = None

    feature_map: str = "elu+1"
    feature_map_kwargs: dict[str, Any] | None = None
    value_act: str | None = None
    decay: str = "none"
    normalizer: str = "z"
    gate_act: str = "sigmoid"
    attention_eps: int | float = 1e-6
    conv_kernel_size: int = 0
    position_embedding_type: str = "sinusoidal"
    scale_embeddings: bool | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    add_cross_attention: bool = False
    cross_attention_hidden_size: int | None = None

    @classmethod
    def from_preset(cls, preset: str, **overrides) -> "LinearAttentionConfig":
        """The config of one of the field's systems, by its name in `presets.py`.

        Args:
            overrides: fields, which win over the preset's: sizes above all.

        Raises:
            ValueError: there is no such preset, or as the constructor.
        """
        num_hidden_layers = overrides.get("num_hidden_layers", cls.num_hidden_layers)
        return cls(**{**preset_fields(preset, num_hidden_layers), **overrides})

    def __post_init__(self, **kwargs):
        self._check_sizes()
        derived = [name for name in DERIVED if getattr(self, name) is None]
        if "head_dim" in derived and self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_attention_heads} where head_dim is not given"
            )
        self._derive(derived)
        super().__post_init__(**kwargs)
        self.validate_architecture()

    def __setattr__(self, name: str, value: Any):
        """Sets a field; those that were derived from it follow, so they can't contradict it."""
        super().__setattr__(name, value)
        derived = self.__dict__.get("_derived", [])
        if name in derived:  # given from now on
            self._derive([other for other in derived if other != name])
        elif name in DERIVED_FROM:
            self._derive(derived)

    def _derive(self, names: list[str]):
        """Sets the named fields from the others."""
        for name in names:
            super().__setattr__(name, DERIVED[name](self))
        self.__dict__["_derived"] = names

    def to_dict(self) -> dict[str, Any]:
        """What is saved: all but the derived fields."""
        output = super().to_dict()
        for name in output.pop("_derived"):
            output.pop(name, None)
        return output

    def validate_architecture(self):
        """Raises a ValueError where a value is none of its choices or values exclude each other."""
        self._check_sizes()
        check_feature_map(self.feature_map, self.feature_map_kwargs)
        check_decay(self.decay)
        choices = {
            "normalizer": NORMALIZERS,
            "gate_act": GATE_ACTIVATIONS,
            "value_act": VALUE_ACTIVATIONS,
            "position_embedding_type": POSITION_EMBEDDING_TYPES,
            "hidden_act": ACT2FN,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                names = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {names}, got {getattr(self, name)!r}")
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(
                f"layer_types may hold {', '.join(map(repr, LAYER_TYPES))}, got {unknown}"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must have num_hidden_layers={self.num_hidden_layers} entries, "
                f"got {len(self.layer_types)}"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                'sliding_window must be given where layer_types has "sliding_attention"'
            )
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.position_embedding_type == "rotary" and self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim={self.head_dim} must be even for rotary positions, which turn pairs"
            )
        if self.position_embedding_type == "sinusoidal" and self.hidden_size % 2 != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be even for sinusoidal positions"
            )
        if not self.is_causal and self.decay != "none":
            raise ValueError(
                'decay must be "none" with is_causal=False, where no token is older than another, '
                f"got {self.decay!r}"
            )
        if self.decay == "aaren":
            self._check_aaren()
        if self.attention_eps < 0:
            raise ValueError(f"attention_eps={self.attention_eps} must be at least 0")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(
                f"attention_dropout={self.attention_dropout} must be at least 0 and less than 1"
            )

    def _check_aaren(self):
        """Raises a ValueError where a value is another than Aaren's definition has."""
        for name, needed in AAREN_NEEDS.items():
            if getattr(self, name) != needed:
                raise ValueError(
                    f'{name} must be {needed!r} with decay="aaren", got {getattr(self, name)!r}'
                )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads must be num_attention_heads={self.num_attention_heads} with "
                f'decay="aaren", whose heads have one query each, got {self.num_key_value_heads}'
            )
        if self.position_embedding_type == "rotary":
            raise ValueError(
                'position_embedding_type must not be "rotary" with decay="aaren", whose queries '
                "have no position"
            )

    def _check_sizes(self):
        """Raises a ValueError for a number that is no size."""
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.conv_kernel_size < 0 or self.conv_kernel_size == 1:
            raise ValueError(
                "conv_kernel_size must be 0 (no convolution) or at least 2 (tokens that it sees), "
                f"got {self.conv_kernel_size}"
            )


# `transformers serve` looks for the class that a config names in its `transformers`, as soon as it
# has the config. It finds the Auto class, which loads the right one. Its `transformers` may not be
# ours: importing transformers.processing_utils makes a second module of that name.
_serving = sys.modules.get("transformers.cli.serving.model_manager")
for _module in {transformers, getattr(_serving, "transformers", transformers)}:
    _module.LinearAttentionForCausalLM = AutoModelForCausalLM

__all__ = ["LinearAttentionConfig"]
