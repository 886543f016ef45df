# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Which layers should stay softmax attention: those that cost most where they alone are linear."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..modeling_linear_attention import LinearAttentionForCausalLM
from .softmax_form import LINEAR, attention_replaced, softmax_forms, types_before


@dataclass(frozen=True)
class LayerRanking:
    """What each layer's linear form costs. `str(ranking)` is for people.

    softmax_loss: in nats per label, with all layers as they were.
    losses: by the number of a layer, with that one linear and all others as they were.
    """

    softmax_loss: float
    losses: dict[int, float]

    @property
    def damages(self) -> dict[int, float]:
        """By how much each layer raises the loss, the worst first."""
        rises = {i: loss - self.softmax_loss for i, loss in self.losses.items()}
        return dict(sorted(rises.items(), key=lambda item: -item[1]))

    def worst(self, n: int) -> list[int]:
        """The numbers, in order, of the n layers with the greatest damage.

        Raises:
            ValueError: there are not so many.
        """
        if not 0 <= n <= len(self.losses):
            raise ValueError(f"n must be from 0 to the {len(self.losses)} linear layers, got {n}")
        return sorted(list(self.damages)[:n])

    def __str__(self) -> str:
        rises = [f"  layer {i:>3}  {rise:+.4f}" for i, rise in self.damages.items()]
        title = f"loss with softmax attention everywhere: {self.softmax_loss:.4f} nats per token"
        return "\n".join([title, "rise with one layer linear:", *rises])


@torch.no_grad()
def rank_layers(
    model: LinearAttentionForCausalLM,
    batches: Collection[Mapping[str, Tensor]],
    original: PreTrainedModel | None = None,
) -> LayerRanking:
    """Measures each linear layer's damage: the rise of the loss where it alone is linear, and all
    others are softmax attention. It takes a forward of every batch for each layer, and one more.

    Args:
        model: a converted model, trained by attention transfer or not at all. It is left as it is.
        batches: the calibration set: what the model's forward takes, with labels, read once for
            each layer.
        original: the model that was converted, where it has what the converted one has not:
            sliding windows, or norms of q and k that the report lists as left out.

    Raises:
        ValueError: there are no labels, or as `softmax_forms`.
    """
    forms, types = softmax_forms(model, original), types_before(model.config, original)
    was_training = model.training
    model.eval()
    try:
        with attention_replaced(model, forms, types):
            softmax_loss = mean_loss(model, batches)
        losses = {}
        for i in forms:
            others = {j: form for j, form in forms.items() if j != i}
            with attention_replaced(model, others, [*types[:i], LINEAR, *types[i + 1 :]]):
                losses[i] = mean_loss(model, batches)
    finally:
        model.train(was_training)
    return LayerRanking(softmax_loss, losses)


def mean_loss(
    model: LinearAttentionForCausalLM, batches: Collection[Mapping[str, Tensor]]
) -> float:
    """Nats per label, over all batches."""
    total, count = 0.0, 0
    for batch in batches:
        inputs = {name: x.to(model.device) for name, x in batch.items()}
        labels = int((inputs["labels"][:, 1:] != -100).sum())
        if labels > 0:
            total += model(**inputs, use_cache=False).loss.item() * labels
            count += labels
    if count == 0:
        raise ValueError("batches must have labels that are to be predicted, got none")
    return total / count
