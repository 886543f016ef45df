# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RecurrentGemma, whose states Transformers keeps on the modules, on our scan: its answers, and
where Transformers' own contradict each other, those without a cache.
"""

import copy
import pickle

import pytest
import torch

from hf_linear_attention import use_kernels
from hf_linear_attention.upstream.layers import rg_lru
from upstream_models import VOCAB_SIZE, close, tiny_upstream

T = 19


@pytest.fixture(scope="module")
def models():
    """Upstream's model, and a copy of it on our kernels."""
    theirs = tiny_upstream("recurrent_gemma")
    ours = copy.deepcopy(theirs)
    report = use_kernels(ours)
    replaced = [change.now.__name__ for change in report.changed if "Recurrent" in str(change.now)]
    assert replaced.count("RecurrentGemmaRecurrentBlock") == 2
    assert replaced.count("RecurrentGemmaRglru") == 2
    return theirs, ours


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE, (2, T), generator=torch.Generator().manual_seed(0))


def block_of(model):
    """A recurrent block that remembers nothing."""
    block = copy.deepcopy(model.model.layers[1].temporal_block)
    block.conv1d_state = block.rg_lru.recurrent_states = None
    return block


def run(block, x, positions, use_cache=False):
    return block(x, positions, None, use_cache=use_cache)[0]


def run_in_pieces(block, x, positions, cuts):
    pieces = zip(x.split(cuts, 1), positions.split(cuts, 1), strict=True)
    return torch.cat([run(block, *piece, use_cache=True) for piece in pieces], 1)


# ---- as Transformers has it ----


@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_and_losses(models, ids, use_cache):
    with torch.no_grad():
        ours, theirs = (m(ids, labels=ids, use_cache=use_cache) for m in reversed(models))
    close(ours.logits, theirs.logits)
    close(ours.loss, theirs.loss)


@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-3), (torch.float64, 2e-4)])
def test_gradients_of_all_parameters(models, ids, dtype, relative):
    found = []
    for model in models:
        model = copy.deepcopy(model).to(dtype)
        logits = model(ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    theirs, ours = found
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        close(ours[name], gradient, relative)


def test_gradients_where_nearly_all_is_remembered(models):
    """There the root's derivative is bounded, without which it would be infinite."""
    theirs, ours = (block_of(model).rg_lru for model in models)
    x, positions = torch.randn(2, T, 40), torch.arange(T)[None]
    found = []
    for unit in (theirs, ours):
        unit.recurrent_param.data.fill_(-30.0)
        leaves = [*unit.parameters(), inputs := x.clone().requires_grad_()]
        found.append(torch.autograd.grad(unit(inputs, positions).square().sum(), leaves))
    for their, mine in zip(*found, strict=True):
        assert mine.isfinite().all()
        close(mine, their, 1e-3)


def test_half_precision_is_as_exact_as_upstreams(models, ids):
    with torch.no_grad():
        want = models[0](ids).logits
        for autocast in (False, True):
            errors = []
            for model in models:
                model = copy.deepcopy(model).to(torch.float32 if autocast else torch.bfloat16)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    errors.append((model(ids).logits - want).square().mean(-1).median())
            assert errors[1] < 2 * errors[0]


def test_generated_tokens_and_their_logits(models, ids):
    theirs, ours = models
    options = dict(max_new_tokens=8, do_sample=False, output_logits=True)
    for prompt in (ids, ids[:, :2], ids[:1]):
        mine, their = (
            model.generate(prompt, return_dict_in_generate=True, **options)
            for model in (ours, theirs)
        )
        assert torch.equal(mine.sequences, their.sequences)
        close(torch.stack(mine.logits), torch.stack(their.logits), 1e-4)


# ---- where Transformers' answers contradict each other ----


def test_a_prompt_of_one_token_remembers_no_earlier_call(models, ids):
    _, ours = models
    options = dict(max_new_tokens=8, do_sample=False)
    first = ours.generate(ids[:, :1], use_cache=False, **options)
    ours.generate(ids, **options)
    assert torch.equal(ours.generate(ids[:, :1], **options), first)


def test_beams_with_a_cache_are_those_without(models, ids):
    theirs, ours = models
    options = dict(
        max_new_tokens=8,
        do_sample=False,
        num_beams=3,
        output_scores=True,
        return_dict_in_generate=True,
    )
    want = theirs.generate(ids, use_cache=False, **options)
    found = ours.generate(ids, **options)
    assert torch.equal(found.sequences, want.sequences)
    close(found.sequences_scores, want.sequences_scores, 1e-4)
    wrong = theirs.generate(ids, **options)  # its beams swap states that it leaves where they are
    assert (wrong.sequences_scores - want.sequences_scores).abs().max() > 1e-3


@pytest.mark.parametrize("cuts", [(18, 1), (11, 1, 1, 5, 1), (1, 1, 1, 1, 15), (2, 2, 15)])
def test_any_split_is_the_whole(models, cuts):
    theirs, ours = map(block_of, models)
    x, positions = torch.randn(2, T, 32), torch.arange(T)[None]
    with torch.no_grad():
        want = run(theirs, x, positions)
        found = run_in_pieces(ours, x, positions, cuts)
    close(found, want)


# Lengths of what is in a row, one after another, each from position 0: sequences, or, where all of
# some are of one token, padding before the last one.
@pytest.mark.parametrize("lengths", [(5, 2, 12), (1, 1, 1, 1, 15), (1, 1, 17), (16, 1, 1, 1)])
def test_what_begins_at_position_0_knows_nothing_of_what_is_before(models, lengths):
    theirs, ours = map(block_of, models)
    x = torch.randn(1, T, 32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    other = torch.arange(T)[None]
    with torch.no_grad():
        both = run(ours, torch.cat([x, x]), torch.cat([positions, other]), use_cache=True)
        found = run(ours, x, positions, use_cache=True)
        want = [
            run(theirs, part, torch.arange(part.shape[1])[None]) for part in x.split(lengths, 1)
        ]
        close(found, torch.cat(want, 1))
        close(both, torch.cat([found, run(theirs, x, other)]))
        # and so does what comes after
        more = torch.randn(1, 3, 32)
        at = torch.arange(lengths[-1], lengths[-1] + 3)[None]
        found = run_in_pieces(ours, more, at, 1)
        together = torch.cat([x[:, T - lengths[-1] :], more], 1)
        want = run(theirs, together, torch.arange(together.shape[1])[None])[:, -3:]
    close(found, want)


def test_positions_that_cannot_be_read_give_the_same_convolution(models, monkeypatch):
    """As those on a device, which nobody waits for."""
    block = block_of(models[1])
    x, before = torch.randn(2, T, 40), torch.randn(2, 40, 3)
    packed = torch.cat([torch.arange(3, 8), torch.arange(2), torch.arange(12)])
    for positions in (torch.stack([packed, torch.arange(T)]), packed[None], torch.arange(T)[None]):
        found = []
        for readable in (True, False):
            monkeypatch.setattr(rg_lru, "is_readable", lambda _, readable=readable: readable)
            block.conv1d_state, leaf = before, x.clone().requires_grad_()
            y, state = block.convolved(leaf, positions)
            found.append((y, state, *torch.autograd.grad(y.square().sum(), leaf)))
        for of_read, of_unread in zip(*found, strict=True):
            torch.testing.assert_close(of_read, of_unread)


def test_sequences_packed_in_a_row_are_kept_apart(models, ids):
    theirs, ours = models
    row, positions = ids.flatten()[None], torch.arange(T).repeat(2)[None]
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits.flatten(0, 1)[None]
        close(ours(row, position_ids=positions, use_cache=False).logits, want)


# ---- around it ----


def test_bounds_of_one_row_are_refused_for_several(models, ids):
    with pytest.raises(ValueError, match=f"cu_seq_lens_q must rise from 0 to B T = {2 * T} "):
        models[1](ids, cu_seq_lens_q=torch.tensor([0, T]), use_cache=False)


def test_the_block_compiles_as_one_graph(models):
    theirs, ours = map(block_of, models)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x, positions = torch.randn(2, T, 32), torch.arange(T).expand(2, -1)
    with torch.no_grad():
        close(run(compiled, x, positions), run(theirs, x, positions))


def test_a_forward_without_a_cache_keeps_no_state(models, ids):
    _, ours = models
    ours(ids, use_cache=False).logits.sum().backward()
    for layer in ours.model.layers[:2]:
        block = layer.temporal_block
        assert block.conv1d_state is None and block.rg_lru.recurrent_states is None


def test_undone_and_pickled_it_answers_as_before(models, ids):
    theirs, ours = models
    again = copy.deepcopy(theirs)
    with torch.no_grad(), use_kernels(again):
        close(pickle.loads(pickle.dumps(again))(ids).logits, ours(ids).logits)
    assert type(again) is type(theirs)
    assert [type(x) for x in again.modules()] == [type(x) for x in theirs.modules()]


def test_continuous_batching_is_refused_with_the_reason(models):
    _, ours = models
    with pytest.raises(NotImplementedError, match="continuous batching"):
        ours.init_continuous_batching()
