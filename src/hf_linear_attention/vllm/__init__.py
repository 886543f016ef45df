# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plugin for vLLM: the package's language models in its engine, with their states in its memory.

vLLM finds `register` by the entry point in the group "vllm.general_plugins" and calls it in each of
its processes, whatever model it serves. So nothing of vLLM is imported here before that.

Made for vLLM 0.32. docs/serving.md says how to use it.
"""

ARCHITECTURE = "LinearAttentionForCausalLM"  # as configs name it


def register() -> None:
    """Lets vLLM know the model, its config, and what it allows of vLLM's settings."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .settings import Settings

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:PagedLinearAttentionForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = Settings
