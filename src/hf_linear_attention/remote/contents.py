# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What of the package travels in a model's folder, for a model of one config."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..mixers.facts import MIXERS, SOFTMAX_MIXERS, all_facts, facts_of
from ..mixers.parts.decays import DECAYS, decay_class, has_lower_bounds
from ..model.arguments import has_softmax_layers
from ..model.configuration import DERIVED
from ..model.modeling import AUTO_CLASSES
from ..ops.feature_maps import MODULES, POINTWISE

# Modules in whose place others travel, which need no compiled kernels.
_FOLDER = Path(__file__).with_name("stand_ins")
STAND_INS = {
    name: f"remote.stand_ins.{name}"
    for path in _FOLDER.rglob("*.py")
    for name in [".".join(path.relative_to(_FOLDER).with_suffix("").parts)]
}
# Of what branches ask for: the answers without the package.
WITHOUT_PACKAGE: dict[str, Any] = {
    "SlotCache": False,
    "SlotLayer": False,
    "slots": None,
    "may_be_recorded": False,
    "may_be_step": False,
    "_makes_no_logits": False,
    "new_softmax_layer": None,
    "recording": None,
    "left_padding": None,
    "left_padding_of": None,
    "padding_before": None,
    "sequence_group": None,
    "shards": None,
    "tree": None,
    "shard": None,
    "state_indices": None,
    "takes_one_op": False,
    "takes_flash": False,
    "takes_window_step": False,
    "takes_join": False,
    "has_any_length": False,
    "rounds": False,
}
# Of classes: methods that only the package calls, and bases that it alone has a use for.
METHODS_LEFT_OUT = {
    *("_prepare_position_ids_for_generation", "redraw_features", "dtype_of_sums"),
    *("equal_fields", "order_of_pieces", "supports_context_parallel"),
    *("step_in_slots_", "run_in_slots_", "replay", "piece", "combine", "recorded", "tokens_of"),
    *("may_be_recorded", "layout", "step_was_taken", "_makes_no_logits", "maybe_distribute_model"),
    *("from_dict", "from_preset", "from_pretrained", "save_pretrained"),
}
# And those that go where no other code calls them: it has a use for them in some models.
METHODS_LEFT_OUT_IF_IDLE = {
    *("sharing_keys", "sharing_queries", "queries_share_keys", "num_state_heads", "is_recurrent"),
    *("one_row", "is_packed", "reset_", "state_sizes", "check_crop", "fold", "draw"),
    *("add_convolutions", "convolve", "has_positions", "has_local_positions"),
    *("add_qk_norms", "norm_queries_and_keys"),
}
BASES_LEFT_OUT = {
    *("CountsCasts", "RecordsLayers", "RecordsSteps"),
    *("ModelCardMixin", "SavedConfig", "SavedModel"),
}
# Whose linear attention is the chunked one where decays are not by channel.
PLAIN_MIXERS = ("linear", "window")

WRITING_MIXERS = ("mamba2", "mamba3")  # which have write strengths
SUMMING_MIXERS = (*PLAIN_MIXERS, *WRITING_MIXERS, "rwkv6")  # which sum without the delta rule
DECAYING_MIXERS = ("rwkv6", "rwkv7")  # which have decays by channel of their own
ADDING_MIXERS = ("comba", "rwkv7")  # whose delta rule adds what it finds along another direction
ERASING_MIXERS = (*ADDING_MIXERS, "gdn2", "preconditioned")  # and which have erase keys

# Fields that only the package asks for: facts of mixers, and others.
FIELDS_LEFT_OUT = {
    *("needs", "conversions", "presets", "projections", "equal", "block", "slots"),
    *("has_positions", "left_padding"),
    *("state_is_first_piece", "packs_states", "shards"),
}
# Of functions: where the states of continuous batching are, and how Transformers' models round.
PARAMETERS_LEFT_OUT = {"slots", "state_indices", "rounds"}
# The layers around mixers, by what `MixerFacts.block` says.
CLASSES_OF_BLOCK = {
    "llama": {"LinearAttentionMLP", "LinearAttentionDecoderLayer"},
    "rwkv": {"RWKVDecoderLayer"},
}
CLASSES_OF_BLOCKS = set().union(*CLASSES_OF_BLOCK.values())


NOT_LOCAL = {"local_rope_parameters": None, "is_local": False}
NOT_ROTARY = {"has_positions": False, "has_local_positions": False}
# Fields that a part of models reads, and whether a config's model has that part.
FIELDS_OF_PARTS: tuple[tuple[tuple[str, ...], Callable[[Any], bool]], ...] = (
    (
        ("linear_rotary", "rotary_layers", "local_rotary_layers", "local_rope_parameters"),
        lambda config: config.position_embedding_type == "rotary",
    ),
    (
        ("attention_dropout", "softmax_mixer", "attn_output_gate"),
        has_softmax_layers,
    ),
    (
        ("use_qk_norm", "qk_norm_of_all_heads", "qk_norm_eps"),
        lambda config: has_softmax_layers(config) or config.mixer == "window",
    ),
    (("cross_attention_hidden_size",), lambda config: config.add_cross_attention),
    (("decay_lower_bound",), lambda config: config.decay == "kda_bounded"),
    (
        ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        lambda config: config.softmax_mixer == "mla",
    ),
)


def definitions_left_out(config: PreTrainedConfig) -> set[str]:
    """Of the two modules: what no model of the config has a use for."""
    return {
        "RENAMED",
        *(["LinearAttentionForMaskedLM"] if config.is_causal else []),
        *(["of_latent"] if config.softmax_mixer != "mla" else []),
        *(CLASSES_OF_BLOCKS - CLASSES_OF_BLOCK[facts_of(config.mixer).block]),
    }


def answers_for(config: PreTrainedConfig) -> dict[str, Any]:
    """Of what branches ask for, by the names that they have for it."""
    by_channel = decay_class(config.decay).per_channel or config.mixer in DECAYING_MIXERS
    is_plain = config.mixer in PLAIN_MIXERS and not by_channel
    is_normalized = config.normalizer == "z" and config.mixer != "window"  # which does it itself
    is_never_plain = by_channel or config.mixer in WRITING_MIXERS
    # Without causality, and for a memory, there are no decays: linear attention is plain then.
    is_causal = config.is_causal and not config.add_cross_attention
    return {
        **({"is_plain_attention": True} if is_plain else {}),
        **({"is_plain_attention": False} if is_never_plain and is_causal else {}),
        **({"is_causal": True} if is_causal else {}),
        **({} if config.add_cross_attention else {"normalize": is_normalized}),
        **({"delta": False} if config.mixer in SUMMING_MIXERS else {}),
        **WITHOUT_PACKAGE,
        **({} if config.mixer in ERASING_MIXERS else {"erase_key": None}),
        **({} if config.mixer in ADDING_MIXERS else {"add_along": None, "adds_along": False}),
        "block": facts_of(config.mixer).block,
        "hands_values_on": facts_of(config.mixer).block == "rwkv",
        "add_cross_attention": config.add_cross_attention,
        "has_cross_attn": config.add_cross_attention,
        "position_embedding_type": config.position_embedding_type,
        "has_softmax_layers": has_softmax_layers(config),
        **({} if has_softmax_layers(config) else {"is_recurrent": True}),
        "has_lower_bounds": has_lower_bounds(config),
        "has_qk_norm": config.use_qk_norm,
        "norms_all_heads": config.qk_norm_of_all_heads,
        **({} if config.local_rope_parameters else NOT_LOCAL),
        **({} if config.position_embedding_type == "rotary" else NOT_ROTARY),
        "is_by_channel": by_channel,
    }


def parameters_left_out(config: PreTrainedConfig) -> set[str]:
    """Of functions: what no call in a model of the config gives."""
    return PARAMETERS_LEFT_OUT | (set() if config.mixer in ERASING_MIXERS else {"erase_key"})


def rows_for(config: PreTrainedConfig) -> dict[str, set[Any]]:
    """Of tables: the keys that a model of the config may ask for."""
    types = set(config.layer_types)
    without_masked_lm = {"AutoModelForMaskedLM"} if config.is_causal else set()
    of_softmax = {"attentions"} if has_softmax_layers(config) else set()
    return {
        "AUTO_CLASSES": {auto.__name__ for auto in AUTO_CLASSES} - without_masked_lm,
        "MIXERS": {config.mixer},
        "RECURRENT_MIXERS": {config.mixer} if "linear_attention" in types else set(),
        "SHIFTED_MLPS": {config.mixer},
        "SOFTMAX_MIXERS": {config.softmax_mixer},
        "SOFTMAX_MODULES": {config.softmax_mixer},
        "OUTPUTS_OF": {"hidden_states", *of_softmax},
        "SOFTMAX_MASKS": types,
        "LAYER_CLASSES": types,
        "STATIC_LAYER_CLASSES": types,
        "DECAYS": {config.decay, "none"},
        "MODULES": {config.feature_map},
        "POINTWISE": {config.feature_map, "identity"},
        "NORMALIZERS": {config.normalizer},
        "NORMS": {config.norms},
        "DERIVED": DERIVED.keys() - unknown_fields(config),
    }


def known_values(config: PreTrainedConfig) -> dict[str, tuple[Any, ...]]:
    """The values of fields that a folder's code knows; none that a user has registered."""
    fields = (
        *("softmax_mixer", "normalizer", "position_embedding_type", "add_cross_attention"),
        *("norms", "qk_norm_of_all_heads", "is_causal"),
    )
    of_package: dict[str, Mapping[str, Any]] = {
        "mixer": MIXERS,
        "feature_map": {**POINTWISE, **MODULES},
    }
    known = {
        **{name: (getattr(config, name),) for name in fields},
        **{name: one_of(getattr(config, name), table) for name, table in of_package.items()},
        "decay": tuple(dict.fromkeys((*one_of(config.decay, DECAYS), "none"))),
        "layer_types": tuple(sorted({*config.layer_types})),
        "local_rotary_layers": (True, False) if config.local_rotary_layers else (None,),
    }
    unknown = unknown_fields(config)
    return {name: values for name, values in known.items() if name not in unknown}


def one_of(value: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    return (value,) if value in table else ()


def unknown_fields(config: PreTrainedConfig) -> set[str]:
    """Fields that no layer of the config's model has."""
    facts = [facts_of(config.mixer), SOFTMAX_MIXERS[config.softmax_mixer]]
    known = {name for x in facts for name in x.fields}
    others = [*all_facts().values(), *SOFTMAX_MIXERS.values()]
    of_parts = {x for fields, is_there in FIELDS_OF_PARTS if not is_there(config) for x in fields}
    return {name for x in others for name in x.fields} - known | of_parts
