# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention of a few queries, against PyTorch's in float64, and where it is used."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_linear_attention import use_kernels
from hf_linear_attention.fast import attention as fast
from hf_linear_attention.ops.compiled.attention import attention, step_
from hf_linear_attention.ops.compiled.library import ops
from tiny import VARIANTS, random_ids, tiny_model

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
SHAPES = [  # B, Hq, Hkv, R, S, K, V
    (1, 8, 2, 1, 700, 64, 64),
    (2, 6, 2, 3, 77, 40, 33),
    (1, 4, 4, 1, 5, 16, 16),
    (3, 5, 1, 2, 300, 33, 7),
    (2, 3, 3, 8, 65, 1, 1),
    (1, 6, 2, 21, 130, 16, 24),
    (1, 8, 8, 1, 1, 128, 256),
    (0, 2, 1, 1, 4, 8, 8),
    (1, 2, 1, 2, 0, 8, 8),
]


def make_inputs(shape, dtype, mask=None, seed=0):
    B, Hq, Hkv, R, S, K, V = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(B, *sizes, generator=generator, dtype=torch.float64).to(dtype)
        for sizes in ((Hq, R, K), (Hkv, S, K), (Hkv, S, V))
    )
    if mask is not None:
        seen = torch.rand(B, 1, R, S, generator=generator) < 0.6
        seen[..., :1] = True
        mask = seen if mask == "kept" else torch.zeros(seen.shape, dtype=dtype)
        if mask.dtype != torch.bool:
            mask = mask.masked_fill(~seen, torch.finfo(dtype).min)
        mask = mask.expand(B, Hq, R, S)
    return q, k, v, mask


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_step_writes_a_token_and_sees_it(dtype):
    for B, Hq, Hkv, room, K, V in [(1, 8, 2, 400, 64, 64), (2, 6, 3, 9, 5, 16), (3, 2, 2, 1, 4, 4)]:
        _, keys, values, _ = make_inputs((B, Hq, Hkv, 1, room + 2, K, V), dtype)
        keys, values = keys[:, :, 1 : room + 1], values[:, :, 1 : room + 1]  # of larger memory
        for used in {0, room // 2, room - 1}:
            count, tokens = torch.tensor([used]), used + 1
            q, k, v = (
                x[:, :, :1] for x in make_inputs((B, Hq, Hkv, 1, 1, K, V), dtype, seed=3)[:3]
            )
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
            given = keys.clone(), values.clone()
            y = step_(q, k, v, *given, count, 0.3)
            assert count.item() == tokens
            for tensor, whole, new in zip(given, (keys, values), (k, v), strict=True):
                assert torch.equal(tensor[:, :, used:tokens], new)
                assert torch.equal(tensor[:, :, :used], whole[:, :, :used])
                assert torch.equal(tensor[:, :, tokens:], whole[:, :, tokens:])
            expected = attention(q, given[0][:, :, :tokens], given[1][:, :, :tokens], None, 0.3)
            assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"used": torch.tensor([4])}, "used must have a number from 0 to 3, got 4"),
        ({"used": torch.tensor([-1])}, "used must have a number from 0 to 3, got -1"),
        ({"used": torch.tensor(1)}, r"used must have shape \(1,\)"),
        ({"used": torch.tensor([1.0])}, "used must"),
        ({"q": torch.ones(1, 4, 2, 8)}, "q must have one token, got 2"),
        ({"k": torch.ones(1, 2, 2, 8)}, r"k must have shape \(1, 2, 1, 8\)"),
        ({"v": torch.ones(1, 2, 1, 8).double()}, "v must"),
        ({"keys": torch.ones(1, 2, 5, 8)}, r"k must have shape \(1, 2, 4, 8\)"),
    ],
)
def test_wrong_arguments_of_a_step_are_named(changes, message):
    q, token, tokens = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 1, 8), torch.ones(1, 2, 4, 8)
    given = dict(q=q, k=token, v=token, keys=tokens, values=tokens.clone(), used=torch.tensor([1]))
    with pytest.raises(RuntimeError, match=f"attention_step_: {message}"):
        ops.attention_step_(*(given | changes).values(), 1.0)
    assert given["used"].item() == 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mask", [None, "kept", "added"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_is_pytorchs(dtype, mask, threads):
    torch.set_num_threads(threads)
    try:
        for shape in SHAPES:
            q, k, v, mask_ = make_inputs(shape, dtype, mask)
            y = attention(q, k, v, mask_, 0.3)
            G = shape[1] // shape[2]
            exact_mask = mask_ if mask != "added" else mask_.double()
            of_heads = (x.double().repeat_interleave(G, 1) for x in (k, v))
            exact = scaled_dot_product_attention(
                q.double(), *of_heads, attn_mask=exact_mask, scale=0.3
            )
            assert y.dtype is dtype and y.is_contiguous()
            torch.testing.assert_close(
                y.double(),
                exact.transpose(1, 2).nan_to_num(0),
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("mask", ["kept", "added"])
def test_large_scores_and_keys_that_nobody_sees(mask):
    q, k, v, mask_ = make_inputs((1, 2, 1, 1, 600, 16, 16), torch.float32, mask)
    q = 1000 * q
    exact = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask_ if mask == "kept" else mask_.double()
    )
    torch.testing.assert_close(attention(q, k, v, mask_, 0.25).double(), exact.transpose(1, 2))
    nothing = torch.zeros(1, 2, 1, 600, dtype=torch.bool)
    assert torch.equal(attention(q, k, v, nothing, 0.25), torch.zeros(1, 1, 2, 16))


def packed_mask(lengths: list[int], past: list[int]) -> torch.Tensor:
    """(1, 1, R, S) of sequences beside each other, each with tokens of its own before it."""
    blocks = [
        torch.ones(n, old + n, dtype=torch.bool).tril(old)
        for n, old in zip(lengths, past, strict=True)
    ]
    return torch.block_diag(*blocks).bool()[None, None]


@pytest.mark.parametrize(("Hq", "Hkv"), [(8, 2), (3, 3), (5, 1)])
def test_blocks_that_a_mask_hides_are_not_looked_at(Hq, Hkv):
    lengths, past = [1, 70, 1, 3, 9], [300, 0, 64, 190, 1]
    mask = packed_mask(lengths, past)
    R, S = mask.shape[2:]
    q, k, v, _ = make_inputs((1, Hq, Hkv, R, S, 24, 40), torch.float32)
    y = attention(q, k, v, mask.expand(1, Hq, R, S), 0.3)
    starts = torch.tensor([0, *lengths]).cumsum(0), torch.tensor([0, *past]).cumsum(0)
    for n, old, r, p in zip(lengths, past, *(x.tolist() for x in starts), strict=False):
        rows, keys = slice(r, r + n), slice(r + p, r + p + n + old)
        own = mask[:, :, rows, keys].expand(1, Hq, n, n + old)
        alone = attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], own, 0.3)
        torch.testing.assert_close(y[:, rows], alone)
    k[:, :, :100], v[:, :, :100] = torch.nan, torch.nan  # of the first query's keys
    unharmed = attention(q, k, v, mask.expand(1, Hq, R, S), 0.3)
    assert unharmed[:, 0].isnan().all()
    last = slice(-lengths[-1], None)  # whose blocks hold none of these
    assert torch.equal(unharmed[:, last], y[:, last])


def test_tensors_of_any_strides():
    q, k, v, _ = make_inputs((2, 4, 2, 1, 90, 24, 24), torch.float32)
    rows = torch.zeros(2, 90, 2, 3 * 24)
    rows[..., :24], rows[..., 24:48] = k.transpose(1, 2), v.transpose(1, 2)
    far = (x.transpose(1, 2) for x in (rows[..., :24], rows[..., 24:48]))
    q_far = torch.stack([q, q], -1)[..., 0]
    assert torch.equal(attention(q_far, *far, None, 0.2), attention(q, k, v, None, 0.2))


def test_opcheck_and_refusals():
    q, k, v, mask = make_inputs((1, 4, 2, 2, 9, 8, 8), torch.float32, "kept")
    torch.library.opcheck(torch.ops.hf_linear_attention.attention.default, (q, k, v, mask, 0.3))
    for wrong, message in (
        ((q[0], k, v, None), "q must have 4 dimensions"),
        ((q, k[:, :, :5], v, None), "k must"),
        ((q[:, :3], k, v, None), "divides"),
        ((q, k, v, mask[..., :5]), "mask must"),
        ((q, k.double(), v, None), "k must"),
        ((q, k.mT.contiguous().mT, v, None), "contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attention(*wrong, 0.3)


@pytest.fixture
def llama():
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture
def calls(monkeypatch):
    found = []

    def counted(*args):
        found.append(args[0].shape[2])
        return attention(*args)

    monkeypatch.setattr(fast, "compiled_attention", counted)
    return found


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_a_llama_generates_the_same(llama, calls, options):
    """With rows that are padded on the left, where it may be."""
    ids = random_ids(1 if "prompt_lookup_num_tokens" in options else 3, 9)
    mask = torch.ones_like(ids)
    if len(ids) > 1:
        mask[0, :4] = 0
    given = dict(attention_mask=mask, max_new_tokens=9, do_sample=False, **options)
    before = llama.generate(ids, **given)
    assert not calls
    with use_kernels(llama) as report:
        assert "attention of few queries" in str(report)
        assert torch.equal(llama.generate(ids, **given), before)
        assert 1 in calls or 2 in calls
    calls.clear()
    assert torch.equal(llama.generate(ids, **given), before) and not calls


def test_own_layers_keep_it_beside_changed_models(llama, calls):
    own = tiny_model(dtype=torch.float32, **VARIANTS["hybrid"]).eval()
    with torch.no_grad():
        own(random_ids(2, 1))
        layers = len(calls)
        with use_kernels(llama):
            own(random_ids(2, 1))
        assert layers > 0 and len(calls) == 2 * layers


def test_many_queries_of_which_a_mask_hides_much(llama, calls):
    bounds = torch.tensor([0, 12, 20])
    for dtype, mask, is_ours in (
        (torch.float32, "kept", True),
        (torch.float32, "added", False),
        (torch.float32, None, False),
        (torch.bfloat16, "kept", False),
    ):
        q, k, v, mask_ = make_inputs((1, 4, 2, 20, 20, 8, 8), dtype, mask)
        llama.num_key_value_groups = 2
        y, _ = fast.attention(llama, q, k, v, mask_, scaling=0.3)
        assert bool(calls) == is_ours
        expected, _ = sdpa_attention_forward(llama, q, k, v, mask_, scaling=0.3)
        torch.testing.assert_close(y, expected)
        calls.clear()
    packed = packed_mask([12, 8], [0, 0])
    fast.attention(llama, q, k, v, packed, cu_seq_lens_q=bounds)
    assert calls  # of sequences that are packed in half precision, too


def test_what_is_left_to_pytorch(llama, calls):
    ids = random_ids(2, 9)
    with use_kernels(llama):
        llama(ids).logits.sum().backward()  # many queries; gradients
        llama(ids[:, :1]).logits.sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            llama(ids[:, :1])
        llama.set_attn_implementation("eager")
        with torch.no_grad():
            llama(ids[:, :1])
        llama.set_attn_implementation("sdpa")
        assert not calls
        with torch.no_grad():
            llama(ids[:, :1])
        assert calls == [1, 1]
    q, k, v, _ = make_inputs((1, 4, 2, 1, 9, 8, 8), torch.float32)
    llama.num_key_value_groups = 2
    calls.clear()
    for more in ({"position_bias": torch.zeros(1, 4, 1, 9)}, {"dropout": 0.5}):
        fast.attention(llama, q, k, v, None, **more)
    assert not calls
    wrapped = lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)  # noqa: E731
    assert fast.hastened(wrapped) is wrapped
