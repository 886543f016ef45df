# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss against Transformers' own, of which it is a leaner form."""

import pytest
import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_linear_attention import loss_linear_attention
from hf_linear_attention.loss_linear_attention import CrossEntropy, causal_lm_loss
from tiny import random_ids, tiny_model

B, T, V = 2, 7, 11
IGNORED = -100


def make_inputs(dtype=torch.float32):
    torch.manual_seed(0)
    logits = (5 * torch.randn(B, T, V)).to(dtype).requires_grad_()
    labels = torch.randint(V, (B, T))
    labels[0, :3] = IGNORED
    return logits, labels


@pytest.fixture(params=[1, 2**20], ids=["a row at a time", "all at once"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(loss_linear_attention.CHUNK_ELEMENTS, "cpu", request.param)


VARIANTS = {
    "mean": {},
    "items as a tensor": {"num_items_in_batch": torch.tensor(5)},
    "items as an int": {"num_items_in_batch": 5},
    "another ignored label": {"ignore_index": 3},
    "shifted already": {"shift_labels": torch.arange(B * T).view(B, T) % V},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_loss_of_transformers(variant, dtype, chunks):
    logits, labels = make_inputs(dtype)
    labels = labels.clamp(min=0) if "ignore_index" in VARIANTS[variant] else labels
    actual = causal_lm_loss(logits, labels, V, **VARIANTS[variant])
    expected = ForCausalLMLoss(logits, labels, V, **VARIANTS[variant])
    torch.testing.assert_close(actual, expected)
    (actual_gradient,) = torch.autograd.grad(3 * actual, logits)
    (expected_gradient,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(actual_gradient, expected_gradient)


def test_gradcheck(chunks):
    logits, labels = make_inputs(torch.float64)
    labels = labels.flatten()

    def losses(x):
        return CrossEntropy.apply(x.view(-1, V), labels, IGNORED)[0]

    assert torch.autograd.gradcheck(losses, (logits,))
    assert torch.autograd.gradgradcheck(losses, (logits,))


def test_extreme_logits_give_no_nan(chunks):
    logits, labels = make_inputs()
    with torch.no_grad():
        logits.mul_(1e4)
        logits[..., 1:3] = -torch.inf
    labels = labels.masked_fill((labels == 1) | (labels == 2), 0)
    loss = causal_lm_loss(logits, labels, V)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and gradient.isfinite().all()
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, labels, V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_confident_token_has_left_to_learn_keeps_its_digits(dtype, chunks):
    logits = torch.linspace(0, 9, 19, dtype=dtype)[:, None] * torch.tensor([[1.0, 0, 0, 0, 0]])
    logits = logits.to(dtype).requires_grad_()
    labels = torch.zeros(19, dtype=torch.int64)
    losses, _ = CrossEntropy.apply(logits, labels, -100)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    exact = logits.detach().double().softmax(1) - F.one_hot(labels, 5)
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-3
    torch.testing.assert_close(gradient.double(), exact, rtol=tolerance, atol=0)


def test_a_label_beyond_the_vocabulary_is_an_error():
    logits, labels = make_inputs()
    with pytest.raises(RuntimeError, match="out of bounds"):
        causal_lm_loss(logits, torch.full_like(labels, V), V)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("shape", [(1, 1), (B, T - 1), (1, T)])
def test_another_number_of_labels_than_of_tokens_is_an_error(name, shape):
    logits, _ = make_inputs()
    given = {"labels": None, name: torch.zeros(shape, dtype=torch.long)}
    message = rf"^{name} must have one label .*\({shape[0]}, {shape[1]}\) for .*\(2, 7, 11\)"
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(logits, vocab_size=V, **given)


def test_no_table_of_the_vocabulary_is_made_forward():
    """What is saved for backward is no larger than the logits, which exist anyway."""
    logits, labels = make_inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        causal_lm_loss(logits, labels, V)
    tables = {x.data_ptr() for x in saved if x.numel() >= logits.numel()}
    assert tables == {logits.data_ptr()}


def test_the_model_uses_it_and_takes_another():
    model = tiny_model(dtype=torch.float32)
    tokens = random_ids(2, 9)
    output = model(tokens, labels=tokens)
    expected = ForCausalLMLoss(output.logits, tokens, model.config.vocab_size)
    torch.testing.assert_close(output.loss, expected)
    assert "CrossEntropy" in str(output.loss.grad_fn.next_functions[0][0].next_functions[0][0])
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum() * 0 + 7
    assert model(tokens, labels=tokens).loss == 7
