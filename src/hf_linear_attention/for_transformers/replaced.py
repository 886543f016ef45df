# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Where pickle finds the classes of replaced modules, each under the name of Transformers' class:
made when they are asked for, so that no model of Transformers is imported before.
"""

from torch import nn

from .families import REPLACED, made_class

_MODULES = {name: module for module, name in REPLACED}


def __getattr__(name: str) -> type[nn.Module]:
    if name not in _MODULES:
        raise AttributeError(f"Transformers' {name} has no replacement")
    return made_class(_MODULES[name], name)
