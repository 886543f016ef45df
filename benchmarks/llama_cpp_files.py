# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""GGUF, llama.cpp's files, of models that Transformers has saved, and of RWKV-7 under
flash-linear-attention's names: a table for each architecture.

For llama_cpp_worker.py, in whose environment torch is not needed.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

ANY_LENGTH = 2**20  # the context of a model whose config names none
HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "backbone.embeddings.weight", "model.embeddings.weight")

Config = Mapping[str, Any]
Weights = dict[str, np.ndarray]
Change = Callable[[np.ndarray, Config], np.ndarray]


class Architecture(NamedTuple):
    name: str  # in llama.cpp
    describe: Callable[[gguf.GGUFWriter, Config], None]
    names: dict[str, str]  # of weights: in Transformers, without model and layer; in llama.cpp
    changes: dict[str, Change]  # by the latter, what is done to these weights
    prepare: Callable[[Weights], Weights] = dict  # what is done to all of them before


# ---- what is done to weights ----


def pairs_side_by_side(heads: str) -> Change:
    """Rotary positions turn the numbers i and i + D / 2 of a head in Transformers, and 2 i and
    2 i + 1 in llama.cpp's Llama. heads: the config's name for how many there are.
    """

    def change(weight: np.ndarray, config: Config) -> np.ndarray:
        halves = weight.reshape(config[heads], 2, -1, weight.shape[-1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    return change


def one_more(weight: np.ndarray, config: Config) -> np.ndarray:
    """Of norms that multiply by 1 + weight."""
    return weight + 1


def rate_of_decay(weight: np.ndarray, config: Config) -> np.ndarray:
    """A, for which Transformers keeps the logarithm of -A."""
    return -np.exp(weight)


def without_middle(weight: np.ndarray, config: Config) -> np.ndarray:
    """Of convolutions: (channels, 1, width)."""
    return weight[:, 0]


def column(weight: np.ndarray, config: Config) -> np.ndarray:
    return weight[:, None]


def column_of_rates(weight: np.ndarray, config: Config) -> np.ndarray:
    return column(rate_of_decay(weight, config), config)


def by_group(weight: np.ndarray, config: Config) -> np.ndarray:
    return weight.reshape(config["n_groups"], -1)


def with_mixes_of_rwkv7_in_one(weights: Weights) -> Weights:
    """A layer's mixes with the token before as one weight, small products' biases under names of
    their own, and mixes of values in the first layer, too, which llama.cpp asks for and does not
    use.
    """
    found: Weights = {}
    for name, weight in weights.items():
        if (mix := re.fullmatch(r"(.*attn\.x_)([rwkvag])", name)) is not None:
            if mix[2] == "r":
                six = [weights[f"{mix[1]}{letter}"].reshape(-1) for letter in "rwkvag"]
                found[f"{mix[1]}all.weight"] = np.stack(six)[:, None, None]
            continue
        if name.endswith(("r_k", "k_k", "k_a", "x_k")):
            name, weight = f"{name}.weight", weight.reshape(-1)
        name = re.sub(r"lora\.2\.bias$", "bias.weight", name)
        found[name] = weight
        if ".0.attn.a_lora" in name:
            found[name.replace("a_lora", "v_lora")] = weight
    return found


# ---- architectures, by the model_type of a config ----


def describe_transformer(writer: gguf.GGUFWriter, config: Config) -> None:
    """What Llama and Qwen3.5 have in common."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def describe_llama(writer: gguf.GGUFWriter, config: Config) -> None:
    describe_transformer(writer, config)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


def describe_qwen35(writer: gguf.GGUFWriter, config: Config) -> None:
    describe_transformer(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    pairs = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
    writer.add_rope_dimension_count(2 * pairs)
    # Pairs take turns between the positions in time, height and width, which are the same in text.
    writer.add_rope_dimension_sections([*(len(range(i, pairs, 3)) for i in range(3)), 0])
    types = config["layer_types"]
    period = types.index("full_attention") + 1
    assert all((t == "full_attention") == (i % period == 0) for i, t in enumerate(types, 1))
    writer.add_full_attention_interval(period)
    # Where several heads of values share one of keys, llama.cpp wants them in another order.
    assert config["linear_num_key_heads"] == config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def describe_mamba2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(ANY_LENGTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])


def describe_rwkv7(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(ANY_LENGTH)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(0)
    writer.add_layer_norm_eps(config["norm_eps"])
    writer.add_wkv_head_size(config["head_dim"])
    writer.add_decay_lora_rank(config["decay_low_rank_dim"])
    writer.add_iclr_lora_rank(config["a_low_rank_dim"])
    writer.add_value_residual_mix_lora_rank(config["v_low_rank_dim"])
    writer.add_gate_lora_rank(config["gate_low_rank_dim"])


NAMES_OF_TRANSFORMERS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        describe_llama,
        NAMES_OF_TRANSFORMERS | {"post_attention_layernorm": "ffn_norm"},
        {
            "attn_q": pairs_side_by_side("num_attention_heads"),
            "attn_k": pairs_side_by_side("num_key_value_heads"),
        },
    ),
    "qwen3_5_text": Architecture(
        "qwen35",
        describe_qwen35,
        NAMES_OF_TRANSFORMERS
        | {
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "linear_attn.in_proj_qkv": "attn_qkv",
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
            "linear_attn.conv1d": "ssm_conv1d",
            "linear_attn.A_log": "ssm_a",
            "linear_attn.dt_bias": "ssm_dt.bias",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        },
        {
            "output_norm": one_more,
            "attn_norm": one_more,
            "post_attention_norm": one_more,
            "attn_q_norm": one_more,
            "attn_k_norm": one_more,
            "ssm_conv1d": without_middle,
            "ssm_a": rate_of_decay,
        },
    ),
    "mamba2": Architecture(
        "mamba2",
        describe_mamba2,
        {
            "embeddings": "token_embd",
            "norm_f": "output_norm",
            "lm_head": "output",
            "norm": "attn_norm",
            "mixer.in_proj": "ssm_in",
            "mixer.conv1d": "ssm_conv1d",
            "mixer.dt_bias": "ssm_dt.bias",
            "mixer.A_log": "ssm_a",
            "mixer.D": "ssm_d",
            "mixer.norm": "ssm_norm",
            "mixer.out_proj": "ssm_out",
        },
        {
            "ssm_conv1d": without_middle,
            "ssm_a": column_of_rates,
            "ssm_d": column,
            "ssm_norm": by_group,
        },
    ),
    "rwkv7": Architecture(
        "rwkv7",
        describe_rwkv7,
        {
            "embeddings": "token_embd",
            "norm": "output_norm",
            "lm_head": "output",
            "pre_norm": "token_embd_norm",
            "attn_norm": "attn_norm",
            "ffn_norm": "attn_norm_2",
            "attn.x_all": "time_mix_lerp_fused",
            **{f"attn.{name}": f"time_mix_{name}" for name in ("r_k", "k_k", "k_a")},
            **{
                f"attn.{x}_lora.{name}": f"time_mix_{x}{number}"
                for x in "wavg"
                for number, name in enumerate(("bias", "lora.0", "lora.2"))
            },
            "attn.r_proj": "time_mix_receptance",
            "attn.k_proj": "time_mix_key",
            "attn.v_proj": "time_mix_value",
            "attn.o_proj": "time_mix_output",
            "attn.g_norm": "time_mix_ln",
            "ffn.x_k": "channel_mix_lerp_k",
            "ffn.key": "channel_mix_key",
            "ffn.value": "channel_mix_value",
        },
        {},
        with_mixes_of_rwkv7_in_one,
    ),
}
OF_NO_LAYER = ("token_embd_norm",)  # though its name has one


# ---- the file ----


class Place(NamedTuple):
    """Where a weight belongs in a file."""

    layer: str  # "blk.3.", or "" outside of layers
    name: str  # in Architecture.changes
    suffix: str  # ".weight", ".bias" or ""


def place_of(name: str, architecture: Architecture) -> Place:
    """name: Transformers'."""
    match = re.fullmatch(
        r"(?:(?:model|backbone)\.)?(?:layers\.(\d+)\.)?(.*?)(\.weight|\.bias)?", name
    )
    assert match is not None
    layer, stem, suffix = match.groups(default="")
    found = architecture.names[stem]
    return Place(f"blk.{layer}." if layer and found not in OF_NO_LAYER else "", found, suffix)


def write_gguf(folder: Path, kind: str, path: Path) -> None:
    """A model saved in float32, in one piece, as a file of llama.cpp's. kind: of all matrices but
    the embeddings', of which a token reads one row.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    architecture.describe(writer, config)
    weights = architecture.prepare(load_file(folder / "model.safetensors"))
    embeddings = next(name for name in EMBEDDINGS if name in weights)
    weights.setdefault(HEAD, weights[embeddings])  # where they are tied, this has a kind of its own
    for name, weight in weights.items():
        layer, new_name, suffix = place_of(name, architecture)
        is_matrix = weight.ndim == 2 and name != embeddings
        dtype = GGMLQuantizationType[kind if is_matrix else "F32"]
        if new_name in architecture.changes and suffix != ".bias":
            weight = architecture.changes[new_name](weight, config)
        weight = gguf.quantize(np.ascontiguousarray(weight), dtype)
        writer.add_tensor(f"{layer}{new_name}{suffix}", weight, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
