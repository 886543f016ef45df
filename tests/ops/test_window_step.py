# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A token of a window: its compiled ops against their definition in float64."""

import random

import pytest
import torch

from hf_linear_attention.mixers.window import LEAST_DENOMINATOR, Mixing
from hf_linear_attention.ops.compiled.attention import join_with_sums, window_step_
from hf_linear_attention.ops.compiled.library import ops
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences import window as recurrences
from hf_linear_attention.recurrences.window import WindowInputs, WindowRecurrence

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = [  # B, Hq, Hkv, K, V, F, W, N
    (1, 9, 3, 64, 64, 128, 70, 4),
    (2, 6, 2, 5, 33, 7, 3, 5),
    (3, 4, 4, 16, 1, 0, 1, 0),
    (1, 5, 1, 1, 8, 16, 300, 2),
    (0, 2, 1, 8, 8, 8, 4, 1),
]


def normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def softmax_of(q, keys, values):
    """q (K,), keys and values (n, K or V) -> y and the logarithm of its denominator."""
    scores = keys @ q * len(q) ** -0.5
    return scores.softmax(0) @ values, scores.logsumexp(0)


def by_definition(recurrence, q, past):
    """What the last of past tokens (n, Hkv, K + V + F) gives, for q (Hq, K), in one vector."""
    K, V, W, N = (getattr(recurrence, x) for x in ("key_dim", "value_dim", "window", "num_sinks"))
    n, group = len(past), len(q) // past.shape[1]
    seen = [i for i in range(n) if i < N or i >= n - W]
    of_heads = [
        softmax_of(x, past[seen, h // group, :K], past[seen, h // group, K : K + V])
        for h, x in enumerate(q)
    ]
    leaving = past[n - 1 - W] if n > W else torch.zeros_like(past[0])
    values = torch.cat([leaving[:, K : K + V], torch.ones_like(leaving[:, :1])], dim=1)
    features = leaving[:, K + V :] * (n - 1 - W >= N)
    sizes = torch.stack([size for _, size in of_heads])
    return torch.cat([*(y for y, _ in of_heads), sizes, values.flatten(), features.flatten()])


def make(shape, dtype, past=0):
    """A recurrence, and the state behind so many tokens."""
    B, Hq, Hkv, K, V, F, W, N = shape
    recurrence = WindowRecurrence(Hkv, K, V, F, W, N)
    tokens = normal(B, past, Hkv, K + V + F, dtype=dtype, seed=1)
    q = normal(B, past, Hq, K, dtype=dtype, seed=2)
    return recurrence, tokens, recurrence.run(WindowInputs(q, tokens), {}, Tokens(True))[1]


def step(recurrence, q, kvf, state, key_mask=None, state_indices=None):
    tensors = state["window"], state.get("sinks"), state["window_count"]
    return window_step_(q, kvf, *tensors, key_mask, recurrence.value_dim, state_indices)


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_definition(shape, dtype, threads):
    """Token by token, while the window fills and when it is full, twice around the ring."""
    torch.set_num_threads(threads)
    B, Hq, Hkv, K, V, F, W, N = shape
    for past in {0, 1, W, W + N + 3}:
        recurrence, tokens, state = make(shape, dtype, past)
        for t in range(min(2 * W + N, 12)):
            kvf = normal(B, 1, Hkv, K + V + F, dtype=dtype, seed=3 + t)
            q = normal(B, 1, K, Hq, dtype=dtype, seed=99 + t).transpose(2, 3)
            tokens = torch.cat([tokens, kvf], dim=1)
            out = step(recurrence, q, kvf, state)
            assert out.dtype is torch.promote_types(dtype, torch.float32)
            for b in range(B):
                expected = by_definition(recurrence, q[b, 0].double(), tokens[b].double())
                tolerance = 5e-6 if dtype in (torch.float16, torch.bfloat16) else TOLERANCE[dtype]
                torch.testing.assert_close(
                    out[b, 0].double(), expected, rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_pytorch_does(seed, monkeypatch):
    """Any shapes, padding, and rows of larger tensors, in any order; states included."""
    draw = random.Random(seed)
    B, Hkv, group = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 5)
    K, V, F, W, N = (draw.randint(least, 40) for least in (1, 1, 0, 1, 0))
    dtype = draw.choice([torch.float32, torch.float64])
    recurrence, _, state = make((B, group * Hkv, Hkv, K, V, F, W, N), dtype, draw.randint(0, 90))
    slots = torch.tensor(draw.sample(range(B + 2), B), dtype=torch.int32)
    large = {name: x.new_full((B + 2, 2, *x.shape[1:]), 7)[:, 0] for name, x in state.items()}
    for name, x in state.items():
        large[name][slots.long()] = x
    for t in range(12):
        q = normal(1, B, group * Hkv, K, dtype=dtype, seed=t).transpose(0, 1)
        kvf = normal(B, 1, Hkv, K + V + F, dtype=dtype, seed=50 + t)
        mask = torch.rand(B, 1, generator=torch.Generator().manual_seed(t)) < 0.7
        inputs, tokens = WindowInputs(q, kvf), Tokens(True, key_mask=None if t < 3 else mask)
        found = recurrence.step_in_slots_(inputs, large, slots, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(recurrences, "takes_window_step", lambda *args: False)
            expected = recurrence.step_(inputs, state, tokens)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for name, x in state.items():
            assert torch.equal(large[name][slots.long()], x), name
    others = [i for i in range(B + 2) if i not in slots.tolist()]
    assert all((x[others] == 7).all() for x in large.values())


def test_rows_without_a_slot_change_nothing():
    recurrence, _, state = make((2, 4, 2, 8, 8, 4, 5, 2), torch.float32, past=1)
    q, kvf = normal(2, 1, 4, 8, dtype=torch.float32), normal(2, 1, 2, 20, dtype=torch.float32)
    before = {name: x.clone() for name, x in state.items()}
    slots = torch.tensor([1, -1], dtype=torch.int32)
    out = step(recurrence, q, kvf, state, state_indices=slots)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    for name, x in state.items():
        assert torch.equal(x[0], before[name][0]) and not torch.equal(x[1], before[name][1])


def test_windows_too_large_for_a_ring_that_float32_counts_are_moved():
    recurrence = WindowRecurrence(1, 1, 1, 1, window=4096, num_sinks=1)
    q, kvf = normal(1, 4100, 1, 1, dtype=torch.float32), normal(1, 4100, 1, 3, dtype=torch.float32)
    whole, after = recurrence.run(WindowInputs(q, kvf), {}, Tokens(True))
    _, state = recurrence.run(WindowInputs(q[:, :-2], kvf[:, :-2]), {}, Tokens(True))
    for t in (-2, -1):
        inputs = WindowInputs(q[:, t:][:, :1], kvf[:, t:][:, :1])
        out = recurrence.step_(inputs, state, Tokens(True))
        torch.testing.assert_close(out, whole[:, t:][:, :1])
    assert all(torch.equal(x, after[name]) for name, x in state.items())


def arguments(dtype=torch.float32):
    return dict(
        q=normal(2, 1, 4, 3, dtype=dtype),
        kvf=normal(2, 1, 2, 9, dtype=dtype, seed=1),
        window=normal(2, 6, 2, 9, dtype=dtype, seed=2),
        sinks=normal(2, 3, 2, 5, dtype=dtype, seed=3),
        window_count=torch.tensor([[9.0], [34.0]]),
        key_mask=torch.tensor([[True], [True]]),
        state_indices=torch.tensor([0, 1], dtype=torch.int32),
        value_dim=2,
    )


@pytest.mark.parametrize("name", ["all", "sinks", "key_mask", "state_indices"])
def test_opcheck(name):
    """Its fake, what it changes, and that nothing else depends on whether something is given."""
    args = arguments()
    if name != "all":
        args[name] = None
    torch.library.opcheck(ops.window_step_.default, tuple(args.values()))


WRONG = {
    "q_dim": ("q", lambda x: x[:, 0], r"q must have shape \(B, 1, Hq, K\), got \(2, 4, 3\)"),
    "q_dtype": ("q", torch.Tensor.int, "q must be float32, bfloat16"),
    "heads": ("q", lambda x: x[:, :, :3], "window must have a number of heads that divides q's, 3"),
    "kvf": ("kvf", lambda x: x[..., :8], r"kvf must have shape \(2, 1, 2, 9\)"),
    "kvf_layout": ("kvf", lambda x: x.mT.contiguous().mT, "kvf must have its last dimension cont"),
    "window": ("window", lambda x: x[0], "window must have 4 dimensions"),
    "no_window": ("window", lambda x: x[:, :0], "window must have a token"),
    "window_dtype": ("window", torch.Tensor.double, "window must be float32 here, got float64"),
    "window_layout": ("window", lambda x: x.mT.contiguous().mT, "each slot of window must be cont"),
    "window_rows": ("window", lambda x: x[:1].expand(2, -1, -1, -1), "of window must not overlap"),
    "sinks": ("sinks", lambda x: x[..., :4], r"sinks must have shape \(2, 3, 2, 5\)"),
    "count": ("window_count", lambda x: x[:, 0], r"window_count must have shape \(2, 1\)"),
    "count_dtype": ("window_count", torch.Tensor.long, "window_count must be float32 here"),
    "too_many": ("window_count", lambda x: x + 26, "window_count must have numbers from 0 to 59"),
    "negative": ("window_count", lambda x: x - 10, "from 0 to 59, got -1"),
    "nan": ("window_count", lambda x: x * torch.nan, "from 0 to 59, got -?nan"),
    "mask": ("key_mask", lambda x: x[:, 0], r"key_mask must have shape \(2, 1\)"),
    "slot": ("state_indices", lambda x: x + 1, "state_indices must be from -1 to 1, got 2"),
    "value_dim": ("value_dim", lambda x: 7, "value_dim must be from 0 to 6, .* got 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_and_nothing_changes(name):
    argument, spoil, message = WRONG[name]
    args = arguments()
    args[argument] = spoil(args[argument])
    before = {k: x.clone() for k, x in args.items() if torch.is_tensor(x)}
    with pytest.raises(RuntimeError, match=f"window_step_: .*{message}"):
        ops.window_step_(*args.values())
    for k, x in before.items():
        torch.testing.assert_close(args[k], x, rtol=0, atol=0, equal_nan=True)


def test_a_tensor_without_data_among_others_is_refused():
    args = arguments()
    args["kvf"] = args["kvf"].to("meta")
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        ops.window_step_(*args.values())


# ---- joined with sums ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1.0, 1e20])
def test_sums_are_joined_as_pytorch_does(dtype, size):
    mixing = Mixing(3).to(dtype)
    mixing.log_factor.data = normal(3, dtype=dtype)
    y = normal(2, 1, 4, 3, dtype=dtype).transpose(2, 3)
    log_size = 80 * normal(2, 1, 5, dtype=dtype)[..., :3]
    sums = size * normal(2, 1, 3, 5, dtype=dtype, seed=1).abs()
    expected = mixing(y, log_size, sums).detach()
    with torch.no_grad():
        found = mixing(y, log_size, sums)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    args = y, log_size, sums, mixing.log_factor.detach(), LEAST_DENOMINATOR
    assert torch.equal(join_with_sums(*args), found)
    torch.library.opcheck(ops.join_with_sums.default, args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.ones(1, 1, 2, 3).bfloat16()}, "y must be float32 or float64, got bfloat16"),
        ({"y": torch.ones(1, 2, 3)}, "y must have 4 dimensions"),
        ({"log_size": torch.ones(1, 1, 3)}, r"log_size must have shape \(1, 1, 2\)"),
        ({"sums": torch.ones(1, 1, 2, 3)}, r"sums must have shape \(1, 1, 2, 4\)"),
        ({"log_factor": torch.ones(4)[::2]}, "log_factor must be contiguous"),
    ],
)
def test_what_can_not_be_joined_is_named(changes, message):
    given = dict(
        y=torch.ones(1, 1, 2, 3),
        log_size=torch.ones(1, 1, 2),
        sums=torch.ones(1, 1, 2, 4),
        log_factor=torch.ones(2),
    )
    with pytest.raises(RuntimeError, match=f"join_with_sums: {message}"):
        ops.join_with_sums(*(given | changes).values(), 1e-30)
