# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The classes of replaced modules, for pickle: each under the path of the class that it replaces,
made on demand, so that no model of Transformers is imported before.
"""

from torch import nn

from .families import found_again


def __getattr__(name: str) -> type[nn.Module]:
    try:
        return found_again(name)
    except (ImportError, ValueError, AttributeError) as error:
        raise AttributeError(f"there is no {name} here that has a replacement") from error
