# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Muon for a model's matrices, AdamW for all else, as one optimizer for Trainer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the size of its
steps is AdamW's, as in Liu et al., arXiv 2502.16982, so that one learning rate serves both. Small
models learn to look up what stood far above within far fewer tokens than with AdamW alone.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon
from transformers import TrainingArguments


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon steps matrices, but for embeddings and the head, and AdamW all other parameters.

    Only matrices have weight decay. Groups of parameters are those of both, so that a schedule of
    the learning rate reaches all.
    """

    def __init__(
        self, model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float
    ):
        tables = [x for x in model.modules() if isinstance(x, nn.Embedding)]
        head = model.get_output_embeddings()
        tables += [] if head is None else [head]
        excluded = {id(x) for table in tables for x in table.parameters()}
        parameters = [x for x in model.parameters() if x.requires_grad]
        matrices = [x for x in parameters if x.ndim == 2 and id(x) not in excluded]
        by_muon = {id(x) for x in matrices}
        others = [x for x in parameters if id(x) not in by_muon]
        self.parts = [
            Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=lr, betas=betas, weight_decay=0.0),
        ]
        super().__init__(self._groups(), defaults={})

    @classmethod
    def of(cls, model: nn.Module, args: TrainingArguments) -> "MuonWithAdamW":
        """With the rates of a Trainer's arguments, for a model on its device."""
        betas = (args.adam_beta1, args.adam_beta2)
        return cls(model, args.learning_rate, betas, args.weight_decay)

    def _groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()
