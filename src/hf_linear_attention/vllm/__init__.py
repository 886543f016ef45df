# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plugin for vLLM: the package's language models in its engine, with their states in its memory.

vLLM finds `register` by the entry point in the group "vllm.general_plugins" and calls it in each of
its processes, whatever model it serves. So nothing of vLLM is imported here before that, and no
release of it makes this fail. docs/serving.md says how to use it.
"""

ARCHITECTURE = "LinearAttentionForCausalLM"  # as configs name it
KNOWN = ("0.32", "0.33")  # releases of vLLM whose source was read; the tests run with the first


def register() -> None:
    """Lets vLLM know the model, its config, and what it allows of vLLM's settings. A release that
    lacks what the plugin uses gets to know that it can't have the model.
    """
    from vllm import ModelRegistry

    from .probe import missing

    module = "other_release" if missing() else "model"
    ModelRegistry.register_model(
        ARCHITECTURE, f"{__name__}.{module}:PagedLinearAttentionForCausalLM"
    )
    if module == "model":
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from .settings import Settings

        MODELS_CONFIG_MAP[ARCHITECTURE] = Settings


def is_known(version: str) -> bool:
    """Whether this release of vLLM, or a build of it, has been read."""
    return version.startswith(tuple(f"{known}." for known in KNOWN))
