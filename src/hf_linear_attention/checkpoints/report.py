# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The report of a checkpoint's weights: what became of each."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..conversion.report import listed


@dataclass
class CheckpointReport:
    """Every weight that is read is in `copied`, `folded` or `left_out`, every one that is written
    in `copied`, `folded` or `made`, by its name. `str(report)` is for people.

    model_type: of flash-linear-attention.
    layer_types: of our model.
    copied: the same numbers, by their names there and here.
    folded: of which others are made, and how.
    made: of nothing, and how.
    left_out: and why.
    not_read: keys of the config.json that neither package knows.
    """

    model_type: str
    layer_types: tuple[str, ...]
    copied: dict[str, str] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()

    def __str__(self) -> str:
        layers = ", ".join(f"{n} x {kind}" for kind, n in Counter(self.layer_types).items())
        keys = f"keys that nobody reads: {', '.join(self.not_read)}" if self.not_read else ""
        return "\n".join(
            [
                f"model type: {self.model_type}",
                f"layers: {layers}",
                f"copied: {len(self.copied)} weights, as they were",
                *_by_reason("folded", self.folded),
                *_by_reason("made", self.made),
                *_by_reason("left out", self.left_out),
                *([keys] if keys else []),
            ]
        )


def _by_reason(what: str, names: dict[str, str]) -> Iterable[str]:
    if not names:
        yield f"{what}: nothing"
    for reason in dict.fromkeys(names.values()):
        of_it = [name for name, other in names.items() if other == reason]
        yield f"{what}, {reason}:\n{listed(of_it)}"
