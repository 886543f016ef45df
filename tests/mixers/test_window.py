# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""mixer="window": softmax over the last tokens and the first, sums over the others, under one
denominator.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attention.cache.caches import LinearAttentionCache
from hf_linear_attention.mixers.window import Mixing, WindowedAttention
from hf_linear_attention.ops import windowed_softmax
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.ops.windowed_flash import flash_window_attention, takes_flash
from hf_linear_attention.ops.windowed_softmax import join, window_attention
from hf_linear_attention.recurrences.window import WindowInputs, WindowRecurrence
from tiny import tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

CAUSAL = Tokens(is_causal=True)
Hq, Hkv, D, C = 4, 2, 8, 32
CASES = {
    "hedgehog": {"feature_map": "hedgehog", "window_size": 4, "window_sinks": 2},
    "t2r_decaying": {"feature_map": "t2r", "window_size": 3, "decay": "per_head"},
    "elu+1_alone": {"feature_map": "elu+1", "window_size": 5, "window_sinks": 0},
    "forgetting": {
        **{"feature_map": "relu", "window_size": 1, "window_sinks": 1},
        **{"decay": "per_token"},
    },
    "more_sinks_than_window": {"feature_map": "exp", "window_size": 2, "window_sinks": 5},
    "per_channel": {"feature_map": "elu+1", "window_size": 2, "window_sinks": 1, "decay": "gla"},
}


def config_of(**fields):
    kwargs = {"num_key_value_heads": Hkv, "position_embedding_type": "none", "layer_types": None}
    return tiny_config(mixer="window", **{**kwargs, **fields})


def build(dtype=torch.float64, **fields) -> WindowedAttention:
    """A layer with random parameters, those that begin as constants included."""
    torch.manual_seed(0)
    layer = WindowedAttention(config_of(**fields), layer_idx=0)
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.5 * torch.randn_like(x))
    return layer.to(dtype)


def hidden(*shape, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, C, dtype=torch.float64, generator=generator).to(dtype)


def loop(layer, x):
    """One row x (T, C) -> (T, C), token by token, by the definition."""
    q, k, v = (getattr(layer, f"{n}_proj")(x).unflatten(-1, (-1, D)) for n in "qkv")
    phi_q, phi_k = (t[0] for t in layer._map(q[None], k[None], None))
    log_decay = layer.decay(x[None])
    log_decay = None if log_decay is None else log_decay[0]
    W, N, outputs = layer.window.window, layer.window.num_sinks, []
    for t in range(len(x)):
        for h in range(Hq):
            g, num, den = h // (Hq // Hkv), torch.zeros(D, dtype=x.dtype), 0.0
            for j in range(t + 1):
                if t - j < W or j < N:
                    weight = (q[t, h] @ k[j, g] / math.sqrt(D)).exp()
                else:
                    phi = phi_k[j, g]
                    if log_decay is not None:  # since it left the window, with token j + W
                        phi = phi * log_decay[j + W + 1 : t + 1, g].sum(0).exp()
                    weight = layer.mixing.log_factor[h].exp() * (phi_q[t, h] @ phi)
                num, den = num + weight * v[j, g], den + weight
            outputs.append(num / den)
    return layer.o_proj(torch.stack(outputs).view(len(x), Hq * D))


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_definition(case):
    layer, x = build(**CASES[case]), hidden(2, 13)
    expected = torch.stack([loop(layer, row) for row in x])
    torch.testing.assert_close(layer(x, CAUSAL)[0], expected)


def test_it_is_the_definition_over_several_blocks_of_queries():
    layer, x = build(feature_map="hedgehog", window_size=20, window_sinks=2), hidden(1, 68)
    torch.testing.assert_close(layer(x, CAUSAL)[0][0], loop(layer, x[0]))


def read_in_pieces(layer, x, pieces, mask=None):
    """With a cache, in pieces of so many tokens."""
    cache, outputs, start = LinearAttentionCache(config_of()), [], 0
    for length in pieces:
        part = None if mask is None else mask[:, start : start + length]
        tokens = CAUSAL._replace(key_mask=part)
        with torch.no_grad():
            outputs.append(layer(x[:, start : start + length], tokens, cache)[0])
        start += length
    return torch.cat(outputs, 1)


SPLITS = [[1] * 13, [6, 1, 6], [2, 11], [12, 1], [0, 3, 0, 10], [2, 1, 1, 1, 3, 1, 1, 3]]


@pytest.mark.parametrize("pieces", SPLITS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_any_split_is_the_whole(case, pieces):
    layer, x = build(**CASES[case]), hidden(2, 13)
    torch.testing.assert_close(read_in_pieces(layer, x, pieces), layer(x, CAUSAL)[0])


@pytest.mark.parametrize("pieces", [[14], [1] * 14, [5, 9], [4, 1, 1, 1, 7]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_padding_anywhere_changes_nothing(case, pieces):
    layer, x = build(**CASES[case]), hidden(3, 14)
    mask = torch.ones(3, 14, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = False
    mask[2, [0, 3, 4, 8, 13]] = False
    x[~mask] = 100.0
    y = read_in_pieces(layer, x, pieces, mask)
    for row in range(3):
        alone = layer(x[row, mask[row]][None], CAUSAL)[0]
        torch.testing.assert_close(y[row, mask[row]][None], alone)


@pytest.mark.parametrize("case", CASES)
def test_packed_sequences_are_read_as_if_alone(case):
    layer, lengths = build(**CASES[case]), [1, 9, 3, 11]
    rows = [hidden(1, length, seed=length) for length in lengths]
    bounds = torch.tensor([0, 1, 10, 13, 24], dtype=torch.int32)
    y = layer(torch.cat(rows, 1), CAUSAL._replace(cu_seqlens=bounds))[0]
    torch.testing.assert_close(y, torch.cat([layer(row, CAUSAL)[0] for row in rows], 1))


@pytest.mark.parametrize("case", ["hedgehog", "forgetting"])
def test_gradients_are_those_of_the_formula(case):
    layer = build(hidden_size=8, **CASES[case])
    x = hidden(1, 9)[..., :8].clone().requires_grad_()
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 1] = False
    tokens = CAUSAL._replace(key_mask=mask)

    def run(x, *parameters):
        return layer(x, tokens)[0][mask]

    assert torch.autograd.gradcheck(run, (x, layer.mixing.log_factor, layer.k_proj.weight))


def test_the_window_and_its_sinks_can_be_differentiated_twice():
    """Also of tokens that see nothing of the sinks, since all are in the window."""
    recurrence = WindowRecurrence(1, 3, 3, 0, window=2, num_sinks=2)
    q = hidden(1, 4)[..., :6].unflatten(-1, (2, 3)).clone().requires_grad_()
    kvf = hidden(1, 4, seed=2)[..., :6].unflatten(-1, (1, 6)).clone().requires_grad_()

    def run(q, kvf):
        return recurrence.run(WindowInputs(q, kvf), {}, CAUSAL)[0]

    assert torch.autograd.gradgradcheck(run, (q, kvf))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_float32_is_near_float64_for_scores_of_any_size(scale):
    layer, x = build(**CASES["hedgehog"]), hidden(1, 20)
    with torch.no_grad():
        layer.q_proj.weight *= scale  # scores up to some hundreds
        layer.k_proj.weight *= scale
        expected = layer(x, CAUSAL)[0]
        actual = layer.float()(x.float(), CAUSAL)[0]
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype):
    layer, x = build(**CASES["hedgehog"]), hidden(1, 40)
    expected = layer(x, CAUSAL)[0]
    actual = layer.to(dtype)(x.to(dtype), CAUSAL)[0]
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=0.06 * expected.abs().max().item()
    )


def test_parts_that_are_far_apart_are_joined_without_a_nan():
    y, other = torch.tensor([[1.0], [2.0]])[..., None]
    for log_size, other_size, expected in (
        (200.0, -200.0, 1.0),
        (-200.0, 200.0, 2.0),
        (5.0, -torch.inf, 1.0),
        (-1e30, 0.0, 2.0),
        (90.0, 90.0, 1.5),
    ):
        sizes = torch.tensor([log_size]), torch.tensor([other_size])
        torch.testing.assert_close(join(y, sizes[0], other, sizes[1]).item(), expected)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-38, 1e-30, 1e-26, 1.0])
def test_no_gradient_is_nan_however_little_older_tokens_weigh(size):
    mixing = Mixing(1)
    y, log_size = torch.randn(1, 2, 1, 3), torch.zeros(1, 2, 1)
    sums = torch.tensor([5, -6, 7, 1, 1, 2, 3, 4]).view(1, 2, 1, 4) * size
    sums.requires_grad_()
    out = mixing(y, log_size, sums)
    out.sum().backward()
    assert out.isfinite().all()
    assert sums.grad.isfinite().all()
    assert mixing.log_factor.grad.isfinite().all()


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_memory_grows_as_the_tokens_and_not_as_their_square():
    def largest(T):
        q, k = torch.randn(1, T, 2, 4), torch.randn(1, T + 16, 2, 4)
        with LargestTensor() as mode:
            window_attention(q, k, k, torch.arange(T)[None], 16)
        return mode.numel

    assert largest(4096) <= 2.1 * largest(2048)
    assert largest(4096) <= 2 * 4096 * (16 + 64)
    assert largest(16384) <= 4.1 * largest(4096)  # in pieces


def test_pieces_of_long_texts_are_the_whole(monkeypatch):
    q, k, v = torch.randn(1, 90, 4, 4), torch.randn(1, 97, 2, 4), torch.randn(1, 97, 2, 3)
    whole = window_attention(q, k, v, torch.arange(90)[None], 7)
    monkeypatch.setattr(windowed_softmax, "PIECE", 40)
    for actual, expected in zip(
        window_attention(q, k, v, torch.arange(90)[None], 7), whole, strict=True
    ):
        torch.testing.assert_close(actual, expected)


# B, T, Hq, Hkv, K, V, window, and tokens before the first
OF_FLASH = {
    "several_blocks": (2, 300, 6, 2, 8, 8, 37, 0),
    "narrow_keys": (1, 5, 2, 2, 4, 6, 1, 0),
    "narrow_values": (1, 260, 4, 4, 16, 12, 200, 0),
    "behind_a_cache": (1, 130, 3, 1, 64, 64, 64, 70),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", OF_FLASH)
def test_flash_is_window_attention(case, dtype):
    B, T, Hq, Hkv, K, V, window, before = OF_FLASH[case]
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = random(B, T, Hq, K), random(B, window + T, Hkv, K), random(B, window + T, Hkv, V)
    padding = 9 * torch.arange(B)[:, None]  # a row's first tokens see themselves alone
    num_before = (torch.arange(T)[None] - padding).clamp(min=0) + before
    given = [x.double().requires_grad_() for x in (q, k, v)]
    expected = window_attention(*given, num_before, window)
    dy, dlog_size = (torch.randn_like(x) for x in expected)
    expected += torch.autograd.grad(expected, given, (dy, dlog_size))

    given = [x.requires_grad_() for x in (q, k, v)]
    assert takes_flash(*given)
    found = flash_window_attention(*given, num_before, window)
    of_outputs = [of.to(x.dtype) for of, x in zip((dy, dlog_size), found, strict=True)]
    found += torch.autograd.grad(found, given, of_outputs)
    for actual, right in zip(found, expected, strict=True):
        error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[actual.dtype]
        torch.testing.assert_close(actual.double(), right, rtol=error, atol=error)


def test_flash_has_gradients_of_gradients():
    q, k, v = (torch.randn(1, T, 2, 3, dtype=torch.float64) for T in (6, 10, 10))
    given = [x.requires_grad_() for x in (q, k, v)]

    def run(*given):
        return flash_window_attention(*given, torch.arange(6)[None], 4)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_flash_keeps_no_scores():
    q, k = torch.randn(1, 4096, 2, 4), torch.randn(1, 4096 + 512, 2, 4)
    with LargestTensor() as mode:
        flash_window_attention(q, k, k, torch.arange(4096)[None], 512)
    assert mode.numel <= 2 * 4 * (4096 + 512) + 128 * (512 + 128)


LENGTHS = [[6, 5, 4], [1, 1, 13], [0, 2, 1, 12], [15], [3, 0, 12]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [3, 7])
def test_pieces_combine_to_the_state_of_the_whole(lengths, window):
    recurrence = WindowRecurrence(2, 3, 2, 4, window, num_sinks=3)
    kvf = torch.randn(2, 15, 2, 9, dtype=torch.float64)
    mask = torch.rand(2, 15) > 0.3
    whole = recurrence.replay(WindowInputs(None, kvf), {}, mask)
    parts = zip(kvf.split(lengths, 1), mask.split(lengths, 1), strict=True)
    pieces = [
        recurrence.piece(WindowInputs(None, x), CAUSAL._replace(key_mask=m)) for x, m in parts
    ]
    combined = recurrence.combine({k: torch.stack([p[k] for p in pieces]) for k in pieces[0]})
    assert combined.keys() == whole.keys() == recurrence.state_sizes().keys()
    for name, x in whole.items():
        torch.testing.assert_close(combined[name], x)
    none = recurrence.combine({name: x[None][:0] for name, x in pieces[0].items()})
    for name, x in recurrence.start(WindowInputs(None, kvf)).items():
        torch.testing.assert_close(none[name], x)
