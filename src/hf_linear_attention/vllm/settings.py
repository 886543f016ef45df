# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What of vLLM's settings these models allow, decided before a process with a model is started."""

import math
import os
from typing import Any

import vllm
from transformers import PreTrainedConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ..configuration_linear_attention import HEADS_OF_SOFTMAX, LinearAttentionConfig
from . import KNOWN, is_known
from .attention import key_size, padded_head_size

logger = init_logger(__name__)

LINEAR = "linear_attention"
# vLLM and PyTorch may each bring an OpenMP runtime of their own. On a busy machine the threads of
# one, which spin while they wait, then take the cores from the other's.
THREADS_WAIT = {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive"}
# Positions whose frequencies depend on the longest sequence of a batch: with them a request's
# answer would depend on the others'.
ROPE_OF_THE_LONGEST = ("dynamic", "longrope")


class Settings(VerifyAndUpdateConfig):
    """vLLM calls these while it makes its config, in the process that a user started."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Says how large heads are in its pages of keys and values."""
        config = own_config(model_config.hf_config)
        if set(config.layer_types) == {LINEAR}:
            return
        sizes = model_config.model_arch_config
        sizes.head_size = padded_head_size(key_size(config))
        if config.softmax_mixer == "mla":  # each head has keys of its own
            sizes.total_num_kv_heads = config.num_attention_heads

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuses what can't be, warns of a release that nobody has read, and lets threads sleep
        while they wait.
        """
        if not is_known(vllm.__version__):
            logger.warning(
                "hf-linear-attention was made for vLLM %s, and this is %s: it has what the plugin "
                "uses, but compare some answers with those of generate()",
                " and ".join(KNOWN),
                vllm.__version__,
            )
        config = own_config(vllm_config.model_config.hf_config)
        check_settings(vllm_config)
        check_model(config, vllm_config.model_config.max_model_len)
        check_ranks(config, vllm_config.parallel_config.tensor_parallel_size)
        if current_platform.is_cpu():
            for name, value in THREADS_WAIT.items():
                os.environ.setdefault(name, value)


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
    if config.position_embedding_type == "rotary" and config.rope_parameters is not None:
        kind = config.rope_parameters.get("rope_type")
        if kind in ROPE_OF_THE_LONGEST:
            raise ValueError(
                f"rope_type must not be {kind!r} in vLLM: its positions depend on the longest "
                "sequence of a batch"
            )


def check_ranks(config: PreTrainedConfig, ranks: int) -> None:
    """Raises a ValueError where ranks of tensor parallelism can't have equal shares."""
    shared = {name: getattr(config, name) for name in fields_of_shares(config)}
    for name, number in shared.items():
        if number % ranks != 0:
            raise ValueError(f"{name}={number} must be a multiple of tensor_parallel_size={ranks}")
    if ranks > 1 and config.mixer == "mamba2" and LINEAR in config.layer_types:
        groups = config.linear_num_key_heads
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
        of_softmax = config.mixer in HEADS_OF_SOFTMAX
        fields.add("num_key_value_heads" if of_softmax else "linear_num_value_heads")
        if config.mixer == "delta_rule":
            fields.add("linear_num_key_heads")
    if set(config.layer_types) != {LINEAR}:
        is_mla = config.softmax_mixer == "mla"
        fields.add("num_attention_heads" if is_mla else "num_key_value_heads")
    return fields
