# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plugin for vLLM: the package's language models in its engine, with their states in its memory.

vLLM finds `register` by the entry point in the group "vllm.general_plugins" and calls it in each of
its processes, whatever model it serves. So nothing of vLLM is imported here before that, and no
release of it makes this fail. docs/serving.md says how to use it.
"""

ARCHITECTURE = "LinearAttentionForCausalLM"  # as configs name it
MADE_FOR = "0.32"  # release of vLLM


def register() -> None:
    """Lets vLLM know the model, its config, and what it allows of vLLM's settings. Of another
    release vLLM gets to know that it can't have the model.
    """
    import vllm
    from vllm import ModelRegistry

    is_known = vllm.__version__.startswith(f"{MADE_FOR}.")
    module = "model" if is_known else "other_release"
    ModelRegistry.register_model(
        ARCHITECTURE, f"{__name__}.{module}:PagedLinearAttentionForCausalLM"
    )
    if is_known:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from .settings import Settings

        MODELS_CONFIG_MAP[ARCHITECTURE] = Settings
