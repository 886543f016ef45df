# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""xLSTM, whose layers are given nothing but a state, on our linear attention: its sums, and what
Transformers' own model has wrong, or not at all.
"""

import copy
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from transformers.models.xlstm.modeling_xlstm import xLSTMPreTrainedModel

from hf_linear_attention import use_kernels
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.matrix_memory import MatrixInputs, MatrixMemory, gates_of
from hf_linear_attention.upstream.told_states import ToldStates
from hf_linear_attention.upstream.xlstm_cache import XLSTMStates
from upstream_models import VOCAB_SIZE, cache_name, close, tiny_upstream

T = 19
HIDDEN = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0])  # 1: real tokens


@pytest.fixture(scope="module")
def models():
    """Upstream's model, and a copy of it on our kernels."""
    return pair()


def pair(**changes):
    theirs = tiny_upstream("xlstm", **changes)
    ours = copy.deepcopy(theirs)
    use_kernels(ours)
    return theirs, ours


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE, (2, T), generator=torch.Generator().manual_seed(0))


def in_pieces(model, ids, cuts, cache=None, mask=None):
    """Logits, and the cache after them."""
    name, logits, stop = cache_name(model), [], 0
    for piece in ids.split(cuts, dim=1):
        stop += piece.shape[1]
        more = {} if mask is None else {"attention_mask": mask[:, :stop]}
        output = model(piece, use_cache=True, **{name: cache}, **more)
        cache = output[name]
        logits.append(output.logits)
    return torch.cat(logits, 1), cache


# ---- the recurrence ----


def loop(inputs, eps):
    """In float64, token by token, as the formula reads."""
    q, k, v, write, decay = (x.double() for x in inputs)
    B, length, H, K = k.shape
    kv, z, m = q.new_zeros(B, H, K, v.shape[-1]), q.new_zeros(B, H, K), q.new_zeros(B, H)
    outputs = []
    for t in range(length):
        largest = torch.maximum(decay[:, t] + m, write[:, t])
        kept, written = (decay[:, t] + m - largest).exp(), (write[:, t] - largest).exp()
        kv = kept[..., None, None] * kv + (
            written[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None]
        )
        z, m = kept[..., None] * z + written[..., None] * k[:, t], largest
        num, den = (torch.einsum(f"bhk,bhk{x}->bh{x}", q[:, t], y) for x, y in (("v", kv), ("", z)))
        outputs.append(num / (torch.maximum(den.abs(), (-m).exp()) + eps)[..., None])
    return torch.stack(outputs, 1), {"kv": kv, "z": z, "m": m[..., None]}


def random_inputs(length, gates, seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, length, 3, 8)
    write, forget = gates * torch.randn(2, 2, length, 3).clamp(-1, 1)
    return MatrixInputs(q, k, v, *gates_of(write, forget))


@pytest.mark.parametrize("gates", [1, 30])
def test_sums_are_those_of_a_loop_in_float64_for_gates_of_any_size(gates):
    recurrence, tokens = MatrixMemory(3, 8, 8), Tokens(is_causal=True)
    for seed in range(3):
        inputs = random_inputs(300, gates, seed)
        want, states = loop(inputs, recurrence.eps)
        y, after = recurrence.run(inputs, {}, tokens)
        # A denominator near 0, of both signs before, leaves few digits: most are far from it.
        error = (y.double() - want).abs() / (1 + want.abs())
        assert error.median() < 1e-6 and error.quantile(0.99) < 1e-3
        for name, state in states.items():
            close(after[name].double(), state, 2e-5)
        state = recurrence.start(inputs)
        for t in range(20):
            token = recurrence.tokens_of(inputs, lambda x, t=t: x[:, t : t + 1])
            step = recurrence.step_(token, state, tokens)
            error = (step[:, 0].double() - want[:, t]).abs() / (1 + want[:, t].abs())
            assert error.median() < 1e-6


def test_pieces_combine_to_the_whole():
    recurrence, tokens = MatrixMemory(3, 8, 8), Tokens(is_causal=True)
    inputs = random_inputs(30, 5, 0)
    _, want = recurrence.run(inputs, {}, tokens)
    cuts = ((0, 7), (7, 8), (8, 30))
    pieces = [
        recurrence.piece(recurrence.tokens_of(inputs, lambda x, a=a, b=b: x[:, a:b]), tokens)
        for a, b in cuts
    ]
    found = recurrence.combine({name: torch.stack([p[name] for p in pieces]) for name in pieces[0]})
    for name, x in want.items():
        close(found[name], x)


def test_gradients_are_those_of_the_loop():
    recurrence = MatrixMemory(3, 8, 8)
    inputs = MatrixInputs(*(x.double() for x in random_inputs(40, 5, 0)))
    found = []
    for run in (
        lambda x: recurrence.run(x, {}, Tokens(is_causal=True))[0],
        lambda x: loop(x, 1e-6)[0],
    ):
        leaves = MatrixInputs(*(x.clone().requires_grad_() for x in inputs))
        weights = torch.linspace(-1, 1, inputs.v.numel(), dtype=torch.float64)
        loss = (run(leaves).flatten() * weights).sum()
        found.append(torch.autograd.grad(loss, list(leaves)))
    for mine, want in zip(*found, strict=True):
        close(mine, want, 1e-4)


# ---- settings ----


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bias": True},
        {"gate_soft_cap": 3.0},
        {"eps": 0.1},
        {"norm_reduction_force_float32": False},
        {"max_inference_chunksize": 7},
    ],
)
def test_every_setting_is_as_upstream(changes, ids):
    theirs, ours = pair(**changes)
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits)
        close(in_pieces(ours, ids, (9, 1, 9))[0], theirs(ids).logits)


def test_fused_weights_are_as_upstream(ids):
    """Which Transformers reads from files, and can't draw."""
    with mock.patch.object(xLSTMPreTrainedModel, "_init_weights", lambda self, module: None):
        theirs, ours = pair(weight_mode="fused")
    with torch.no_grad():
        close(in_pieces(ours, ids, (9, 1, 9))[0], theirs(ids).logits)


# ---- states ----


def test_either_goes_on_from_the_states_of_the_other(models, ids):
    with torch.no_grad():
        want = models[0](ids).logits[:, 9:]
        for first, then in (models, models[::-1]):
            _, cache = in_pieces(first, ids[:, :9], 9)
            close(in_pieces(then, ids[:, 9:], (1, 1, 8), cache)[0], want)


def test_padding_anywhere_neither_writes_nor_forgets(models, ids):
    theirs, ours = models
    mask = torch.stack([HIDDEN, torch.ones_like(HIDDEN)])
    is_real = HIDDEN.bool()
    with torch.no_grad():
        want, their = in_pieces(theirs, ids[:1, is_real], T)
        for cuts in ((T,), (5, 1, 1, 12)):
            logits, cache = in_pieces(ours, ids, cuts, mask=mask)
            close(logits[:1, is_real], want)
            close(logits[1:], theirs(ids[1:]).logits)
            for state, expected in zip(cache.rnn_state[1], their.rnn_state[1], strict=True):
                close(state[:1], expected)
        close(ours(ids, attention_mask=mask, use_cache=False).logits[:1, is_real], want)
        pieces = pair(max_inference_chunksize=7)[1]
        close(pieces(ids, attention_mask=mask).logits[:1, is_real], want)


def test_what_told_layers_only_is_no_cache(models, ids):
    _, ours = models
    mask = torch.stack([HIDDEN, torch.ones_like(HIDDEN)])
    output = ours(ids, attention_mask=mask, use_cache=False)
    assert output.get(cache_name(ours)) is None
    outputs = ours.backbone(ids, attention_mask=mask, use_cache=False, return_dict=False)
    assert not any(isinstance(x, ToldStates) for x in outputs)


def test_packed_sequences_are_read_without_a_cache_and_in_one_piece(models, ids):
    row, positions = ids.flatten()[None], torch.arange(T).repeat(2)[None]
    with torch.no_grad():
        want = models[0](ids).logits.flatten(0, 1)[None]
        close(models[1](row, position_ids=positions).logits, want)
        _, cache = in_pieces(models[0], ids[:1], T)
        bounds = torch.tensor([0, T, 2 * T], dtype=torch.int32)
        with pytest.raises(ValueError, match="packed sequences can't be cached"):
            models[1](row, cu_seq_lens_q=bounds, **{cache_name(models[1]): cache})
        pieces = pair(max_inference_chunksize=7)[1]
        with pytest.raises(ValueError, match="rows of over 7 tokens"):
            pieces(row, cu_seq_lens_q=bounds)


def test_training_needs_no_use_cache_and_goes_on_with_checkpoints(ids):
    """With a cache Transformers' own fails, and so it does in training unless told otherwise."""
    gradients = []
    for model, checkpoints, more in (
        (pair()[0], False, {"use_cache": False}),
        (pair()[1], False, {}),
        (pair()[1], True, {}),
        (pair()[1], True, {"attention_mask": torch.ones_like(ids), "use_cache": False}),
    ):
        model.train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids, **more).loss.backward()
        gradients.append([x.grad for x in model.parameters()])
    for others in gradients[1:]:
        for mine, want in zip(others, gradients[0], strict=True):
            close(mine, want, 2e-3)


def test_checkpoints_know_of_padding(ids):
    mask = torch.stack([HIDDEN, torch.ones_like(HIDDEN)])
    gradients = []
    for checkpoints in (False, True):
        model = pair()[1].train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        F.cross_entropy(logits[mask.bool()], ids[mask.bool()]).backward()
        gradients.append([x.grad for x in model.parameters()])
    for mine, want in zip(*gradients, strict=True):
        close(mine, want, 1e-5)


def test_gradients_flow_through_a_cache(models, ids):
    name, ours = cache_name(models[1]), copy.deepcopy(models[1])
    embeddings = ours.get_input_embeddings()(ids).detach().requires_grad_()
    cache, logits = None, []
    for piece in embeddings.split((9, 1, 9), 1):
        output = ours(inputs_embeds=piece, use_cache=True, **{name: cache})
        cache = output[name]
        logits.append(output.logits)
    weights = torch.randn(2, T, VOCAB_SIZE)
    (got,) = torch.autograd.grad((torch.cat(logits, 1) * weights).sum(), embeddings)
    whole = ours(inputs_embeds=embeddings, use_cache=False).logits
    (want,) = torch.autograd.grad((whole * weights).sum(), embeddings)
    close(got, want, 1e-4)


def test_a_cache_takes_back_no_more_than_it_recorded(models, ids):
    _, ours = models
    name = cache_name(ours)
    cache = XLSTMStates.new(ours.config, 2, ours.dtype, ours.device)
    with torch.no_grad():
        want = ours(ids).logits
        in_pieces(ours, ids[:, :4], 4, cache)
        cache.activate_past_recording()
        in_pieces(ours, ids[:, 4:12], (5, 1, 2), cache)
        assert cache.get_seq_length() == 12
        with pytest.raises(RuntimeError, match="crop.-9. can't be: 8 tokens can be removed"):
            cache.crop(-9)
        for removed in (0, 3, 2):
            cache.crop(-removed)
        assert cache.get_seq_length() == 7
        cache.reorder_cache(torch.tensor([1, 0]))
        later = ours(ids[:, 7:].flip(0), **{name: cache}).logits
    close(later.flip(0), want[:, 7:], 1e-4)
