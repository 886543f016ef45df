# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""use_kernels gives Transformers' language models our loss, where theirs is the same formula."""

import copy
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification
from transformers.loss import loss_utils

from hf_linear_attention import use_kernels, use_kernels_everywhere
from hf_linear_attention.model.loss import causal_lm_loss
from upstream_models import VOCAB_SIZE, tiny_upstream


@pytest.fixture
def model():
    return tiny_upstream("qwen3_5_text")


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (2, 11))


def some_ignored(ids, ignore_index=-100):
    return ids.masked_fill(torch.arange(ids.shape[1]) % 3 == 0, ignore_index)


ARGUMENTS = {
    "labels": lambda ids: {"labels": some_ignored(ids)},
    "another index": lambda ids: {"labels": some_ignored(ids, 1), "ignore_index": 1},
    "a number of items": lambda ids: {"labels": ids, "num_items_in_batch": 7},
    "a tensor of items": lambda ids: {"labels": ids, "num_items_in_batch": torch.tensor(7)},
    "shifted labels": lambda ids: {"labels": ids, "shift_labels": some_ignored(ids)},
}


def loss_and_gradients(model, **arguments):
    loss = model(use_cache=False, **arguments).loss
    used = [x for x in model.parameters() if x.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, used, allow_unused=True)


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_the_same(model, ids, given, dtype):
    """But for the loss, both are one model, so that nothing else rounds otherwise."""
    model.to(dtype)
    use_kernels(model)
    arguments = {"input_ids": ids, **ARGUMENTS[given](ids)}
    loss, gradients = loss_and_gradients(model, **arguments)
    model.loss_function = loss_utils.ForCausalLMLoss
    want, wanted = loss_and_gradients(model, **arguments)
    torch.testing.assert_close(loss, want)
    relative = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    for mine, their in zip(gradients, wanted, strict=True):
        assert (mine - their).norm() <= relative * their.norm()


def test_what_a_model_adds_for_its_routers_stays(ids):
    model = tiny_upstream("minimax", router_aux_loss_coef=0.5)
    options = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    want = model(**options)
    with use_kernels(model) as report:
        assert report.losses
        got = model(**options)
    assert want.aux_loss > 0
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    torch.testing.assert_close(got.loss, want.loss)


class LargestTensors(TorchDispatchMode):
    """Counts the tensors of float32 that ops return and that hold as much as all logits."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if isinstance(y, torch.Tensor) and y.dtype == torch.float32:
            self.count += y.numel() >= self.numel
        return y


def test_no_copy_of_all_logits_is_made_in_float32(model):
    logits = torch.randn(1, 100, 6000, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(6000, (1, 100))

    def copies():
        with LargestTensors(logits.numel()) as seen:
            model.loss_function(logits, labels, 6000).backward()
        return seen.count

    assert copies() > 0
    use_kernels(model)
    assert copies() == 0


def test_undo_brings_back_what_a_model_had(model):
    report = use_kernels(model)
    assert model.loss_function is causal_lm_loss
    assert "1 Qwen3_5ForCausalLM    loss\n" in f"{report}\n"
    report.undo()
    assert "_loss_function" not in vars(model)
    assert model.loss_function is loss_utils.ForCausalLMLoss
    model.loss_function = loss_utils.ForCausalLMLoss
    with use_kernels(model):
        assert model.loss_function is causal_lm_loss
    assert vars(model)["_loss_function"] is loss_utils.ForCausalLMLoss


def test_undo_leaves_a_loss_that_was_given_since(model):
    with use_kernels(model):
        model.loss_function = mine = lambda *args, **kwargs: None
    assert model.loss_function is mine


def test_a_loss_of_its_own_is_left_alone(model):
    def my_loss(logits, labels, vocab_size, **kwargs):
        return logits.sum()

    model.loss_function = my_loss
    report = use_kernels(model)
    assert model.loss_function is my_loss
    assert "Qwen3_5ForCausalLM    left alone: its loss is my_loss" in str(report)


def test_another_source_upstream_is_left_alone(model):
    with mock.patch.object(loss_utils, "fixed_cross_entropy", lambda *args: None):
        report = use_kernels(model)
    assert "has another loss than 5.17 to 5.24 have" in str(report)
    assert "_loss_function" not in vars(model)


def test_a_classifier_keeps_its_loss(model):
    classifier = AutoModelForSequenceClassification.from_config(model.config)
    report = use_kernels(classifier)
    assert report.changed and not report.losses
    assert "left alone: its loss is ForSequenceClassificationLoss" in str(report)


def test_everywhere_and_in_copies(model, ids):
    with use_kernels_everywhere() as everywhere:
        model(ids)
        assert model.loss_function is causal_lm_loss is copy.deepcopy(model).loss_function
        assert everywhere.reports[model].losses
    assert model.loss_function is loss_utils.ForCausalLMLoss
