# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What Transformers is told of these classes, so that it treats them as its own."""

import sys
from typing import Any

import transformers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def register_config(config_class: type[PreTrainedConfig], causal_lm: str) -> None:
    """`transformers serve` looks for the class that a config names, `causal_lm`, in its
    `transformers`, of which there may be two.
    """
    config_class.register_for_auto_class()
    serving = sys.modules.get("transformers.cli.serving.model_manager")
    for module in {transformers, getattr(serving, "transformers", transformers)}:
        setattr(module, causal_lm, AutoModelForCausalLM)


def register_adapters(model_type: str) -> None:
    """What PEFT adapts where a config of its own names no modules: what it does in Llama, whose
    names the modules have. It asks after it has turned the model's config into a dict.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            table.setdefault(model_type, table["llama"])


def register_models(
    config_class: type[PreTrainedConfig], auto_classes: dict[Any, type[PreTrainedModel]]
) -> None:
    """Makes Auto classes find the models of a config, and save their code with them; and Trainer
    shift the labels for label smoothing.
    """
    for auto_class, model_class in auto_classes.items():
        auto_class.register(config_class, model_class, exist_ok=True)
        model_class.register_for_auto_class(auto_class)
    name = auto_classes[AutoModelForCausalLM].__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config_class.model_type] = name


def register_base_model(config: PreTrainedConfig, base_model: type[PreTrainedModel]) -> None:
    """Heads ask AutoModel for their base, by the class of a config, of which there may be two."""
    AutoModel.register(type(config), base_model, exist_ok=True)
