# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The report of a conversion: each parameter, and where it came from."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ConversionReport:
    """Every parameter of the converted model is in `copied`, `changed` or `new`, and every one of
    the original is in `copied`, `changed` or `left_out`, by the name that the former has for it.
    `str(report)` is for people.

    layer_types: of the converted model's layers.
    copied: the same numbers, under the same name.
    changed: made of the original's, and how.
    new: nothing of the original; these are to be trained.
    left_out: what the new attention has no use for.
    """

    layer_types: tuple[str, ...]
    copied: tuple[str, ...]
    changed: dict[str, str]
    new: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        layers = ", ".join(f"{n} x {kind}" for kind, n in Counter(self.layer_types).items())
        how = defaultdict(list)
        for name, change in self.changed.items():
            how[change].append(name)
        return "\n".join(
            [
                f"layers: {layers}",
                f"copied: {len(self.copied)} parameters, as they were",
                *(f"changed, {change}:\n{listed(names)}" for change, names in how.items()),
                f"new, to be trained:\n{listed(self.new)}",
                f"left out:\n{listed(self.left_out)}",
            ]
        )


def listed(names: Iterable[str]) -> str:
    """A line for each name, those that differ in the number of a layer in one."""
    layers: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"\.(\d+)\.", name)
        pattern = name if number is None else name.replace(number[0], ".*.", 1)
        layers.setdefault(pattern, []).extend([] if number is None else [int(number[1])])
    lines = [
        f"  {pattern}" + (f"  (layers {', '.join(map(str, numbers))})" if numbers else "")
        for pattern, numbers in layers.items()
    ]
    return "\n".join(lines) or "  nothing"
