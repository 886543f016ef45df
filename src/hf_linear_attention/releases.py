# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Names that Transformers' releases have for one thing, each decided in this one place.

By looking at what the installed release has, not at its number, so that builds from its main branch
are told right, too. The numbers of releases are here only to say which have been tried.
"""

import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
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
        raise ValueError(
            f"give one cache, got different ones as {' and '.join(given)}; keys and values that "
            "PEFT's prefix tuning gives are no state of linear attention"
        )
    return caches[0] if caches else None


# The newest releases that the tests have run with.
NEWEST_TRIED = {"transformers": "5.24", "torch": "2.14"}


def warn_of_newer(versions: Mapping[str, str] | None = None) -> None:
    """Warns of installed releases that are newer than any tried; a build of a development version
    counts as the release that it is to become. The package does it when it is imported.
    """
    if versions is None:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    newer = [
        f"{name} {versions[name]} (tried: up to {tried})"
        for name, tried in NEWEST_TRIED.items()
        if major_and_minor(versions[name]) > major_and_minor(tried)
    ]
    if newer:
        warnings.warn(
            f"hf-linear-attention has not been tried with {' and '.join(newer)}: "
            "`python -m hf_linear_attention check FOLDER_OR_NAME` says whether a model answers "
            "right with it. PYTHONWARNINGS='ignore:hf-linear-attention' silences this.",
            stacklevel=3,  # who imports the package
        )


def major_and_minor(version: str) -> tuple[int, int]:
    """(5, 24) of "5.24.0.dev0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
