# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ranking of layers by their need for softmax attention: by the cost where one layer alone is
linear, or by the gain where all others are.

The two differ where layers can do each other's work: each of them alone costs nothing then, and
what both did is missed once both are linear.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.modeling import LinearAttentionForCausalLM
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
        check_count(n, len(self.losses))
        return sorted(list(self.damages)[:n])

    def __str__(self) -> str:
        rises = [f"  layer {i:>3}  {rise:+.4f}" for i, rise in self.damages.items()]
        title = f"loss with softmax attention everywhere: {self.softmax_loss:.4f} nats per token"
        return "\n".join([title, "rise with one layer linear:", *rises])


@dataclass(frozen=True)
class LayerChoice:
    """Layers that were put back to softmax attention one after the other, each time that which
    lowered the loss most. `str(choice)` is for people.

    linear_loss: in nats per label, with all layers as they are in the model.
    rounds: for each choice the losses, by the number of the layer that is put back beside those
        that were chosen before.
    """

    linear_loss: float
    rounds: list[dict[int, float]]

    @property
    def chosen(self) -> list[int]:
        """The numbers of the layers, the most helpful first."""
        return [min(losses, key=lambda i: losses[i]) for losses in self.rounds]

    def __str__(self) -> str:
        lines = [f"loss as converted: {self.linear_loss:.4f} nats per token"]
        for number, (losses, best) in enumerate(zip(self.rounds, self.chosen, strict=True), 1):
            lines.append(f"with one more softmax layer, the {number}. of {len(self.rounds)}:")
            for i, loss in sorted(losses.items(), key=lambda item: item[1]):
                lines.append(f"  layer {i:>3}  {loss:.4f}{'  chosen' if i == best else ''}")
        return "\n".join(lines)


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
    forms = softmax_forms(model, original)

    def loss(linear: set[int]) -> float:
        return _loss(model, forms, forms.keys() - linear, batches, original)

    return LayerRanking(loss(set()), {i: loss({i}) for i in forms})


@torch.no_grad()
def choose_layers(
    model: LinearAttentionForCausalLM,
    batches: Collection[Mapping[str, Tensor]],
    n: int,
    original: PreTrainedModel | None = None,
) -> LayerChoice:
    """Chooses the n linear layers that lower the loss most as softmax attention. It takes up to n
    forwards of every batch for each layer, and one more.

    Args:
        model, batches, original: as of `rank_layers`.

    Raises:
        ValueError: there are not so many layers, or as `rank_layers`.
    """
    forms = softmax_forms(model, original)
    check_count(n, len(forms))

    def loss(softmax: set[int]) -> float:
        return _loss(model, forms, softmax, batches, original)

    choice = LayerChoice(loss(set()), [])
    for _ in range(n):
        chosen = set(choice.chosen)
        choice.rounds.append({i: loss({*chosen, i}) for i in forms if i not in chosen})
    return choice


def check_count(n: int, most: int) -> None:
    if type(n) is not int or not 0 <= n <= most:
        raise ValueError(f"n must be from 0 to the {most} linear layers, got {n!r}")


def _loss(
    model: LinearAttentionForCausalLM,
    forms: Mapping[int, nn.Module],
    softmax: Collection[int],
    batches: Collection[Mapping[str, Tensor]],
    original: PreTrainedModel | None,
) -> float:
    """With these of the linear layers as what they were before."""
    before = types_before(model.config, original)
    types = [LINEAR if i in forms and i not in softmax else x for i, x in enumerate(before)]
    was_training = model.training
    model.eval()
    try:
        with attention_replaced(model, {i: forms[i] for i in softmax}, types):
            return mean_loss(model, batches)
    finally:
        model.train(was_training)


def mean_loss(
    model: LinearAttentionForCausalLM, batches: Collection[Mapping[str, Tensor]]
) -> float:
    """Nats per label, over all batches."""
    total, count = 0.0, 0
    for batch in batches:
        inputs = {name: x.to(model.device) for name, x in batch.items()}
        if "labels" not in inputs:
            continue
        labels = int((inputs["labels"][:, 1:] != -100).sum())
        if labels > 0:
            total += model(**inputs, use_cache=False).loss.item() * labels
            count += labels
    if count == 0:
        raise ValueError("batches must have labels that are to be predicted, got none")
    return total / count
