# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Folders that earlier versions saved, with copies of the package's own files of then.

They ask the package for kernels by names that it has no more, and take a cache by a name that newer
releases of Transformers do not give it: generate() would go on from the last token alone. Their
files can't be changed, but they import the package, and then its classes load the folder in their
place.
"""

import logging
import sys
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..model.configuration import LinearAttentionConfig
from ..model.modeling import AUTO_CLASSES

logger = logging.getLogger(__name__)

OURS = {model.__name__: model for model in AUTO_CLASSES.values()}
WAYS_TO_LOAD = ("from_pretrained", "_from_config")


def replace_outdated(cls: type[PreTrainedModel]) -> None:
    """Lets a class that a folder's own code defines load models of the package's class, if that
    code is a copy of files of then.
    """
    is_saved = cls.__module__.startswith("transformers_modules.")
    if not is_saved or cls.__name__ not in OURS or hasattr(sys.modules[cls.__module__], "CACHE"):
        return
    ours = OURS[cls.__name__]
    for name in WAYS_TO_LOAD:
        setattr(cls, name, classmethod(_of_package(getattr(ours, name))))


def _of_package(load: Any) -> Any:
    def load_by_package(cls, *args, **kwargs):
        logger.warning(
            "The code in this model's folder is of an earlier hf-linear-attention: the classes of "
            "the installed one load it instead. model.save_pretrained(folder) renews the code."
        )
        named = {name: _config_of_package(x) for name, x in kwargs.items()}
        return load(*map(_config_of_package, args), **named)

    return load_by_package


def _config_of_package(given: Any) -> Any:
    """Of a config of the folder's class the same of the package's; anything else as it is."""
    if not isinstance(given, PreTrainedConfig) or isinstance(given, LinearAttentionConfig):
        return given
    config = LinearAttentionConfig.from_dict(given.to_dict())
    config._name_or_path = given._name_or_path
    config._attn_implementation = given._attn_implementation
    return config
