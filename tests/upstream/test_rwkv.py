# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-4, whose model keeps a list of states, on our scan: its answers, and where Transformers' own
contradict each other, those of one row, or without states.
"""

import copy
import pickle

import pytest
import torch

from hf_linear_attention import use_kernels
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.upstream.layers.wkv import LEAST, WKV
from upstream_models import VOCAB_SIZE, cast, close, tiny_upstream

T = 19


@pytest.fixture(scope="module")
def models():
    """Upstream's model, and a copy of it on our kernels."""
    theirs = tiny_upstream("rwkv")
    ours = copy.deepcopy(theirs)
    report = use_kernels(ours)
    replaced = [change.now.__name__ for change in report.changed]
    assert replaced.count("RwkvSelfAttention") == replaced.count("RwkvFeedForward") == 2
    return theirs, ours


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE, (2, T), generator=torch.Generator().manual_seed(0))


def in_pieces(model, ids, cuts, state=None):
    """Logits, and the states after them."""
    logits = []
    for piece in ids.split(cuts, dim=1):
        output = model(piece, state=state, use_cache=True)
        state = output.state
        logits.append(output.logits)
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_losses_and_states(models, ids, use_cache):
    with torch.no_grad():
        theirs, ours = (m(ids, labels=ids, use_cache=use_cache) for m in models)
    close(ours.logits, theirs.logits)
    close(ours.loss, theirs.loss)
    assert ("state" in ours) == ("state" in theirs) == use_cache
    for mine, their in zip(ours.get("state", []), theirs.get("state", []), strict=True):
        assert mine.dtype == their.dtype
        close(mine, their)


@pytest.mark.parametrize("dtype, relative", [(torch.float32, 2e-3), (torch.float64, 2e-4)])
def test_gradients_of_all_parameters(models, ids, dtype, relative):
    found = []
    for model in models:
        model = copy.deepcopy(model).to(dtype).train()
        logits = model(ids).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0, name
        close(found[1][name], gradient, relative)


@pytest.mark.parametrize("log_rate", [20.0, 90.0, 300.0])
def test_decays_out_of_float32s_range_forget_all(models, ids, log_rate):
    theirs, ours = map(copy.deepcopy, models)
    for model in (theirs, ours):
        for name, parameter in model.named_parameters():
            if name.endswith("time_decay"):
                parameter.data.fill_(log_rate)
    with torch.no_grad():
        want = theirs.double()(ids).logits.float()
    output = ours(ids, labels=ids)
    close(output.logits, want)
    output.loss.backward()
    assert all(x.grad.isfinite().all() for x in ours.parameters())


def test_half_precision_is_as_exact_as_upstreams(models, ids):
    with torch.no_grad():
        want = models[0](ids).logits
        for autocast in (False, True):
            errors = []
            for model in models:
                model = cast(copy.deepcopy(model), torch.float32 if autocast else torch.bfloat16)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    errors.append((model(ids).logits - want).square().mean(-1).median())
            assert errors[1] < 2 * errors[0]


def test_either_goes_on_from_the_states_of_the_other(models, ids):
    with torch.no_grad():
        want = models[0](ids[:1]).logits[:, 11:]
        for first, then in (models, models[::-1]):
            _, state = in_pieces(first, ids[:1, :11], 11)
            close(in_pieces(then, ids[:1, 11:], (1, 1, 6), state)[0], want)


@pytest.mark.parametrize("cuts", [(18, 1), (11, 1, 1, 5, 1), (1, 1, 1, 1, 15)])
def test_any_split_of_several_rows_is_the_whole(models, ids, cuts):
    """Transformers mixes rows up where they are of one token."""
    theirs, ours = models
    with torch.no_grad():
        close(in_pieces(ours, ids, cuts)[0], theirs(ids).logits)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generated_tokens_are_those_of_each_row_without_states(models, ids, num_beams):
    theirs, ours = models
    options = dict(max_new_tokens=6, do_sample=False, num_beams=num_beams)
    want = [theirs.generate(row[None], use_cache=False, **options)[0] for row in ids]
    assert torch.equal(ours.generate(ids, **options), torch.stack(want))


def test_a_left_padded_batch_generates_as_its_rows(models, ids):
    theirs, ours = models
    options = dict(max_new_tokens=5, do_sample=False, use_cache=True)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :7], mask[0, :7] = 0, 0
    found = ours.generate(padded, attention_mask=mask, **options)
    want = [theirs.generate(row, **options)[0, -5:] for row in (ids[:1, 7:], ids[1:])]
    assert torch.equal(found[:, -5:], torch.stack(want))


def test_padding_anywhere_neither_writes_nor_forgets(models, ids):
    theirs, ours = models
    mask = torch.ones_like(ids)
    mask[0, [0, 3, 4, 9, T - 1]] = 0
    is_real = mask[0].bool()
    with torch.no_grad():
        output = ours(ids, attention_mask=mask, use_cache=True)
        want, state = in_pieces(theirs, ids[:1, is_real], T)
        close(output.logits[:1, is_real], want)
        for mine, their in zip(output.state, state, strict=True):
            close(mine[:1], their)


def test_sequences_packed_in_a_row_are_kept_apart(models, ids):
    theirs, ours = models
    row, positions = ids.flatten()[None], torch.arange(T).repeat(2)[None]
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits.flatten(0, 1)[None]
        output = ours(row, position_ids=positions)
        close(output.logits, want)
        assert output.state is None
        state = theirs(ids, use_cache=True).state
        with pytest.raises(ValueError, match="packed sequences can't be cached"):
            ours(row, position_ids=positions, state=state)


def test_an_empty_sequence_among_packed_ones_is_none(models, ids):
    bounds = torch.tensor([0, 0, 5, 5, T], dtype=torch.int32)
    with torch.no_grad():
        y = models[1](ids[:1], cu_seq_lens_q=bounds, use_cache=False).logits
        close(y, models[1](ids[:1], cu_seq_lens_q=bounds[1:].unique(), use_cache=False).logits)


def test_sums_are_those_of_a_loop_in_float64_for_large_keys():
    """Whose exponentials no number holds."""
    layer = WKV()
    for seed in range(3):
        torch.manual_seed(seed)
        k, v = 30 * torch.randn(2, 300, 5), torch.randn(2, 300, 5)
        layer.time_decay, layer.time_first = torch.randn(5) - 1, torch.randn(5)
        y, _ = layer.mean(k, v, None, Tokens(is_causal=True))
        decay, first = -layer.time_decay.double().exp(), layer.time_first.double()
        num = den = torch.zeros(2, 5, dtype=torch.float64)
        largest = den + LEAST
        for t in range(300):
            kt, vt = k[:, t].double(), v[:, t].double()
            top = torch.maximum(largest, kt + first)
            before, own = (largest - top).exp(), (kt + first - top).exp()
            want = (before * num + own * vt) / (before * den + own)
            torch.testing.assert_close(y[:, t].double(), want, rtol=0, atol=1e-5)
            top = torch.maximum(largest + decay, kt)
            kept, written = (largest + decay - top).exp(), (kt - top).exp()
            num, den, largest = kept * num + written * vt, kept * den + written, top


def test_undone_and_pickled_it_answers_as_before(models, ids):
    theirs, ours = models
    again = copy.deepcopy(theirs)
    with torch.no_grad(), use_kernels(again):
        close(pickle.loads(pickle.dumps(again))(ids).logits, ours(ids).logits)
    assert [type(x) for x in again.modules()] == [type(x) for x in theirs.modules()]


def test_continuous_batching_is_refused_with_the_reason(models):
    with pytest.raises(NotImplementedError, match="continuous batching"):
        models[1].init_continuous_batching()
