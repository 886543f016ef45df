# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What others know of a mixer: the config, its presets, parallel ranks, files of caches, vLLM and
conversion ask `facts_of` by a config's name for it. A mixer of a user has its facts as an attribute
of its class; those of the package's are apart from their modules, for a config loads no kernels.
"""

from typing import Any, NamedTuple

from .parts.normalizers import NORMALIZERS

QKV = ("q_proj", "k_proj", "v_proj")
# Feature maps under which weights are never negative, and as large as they are.
WEIGHTS = (
    *("elu+1", "relu", "relu2", "exp", "softmax"),
    *("polynomial2", "taylor", "dpfp", "t2r", "hedgehog"),
)
RMS_NORMS = tuple(name for name, norm in NORMALIZERS.items() if norm and norm.over)
NOT_ROTARY = ("sinusoidal", "none", "learned")
DELTA = {"feature_map": "identity", "normalizer": "rms_norm"}
GATED = {"normalizer": "gated_rms_norm", "gate_act": "silu"}


class MixerFacts(NamedTuple):
    """Of one mixer.

    needs: the values that other fields of the config can have, by its definition.
    equal: fields that have the value of another, by its definition.
    fields: those that no other mixer reads; a user's may be no fields of the config yet.
    heads: fields that count heads, of which parallel ranks have equal shares. Of
        "num_key_value_heads" queries share keys and values, as softmax's do; else values share
        keys, which all ranks have whole without "linear_num_key_heads".
    projections: modules that lead to these heads; "o_proj" leads back.
    reads_the_past: whether it has no form without an order of tokens.
    takes_keys: whether it takes the keys that a decay gives.
    has_own_heads: whether its numbers of heads need not be those of softmax layers.
    has_positions: whether "rotary" positions turn its queries and keys.
    block: the layer around it: "llama", or "rwkv", which has other norms and another MLP, and no
        layers of other types beside it.
    conversions: what softmax layers may become by it, by name: fields of the config, without
        convolutions, which softmax layers have not; conv_kernel_size=4 adds them.
    presets: of a user's mixer, as `model/presets.py` has those of the package's.
    """

    needs: dict[str, tuple[Any, ...]] = {}
    equal: dict[str, str] = {}
    fields: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("num_key_value_heads",)
    projections: tuple[str, ...] = QKV
    reads_the_past: bool = True
    takes_keys: bool = False
    has_own_heads: bool = False
    has_positions: bool = False
    block: str = "llama"
    conversions: dict[str, dict[str, Any]] = {}
    presets: dict[str, Any] = {}

    @property
    def queries_share_keys(self) -> bool:
        return "num_key_value_heads" in self.heads

    @property
    def equal_fields(self) -> dict[str, str]:
        of_softmax = {
            "linear_num_key_heads": "num_key_value_heads",
            "linear_num_value_heads": "num_attention_heads",
        }
        is_bound = self.queries_share_keys and not self.has_own_heads
        return {**(of_softmax if is_bound else {}), **self.equal}


ONE_QUERY_PER_KEY = {"num_key_value_heads": "num_attention_heads"}
OF_RWKV = {
    "norms": ("before",),
    "feature_map": ("identity",),
    "normalizer": ("layer_norm",),
    "value_act": (None,),
    "decay": ("none",),
    "conv_kernel_size": (0,),
    "position_embedding_type": NOT_ROTARY,
    "add_cross_attention": (False,),
}
MIXERS: dict[str, MixerFacts] = {  # by the config's `mixer`; `RECURRENT_MIXERS` has the modules
    "linear": MixerFacts(
        needs={"normalizer": ("z", *RMS_NORMS)},
        reads_the_past=False,
        takes_keys=True,
        has_own_heads=True,
        has_positions=True,
        conversions={
            "hedgehog": {"feature_map": "hedgehog"},
            "t2r": {"feature_map": "t2r"},
            "elu+1": {"feature_map": "elu+1"},
            "gated_linear": {"feature_map": "identity", "decay": "per_token", **GATED},
        },
    ),
    "aaren": MixerFacts(
        needs={
            "feature_map": ("exp",),
            "normalizer": ("z",),
            "value_act": (None,),
            "decay": ("none",),
            "position_embedding_type": NOT_ROTARY,  # queries are alike for all tokens
        },
        equal=ONE_QUERY_PER_KEY,
        projections=("k_proj", "v_proj"),
    ),
    "delta_rule": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("rms_norm", "gated_rms_norm"),
            "value_act": (None,),
        },
        heads=("linear_num_key_heads", "linear_num_value_heads"),
        conversions={
            "deltanet": DELTA,
            "gated_deltanet": {**DELTA, "decay": "per_token", **GATED},
            "kda": {
                **DELTA,
                "decay": "kda",
                "normalizer": "gated_rms_norm",
                "low_rank_gate": True,
            },
        },
    ),
    "delta_product": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("rms_norm", "gated_rms_norm"),
            "value_act": (None,),
        },
        fields=("num_householder",),
        heads=("linear_num_key_heads", "linear_num_value_heads"),
    ),
    "comba": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("rms_norm", "gated_rms_norm"),
            "value_act": (None,),
            "decay": ("per_token",),
        },
        heads=("linear_num_key_heads", "linear_num_value_heads"),
    ),
    "gdn2": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("rms_norm", "gated_rms_norm"),
            "value_act": (None,),
            "decay": ("kda", "kda_bounded"),
        },
        equal={"linear_num_key_heads": "linear_num_value_heads"},
        heads=("linear_num_key_heads", "linear_num_value_heads"),
    ),
    "preconditioned": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("rms_norm", "gated_rms_norm"),
            "value_act": (None,),
            "decay": ("per_token", "kda", "kda_bounded"),
        },
        fields=("squash_x", "squash_eps"),
        heads=("linear_num_key_heads", "linear_num_value_heads"),
    ),
    "mamba2": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("rms_norm_of_gated",),
            "gate_act": ("silu",),
            "low_rank_gate": (False,),
            "value_act": (None,),
            "decay": ("none",),
        },
        fields=("time_step_min", "time_step_max", "time_step_floor"),
        heads=("linear_num_value_heads",),
        projections=("v_proj",),
    ),
    "mamba3": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": ("gate",),
            "gate_act": ("silu",),
            "low_rank_gate": (False,),
            "value_act": (None,),
            "decay": ("none",),
            "conv_kernel_size": (0,),
            "time_step_limit": (None,),
            "rope_fraction": (0.5, 1),
        },
        fields=("time_step_min", "time_step_max", "time_step_floor", "rope_fraction", "A_floor"),
        heads=("linear_num_value_heads",),
        projections=("v_proj",),
    ),
    "hgrn": MixerFacts(
        needs={
            "feature_map": ("identity",),
            "normalizer": RMS_NORMS,
            "decay": ("hgrn2",),
        },
        # Heads are shares of channels, which have one gate and one value each.
        equal={
            "linear_num_key_heads": "linear_num_value_heads",
            "linear_key_head_dim": "linear_value_head_dim",
        },
        projections=("k_proj", "v_proj"),
        takes_keys=True,
        has_own_heads=True,
    ),
    "rwkv6": MixerFacts(
        needs=OF_RWKV,
        equal={"linear_num_key_heads": "linear_num_value_heads"},
        fields=("proj_low_rank_dim", "decay_low_rank_dim"),
        heads=("linear_num_key_heads", "linear_num_value_heads"),
        projections=("r_proj", "k_proj", "v_proj", "g_proj"),
        block="rwkv",
    ),
    "rwkv7": MixerFacts(
        needs=OF_RWKV,
        equal={"linear_num_key_heads": "linear_num_value_heads"},
        fields=(
            *("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"),
            "learn_initial_state",
        ),
        heads=("linear_num_key_heads", "linear_num_value_heads"),
        projections=("r_proj", "k_proj", "v_proj"),
        block="rwkv",
    ),
    "window": MixerFacts(
        needs={"feature_map": WEIGHTS, "normalizer": ("z",), "value_act": (None,)},
        fields=("window_size", "window_sinks"),
        has_positions=True,
        conversions={"window": {"feature_map": "hedgehog"}},
    ),
}
SOFTMAX_MIXERS: dict[str, MixerFacts] = {  # by its `softmax_mixer`
    "softmax": MixerFacts(),
    "mla": MixerFacts(
        needs={"position_embedding_type": NOT_ROTARY, "use_qk_norm": (False,)},
        fields=("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        heads=("num_attention_heads",),
        projections=("q_proj", "kv_b_proj"),
    ),
}
REGISTERED_MIXERS: dict[str, Any] = {}  # by users: classes of modules


def all_facts() -> dict[str, MixerFacts]:
    """Of the package's mixers and of users', by name."""
    return {**MIXERS, **{name: mixer.facts for name, mixer in REGISTERED_MIXERS.items()}}


def facts_of(mixer: str) -> MixerFacts:
    """Of one mixer, by a config's name for it.

    Raises:
        ValueError: there is none of that name; the choices are listed.
    """
    if mixer in MIXERS:
        return MIXERS[mixer]
    if mixer in REGISTERED_MIXERS:
        return REGISTERED_MIXERS[mixer].facts
    raise ValueError(
        f"mixer must be one of {', '.join(map(repr, all_facts()))}, got {mixer!r} (if it is one of "
        f"your own, call hf_linear_attention.register_mixer({mixer!r}, ...) first)"
    )
