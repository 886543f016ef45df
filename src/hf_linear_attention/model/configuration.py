# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The configuration of a linear-attention language model, validated when it is made."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from ..mixers.facts import facts_of
from ..mixers.parts.normalizers import NORMALIZERS
from ..mixers.parts.tensor_parallel import TensorParallelPlan
from .auto import register_adapters, register_config
from .config_checks import ConfigChecks
from .presets import PAPER, preset_fields
from .saving import SavedConfig


def of_latent(config: "LinearAttentionConfig", size: int) -> int | None:
    """None without latent attention, for which clients take a model that has these fields."""
    return size if config.softmax_mixer == "mla" else None


DERIVED = {  # fields that None leaves to the others, each after those that it is made of
    "num_key_value_heads": lambda config: config.num_attention_heads,
    # Of no heads, which a model refuses, there is nothing to derive.
    "head_dim": lambda config: config.hidden_size // max(config.num_attention_heads, 1),
    "linear_num_key_heads": lambda config: config.num_key_value_heads,
    "linear_num_value_heads": lambda config: config.num_attention_heads,
    "linear_key_head_dim": lambda config: int(config.head_dim * config.expand_k),
    "linear_value_head_dim": lambda config: int(config.head_dim * config.expand_v),
    "kv_lora_rank": lambda config: of_latent(config, 4 * config.head_dim),
    "qk_nope_head_dim": lambda config: of_latent(config, config.head_dim),
    "qk_rope_head_dim": lambda config: of_latent(config, max(config.head_dim // 2, 1)),
    "v_head_dim": lambda config: of_latent(config, config.head_dim),
    "attention_out_bias": lambda config: config.attention_bias,
    "gate_bias": lambda config: config.attention_bias,
    "output_norm_eps": lambda config: config.rms_norm_eps,
    "qk_norm_eps": lambda config: config.rms_norm_eps,
    "scale_embeddings": lambda config: config.position_embedding_type == "sinusoidal",
    "layer_types": lambda config: ["linear_attention"] * config.num_hidden_layers,
}
DERIVED_FROM = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "expand_k",
    "expand_v",
    "num_hidden_layers",
    "attention_bias",
    "rms_norm_eps",
    "position_embedding_type",
    "softmax_mixer",
)


@strict
class LinearAttentionConfig(SavedConfig, ConfigChecks, PreTrainedConfig):
    """Everything that decides what a linear-attention model computes.

    The default is Gated DeltaNet (arXiv 2412.06464) in a pre-norm decoder, the preset
    "gated_deltanet". `from_preset` gives other systems by name: "katharopoulos" is the attention of
    *Transformers are RNNs* (arXiv 2006.16236).

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, hidden_act, rms_norm_eps,
        initializer_range, attention_bias, mlp_bias, tie_word_embeddings, use_cache: as in Llama.
        attention_out_bias: whether the projection behind attention has a bias; by default as
            attention_bias says of those before it. Qwen2 has the others alone.
        gate_bias: whether the projection that gives the gate of linear attention has a bias; by
            default as attention_bias says of the others. Kimi Linear's second one has.
        intermediate_size: features of the MLPs; 0: there are none.
        fuse_linear_cross_entropy: whether a causal language model, while it trains on labels,
            computes its loss from the last hidden states a few rows at a time, and returns no
            logits, whose tables of (tokens, vocab_size) can be the largest there are.
        rope_parameters: of "rotary" positions, as in Llama, for layers of all types: rope_type
            "default", "linear", "dynamic", "yarn", "llama3", "longrope" or "proportional", and
            what it needs; partial_rotary_factor turns only so large a part of a head's features.
        num_key_value_heads: heads of keys, values and states; divides num_attention_heads, its
            default.
        head_dim: features of a head; by default hidden_size // num_attention_heads.
        linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim:
            heads of keys and of values, and their features, in layers of the type
            "linear_attention"; by default num_key_value_heads, num_attention_heads,
            head_dim * expand_k and head_dim * expand_v. Value heads share key heads, whose number
            divides theirs; with mixer="linear" the former are heads of queries, and values have as
            many heads as keys. With mixer="aaren" and "window" the numbers are the defaults.
        expand_k, expand_v: how much wider than head_dim keys and values are there.
        max_position_embeddings: rows of the table of learned positions; other kinds of positions
            have no limit. Where rope_parameters stretch them, the length from which on they do,
            unless they say so themselves by original_max_position_embeddings.
        attention_dropout: on the softmax layers' attention weights; linear attention has none.
        mixer: what layers of the type "linear_attention" mix tokens by: "linear"; or "aaren",
            softmax attention of one learned query per head, which takes feature_map="exp",
            normalizer="z" and as many key-value heads as heads; or "delta_rule", for keys and
            queries of norm 1, or its kin "delta_product", "comba", "gdn2" and "preconditioned",
            which take feature_map="identity", a norm for normalizer, and no rotary positions; or
            "mamba2", "mamba3": state spaces, whose other fields `model/presets.py` has:
            linear_num_key_heads are groups, and linear_key_head_dim is the size of the state; or
            "hgrn", HGRN's gated recurrence of channels; or "rwkv6", "rwkv7", RWKV's layers, with
            fields as there; or "window", softmax attention over a window of the last tokens and
            linear attention over all older ones, under one denominator, for layers that were
            softmax attention. It takes normalizer="z", adds no attention_eps, and a feature_map
            whose weights are not negative.
        window_size, window_sinks: tokens of that window, the current one included, and how many of
            the first tokens softmax attention goes on seeing.
        linear_allow_neg_eigval: whether beta, how much of a value "delta_rule" writes, is up to 2
            instead of 1: then a state can change its sign, and follow parity.
        num_householder: steps of the delta rule that "delta_product" takes for each token.
        squash_x, squash_eps: of "preconditioned", by how much keys' channels are enlarged or made
            smaller at most, and what is added to the sums of their squares, which decide on that.
        softmax_mixer: what layers of other types mix tokens by: "softmax", or "mla", multi-head
            latent attention without positions, whose cache has a latent vector of each token.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: for "mla" the features of that
            vector, of keys: a head's own and those that all share, and of values; by default
            4 head_dim, head_dim, head_dim // 2 and head_dim.
        norms: where a layer's norms are: "before" its mixer and its MLP, as in Llama; "behind"
            them, as in OLMo 2; or "around", both, as in Gemma 2 and 3.
        use_qk_norm: whether softmax layers, and those of mixer="window", bring each head's q and k
            to unit mean square, by norms with a weight. Not with layers of softmax_mixer="mla",
            which have a norm of the latent vector alone.
        qk_norm_of_all_heads: whether these norms are of all heads at once, as in OLMo 2.
        qk_norm_eps: the epsilon of these norms; by default rms_norm_eps.
        attn_output_gate: whether they multiply their output by the sigmoid of a projection.
        feature_map: phi, by name: a pointwise one, which the kernels apply, or a module, which
            runs before them (`ops/feature_maps.py`), or one registered by
            `register_feature_map`. With a decay for every channel a pointwise one; with one that
            gives the keys, as "hgrn2", it is of queries alone.
        feature_map_kwargs: options of that module.
        value_act: activation of v, None or "silu".
        decay: how linear attention forgets, by name (`mixers/parts/decays.py`), or one
            registered by `register_decay`.
        decay_lower_bound: of decay="kda_bounded", the least log decay of a token, negative.
        normalizer: "z" divides by phi(q) z + attention_eps; "rms_norm" instead brings every head's
            output to unit mean square; "gated_rms_norm" then multiplies it by a gate. So do, for
            all heads at once, "rms_norm_of_all_heads" and "gated_rms_norm_of_all_heads";
            "rms_norm_of_gated" gates first, for all heads that share a key; "gate" does no more.
        output_norm_eps: the epsilon of that norm; by default rms_norm_eps. Queries scaled by s,
            as some models scale them, are the same as this divided by s * s.
        gate_act: activation of that gate, "sigmoid" or "silu".
        low_rank_gate: whether its projection is two, with linear_value_head_dim features between.
        attention_eps: added to the denominator of normalizer="z".
        state_in_fp64: whether what linear attention remembers is kept, and computed, in float64,
            whatever the model's dtype: for texts of millions of tokens, over which float32 drifts
            where little is forgotten. States are twice as large. MPS has no float64.
        conv_kernel_size: tokens that a causal depthwise convolution on q, k and v sees; 0: none.
        conv_bias: whether these convolutions have a bias.
        time_step_min, time_step_max, time_step_floor: of "mamba2" and "mamba3", between which their
            steps are drawn at first, and the least that they are then.
        rope_fraction: of "mamba3", the part of a key's features that angles turn, 0.5 or 1.
        A_floor: of "mamba3", the least rate of forgetting.
        time_step_limit: the least and the largest steps of "mamba2"; by default 0 and infinity.
        proj_low_rank_dim: features between the projections by which "rwkv6" makes each of its five
            mixes of a token and the one before; None: the authors' 32, or 64 of large models.
        decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim: features between the
            projections by which "rwkv7" makes decays, rates of the delta rule, shares of the first
            layer's values, and gates, and "rwkv6" decays; None: as many as the authors'.
        learn_initial_state: whether each layer of "rwkv7" has a state that sequences begin with, a
            parameter, 0 at first: with all others frozen that is state tuning.
        position_embedding_type: "sinusoidal" (added to the embeddings: arXiv 1706.03762, section
            3.5), "learned" (added, too), "rotary" (on q and k, before the feature map) or "none".
        linear_rotary: whether "rotary" positions also turn q and k of mixer="linear", and not only
            those of softmax layers.
        rotary_layers: for every layer whether "rotary" positions turn its q and k; None: in all,
            as far as linear_rotary and the mixer let them. SmolLM3 has layers without.
        local_rotary_layers, local_rope_parameters: for every layer whether it has a second kind of
            "rotary" positions, and which, as Gemma 3 and OLMo 3 have with sliding windows.
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
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    base_model_tp_plan = TensorParallelPlan()
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
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    expand_k: int | float = 1
    expand_v: int | float = 2
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
    attention_out_bias: bool | None = None
    mlp_bias: bool = False
    fuse_linear_cross_entropy: bool = False
    attention_dropout: int | float = 0.0
    rope_parameters: RopeParameters | dict | None = None

    mixer: str = "delta_rule"
    window_size: int = 64
    window_sinks: int = 4
    linear_allow_neg_eigval: bool = False
    num_householder: int = 2
    squash_x: int | float = 1.5
    squash_eps: int | float = 1e-6
    softmax_mixer: str = "softmax"
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    norms: str = "before"
    use_qk_norm: bool = False
    qk_norm_of_all_heads: bool = False
    qk_norm_eps: int | float | None = None
    attn_output_gate: bool = False
    feature_map: str = "identity"
    feature_map_kwargs: dict[str, Any] | None = None
    value_act: str | None = None
    decay: str = "per_token"
    decay_lower_bound: int | float = -5.0
    normalizer: str = "gated_rms_norm"
    gate_act: str = "silu"
    low_rank_gate: bool = False
    gate_bias: bool | None = None
    output_norm_eps: int | float | None = None
    attention_eps: int | float = 1e-6
    state_in_fp64: bool = False
    conv_kernel_size: int = 4
    conv_bias: bool = False
    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    learn_initial_state: bool = False
    time_step_min: int | float = 0.001
    time_step_max: int | float = 0.1
    time_step_floor: int | float = 1e-4
    rope_fraction: int | float = 0.5
    A_floor: int | float = 1e-4
    time_step_limit: list[int | float] | tuple[int | float, ...] | None = None
    position_embedding_type: str = "none"
    linear_rotary: bool = True
    rotary_layers: list[bool] | None = None
    local_rotary_layers: list[bool] | None = None
    local_rope_parameters: RopeParameters | dict | None = None
    scale_embeddings: bool | None = True
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    add_cross_attention: bool = False
    cross_attention_hidden_size: int | None = None

    @property
    def active_layer_types(self) -> list[str]:
        """The types of the layers that run: to draft, generate() may lower `num_hidden_layers`."""
        assert self.layer_types is not None
        return self.layer_types[: self.num_hidden_layers]

    def is_recurrent(self, layer_idx: int) -> bool:
        """Whether a layer's type is "linear_attention"."""
        assert self.layer_types is not None
        return self.layer_types[layer_idx] == "linear_attention"

    def has_positions(self, layer_idx: int) -> bool:
        """Whether "rotary" positions, if the model has them, turn q and k of a layer."""
        if self.is_recurrent(layer_idx) and not self.linear_rotary:
            return False
        return self.rotary_layers is None or self.rotary_layers[layer_idx]

    def has_local_positions(self, layer_idx: int) -> bool:
        """Whether these are those of local_rope_parameters."""
        return self.local_rotary_layers is not None and self.local_rotary_layers[layer_idx]

    @property
    def num_state_heads(self) -> int:
        """Heads of a "linear_attention" layer's states, each of which forgets by itself."""
        shares_keys = facts_of(self.mixer).queries_share_keys
        heads = self.linear_num_key_heads if shares_keys else self.linear_num_value_heads
        assert heads is not None  # derived
        return heads

    @property
    def is_gated(self) -> bool:
        """Whether linear attention's outputs are multiplied by a gate."""
        normalizer = NORMALIZERS[self.normalizer]
        return normalizer is not None and normalizer.is_gated

    @classmethod
    def from_preset(cls, preset: str, **overrides) -> "LinearAttentionConfig":
        """The config of one of the field's systems, by its name in `model/presets.py`.

        Args:
            overrides: fields, which win over the preset's: sizes above all.

        Raises:
            ValueError: there is no such preset, or as the constructor.
        """
        num_hidden_layers = overrides.get("num_hidden_layers", cls.num_hidden_layers)
        return cls(**{**preset_fields(preset, num_hidden_layers), **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Any:
        """As in Transformers. Folders of version 0.1 do not say where they are as the paper."""
        return super().from_dict({**PAPER, **config_dict}, **kwargs)

    def __post_init__(self, **kwargs):
        if self.decay == "aaren":  # as version 0.1 said it
            self.mixer, self.decay = "aaren", "none"
        self.check_sizes()
        derived = [name for name in DERIVED if getattr(self, name) is None]
        self._derive(derived)
        super().__post_init__(**kwargs)
        self.warn_of_mistakes(kwargs.keys() & vars(self).keys())
        self.validate_architecture()

    def __setattr__(self, name: str, value: Any):
        """Sets a field; those that were derived from it follow, so they can't contradict it."""
        super().__setattr__(name, value)
        derived = self.__dict__.get("_derived")
        if derived is None:  # the constructor derives when it has all
            return
        if name in DERIVED:  # given from now on, or by None left to the others again
            follow = {*derived, name} if value is None else {*derived} - {name}
            self._derive([other for other in DERIVED if other in follow])
        elif name in DERIVED_FROM:
            self._derive(derived)

    def _derive(self, names: list[str]):
        """Sets the named fields from the others."""
        for name in names:
            super().__setattr__(name, DERIVED[name](self))
        self.__dict__["_derived"] = names

    def to_dict(self) -> dict[str, Any]:
        """What is saved: the fields that the model uses, but for those derived, or as None where
        that is not their default.
        """
        register_adapters(self.model_type)
        output = super().to_dict()
        derived = output.pop("_derived")
        output.update((name, None) for name in derived)
        for name in {*derived, *self.unsaid_fields()} - PAPER.keys():
            output.pop(name, None)
        return output


register_config(LinearAttentionConfig, causal_lm="LinearAttentionForCausalLM")

__all__ = ["LinearAttentionConfig"]
