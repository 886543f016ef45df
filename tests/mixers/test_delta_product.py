# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Gated DeltaProduct's recurrence beside its formula, and its layer and Comba's beside Gated
DeltaNet's. tests/checkpoints has whole models beside flash-linear-attention's.
"""

import pytest
import torch

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.delta_product import ProductInputs, ProductRecurrence
from hf_linear_attention.recurrences.delta_rule import DeltaRecurrence
from hf_linear_attention.recurrences.interface import SlotPieces

B, Hk, Hv, K, V = 2, 2, 4, 5, 3
RECURRENCE = ProductRecurrence(DeltaRecurrence(Hv, K, V))
DECAYS = {"none": (), "per_head": (Hv,), "per_channel": (Hv, K)}
EXACT = {"rtol": 0, "atol": 1e-10}


def inputs(T: int, n: int = 3, decay: str = "per_head", rows: int = B) -> ProductInputs:
    draw = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(rows, T, *shape, dtype=torch.float64, generator=draw)

    q, k, v, beta = normal(Hk, K), normal(n, Hk, K), normal(n, Hv, V), 2 * normal(n, Hv).sigmoid()
    return ProductInputs(q, k, v, beta, -normal(*DECAYS[decay]).abs() if DECAYS[decay] else None)


def loop(given: ProductInputs):
    """Outputs and state of the formula."""
    q, k, v, beta, log_decay = given
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(Hv // Hk, -2) for x in (q, k))
    S, outputs = q.new_zeros(len(q), Hv, K, V), []
    for t in range(q.shape[1]):
        if log_decay is not None:
            decay = log_decay[:, t].exp()
            S = S * decay.view(*decay.shape, *[1] * (4 - decay.dim()))
        for i in range(k.shape[2]):
            key, value = k[:, t, i, :, :, None], v[:, t, i, :, None]
            S = S + beta[:, t, i, :, None, None] * key * (value - (S * key).sum(-2, keepdim=True))
        outputs.append((S * q[:, t, :, :, None]).sum(-2) * K**-0.5)
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("decay", DECAYS)
def test_it_is_the_formula_in_one_run_in_pieces_and_in_steps(n, decay):
    whole = inputs(9, n, decay)
    expected, state = loop(whole)
    y, after = RECURRENCE.run(whole, {}, Tokens(is_causal=True))
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(after["kv"], state, **EXACT)
    outputs, states = [], {}
    for cut in (slice(0, 4), slice(4, 5), slice(5, 9)):
        piece = RECURRENCE.tokens_of(whole, lambda x, cut=cut: x[:, cut])
        y, states = RECURRENCE.run(piece, states, Tokens(is_causal=True))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, **EXACT)
    states = RECURRENCE.start(whole)
    steps = [RECURRENCE.tokens_of(whole, lambda x, t=t: x[:, t : t + 1]) for t in range(9)]
    with torch.no_grad():
        outputs = [RECURRENCE.step_(step, states, Tokens(is_causal=True)) for step in steps]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, **EXACT)
    torch.testing.assert_close(states["kv"], state, **EXACT)


def test_padding_is_neither_written_nor_forgotten():
    whole = inputs(9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0], [1] * 9], dtype=torch.bool)
    y, after = RECURRENCE.run(whole, {}, Tokens(is_causal=True, key_mask=mask))
    for row in range(B):
        real = RECURRENCE.tokens_of(whole, lambda x, row=row: x[row : row + 1, mask[row]])
        expected, state = loop(real)
        torch.testing.assert_close(y[row : row + 1, mask[row]], expected, **EXACT)
        torch.testing.assert_close(after["kv"][row : row + 1], state, **EXACT)
    recorded = RECURRENCE.recorded(whole)
    assert recorded.q is None
    replayed = RECURRENCE.replay(recorded, {}, mask)
    torch.testing.assert_close(replayed["kv"], after["kv"], **EXACT)


def test_packed_sequences_and_slots_are_rows():
    packed = inputs(11, rows=1)
    bounds = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    cuts = [slice(*x) for x in ((0, 4), (4, 5), (5, 11))]
    rows = [loop(RECURRENCE.tokens_of(packed, lambda x, cut=cut: x[:, cut])) for cut in cuts]
    expected, states = torch.cat([y for y, _ in rows], 1), torch.cat([S for _, S in rows])
    y, after = RECURRENCE.run(packed, {}, Tokens(is_causal=True, cu_seqlens=bounds))
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(after["kv"], states, **EXACT)
    slots = {"kv": torch.full((5, Hv, K, V), 7.0, dtype=torch.float64)}
    pieces = SlotPieces(
        *(torch.tensor([4, 0, 2], dtype=torch.int32), torch.ones(3, dtype=torch.bool), bounds),
        ((4, 0, 4, True), (0, 4, 5, True), (2, 5, 11, True)),
    )
    with torch.no_grad():
        y = RECURRENCE.run_in_slots_(packed, slots, pieces, Tokens(is_causal=True))
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(slots["kv"][[4, 0, 2]], states, **EXACT)


def test_pieces_combine_to_the_state_of_the_whole_with_its_gradients():
    whole = inputs(12)
    mask = torch.rand(B, 12) > 0.3
    leaves = [x.requires_grad_() for x in whole if x is not None]
    _, state = RECURRENCE.run(whole, {}, Tokens(is_causal=True, key_mask=mask))
    pieces = []
    for cut in (slice(0, 5), slice(5, 6), slice(6, 12)):
        piece = RECURRENCE.tokens_of(whole, lambda x, cut=cut: x[:, cut])
        pieces.append(RECURRENCE.piece(piece, Tokens(is_causal=True, key_mask=mask[:, cut])))
    stacked = {name: torch.stack([x[name] for x in pieces]) for name in pieces[0]}
    combined = RECURRENCE.combine(stacked)
    torch.testing.assert_close(combined["kv"], state["kv"], **EXACT)
    d = torch.randn_like(state["kv"])
    del leaves[0]  # nobody reads
    gradients = [torch.autograd.grad(x["kv"], leaves, d) for x in (combined, state)]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


# The layers


def make_layer(preset: str, **fields):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 9}
    config = LinearAttentionConfig.from_preset(preset, **{**sizes, **heads, **fields})
    torch.manual_seed(0)
    return LinearAttentionForCausalLM(config).double().eval().model.layers[0].self_attn


@torch.no_grad()
def answer(layer):
    x = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return layer(x, Tokens(is_causal=True))[0]


@torch.no_grad()
def comba_and_gated_deltanet():
    """Of the same weights, the first without corrections: a sigmoid of 40 is 1."""
    layer, plain = make_layer("comba"), make_layer("gated_deltanet", gate_act="sigmoid")
    layer.load_state_dict({**layer.state_dict(), **plain.state_dict()})
    layer.D.zero_()
    layer.inner_decay.fill_(40)
    return layer, plain


def test_of_one_step_it_is_gated_deltanet():
    layer = make_layer("gated_deltaproduct", num_householder=1)
    plain = make_layer("gated_deltanet", linear_allow_neg_eigval=True)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(answer(layer), answer(plain), **EXACT)


def test_comba_that_forgets_and_corrects_nothing_is_gated_deltanet():
    layers = comba_and_gated_deltanet()
    with torch.no_grad():
        for layer in layers:
            layer.decay.A_log.fill_(-100)
    torch.testing.assert_close(*map(answer, layers), **EXACT)


def test_comba_asks_a_state_before_it_decays():
    layer, plain = comba_and_gated_deltanet()
    assert (answer(layer) - answer(plain)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("preset", "fields", "message"),
    [
        ("gated_deltaproduct", {"num_householder": 0}, "num_householder=0 must be at least 1"),
        ("gated_deltaproduct", {"normalizer": "z"}, "normalizer must be 'rms_norm' or 'gated_rms"),
        ("comba", {"decay": "kda"}, "decay must be 'per_token' with mixer='comba', got 'kda'"),
        ("comba", {"feature_map": "relu"}, "feature_map must be 'identity' with mixer='comba'"),
    ],
)
def test_what_they_need_is_named(preset, fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(preset, **fields)


def test_the_number_of_steps_is_saved_with_that_mixer_alone():
    saved = LinearAttentionConfig.from_preset(
        "gated_deltaproduct", num_householder=4
    ).to_diff_dict()
    assert saved["num_householder"] == 4
    assert "num_householder" not in LinearAttentionConfig().to_diff_dict()
