# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The report on the weights of an import or an export."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..conversion.report import listed


@dataclass
class CheckpointReport:
    """Every weight that was read is in `copied`, `folded` or `left_out`, every weight that was
    written in `copied`, `folded` or `made`. `str(report)` is for people.

    model_type: flash-linear-attention's name of the model.
    layer_types: the types of our model's layers.
    copied: weights that are one of ours, their name there: our name.
    folded: names there of weights with other numbers or several parts: the change.
    made: names of weights without an original: their numbers.
    left_out: names of weights without a use: the reason.
    cast: our names of weights whose numbers were rounded or widened: from which dtype to which.
    not_read: keys of the config.json that neither package knows.
    """

    model_type: str
    layer_types: tuple[str, ...]
    copied: dict[str, str] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()

    def __str__(self) -> str:
        layers = ", ".join(f"{n} x {kind}" for kind, n in Counter(self.layer_types).items())
        keys = f"keys that nobody reads: {', '.join(self.not_read)}" if self.not_read else ""
        return "\n".join(
            [
                f"model type: {self.model_type}",
                f"layers: {layers}",
                f"copied: {len(self.copied)} weights",
                *_by_reason("folded", self.folded),
                *_by_reason("made", self.made),
                *_by_reason("left out", self.left_out),
                *_by_reason("cast", self.cast),
                *([keys] if keys else []),
            ]
        )


def _by_reason(what: str, names: dict[str, str]) -> Iterable[str]:
    if not names:
        yield f"{what}: nothing"
    for reason in dict.fromkeys(names.values()):
        of_it = [name for name, other in names.items() if other == reason]
        yield f"{what}, {reason}:\n{listed(of_it)}"
