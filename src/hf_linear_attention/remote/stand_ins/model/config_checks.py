# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""This code is of one architecture: a model of another needs the package."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..needs_package import needs_package

# The values of fields that it knows.
KNOWN: dict[str, tuple[Any, ...]] = {}


class ConfigChecks:
    from_preset: Any = needs_package("from_preset()")

    if TYPE_CHECKING:  # its fields

        def __getattr__(self, name: str) -> Any: ...

    def check_sizes(self) -> None:
        """Left to the package, as are all checks but the one below."""

    def warn_of_mistakes(self, names: Iterable[str]) -> None:
        """As above."""

    def unsaid_fields(self) -> set[str]:
        """Fields that are not saved: all are."""
        return set()

    def validate_architecture(self) -> None:
        """As above: to show a config, Transformers before 5.18 makes one of defaults."""

    def check_for_model(self) -> None:
        """Raises a ValueError where this file has no code for a model of the config."""
        for name, known in KNOWN.items():
            values = getattr(self, name)
            for value in values if isinstance(values, list) else [values]:
                if value not in known:
                    choices = " or ".join(map(repr, known)) or "one of the package's own"
                    raise ValueError(
                        f"{name} must be {choices} for the code in this folder, got {value!r}; "
                        "the package hf-linear-attention has the code of all"
                    )
