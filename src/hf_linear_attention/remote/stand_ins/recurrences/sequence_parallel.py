# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sequences are all here: to share them among ranks needs the package."""

from typing import Any

from ..needs_package import needs_package


def check_sequence_group(group: Any, *others: Any) -> None:
    if group is not None:
        needs_package("sequence_group")()
