# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss against Transformers' own, of which it is a leaner form."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.modules.module import register_module_full_backward_hook
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_linear_attention.model import loss as loss_module
from hf_linear_attention.model.loss import (
    CrossEntropy,
    LinearCrossEntropy,
    causal_lm_loss,
    compiled_backward,
    compiled_cross_entropy,
    linear_causal_lm_loss,
)
from tiny import random_ids, tiny_model

B, T, V = 2, 7, 11
IGNORED = -100
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OP = torch.ops.hf_linear_attention


def make_inputs(dtype=torch.float32):
    torch.manual_seed(0)
    logits = (5 * torch.randn(B, T, V)).to(dtype).requires_grad_()
    labels = torch.randint(V, (B, T))
    labels[0, :3] = IGNORED
    return logits, labels


@pytest.fixture(params=[None, 1, 2**20], ids=["compiled", "a row at a time", "all at once"])
def way(request, monkeypatch):
    """Of the ways to compute it, one after the other: compiled, or in pieces of so many numbers."""
    if request.param is None:
        assert loss_module.IS_COMPILED
    else:
        monkeypatch.setattr(loss_module, "IS_COMPILED", False)
        monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", request.param)


VARIANTS = {
    "mean": {},
    "items as a tensor": {"num_items_in_batch": torch.tensor(5)},
    "items as an int": {"num_items_in_batch": 5},
    "another ignored label": {"ignore_index": 3},
    "shifted already": {"shift_labels": torch.arange(B * T).view(B, T) % V},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_loss_of_transformers(variant, dtype, way):
    logits, labels = make_inputs(dtype)
    labels = labels.clamp(min=0) if "ignore_index" in VARIANTS[variant] else labels
    actual = causal_lm_loss(logits, labels, V, **VARIANTS[variant])
    expected = ForCausalLMLoss(logits, labels, V, **VARIANTS[variant])
    torch.testing.assert_close(actual, expected)
    (actual_gradient,) = torch.autograd.grad(3 * actual, logits)
    (expected_gradient,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(actual_gradient, expected_gradient)


def test_gradcheck(way):
    logits, labels = make_inputs(torch.float64)
    labels = labels.flatten()

    def losses(x):
        return CrossEntropy.apply(x.view(-1, V), labels, IGNORED)[0]

    assert torch.autograd.gradcheck(losses, (logits,))
    assert torch.autograd.gradgradcheck(losses, (logits,))


def test_extreme_logits_give_no_nan(way):
    logits, labels = make_inputs()
    with torch.no_grad():
        logits.mul_(1e4)
        logits[..., 1:3] = -torch.inf
    labels = labels.masked_fill((labels == 1) | (labels == 2), 0)
    loss = causal_lm_loss(logits, labels, V)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and gradient.isfinite().all()
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, labels, V))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_confident_token_has_left_to_learn_keeps_its_digits(dtype, way):
    logits = torch.linspace(0, 9, 19, dtype=dtype)[:, None] * torch.tensor([[1.0, 0, 0, 0, 0]])
    logits = logits.to(dtype).requires_grad_()
    labels = torch.zeros(19, dtype=torch.int64)
    losses, _ = CrossEntropy.apply(logits, labels, -100)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    exact = logits.detach().double().softmax(1) - F.one_hot(labels, 5)
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-3
    torch.testing.assert_close(gradient.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_that_is_no_word_is_an_error(label, way):
    logits, labels = make_inputs()
    with pytest.raises(RuntimeError, match=rf"out of bounds|from 0 to 10, .* got {label} in row 0"):
        causal_lm_loss(logits, torch.full_like(labels, label), V)


# Fewer words than a vector has numbers, as many, a few more, and several vectors and a rest.
@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("words", [1, 3, 15, 16, 17, 64, 65, 131, 1000])
def test_any_number_of_words(words, dtype, way):
    generator = torch.Generator().manual_seed(words)
    logits = (9 * torch.randn(41, words, generator=generator) - 30).to(dtype).requires_grad_()
    labels = torch.randint(words, (41,), generator=generator)
    labels[::5] = IGNORED
    exact = logits.detach().double().requires_grad_()
    scales = torch.randn(41, generator=generator)

    def results(losses, x):
        return losses.double(), torch.autograd.grad((losses * scales).sum(), x)[0].double()

    losses, gradient = results(CrossEntropy.apply(logits, labels, IGNORED)[0], logits)
    nats = F.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="none")
    expected_losses, expected = results(nats, exact)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    rtol = max(2 * torch.finfo(dtype).eps, 2e-5)
    # The logits' own digits are what a float32 of some 30 has.
    torch.testing.assert_close(gradient, expected, rtol=rtol, atol=1e-5)


def test_rows_that_do_not_count_have_no_gradient_whatever_they_hold():
    logits, labels = (x.flatten(0, 1) for x in make_inputs())
    logits = logits.detach()
    logits[0], logits[1, 2], logits[2] = math.nan, math.inf, -math.inf
    logits.requires_grad_()
    losses, _ = CrossEntropy.apply(logits, labels.flatten(), IGNORED)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert not losses[:3].any() and not gradient[:3].any() and gradient[3:].all()


def test_what_is_no_number_shows_in_the_loss(way):
    logits, labels = (x.detach().flatten(0, 1) for x in make_inputs())
    logits[3, 5] = math.nan
    losses, _ = CrossEntropy.apply(logits, labels, IGNORED)
    assert losses.isnan().nonzero().tolist() == [[3]]


# ---- the compiled ops ----


def op_arguments(dtype=torch.float64):
    logits, labels = (x.detach().flatten(0, 1) for x in make_inputs(dtype))
    return {"logits": logits, "labels": labels, "ignore_index": IGNORED}


def backward_op_arguments(dtype=torch.float64):
    args = op_arguments(dtype)
    losses, normalizers = OP.cross_entropy(**args)
    return {"dlosses": losses.cos(), "normalizers": normalizers, **args}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_ops_pass_opcheck(dtype):
    torch.library.opcheck(OP.cross_entropy.default, (), op_arguments(dtype))
    torch.library.opcheck(OP.cross_entropy_backward.default, (), backward_op_arguments(dtype))


@pytest.mark.parametrize("rows, words", [(0, 5), (0, 0), (3, 0)])
def test_the_loss_of_nothing(rows, words):
    logits = torch.zeros(rows, words)
    labels = torch.full((rows,), IGNORED)
    losses, normalizers = compiled_cross_entropy(logits, labels, IGNORED)
    assert losses.tolist() == [0] * rows and normalizers.tolist() == [-math.inf] * rows
    gradient = compiled_backward(losses, logits, labels, normalizers, IGNORED)
    assert gradient.shape == logits.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_the_same_to_the_bit_with_any_number_of_threads(dtype):
    logits = torch.randn(301, 1003).to(dtype)
    labels = torch.randint(1003, (301,))

    def results():
        losses, normalizers = compiled_cross_entropy(logits, labels, IGNORED)
        gradient = compiled_backward(losses, logits, labels, normalizers, IGNORED)
        return losses, normalizers, gradient

    expected = results()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert all(map(torch.equal, results(), expected))
    finally:
        torch.set_num_threads(threads)


WRONG = {
    "logits_dims": ("logits", lambda x: x[0], r"logits must have shape \(rows, words\), got"),
    "logits_dtype": ("logits", lambda x: x.int(), "logits must be float32, bfloat16, float16"),
    "logits_layout": ("logits", lambda x: x.t().contiguous().t(), "logits must be contiguous"),
    "labels_shape": ("labels", lambda x: x[1:], r"labels must have shape \(14,\), got \(13,\)"),
    "labels_dtype": ("labels", lambda x: x.int(), "labels must be int64 here, got int32"),
    "labels_size": ("labels", lambda x: x + V, "labels must be from 0 to 10, or ignore_index"),
}
WRONG_FOR_BACKWARD = WRONG | {
    "dlosses_shape": ("dlosses", lambda x: x[1:], r"dlosses must have shape \(14,\)"),
    "dlosses_dtype": ("dlosses", lambda x: x.float(), "dlosses must be float64 here, got float32"),
    "normalizers_shape": ("normalizers", lambda x: x[1:], r"normalizers must have shape \(14,\)"),
    "normalizers_dtype": ("normalizers", lambda x: x.half(), "normalizers must be float64 here"),
}


@pytest.mark.parametrize("name", WRONG_FOR_BACKWARD)
def test_wrong_arguments_are_refused(name):
    argument, spoil, message = WRONG_FOR_BACKWARD[name]
    backward = backward_op_arguments()
    backward[argument] = spoil(backward[argument])
    with pytest.raises(RuntimeError, match=f"::cross_entropy_backward: .*{message}"):
        OP.cross_entropy_backward(**backward)
    if name in WRONG:
        args = op_arguments()
        args[argument] = spoil(args[argument])
        with pytest.raises(RuntimeError, match=f"::cross_entropy: .*{message}"):
            OP.cross_entropy(**args)


# ---- the whole loss ----


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


# ---- without logits ----


@pytest.fixture(params=[0, 10 * V, 2**20], ids=["as many as features", "ten", "all"])
def rows_at_a_time(request, monkeypatch):
    monkeypatch.setattr(loss_module, "LINEAR_CHUNK_ELEMENTS", request.param)


def make_head(dtype=torch.float32, C=8):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(size, generator=generator).to(dtype).requires_grad_()
        for size in ((B, T, C), (V, C))
    ]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_without_logits_is_the_same(variant, dtype, rows_at_a_time, way):
    hidden_states, weight = make_head(dtype)
    _, labels = make_inputs()
    labels = labels.clamp(min=0) if "ignore_index" in VARIANTS[variant] else labels
    exact = [x.detach().double().requires_grad_() for x in (hidden_states, weight)]
    actual = linear_causal_lm_loss(hidden_states, weight, labels, **VARIANTS[variant])
    expected = ForCausalLMLoss(exact[0] @ exact[1].t(), labels, V, **VARIANTS[variant])
    # Logits are rounded to the dtype, as they are where they are kept.
    tolerance = {"rtol": 4 * max(torch.finfo(dtype).eps, 1e-6), "atol": 0}
    torch.testing.assert_close(actual.double(), expected.double(), **tolerance)
    gradients = torch.autograd.grad(3 * actual, [hidden_states, weight])
    for one, other in zip(gradients, torch.autograd.grad(3 * expected, exact), strict=True):
        assert one.dtype == dtype
        largest = other.abs().max().item()
        atol = 4 * max(torch.finfo(dtype).eps, 1e-6) * largest
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


def test_gradcheck_without_logits(rows_at_a_time):
    hidden_states, weight = make_head(torch.float64)
    _, labels = make_inputs()

    def total(x, weight):
        return LinearCrossEntropy.apply(x.flatten(0, 1), weight, labels.flatten(), IGNORED)

    assert torch.autograd.gradcheck(total, (hidden_states, weight))


@pytest.mark.parametrize("frozen", ["hidden_states", "weight"])
def test_only_what_is_needed_is_computed_without_logits(frozen):
    inputs = dict(zip(("hidden_states", "weight"), make_head(), strict=True))
    _, labels = make_inputs()
    inputs[frozen].requires_grad_(False)
    linear_causal_lm_loss(*inputs.values(), labels).backward()
    assert [x.grad is None for x in inputs.values()] == [name == frozen for name in inputs]


def test_no_labels_at_all_give_what_torch_gives():
    hidden_states, weight = make_head()
    labels = torch.full((B, T), IGNORED)
    loss = linear_causal_lm_loss(hidden_states, weight, labels)
    loss.backward()  # to zeros, or an optimizer's step would make all weights NaN
    assert loss.isnan() and not hidden_states.grad.any() and not weight.grad.any()
    loss = linear_causal_lm_loss(hidden_states, weight, labels, num_items_in_batch=5)
    loss.backward()
    assert loss == 0 and not hidden_states.grad.any() and not weight.grad.any()


def test_another_number_of_labels_is_an_error_without_logits_too():
    hidden_states, weight = make_head()
    message = r"labels must have one label .*\(1, 7\) for .*\(2, 7, 8\)"
    with pytest.raises(ValueError, match=message):
        linear_causal_lm_loss(hidden_states, weight, torch.zeros(1, T, dtype=torch.long))


def gradients_of(model, tokens, labels, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(tokens, labels=labels)
    output.loss.backward()
    return output, {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_trains_without_logits_as_with_them(tie, autocast):
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=tie).train()
    tokens = random_ids(2, 9)
    labels = tokens.clone()
    labels[0, :5] = IGNORED
    plain, expected = gradients_of(model, tokens, labels, autocast)
    model.config.fuse_linear_cross_entropy = True
    fused, actual = gradients_of(model, tokens, labels, autocast)
    assert plain.logits is not None and fused.logits is None
    tolerance = 0.02 if autocast else 1e-5
    torch.testing.assert_close(fused.loss, plain.loss, rtol=tolerance, atol=0)
    for name, gradient in expected.items():
        atol = tolerance * gradient.abs().max().item()
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=atol)


def test_a_model_gives_logits_wherever_else_they_are_wanted():
    model = tiny_model(dtype=torch.float32, fuse_linear_cross_entropy=True).train()
    tokens = random_ids(2, 9)
    assert model(tokens, labels=tokens).logits is None
    assert model(tokens).logits is not None
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert model(tokens, labels=tokens).logits is seen[0]
    handle.remove()
    assert model.eval()(tokens, labels=tokens).logits is not None
    model.train().loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert model(tokens, labels=tokens).logits is not None


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_for_all"])
def test_a_hook_that_waits_for_the_gradient_of_logits_is_called(register):
    """Without logits there would be nothing that it could be called with."""
    model = tiny_model(dtype=torch.float32, fuse_linear_cross_entropy=True).train()
    tokens, seen = random_ids(2, 9), []

    def see(module, gradients_of_inputs, gradients_of_outputs):
        if module is model.lm_head:
            seen.extend(gradients_of_outputs)

    if register == "register_for_all":
        handle = register_module_full_backward_hook(see)
    else:
        handle = getattr(model.lm_head, register)(see)
    try:
        outputs = model(tokens, labels=tokens)
        outputs.loss.backward()
    finally:
        handle.remove()
    assert [gradient.shape for gradient in seen] == [outputs.logits.shape]


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_with_more_words_than_it_had_trains_without_logits(tie):
    """Transformers makes another head for them."""
    model = tiny_model(
        dtype=torch.float32, fuse_linear_cross_entropy=True, tie_word_embeddings=tie
    ).train()
    model.resize_token_embeddings(model.config.vocab_size + 3)
    tokens = random_ids(2, 9)
    outputs = model(tokens, labels=tokens)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, model.eval()(tokens, labels=tokens).loss)


def test_no_logits_are_made_while_a_model_trains_without_them(rows_at_a_time, monkeypatch):
    sizes = []
    product = loss_module.plain_product

    def seen(x, weight):
        y = product(x, weight)
        sizes.append(y.shape)
        return y

    monkeypatch.setattr(loss_module, "plain_product", seen)
    model = tiny_model(dtype=torch.float32, fuse_linear_cross_entropy=True).train()
    tokens = random_ids(2, 9)
    model(tokens, labels=tokens).loss.backward()
    V, C = model.config.vocab_size, model.config.hidden_size
    rows = max(C, loss_module.LINEAR_CHUNK_ELEMENTS // V)
    logits = [size for size in sizes if size[1] == V]
    assert sum(size[0] for size in logits) == 2 * 8  # what has a label
    assert all(size[0] <= rows for size in logits)


@pytest.mark.thorough
def test_a_model_that_trains_without_logits_compiles():
    model = tiny_model(dtype=torch.float32, fuse_linear_cross_entropy=True).train()
    tokens = random_ids(2, 9)
    expected, gradients = gradients_of(model, tokens, tokens)
    compiled = torch.compile(model)
    loss = compiled(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected.loss)


def test_a_model_of_meta_tensors_trains_without_logits():
    with torch.device("meta"):
        model = tiny_model(dtype=torch.float32, fuse_linear_cross_entropy=True).train()
        tokens = torch.zeros(2, 9, dtype=torch.int64)
        model(tokens, labels=tokens).loss.backward()
    assert all(x.grad.shape == x.shape for x in model.parameters())
