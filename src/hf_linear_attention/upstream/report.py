# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What `use_kernels` did to a model: what it changed and left, and how that is undone."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..fast import linear
from . import attention, recorded_models
from .losses import ChangedLoss
from .module_classes import change_class
from .served import forget_manager


class Change(NamedTuple):
    """A module that runs on our kernels, with its class before and now."""

    name: str
    module: ref[nn.Module]
    before: type[nn.Module]
    now: type[nn.Module]
    gist: str


class Left(NamedTuple):
    """A module that stayed as it was."""

    name: str
    class_name: str
    why: str


class ChangedHead(NamedTuple):
    """A model that takes drafts now, or continuous batches, with its class before and now."""

    model: ref[PreTrainedModel]
    before: type[PreTrainedModel]
    now: type[PreTrainedModel]


class ChangedLayer(NamedTuple):
    """A layer whose generated tokens are recorded, with its class before and now."""

    layer: ref[nn.Module]
    before: type[nn.Module]
    now: type[nn.Module]


class Undoable(ABC):
    """Undone by `undo()`, or at the end of a `with` block."""

    @abstractmethod
    def undo(self) -> None:
        """Makes everything what it was."""

    def __enter__(self):
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


@dataclass(repr=False)
class Report(Undoable):
    """What `use_kernels` changed in a model, and what it left alone, and why: `str(report)` is a
    table. It keeps no model in memory.
    """

    changed: list[Change] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    losses: list[ChangedLoss] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    takes_drafts: list[ChangedHead] = field(default_factory=list)
    takes_batches: list[ChangedHead] = field(default_factory=list)
    recorded: list[ChangedLayer] = field(default_factory=list)
    recorded_models: list[ref[nn.Module]] = field(default_factory=list)

    @property
    def has_changes(self) -> bool:
        return bool(self.changed or self.losses or self.takes_drafts or self.takes_batches)

    def keep_fp64(self) -> bool:
        """Lets all changed layers that can keep their sums in float64. Returns whether any can."""
        found = False
        for number, change in enumerate(self.changed):
            layer = change.module()
            if layer is not None and getattr(layer, "state_in_fp64", None) is not None:
                vars(layer)["state_in_fp64"] = True
                self.changed[number] = change._replace(gist=f"{change.gist}, states in float64")
                found = True
        return found

    def undo(self) -> None:
        """Makes the model what it was. Copies that were made of it meanwhile stay as they are, and
        so do modules that became of another class meanwhile, as those given to FSDP2 do. If a part
        was given first, and then the whole, that of the whole is undone first: its head relies on
        the part's layers.
        """
        for one, before, now in (
            *self.recorded,
            *((change.module, change.before, change.now) for change in self.changed),
        ):
            module = one()
            if module is not None and type(module) is now:
                change_class(module, before)
                linear.restore(module)
                attention.restore(module)
                vars(module).pop("state_in_fp64", None)  # and so back to its class's
        for whole in self.recorded_models:
            if (model := whole()) is not None:
                recorded_models.restore(model)
        for loss in self.losses:
            loss.undo()
        for hook in self.hooks:
            hook.remove()
        for one, before, now in (*self.takes_batches, *self.takes_drafts):
            model = one()
            if model is None:
                continue
            vars(model).pop("_is_stateful", None)
            forget_manager(model)
            if type(model) is now:
                change_class(model, before)

    def __repr__(self) -> str:
        counts = Counter((one.before.__name__, one.gist) for one in self.changed)
        counts.update((one.class_name, "loss") for one in self.losses)
        counts.update((one.class_name, f"left alone: {one.why}") for one in self.left)
        rows = [(str(n), class_name, what) for (class_name, what), n in counts.items()]
        if not rows:
            return "nothing was changed"
        wide, wider = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{n:>{wide}} {name:<{wider}}  {what}" for n, name, what in rows)
