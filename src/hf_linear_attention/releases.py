# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Names that Transformers' releases have for one thing, each decided in this one place.

By looking at what the installed release has, not at its number, so that builds from its main branch
are told right, too.
"""

import inspect
from typing import Any

from transformers.masking_utils import create_causal_mask

# A cache, among the arguments of models, layers and mask functions, and in outputs: "cache" since
# 5.24. Before that "past_key_values", in a few models "cache_params".
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_of_masks = inspect.signature(create_causal_mask).parameters
CACHE = next(name for name in CACHE_NAMES if name in _of_masks)


def cache_among(**named: Any) -> Any:
    """The cache that a caller gave by one of its names; None where there is none.

    Raises:
        ValueError: two are given by different names, and are not the same.
    """
    given = {name: cache for name, cache in named.items() if cache is not None}
    caches = list(given.values())
    if any(cache is not caches[0] for cache in caches):
        raise ValueError(f"give one cache, got different ones as {' and '.join(given)}")
    return caches[0] if caches else None
