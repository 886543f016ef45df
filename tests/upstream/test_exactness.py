# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' recurrent models answer on our kernels as they do without."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_linear_attention import use_kernels
from hf_linear_attention.model.loss import causal_lm_loss
from upstream_models import CONFIGS, VOCAB_SIZE, cache_name, cast, close, tiny_upstream

T = 19  # more than two chunks of upstream's
NO_BEAMS = ("xlstm", "minimax")  # whose states upstream can't reorder, or leaves to others


@pytest.fixture(scope="module", params=CONFIGS)
def models(request):
    """Upstream's model, and a copy of it on our kernels."""
    theirs = tiny_upstream(request.param)
    ours = copy.deepcopy(theirs)
    report = use_kernels(ours)
    assert report.changed
    return theirs, ours


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (2, T))


def test_logits(models, ids):
    theirs, ours = models
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits)


def test_losses(models, ids):
    """With all that a model adds to that of its labels."""
    theirs, ours = models
    labels = ids.masked_fill(ids % 3 == 0, -100)
    assert ours.loss_function is causal_lm_loss
    with torch.no_grad():
        close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)


def gradients(model, ids):
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_projections_are_called_in_the_same_order(models, ids):
    """Else what an adapter on them draws for its dropout would be another one's."""

    def called(model):
        names = []
        hooks = [
            module.register_forward_hook(lambda *_, name=name: names.append(name))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]
        with torch.no_grad():
            model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return names

    theirs, ours = map(called, models)
    more = set(ours) - set(theirs)  # Mamba's dt_proj, past which Transformers reads the weights
    assert [name for name in ours if name not in more] == theirs


# In float64 it is upstream that rounds, where it goes to float32 in between.
@pytest.mark.sample(29)
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 2e-3), (torch.float64, 2e-4)])
def test_gradients_of_all_parameters(models, ids, dtype, relative):
    theirs, ours = (gradients(cast(copy.deepcopy(model), dtype), ids) for model in models)
    for mine, their in zip(ours, theirs, strict=True):
        if their is None:
            assert mine is None
        else:
            close(mine, their, relative)


@pytest.mark.parametrize("cuts", [(18, 1), (11, 1, 1, 5, 1), (1, 1, 1, 1, 15)])
def test_any_split_with_a_cache_is_the_whole(models, ids, cuts):
    theirs, ours = models
    with torch.no_grad():
        want = theirs(ids).logits
        pieces, cache = [], {}
        positions = torch.arange(T)[None].split(cuts, dim=1)
        for piece, at in zip(ids.split(cuts, dim=1), positions, strict=True):
            if ours.config.model_type == "bamba":  # which would count from 0 again
                cache["position_ids"] = at
            output = ours(piece, use_cache=True, **cache)
            cache = {cache_name(ours): output[cache_name(ours)]}
            pieces.append(output.logits)
    close(torch.cat(pieces, 1), want)


@pytest.mark.sample(15)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generated_tokens(models, ids, num_beams):
    theirs, ours = models
    options = dict(max_new_tokens=5, do_sample=False, num_beams=num_beams)
    without = {"use_cache": False} if ours.config.model_type in NO_BEAMS and num_beams > 1 else {}
    want = theirs.generate(ids, **options, **without)
    assert torch.equal(ours.generate(ids, **options), want)


def test_a_left_padded_batch_generates_as_its_rows(models, ids):
    theirs, ours = models
    options = dict(max_new_tokens=5, do_sample=False)
    short = ids[:1, 7:]
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :7], mask[0, :7] = 0, 0
    together = ours.generate(padded, attention_mask=mask, **options)
    want = [theirs.generate(row, **options)[0, -5:] for row in (short, ids[1:])]
    assert torch.equal(together[:, -5:], torch.stack(want))


def test_half_precision_is_as_exact_as_upstreams(models, ids):
    theirs, ours = (cast(copy.deepcopy(model), torch.bfloat16) for model in models)
    with torch.no_grad():
        want = models[0](ids).logits
        errors = [(model(ids).logits - want).square().mean(-1) for model in (ours, theirs)]
    assert errors[0].median() < 2 * errors[1].median()  # a router may choose another expert


def test_autocast_is_as_exact_as_upstreams(models, ids):
    theirs, ours = models
    with torch.no_grad():
        want = theirs(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            logits = [model(ids).logits for model in (ours, theirs)]
    errors = [(x - want).square().mean(-1) for x in logits]
    assert errors[0].median() < 2 * errors[1].median()


REAL_SIZES = {
    "qwen3_5_text": dict(
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "kimi_linear": dict(linear_num_heads=2, linear_head_dim=128),
    "mamba2": dict(num_heads=4, head_dim=64, state_size=128, n_groups=1, expand=8, chunk_size=256),
    "minimax": dict(head_dim=128, block_size=256),
}


@pytest.mark.parametrize("model_type", REAL_SIZES)
def test_heads_of_real_sizes(model_type):
    """Over several chunks, and from a prompt to a few tokens more."""
    model = tiny_upstream(model_type, **REAL_SIZES[model_type])
    ids = torch.randint(2, VOCAB_SIZE - 4, (1, 300))
    name = cache_name(model)
    with torch.no_grad():
        want = model(ids).logits
        use_kernels(model)
        close(model(ids).logits, want, 1e-4)
        cache = model(ids[:, :290], use_cache=True)[name]
        pieces = [model(x, **{name: cache}).logits for x in ids[:, 290:].split((1, 8, 1), dim=1)]
    close(torch.cat(pieces, dim=1), want[:, 290:], 1e-4)
