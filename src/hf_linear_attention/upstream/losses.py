# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Our loss in place of that of Transformers' language models, without float32 copies of logits."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import transformers
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from ..model.loss import causal_lm_loss
from .proof.fingerprints import fingerprint_of

# Fingerprints of the functions that ours stands in for, and the versions that have them.
SOURCES = {"9d4c35b46799": "5.17 to 5.24"}
# Where `PreTrainedModel.loss_function` looks first: what a model was given as its own.
GIVEN = "_loss_function"


class ChangedLoss(NamedTuple):
    """A model whose loss is ours now, and what it had been given before, if anything."""

    name: str
    class_name: str
    model: ref[PreTrainedModel]
    before: Callable[..., Any] | None

    def undo(self) -> None:
        """Unless another one was given to the model since."""
        model = self.model()
        if model is not None and vars(model).get(GIVEN) is causal_lm_loss:
            del model._loss_function
            if self.before is not None:
                model.loss_function = self.before


def has_loss(model: PreTrainedModel) -> bool:
    """Whether its forward asks `loss_function` for its loss, to which it may add others, of
    routers, say.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def why_not(model: PreTrainedModel) -> str | None:
    """Why ours must not replace the loss of a model that has one; None where it may."""
    theirs = model.loss_function
    if theirs is causal_lm_loss:
        return "its loss is ours already"
    if theirs is not loss_utils.ForCausalLMLoss:
        return f"its loss is {getattr(theirs, '__name__', type(theirs).__name__)}"
    if fingerprint_of(theirs, loss_utils.fixed_cross_entropy) not in SOURCES:
        known = ", ".join(dict.fromkeys(SOURCES.values()))
        return f"Transformers {transformers.__version__} has another loss than {known} have"
    return None


def change_loss(name: str, model: PreTrainedModel) -> ChangedLoss:
    """Gives ours to a model, in whose instance alone something changes."""
    change = ChangedLoss(name, type(model).__name__, ref(model), vars(model).get(GIVEN))
    model.loss_function = causal_lm_loss
    return change
