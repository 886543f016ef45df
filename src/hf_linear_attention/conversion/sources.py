# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The models of Transformers that can be converted: how their configs map to ours, and the reasons
why others can't be.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights
# Fields that both configs have, with one meaning.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "rope_parameters",
)
# Fields of configs that say of any model that it has what ours can't have, and what that is.
UNSUPPORTED_FIELDS = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "attn_logit_softcapping": "soft-capping of attention scores",
    "final_logit_softcapping": "soft-capping of logits",
    "use_bidirectional_attention": "attention in both directions",
    "attn_output_gate": "gates behind attention",
    "embd_pdrop": "dropout of embeddings",
    "resid_pdrop": "dropout of what layers add",
    "add_cross_attention": "cross attention",
}
# What models that one might try have beside that.
UNSUPPORTED_MODELS = {
    "gemma2": "soft-capping of attention scores and of logits",
    "gemma3": "images; its language model is Gemma3ForCausalLM",
    "gemma3n_text": "embeddings of its own for each layer",
    "cohere": "layers whose MLP reads what attention reads",
}


@dataclass(frozen=True)
class Source:
    """A model of Transformers whose layers are as ours: its parameters have the names of ours.

    fields: what else of its config ours has, under the same name.
    fixed: what its class does, and no field says.
    norms_add_1: whether its norms of the hidden size multiply by 1 + weight.
    turns_part: whether it reads the partial_rotary_factor of rope_parameters.
    slides: whether a sliding_window, if there is one, is that of all layers.
    fused: projections that it has in one, rows behind rows, by its name.
    renamed: fields of ours that its config has under another name.
    factors: of a config, and whether embeddings and head are one: what it multiplies the outputs
        of modules by, by the ends of their names. Their weights and biases take that up.
    """

    class_name: str
    fields: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norms_add_1: bool = False
    turns_part: bool = False
    slides: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    factors: Callable[[Any, bool], Mapping[str, float]] = lambda config, is_tied: {}


def granite_factors(config: Any, is_tied: bool) -> dict[str, float]:
    """Of embeddings, scores, what layers add, and logits: the norm before the head takes up the
    latter, and takes back what the embeddings' factor does to a head that they are.
    """
    of_head = config.embedding_multiplier if is_tied else 1
    return {
        "model.embed_tokens": config.embedding_multiplier,
        "self_attn.q_proj": config.attention_multiplier * head_dim_of(config) ** 0.5,
        "self_attn.o_proj": config.residual_multiplier,
        "mlp.down_proj": config.residual_multiplier,
        "model.norm": 1 / (config.logits_scaling * of_head),
    }


def gemma_factors(config: Any, is_tied: bool) -> dict[str, float]:
    """Of scores, whose scale is another than that of the head dim: norms of queries take it up."""
    return {"self_attn.q_norm": (config.head_dim / config.query_pre_attn_scalar) ** 0.5}


GEMMA = Source(
    "GemmaForCausalLM", ("attention_bias",), {"scale_embeddings": True}, norms_add_1=True
)
OLMO = Source(
    "Olmo2ForCausalLM",
    ("attention_bias",),
    {"norms": "behind", "use_qk_norm": True, "qk_norm_of_all_heads": True},
)
SOURCES: dict[str, Source] = {  # by model type
    "llama": Source("LlamaForCausalLM", ("attention_bias", "mlp_bias")),
    "mistral": Source("MistralForCausalLM", slides=True),
    "granite": Source(
        "GraniteForCausalLM", ("attention_bias", "mlp_bias"), factors=granite_factors
    ),
    "phi3": Source(
        "Phi3ForCausalLM",
        turns_part=True,
        slides=True,
        fused={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
    ),
    "qwen2": Source(
        "Qwen2ForCausalLM", fixed={"attention_bias": True, "attention_out_bias": False}
    ),
    "qwen3": Source("Qwen3ForCausalLM", ("attention_bias",), {"use_qk_norm": True}),
    "smollm3": Source("SmolLM3ForCausalLM", ("attention_bias", "mlp_bias")),
    "olmo2": OLMO,
    "olmo3": replace(OLMO, class_name="Olmo3ForCausalLM"),
    "gemma": GEMMA,
    "gemma3_text": replace(
        GEMMA,
        class_name="Gemma3ForCausalLM",
        fixed={"scale_embeddings": True, "norms": "around", "use_qk_norm": True},
        renamed={"hidden_act": "hidden_activation"},
        factors=gemma_factors,
    ),
    "linear_attention": Source(  # of this package, with softmax layers only
        "LinearAttentionForCausalLM",
        (
            *("attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "qk_norm_eps"),
            *("position_embedding_type", "scale_embeddings", "rotary_layers", "norms"),
            *("qk_norm_of_all_heads", "local_rotary_layers", "local_rope_parameters"),
        ),
        turns_part=True,
    ),
}


def find_source(config: PreTrainedConfig) -> Source:
    """What is known of the model that a config is of.

    Raises:
        ValueError: it can't be converted; the message names what is not supported.
    """
    model_type = config.model_type
    found = {what for name, what in UNSUPPORTED_FIELDS.items() if getattr(config, name, None)}
    if model_type in UNSUPPORTED_MODELS:
        found = {UNSUPPORTED_MODELS[model_type]}
    if model_type == "linear_attention":
        found |= _obstacles_of_ours(config)
    if model_type not in SOURCES or found:
        has = f", which has {' and '.join(sorted(found))}" if found else ""
        raise ValueError(
            f"model must be one of {', '.join(map(repr, SOURCES))}, with layers as ours, got "
            f"{model_type!r}{has}"
        )
    return SOURCES[model_type]


def _obstacles_of_ours(config: Any) -> set[str]:
    """What one of our own models has that can't be converted."""
    obstacles = {
        "layers that are linear already": "linear_attention" in config.active_layer_types,
        "latent attention": config.softmax_mixer == "mla",
    }
    return {what for what, is_there in obstacles.items() if is_there}


def layer_types_of(config: PreTrainedConfig) -> list[str]:
    """The type of each layer, as our configs call them."""
    L = config.num_hidden_layers
    source = SOURCES.get(config.model_type)
    if source is not None and source.slides:
        return ["full_attention" if config.sliding_window is None else "sliding_attention"] * L
    return list((getattr(config, "layer_types", None) or ["full_attention"] * L)[:L])


def head_dim_of(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if head_dim is None else head_dim


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of our config that say what another is, but for layer_types.

    Raises:
        ValueError: as `find_source`.
    """
    source = find_source(config)
    names = {name: source.renamed.get(name, name) for name in SHARED_FIELDS + source.fields}
    fields = {name: copy.deepcopy(getattr(config, theirs)) for name, theirs in names.items()}
    fields |= _rope_of_layers(fields["rope_parameters"], layer_types_of(config))
    if not source.turns_part and fields["rope_parameters"].get("rope_type") == "default":
        fields["rope_parameters"].pop("partial_rotary_factor", None)  # these models don't read it
    if "sliding_attention" in layer_types_of(config):
        fields["sliding_window"] = config.sliding_window
    has_rope = getattr(config, "no_rope_layers", None)
    if has_rope is not None and not all(has_rope):
        fields["rotary_layers"] = [bool(has) for has in has_rope[: config.num_hidden_layers]]
    return {
        "position_embedding_type": "rotary",
        "scale_embeddings": False,
        **fields,
        "head_dim": head_dim_of(config),
        "attention_dropout": config.attention_dropout or 0.0,
        **source.fixed,
    }


def _rope_of_layers(rope_parameters: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Fields of ours, of what a config says for all layers or for each type of them."""
    if "full_attention" not in rope_parameters:
        return {"rope_parameters": rope_parameters}
    of_full, of_sliding = (rope_parameters[x] for x in ("full_attention", "sliding_attention"))
    if of_full == of_sliding:
        return {"rope_parameters": of_full}
    return {
        "rope_parameters": of_full,
        "local_rope_parameters": of_sliding,
        "local_rotary_layers": [kind == "sliding_attention" for kind in types],
    }


def check_model(model: nn.Module) -> Source:
    """What is known of a model.

    Raises:
        ValueError: it can't be converted, or its weights are not there, or are no plain numbers.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a model of Transformers, got {type(model).__name__}; one with PEFT's "
            "adapters comes out of its merge_and_unload()"
        )
    source = find_source(model.config)
    if type(model).__name__ != source.class_name:
        raise ValueError(f"model must be a {source.class_name}, got {type(model).__name__}")
    # Models that were quantised once, as in a GGUF file, may hold plain numbers: these tell.
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if type(x) not in (nn.Parameter, Tensor) or x.dtype not in DTYPES:
            raise ValueError(
                f"model must not be quantised or sharded: {name} is {type(x).__name__} of "
                f"{x.dtype}, and must be a plain tensor of float64, float32, bfloat16 or float16"
            )
        if x.device == torch.device("meta"):
            raise ValueError(f"model must hold its weights: {name} is on the meta device")
    return source
