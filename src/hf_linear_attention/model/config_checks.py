# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The checks of a config, and the choice of the fields that are saved."""

import dataclasses
import difflib
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from transformers.activations import ACT2FN

from ..mixers.facts import SOFTMAX_MIXERS, MixerFacts, all_facts, facts_of
from ..mixers.parts.decays import check_decay, decay_class
from ..mixers.parts.normalizers import NORMALIZERS
from ..mixers.parts.rope import check_rope
from ..ops.feature_maps import POINTWISE, check_feature_map

LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
GATE_ACTIVATIONS = ("sigmoid", "silu")
VALUE_ACTIVATIONS = (None, "silu")
NORMS = ("before", "behind", "around")
POSITION_EMBEDDING_TYPES = ("sinusoidal", "none", "learned", "rotary")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "sliding_window",
    "window_size",
    "window_sinks",
    "num_householder",
    "proj_low_rank_dim",
    "decay_low_rank_dim",
    "a_low_rank_dim",
    "v_low_rank_dim",
    "gate_low_rank_dim",
    "cross_attention_hidden_size",
)
MAY_BE_0 = ("intermediate_size", "window_sinks")  # which means that there is none
NOT_NEGATIVE = (
    *("expand_k", "expand_v", "initializer_range", "rms_norm_eps", "attention_eps"),
    *("output_norm_eps", "qk_norm_eps", "A_floor"),
)
POSITIVE = ("squash_x", "squash_eps")


def has_rotary(config: Any) -> bool:
    return config.position_embedding_type == "rotary"


def turns_linear(config: Any) -> bool:
    return has_rotary(config) and facts_of(config.mixer).has_positions


PLAIN = ("expand_k", "softmax_mixer", "is_causal", "use_cache", "A_floor", "norms")
# Which models use a field that not all do, beside mixers' own. Others do not save it.
USED_BY: dict[str, Callable[[Any], bool]] = {
    "attention_dropout": lambda config: set(config.active_layer_types) != {"linear_attention"},
    "rope_parameters": has_rotary,
    "linear_rotary": turns_linear,
    "gate_act": lambda config: config.is_gated,
    "decay_lower_bound": lambda config: config.decay == "kda_bounded",
    "attention_eps": lambda config: config.normalizer == "z",
}


def unused_fields(config: Any) -> set[str]:
    """Those that only other models use."""
    unused = {name for name, is_used in USED_BY.items() if not is_used(config)}
    return unused | fields_of_others(config)


def fields_of_others(config: Any) -> set[str]:
    """Those that belong to mixers, and not to this config's."""
    return {x for facts in all_facts().values() for x in facts.fields} - {*config.mixer_fields}


@functools.cache
def unsaid_values(config_class: Any) -> dict[str, Any]:
    """Fields that are not saved where they have these values, their defaults, which are to stay:
    what is off where nothing is said, and the plain form of a model. For the one that is left out
    others take another default.
    """
    return {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if field.name in config_class.__annotations__
        and (not field.default or field.name in PLAIN)
        and field.name != "tie_word_embeddings"
    }


class ConfigChecks:
    """Of a LinearAttentionConfig."""

    if TYPE_CHECKING:  # its fields

        def __getattr__(self, name: str) -> Any: ...

    @property
    def mixer_fields(self) -> tuple[str, ...]:
        """Those that its mixer alone has a use for."""
        return facts_of(self.mixer).fields

    def unsaid_fields(self) -> set[str]:
        """Those that are not saved: a model does not use them, or nothing is said by them."""
        config_class: Any = type(self)
        values = unsaid_values(config_class)
        return unused_fields(self) | {x for x, value in values.items() if getattr(self, x) == value}

    def warn_of_mistakes(self, names: Iterable[str]) -> None:
        """Warns of attributes that are no fields, but nearly; others may be a user's own. And of
        fields that were set, and that other mixers alone read.
        """
        default = {field.name: field.default for field in dataclasses.fields(type(self))}  # type: ignore[arg-type]
        for name in sorted(fields_of_others(self) & default.keys()):
            value = getattr(self, name)
            if value != default[name] and name not in self.__dict__["_derived"]:
                warnings.warn(
                    f"{name}={value!r} changes nothing in the model: mixer={self.mixer!r} does not "
                    "read it",
                    stacklevel=5,
                )
        for name in {*names}.difference(self.mixer_fields):
            near = difflib.get_close_matches(name, type(self).__annotations__, 2)
            if near and name != "auto_map" and not name.endswith("_token_id"):  # Transformers' own
                warnings.warn(
                    f"LinearAttentionConfig has no field {name!r}, which changes nothing in the "
                    f"model; did you mean {' or '.join(map(repr, near))}?",
                    stacklevel=5,  # who makes the config
                )

    def validate_rope(self):
        """Transformers' checks of rope_parameters, where a layer reads them."""
        if self.position_embedding_type == "rotary":
            super().validate_rope()  # type: ignore[misc]

    def check_for_model(self):
        """Raises a ValueError as below: a config may have been changed since it was made."""
        self.validate_architecture()

    def validate_architecture(self):
        """Raises a ValueError where a value is none of its choices or values exclude each other."""
        self.check_sizes()
        check_feature_map(self.feature_map, self.feature_map_kwargs)
        check_decay(self.decay)
        facts_of(self.mixer)
        choices = {
            "softmax_mixer": SOFTMAX_MIXERS,
            "normalizer": NORMALIZERS,
            "gate_act": GATE_ACTIVATIONS,
            "value_act": VALUE_ACTIVATIONS,
            "position_embedding_type": POSITION_EMBEDDING_TYPES,
            "hidden_act": ACT2FN,
            "norms": NORMS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                names = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {names}, got {getattr(self, name)!r}")
        self._check_layers()
        self._check_heads()
        self._check_mixers()
        self._check_decay()
        self._check_time_steps()
        if not self.is_causal and self.decay != "none":
            raise ValueError(
                'decay must be "none" with is_causal=False, where no token is older than another, '
                f"got {self.decay!r}"
            )
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(
                f"attention_dropout={self.attention_dropout} must be at least 0 and less than 1"
            )

    def _check_layers(self):
        """Raises a ValueError where layer_types does not fit."""
        layer_types = self.layer_types or []
        unknown = sorted(set(layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(
                f"layer_types may hold {', '.join(map(repr, LAYER_TYPES))}, got {unknown}"
            )
        if len(layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must have num_hidden_layers={self.num_hidden_layers} entries, "
                f"got {len(layer_types)}"
            )
        for name in ("rotary_layers", "local_rotary_layers"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} must have num_hidden_layers={self.num_hidden_layers} entries, got "
                    f"{len(entries)}"
                )
        if "sliding_attention" in layer_types and self.sliding_window is None:
            raise ValueError(
                'sliding_window must be given where layer_types has "sliding_attention"'
            )

    def _check_heads(self):
        """Raises a ValueError where heads or positions can't be divided as they must be."""
        assert self.num_key_value_heads is not None and self.head_dim is not None  # derived
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        assert self.linear_num_key_heads is not None and self.linear_num_value_heads is not None
        if self.linear_num_value_heads % self.linear_num_key_heads != 0:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}"
            )
        if self.position_embedding_type == "rotary" and self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim={self.head_dim} must be even for rotary positions, which turn pairs"
            )
        check_rope(self.rope_parameters, self.head_dim)
        check_rope(self.local_rope_parameters, self.head_dim, "local_rope_parameters")
        if (self.local_rotary_layers is None) != (self.local_rope_parameters is None):
            raise ValueError(
                "local_rotary_layers and local_rope_parameters must be given both or neither, got "
                f"{self.local_rotary_layers} and {self.local_rope_parameters}"
            )
        if self.position_embedding_type == "sinusoidal" and self.hidden_size % 2 != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be even for sinusoidal positions"
            )

    def _check_mixers(self):
        """Raises a ValueError where a value is another than a mixer's definition has."""
        facts, layer_types = facts_of(self.mixer), set(self.layer_types or [])
        if facts.block == "rwkv" and layer_types != {"linear_attention"}:
            raise ValueError(
                f'layer_types must be "linear_attention" alone with mixer={self.mixer!r}, got '
                f"{sorted(layer_types)}"
            )
        self._check_needs("mixer", facts)
        if layer_types != {"linear_attention"}:
            self._check_needs("softmax_mixer", SOFTMAX_MIXERS[self.softmax_mixer])
        if facts.reads_the_past and not self.is_causal:
            raise ValueError(
                f'mixer must not be "{self.mixer}" with is_causal=False: it reads what came before'
            )
        for name, other in facts.equal_fields.items():
            value, expected = getattr(self, name), getattr(self, other)
            if value != expected:
                raise ValueError(
                    f"{name} must be {other}={expected} with mixer={self.mixer!r}, got {value}"
                )
        turns = turns_linear(self) and self.linear_rotary and "linear_attention" in layer_types
        if turns and self.linear_key_head_dim != self.head_dim:
            raise ValueError(
                f"linear_key_head_dim must be head_dim={self.head_dim} with rotary positions, got "
                f"{self.linear_key_head_dim}; linear_rotary=False keeps them to softmax layers"
            )

    def _check_needs(self, field: str, facts: MixerFacts):
        """Raises a ValueError where the mixer that `field` names can't have a value of another."""
        for name, choices in facts.needs.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be {' or '.join(map(repr, choices))} with "
                    f"{field}={getattr(self, field)!r}, got {getattr(self, name)!r}"
                )

    def _check_decay(self):
        """Raises a ValueError where a decay has no use for the features or keys that it gets."""
        if not -math.inf < self.decay_lower_bound < 0:
            raise ValueError(
                f"decay_lower_bound={self.decay_lower_bound} must be less than 0 and finite"
            )
        decay = decay_class(self.decay)
        if decay.per_channel and self.feature_map not in POINTWISE:
            raise ValueError(
                f"feature_map must be one of {', '.join(map(repr, POINTWISE))} with "
                f"decay={self.decay!r}, which is one for every channel, got {self.feature_map!r}"
            )
        if decay.gives_keys and not facts_of(self.mixer).takes_keys:
            taking = [repr(name) for name, facts in all_facts().items() if facts.takes_keys]
            raise ValueError(
                f"mixer must be {' or '.join(taking)} with decay={self.decay!r}, "
                f"which gives the keys, got {self.mixer!r}"
            )

    def _check_time_steps(self):
        """Raises a ValueError where time steps could be none."""
        is_range = 0 < self.time_step_min <= self.time_step_max < math.inf
        if not (is_range and 0 < self.time_step_floor < math.inf):
            raise ValueError(
                "time_step_min, time_step_max and time_step_floor must be more than 0 and finite, "
                f"and the first at most the second, got {self.time_step_min}, {self.time_step_max} "
                f"and {self.time_step_floor}"
            )
        limit = self.time_step_limit
        if limit is not None and not (len(limit) == 2 and 0 <= limit[0] <= limit[1]):
            raise ValueError(
                f"time_step_limit must be two numbers of at least 0 that rise, got {limit}"
            )

    def check_sizes(self):
        """Raises a ValueError for a number that is no size, or that heads can't share."""
        for name in SIZES:
            value = getattr(self, name)
            smallest = 0 if name in MAY_BE_0 else 1
            if value is not None and value < smallest:
                raise ValueError(f"{name}={value} must be at least {smallest}")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:  # neither is NaN
                raise ValueError(f"{name}={value} must be at least 0 and finite")
        for name in POSITIVE:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be more than 0 and finite")
        is_derived = self.head_dim is None or "head_dim" in self.__dict__.get("_derived", [])
        if is_derived and self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_attention_heads} where head_dim is not given"
            )
        if self.conv_kernel_size < 0 or self.conv_kernel_size == 1:
            raise ValueError(
                "conv_kernel_size must be 0 (no convolution) or at least 2 (tokens that it sees), "
                f"got {self.conv_kernel_size}"
            )
