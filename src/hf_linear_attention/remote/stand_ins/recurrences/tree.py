# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts are read one by one: trees need the package."""

from typing import Any

from ..needs_package import needs_package


def check_tree(given: Any, *others: Any) -> None:
    if given is not None:
        needs_package("tree")()
