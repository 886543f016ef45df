# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The settings of vLLM that these models allow, decided before any process has a model."""

import os
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ..mixers.facts import SOFTMAX_MIXERS
from . import KNOWN, is_known
from .attention import key_size, padded_head_size
from .refusals import LINEAR, check_model, check_ranks, check_settings, own_config

logger = init_logger(__name__)

# vLLM and PyTorch may each bring an OpenMP runtime of their own. On a busy machine the threads of
# one, which spin while they wait, then take the cores from the other's.
THREADS_WAIT = {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive"}


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
        (heads_of_keys,) = SOFTMAX_MIXERS[config.softmax_mixer].heads
        sizes.total_num_kv_heads = getattr(config, heads_of_keys)

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
