# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What can't be done without the package says so."""

from collections.abc import Callable
from typing import Any


def needs_package(what: str) -> Callable[..., Any]:
    """In the place of a method that the package has."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{what} needs the package hf-linear-attention: where it is installed, it loads this "
            "folder's model"
        )

    return refuse
