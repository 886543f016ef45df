# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A family is one model type of flash-linear-attention (fla): the mapping from its config.json to
our config, and from its weights' names to ours. Both are functions of the config.json alone.

In this folder "theirs" means fla's, as fla 0.6.0 reads it. A key is an entry of fla's config.json,
a field an attribute of our config.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..model.configuration import LinearAttentionConfig
from .kinds import Keys, check_kinds, is_whole, refusal

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ATTENTION_DEFAULTS = {
    "num_kv_heads": None,
    "qkv_bias": False,
    "window_size": None,
    "rope_theta": 10000.0,
}
# The keys that all families read, with fla's defaults.
OF_ALL: Keys = {
    "hidden_size": 2048,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "fuse_linear_cross_entropy": False,
}
COMMON: Keys = {  # the keys that all families but Mamba-2 read
    **OF_ALL,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "attn": None,
    "attnres_block_size": None,
    "max_position_embeddings": 2048,
}
# The values that we compute; others are refused.
COMMON_NEEDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish", "silu"),
    "attnres_block_size": (None,),
}
# Keys that change the speed or the training of fla's models, and no result.
OF_KERNELS = (
    *("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "use_l2warp", "chunk_size"),
    *("residual_in_fp32", "rescale_prenorm_residual"),
)
# Keys that Transformers writes into every config.json.
OF_TRANSFORMERS = (
    *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("name_or_path", "_name_or_path", "problem_type"),
)


class Rule(NamedTuple):
    """One weight of theirs, and our weights that it consists of, in order along dimension 0.
    theirs is None for a norm without weight in their model: ours gets a weight of ones. Where rows
    are (n, H), theirs are n times all H heads, ours of each head the n.
    """

    theirs: str | None
    ours: tuple[str, ...]
    rows: tuple[int, int] | None = None


class Skeleton(NamedTuple):
    """The names of all weights outside the mixers."""

    prefix: str  # of a layer in their model; {} is the layer's number
    mixer: str  # their prefix for the module that is self_attn here
    top: dict[str, str]  # our name: theirs
    block: dict[str, str]  # the same for a layer, without its prefix


DECODER = Skeleton(
    "model.layers.{}.",
    "attn.",
    {
        "model.embed_tokens.weight": "model.embeddings.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    },
    {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "mlp.gate_proj.weight": "mlp.gate_proj.weight",
        "mlp.up_proj.weight": "mlp.up_proj.weight",
        "mlp.down_proj.weight": "mlp.down_proj.weight",
    },
)


# ---- keys of all families ----


def common_fields(keys: Keys) -> dict[str, Any]:
    """The fields of our config that all families but Mamba-2 set alike."""
    return {
        **shared_fields(keys),
        "intermediate_size": mlp_width(keys),
        "max_position_embeddings": keys["max_position_embeddings"],
    }


def shared_fields(keys: Keys) -> dict[str, Any]:
    """The fields of our config that all families set alike."""
    names = (
        *("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings"),
        *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"),
        "fuse_linear_cross_entropy",
    )
    return {
        **{name: keys[name] for name in names},
        "rms_norm_eps": keys["norm_eps"],
        "hidden_act": "silu",
        "scale_embeddings": False,
    }


def mlp_width(keys: Keys) -> int:
    """The features of an MLP: intermediate_size, or fla's multiple of 256 for its hidden_ratio."""
    if keys["intermediate_size"] is not None:
        return keys["intermediate_size"]
    ratio = 4 if keys["hidden_ratio"] is None else keys["hidden_ratio"]
    return in_steps_of(256, keys["hidden_size"] * ratio * 2 / 3)


def in_steps_of(step: int, features: float) -> int:
    """The features of an MLP as the next multiple of step.

    Raises:
        ValueError: there are none.
    """
    if features < 1:
        raise refusal("hidden_size * hidden_ratio", "such that MLPs have features", features)
    return step * math.ceil(int(features) / step)


def whole(name: str, value: float) -> int:
    """A number of features as an integer.

    Raises:
        ValueError: it is a fraction.
    """
    if not math.isclose(value, round(value), rel_tol=1e-5):
        raise refusal(name, "such that features are whole numbers", value)
    return round(value)


def gate_fields(is_gated: bool, activation: str) -> dict[str, Any]:
    """The fields for a norm of each head's output, with or without a gate behind it."""
    if not is_gated:
        return {"normalizer": "rms_norm"}
    return {"normalizer": "gated_rms_norm", "gate_act": activation}


def share_of(part: int, whole: int) -> int | float:
    """part / whole, as an integer if it is one."""
    return part // whole if part % whole == 0 else part / whole


def expect(config: Any, **values: Any) -> None:
    """Raises a ValueError where fields of our config have other values."""
    for name, expected in values.items():
        if getattr(config, name) != expected:
            raise ValueError(f"{name} must be {expected!r}, got {getattr(config, name)!r}")


# ---- softmax layers of hybrids ----


def attention_fields(keys: Keys, **of_pure: Any) -> dict[str, Any]:
    """The fields for a hybrid's softmax layers; for a model without them, of_pure.

    Raises:
        ValueError: the softmax layers differ in more than whether they have a window.
    """
    specs = attention_specs(keys)
    if not specs:
        return {"position_embedding_type": "none", **of_pure}
    first = specs[0]
    for name in ("num_heads", "num_kv_heads", "rope_theta"):
        values = [spec[name] for spec in specs]
        if values.count(values[0]) != len(values):
            raise refusal(f"attn[{name!r}]", "the same for all softmax layers", values)
    for spec in specs:
        if spec["qkv_bias"]:
            raise refusal("attn['qkv_bias']", "False in a hybrid", spec["qkv_bias"])
    windows = sorted({spec["window_size"] for spec in specs if spec["window_size"] is not None})
    if len(windows) > 1:
        raise refusal("attn['window_size']", "the same wherever there is one", windows)
    return {
        **head_fields(keys["hidden_size"], first["num_heads"], first["num_kv_heads"]),
        **rotary_fields(first["rope_theta"]),
        "linear_rotary": False,
        "layer_types": layer_types(keys),
        "sliding_window": windows[0] if windows else None,
    }


def attention_specs(keys: Keys) -> list[Keys]:
    """The specifications in `attn`, with defaults: one object, or since fla 0.6.0 a list of them.

    Raises:
        ValueError: `attn` has another form.
    """
    given = keys.get("attn")
    specs = [] if given is None else [given] if isinstance(given, dict) else given
    is_list = isinstance(specs, (list, tuple)) and all(isinstance(x, dict) for x in specs)
    if not is_list or any("layers" not in x or "num_heads" not in x for x in specs):
        raise refusal("attn", "null, or one or several objects with layers and num_heads", given)
    check_layers([spec["layers"] for spec in specs], keys["num_hidden_layers"])
    specs = [{**ATTENTION_DEFAULTS, **spec} for spec in specs if spec["layers"]]
    for spec in specs:
        unknown = sorted(spec.keys() - {*ATTENTION_DEFAULTS, "layers", "num_heads"})
        if unknown:
            raise refusal("attn", f"without {', '.join(unknown)}", given)
        check_kinds(spec, {**ATTENTION_DEFAULTS, "num_heads": 1}, shown="attn[{!r}]")
        spec["num_kv_heads"] = spec["num_kv_heads"] or spec["num_heads"]
    return specs


def check_layers(lists: list[Any], L: int) -> None:
    """Raises a ValueError where these are no lists of different numbers of layers."""
    are_lists = all(isinstance(x, (list, tuple)) for x in lists)
    layers = [layer for x in lists for layer in x] if are_lists else lists
    are_layers = are_lists and all(is_whole(x, 0) and x < L for x in layers)
    if not are_layers or len({*layers}) != len(layers):
        raise refusal("attn['layers']", f"numbers from 0 to {L - 1}, each once", layers)


def layer_types(keys: Keys) -> list[str]:
    types = [LINEAR] * keys["num_hidden_layers"]
    for spec in attention_specs(keys):
        for layer in spec["layers"]:
            types[layer] = FULL if spec["window_size"] is None else SLIDING
    return types


def head_fields(hidden_size: int, num_heads: int, num_kv_heads: int | None) -> dict[str, Any]:
    """The fields for the heads of softmax layers."""
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": whole("hidden_size / num_heads", hidden_size / num_heads),
    }


def rotary_fields(theta: float) -> dict[str, Any]:
    return {
        "position_embedding_type": "rotary",
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
    }


def attention_keys(config: Any) -> list[Keys] | Keys | None:
    """The value of `attn` for our config: one object, or two for layers with and without a window.

    Raises:
        ValueError: fla's softmax layers do not compute what ours do.
    """
    types = config.active_layer_types
    if {*types} == {LINEAR}:
        return None
    if LINEAR not in types:
        raise ValueError(f"layer_types must hold {LINEAR!r}, got {sorted({*types})}")
    expect(config, softmax_mixer="softmax", use_qk_norm=False, attn_output_gate=False)
    expect(config, attention_bias=False, position_embedding_type="rotary")
    specs = []
    for kind, window in ((FULL, None), (SLIDING, config.sliding_window)):
        layers = [i for i, one in enumerate(types) if one == kind]
        if layers:
            specs.append(
                {
                    "layers": layers,
                    "num_heads": config.num_attention_heads,
                    "num_kv_heads": config.num_key_value_heads,
                    "qkv_bias": False,
                    "window_size": window,
                    "rope_theta": (config.rope_parameters or {}).get("rope_theta", 10000.0),
                }
            )
    return specs[0] if len(specs) == 1 else specs


# ---- names ----


def same(*names: str) -> list[Rule]:
    """Rules for weights with equal names."""
    return [Rule(name, (name,)) for name in names]


def renamed(**names: str) -> list[Rule]:
    """Rules for weights of modules, given as our_name="their_name"; "__" stands for a dot."""
    return [
        Rule(f"{theirs}.weight", (f"{ours.replace('__', '.')}.weight",))
        for ours, theirs in names.items()
    ]


def weights(*modules: str) -> list[Rule]:
    """Rules for the weights of modules with equal names."""
    return same(*(f"{module}.weight" for module in modules))


def convolutions(keys: Keys, *names: str) -> list[Rule]:
    """Rules for the weights of short convolutions, if the model has them."""
    return weights(*(f"{name}_conv1d" for name in names)) if keys["use_short_conv"] else []


def attention_names(keys: Keys) -> list[Rule]:
    """Rules for a softmax layer."""
    biases = [f"{x}_proj.bias" for x in "qkv"] if keys.get("qkv_bias") else []
    has_norms = keys.get("qk_norm") is True  # DeltaNet's is a word, and of other layers
    norms = weights("q_norm", "k_norm") if has_norms else []
    return [*weights("q_proj", "k_proj", "v_proj", "o_proj"), *same(*biases), *norms]


@dataclass(frozen=True)
class Family:
    """Everything known of one model type.

    class_name: the name of its model class, without "ForCausalLM".
    keys: the keys that this family reads beside `common`, with fla's defaults.
    needs: the values that we compute, by key; others are refused.
    nullable: the keys that may be null though their default is not.
    fields: the function from keys to fields of our config.
    back: its inverse, from our config to keys; it raises a ValueError if no keys fit.
    names: the rules for the weights of a recurrent mixer.
    names_of_some: of weights that not all layers have, below the layer's prefix, by its number.
    unused: keys of fla's config class that none of its layers reads.
    left_out: patterns of weights that no model needs, with the reason.
    has_lower_bounds: whether the model has HGRN's table of lower bounds.
    others: keys that mark a folder of another package with the same model type, and its owner.
    common, around: the keys shared with other families, and the function from them to fields.
    """

    class_name: str
    keys: Keys
    fields: Callable[[Keys], dict[str, Any]]
    back: Callable[[Any], Keys]
    names: Callable[[Keys], list[Rule]]
    names_of_some: Callable[[Keys, int], list[Rule]] = lambda keys, layer: []
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    skeleton: Skeleton = DECODER
    has_lower_bounds: bool = False
    others: Mapping[str, str] = field(default_factory=dict)
    common: Keys = field(default_factory=COMMON.copy)
    around: Callable[[Keys], dict[str, Any]] = common_fields

    @property
    def defaults(self) -> Keys:
        return {**self.common, **self.keys}

    def read(self, config: Keys) -> Keys:
        """The keys of a config.json that this family reads, with defaults for missing ones.

        Raises:
            ValueError: we do not compute a value, or it is of another kind; the message names it.
        """
        for name, what in self.others.items():
            if name in config:
                raise ValueError(f"{name} in its config.json says that it is {what}")
        keys = {name: config.get(name, default) for name, default in self.defaults.items()}
        check_kinds(keys, self.defaults, ("hidden_ratio", *self.nullable))
        for name, choices in {**COMMON_NEEDS, **self.needs}.items():
            if name in keys and keys[name] not in choices:
                raise refusal(name, " or ".join(map(repr, choices)), keys[name])
        return keys

    def not_read(self, config: Keys) -> list[str]:
        """The keys of a config.json that neither fla nor we know."""
        known = {*self.defaults, *self.unused, *OF_KERNELS, *OF_TRANSFORMERS}
        return sorted(config.keys() - known)

    def config_for(self, keys: Keys) -> LinearAttentionConfig:
        """Our config for these keys.

        Raises:
            ValueError: the keys do not fit our model; the message names the key or the field.
        """
        return LinearAttentionConfig(**{**self.around(keys), **self.fields(keys)})


def rules_of(family: Family, keys: Keys) -> list[Rule]:
    """The rules for all weights of a model."""
    skeleton = family.skeleton
    top = dict(skeleton.top)
    if keys["tie_word_embeddings"]:
        del top["lm_head.weight"]
    rules = [Rule(theirs, (ours,)) for ours, theirs in top.items()]
    kinds = family.config_for(keys).active_layer_types
    if family.has_lower_bounds and LINEAR in kinds[1:]:  # the first has none
        rules.append(Rule("model.lower_bounds", ("model.lower_bounds.weight",)))
    for layer, kind in enumerate(kinds):
        theirs, ours = skeleton.prefix.format(layer), f"model.layers.{layer}."
        block = [Rule(x, (y,)) for y, x in skeleton.block.items()]
        mixer = family.names(keys) if kind == LINEAR else attention_names(keys)
        rules += _below(theirs, ours, [*block, *family.names_of_some(keys, layer)])
        rules += _below(theirs + skeleton.mixer, f"{ours}self_attn.", mixer)
    return rules


def _below(theirs: str, ours: str, rules: Iterable[Rule]) -> list[Rule]:
    return [
        Rule(None if x is None else theirs + x, tuple(ours + y for y in own), rows)
        for x, own, rows in rules
    ]


def swapped(x: Tensor, rows: tuple[int, int]) -> Tensor:
    """x (n H D, ...) as (H n D, ...), for rows (n, H)."""
    return x.unflatten(0, (*rows, -1)).transpose(0, 1).flatten(0, 2)
