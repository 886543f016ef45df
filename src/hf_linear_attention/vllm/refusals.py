# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The settings that these models refuse in vLLM, found without asking vLLM."""

import math
from typing import Any

from transformers import PreTrainedConfig

from ..mixers.facts import SOFTMAX_MIXERS, facts_of
from ..model.configuration import LinearAttentionConfig
from ..recurrences.sequence_parallel import rope_by_length

LINEAR = "linear_attention"


def own_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of this package, where vLLM has loaded that of a checkpoint's code."""
    if isinstance(config, LinearAttentionConfig):
        return config
    return LinearAttentionConfig.from_dict(config.to_dict())


def check_settings(vllm_config: Any) -> None:
    """Raises a ValueError for settings that these models are not made for."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    given = {  # what was asked for, None where it was not
        "LoRA (enable_lora)": vllm_config.lora_config,
        f"quantization ({model.quantization})": model.quantization,
        "speculative decoding (speculative_config)": vllm_config.speculative_config,
        "pipeline parallelism (pipeline_parallel_size)": more_than_one(
            parallel.pipeline_parallel_size
        ),
        "context parallelism (decode_context_parallel_size)": more_than_one(
            parallel.decode_context_parallel_size
        ),
    }
    refused = [name for name, value in given.items() if value]
    if refused:
        raise ValueError(f"hf-linear-attention's models in vLLM go without {', '.join(refused)}")


def more_than_one(number: int) -> bool:
    return number > 1


def check_model(config: PreTrainedConfig, longest: int) -> None:
    """Raises a ValueError for a model that answers only alone, needs more than a prompt, or has no
    positions for so many tokens.
    """
    if config.add_cross_attention:
        raise ValueError(
            "add_cross_attention must be False in vLLM, where a request has no memory to attend to"
        )
    limit = config.max_position_embeddings
    if config.position_embedding_type == "learned" and longest > limit:
        raise ValueError(
            f"max_model_len must be at most max_position_embeddings={limit} with learned "
            f"positions, got {longest}"
        )
    if (kind := rope_by_length(config)) is not None:
        raise ValueError(
            f"rope_type must not be {kind!r} in vLLM: its positions depend on the longest sequence "
            "of a batch"
        )


def check_ranks(config: PreTrainedConfig, ranks: int) -> None:
    """Raises a ValueError where ranks of tensor parallelism can't have equal shares."""
    shared = {name: getattr(config, name) for name in fields_of_shares(config)}
    for name, number in shared.items():
        if number % ranks != 0:
            raise ValueError(f"{name}={number} must be a multiple of tensor_parallel_size={ranks}")
    heads = facts_of(config.mixer).heads
    if ranks > 1 and LINEAR in config.layer_types and heads == ("linear_num_value_heads",):
        groups = config.linear_num_key_heads  # of which each rank takes what its heads share
        if config.linear_num_value_heads % math.lcm(groups, ranks) != 0:
            raise ValueError(
                f"linear_num_value_heads={config.linear_num_value_heads} must be a multiple of "
                f"{math.lcm(groups, ranks)} with linear_num_key_heads={groups} groups and "
                f"tensor_parallel_size={ranks}"
            )


def fields_of_shares(config: PreTrainedConfig) -> set[str]:
    """What of a config ranks have equal shares of."""
    fields = {"intermediate_size"}
    if LINEAR in config.layer_types:
        facts = facts_of(config.mixer)
        fields |= {*facts.heads, *(["linear_num_key_heads"] if facts.has_own_heads else [])}
    if set(config.layer_types) != {LINEAR}:
        fields |= {*SOFTMAX_MIXERS[config.softmax_mixer].heads}
    return fields
