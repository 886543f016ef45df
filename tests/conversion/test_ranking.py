# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Which layers cost most, and how they are put back to softmax attention."""

import dataclasses

import pytest
import torch

from hf_linear_attention import convert
from hf_linear_attention.conversion.convert import forms
from hf_linear_attention.conversion.ranking import (
    LayerChoice,
    LayerRanking,
    choose_layers,
    rank_layers,
)
from hf_linear_attention.conversion.softmax_form import restore_softmax
from softmax_models import softmax_model, some_ids

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"rtol": 1e-4, "atol": 3e-5}
WINDOW = {"window_size": 3, "window_sinks": 1}


def batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    ids = [some_ids(2, 16, seed=seed) for seed in range(count)]
    return [{"input_ids": x, "labels": x} for x in ids]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_damages_are_those_of_models_in_which_one_layer_is_linear(name):
    original = softmax_model(name)
    model = convert(original, "gated_deltanet").model
    types, training = model.config.layer_types, model.training
    with torch.no_grad():
        for x in model.parameters():  # as a layer that was trained
            if x.shape == (4,):
                x.add_(0.5)
    ranking = rank_layers(model, batches(), original)
    assert model.config.layer_types == types and model.training == training
    loss = sum(original(**batch).loss.item() for batch in batches()) / 2
    assert ranking.softmax_loss == pytest.approx(loss, rel=1e-4)
    kept = convert(original, softmax_layers="all").model.config.layer_types
    for i in range(3):
        only = [x if i != j else "linear_attention" for j, x in enumerate(kept)]
        alone = convert(original, "gated_deltanet", layer_types=only).model
        for layer, trained in zip(alone.model.layers, model.model.layers, strict=True):
            if layer.self_attn.layer_idx == i:
                layer.self_attn.load_state_dict(trained.self_attn.state_dict())
        with torch.no_grad():
            loss = sum(alone(**batch).loss.item() for batch in batches()) / 2
        assert ranking.losses[i] == pytest.approx(loss, rel=1e-4)


def test_a_layer_that_was_damaged_is_found():
    original, ids = softmax_model("llama"), some_ids(2, 16)
    model = convert(original, window_size=16, window_sinks=0).model  # exact for so short a text
    attention = model.model.layers[1].self_attn
    attention.window = dataclasses.replace(attention.window, window=3)
    with torch.no_grad():  # what the original would say, so that damage raises the loss
        words = original(ids).logits.argmax(-1)
    labels = torch.cat([ids[:, :1], words[:, :-1]], dim=1)
    ranking = rank_layers(model, [{"input_ids": ids, "labels": labels}])
    assert ranking.damages[1] > 0.1
    assert max(abs(ranking.damages[i]) for i in (0, 2)) < 1e-3
    assert next(iter(ranking.damages)) == 1
    assert ranking.worst(1) == [1]
    assert "layer   1" in str(ranking).splitlines()[2]


def test_the_worst_layers_come_in_order():
    ranking = LayerRanking(2.0, {0: 2.5, 1: 1.9, 2: 3.0, 4: 2.2})
    assert list(ranking.damages) == [2, 0, 4, 1]
    assert ranking.worst(3) == [0, 2, 4]
    assert ranking.worst(0) == []
    with pytest.raises(ValueError, match="n must be from 0 to the 4 linear layers, got 5"):
        ranking.worst(5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_layers_are_chosen_one_after_the_other_by_what_they_lower_the_loss(name):
    original = softmax_model(name)
    model = convert(original, "elu+1").model
    types = model.config.layer_types
    choice = choose_layers(model, batches(), 2, original)
    assert model.config.layer_types == types

    def loss_with(softmax: list[int]) -> float:
        hybrid = convert(original, "elu+1", softmax_layers=softmax).model
        return sum(hybrid(**batch).loss.item() for batch in batches()) / 2

    assert choice.linear_loss == pytest.approx(loss_with([]), rel=1e-4)
    first, second = choice.chosen
    for kept, losses in zip(([], [first]), choice.rounds, strict=True):
        assert losses == pytest.approx(
            {i: loss_with([*kept, i]) for i in range(3) if i not in kept}, rel=1e-4
        )
    assert first == min(choice.rounds[0], key=choice.rounds[0].get)
    assert second != first
    with pytest.raises(ValueError, match="n must be from 0 to the 3 linear layers, got 4"):
        choose_layers(model, batches(), 4, original)


def test_two_layers_that_do_the_same_are_told_by_choice_alone():
    """Neither costs anything alone; of both, one is worth keeping."""
    ranking = LayerRanking(1.0, {0: 1.1, 1: 1.0, 2: 1.0})
    choice = LayerChoice(3.0, [{0: 2.9, 1: 1.2, 2: 1.3}])
    assert ranking.worst(1) == [0] and choice.chosen == [1]
    assert "layer   1  1.2000  chosen" in str(choice)


def test_a_calibration_set_without_labels_is_refused():
    model = convert(softmax_model("llama")).model
    ids = some_ids(1, 4)
    with pytest.raises(ValueError, match="batches must have labels"):
        rank_layers(model, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}])
    with pytest.raises(ValueError, match="batches must have labels"):
        rank_layers(model, [{"input_ids": ids}])
    with pytest.raises(ValueError, match="n must be from 0 to the .* linear layers, got 1.5"):
        choose_layers(model, [{"input_ids": ids, "labels": ids}], n=1.5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mixer", forms())
@torch.no_grad()
def test_layers_that_are_put_back_give_what_they_did(mixer, tmp_path):
    original = softmax_model("qwen3")
    model = convert(original, mixer, **WINDOW).model
    restore_softmax(model, [1], original)
    ids = some_ids(2, 16)
    expected = convert(original, mixer, softmax_layers=[1], **WINDOW).model
    for name, x in model.named_parameters():
        if name in dict(expected.named_parameters()) and ".1." not in name:
            expected.get_parameter(name).copy_(x)  # which is drawn at random
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    torch.testing.assert_close(loaded(ids).logits, expected(ids).logits)
    restore_softmax(model, [0, 2], original)
    torch.testing.assert_close(model(ids).logits, original(ids).logits, **EXACT)
    assert all(x.requires_grad for x in model.parameters())


def test_what_can_not_be_put_back_is_refused():
    model = convert(softmax_model("llama"), "deltanet", softmax_layers=[0]).model
    with pytest.raises(ValueError, match=r"layers must be linear ones, of \[1, 2\], got \[0\]"):
        restore_softmax(model, [0, 1])
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0] += 1
    with pytest.raises(ValueError, match="in layer 2 those that were repeated have been trained"):
        restore_softmax(model, [2])
