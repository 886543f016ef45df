# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sums over more tokens than a float32 adds up without drift: in levels, whatever the case."""

from contextlib import contextmanager

import pytest
import torch

from attention_cases import (
    Case,
    assert_all_close,
    make_inputs,
    run_with_gradients,
    to_float64,
)
from hf_linear_attention.ops.chunks import CHUNK_SIZE, MANY_CHUNKS
from hf_linear_attention.ops.delta_rule import delta_rule
from hf_linear_attention.ops.elementwise_scan import elementwise_scan
from hf_linear_attention.ops.linear_attention import linear_attention
from hf_linear_attention.ops.selective_scan import selective_scan
from hf_linear_attention.upstream.layers.rg_lru import IMPLEMENTATIONS as RG_LRU

LONG = MANY_CHUNKS * CHUNK_SIZE  # and in kernels alike
BACKENDS = ["cpu", "chunked"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def off_by(actual, expected):
    """The largest error, relative to the largest value."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def summands(T: int, D: int, kind: str, **options) -> dict:
    """Keys, queries and values that add up: all alike, or random around a mean."""
    if kind == "alike":
        q = k = torch.ones(1, T, 1, D)
        v = torch.full((1, T, 1, D), 0.1)
    else:
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.rand(3, 1, T, 1, D, generator=generator)
    return {"q": q, "k": k, "v": v, "feature_map": "identity", **options}


@contextmanager
def of_threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_pieces_of_a_sequence_for_threads_remember_alike():
    T = 2**17
    log_decay = torch.full((1, T, 1), -1e-6)
    inputs = summands(T, 4, "random", normalize=False, log_decay=log_decay)
    results = []
    for threads in (1, 4):
        leaves = [inputs[name].requires_grad_() for name in ("q", "v")]
        with of_threads(threads):
            y, state = linear_attention(**inputs, return_state=True, backend="cpu")
            results.append((y, state.kv, *torch.autograd.grad(y.square().sum(), leaves)))
    for one, other in zip(*results, strict=True):
        assert off_by(other, one.double()) < 1e-5


@every_backend
@pytest.mark.parametrize("log_decay", [None, -1e-6, -1e-3])
@pytest.mark.parametrize("kind", ["alike", "random"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_quarter_of_a_million_tokens_are_a_millionth_off(kind, log_decay, normalize, backend):
    T = 2**18
    inputs = summands(T, 4, kind, normalize=normalize)
    if log_decay is not None:
        inputs["log_decay"] = torch.full((1, T, 1), log_decay)
    y, state = linear_attention(**inputs, return_state=True, backend=backend)
    y64, state64 = linear_attention(**to_float64(inputs), return_state=True, backend="chunked")
    assert off_by(y[:, -64:], y64[:, -64:]) < 1.5e-6
    assert off_by(state.kv, state64.kv) < 1e-6
    if normalize:
        assert off_by(state.z, state64.z) < 1e-6


@every_backend
@pytest.mark.parametrize("log_decay", [None, -1e-6])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_many_tokens_are_exact(log_decay, normalize, backend):
    T = 4 * LONG
    inputs = summands(T, 4, "alike", normalize=normalize)
    if log_decay is not None:
        inputs["log_decay"] = torch.full((1, T, 1), log_decay)

    def gradients(inputs, backend):
        leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v")]
        y = linear_attention(**inputs, backend=backend)
        return torch.autograd.grad((y * torch.linspace(0, 1, T)[:, None, None]).sum(), leaves)

    inputs["q"] = inputs["q"].clone()
    exact = gradients(to_float64(inputs), "chunked")
    for actual, expected in zip(gradients(inputs, backend), exact, strict=True):
        if expected.abs().max() > 1e-6:  # normalised values that are alike have none of q and k
            assert off_by(actual, expected) < 3e-6


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1),
        Case(B=1, decay="mild", initial=True),
        Case(B=1, decay="resets", mask="middle"),
        Case(B=1, decay="resets", feature_map="silu", normalize=False),
        Case(B=1, Hq=6, Hkv=2, decay="mild", mask="left"),
        Case(B=1, is_causal=False, initial=True),
        Case(B=1, normalize=False, K=20, V=37, decay="mild", strided=True),
        Case(B=1, K=64, V=130),
        Case(B=1, Hkv=1, Hq=3, K=33, V=1, normalize=False),
        Case(B=1, decay="mild", lengths=(3, 0, LONG + 1, 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 4])
def test_values_and_gradients_of_every_case(case, threads):
    """Just long enough; 4 threads: time is cut into pieces."""
    T = LONG + 10
    inputs = make_inputs(Case(**(vars(case) | {"T": T})), torch.float32)

    def run(inputs, backend):
        return run_with_gradients(
            lambda **inputs: linear_attention(**inputs, return_state=True, backend=backend), inputs
        )

    with of_threads(threads):
        actual = run(inputs, "cpu")
    assert_all_close(actual, run(to_float64(inputs), "chunked"), torch.float32)


@every_backend
@pytest.mark.parametrize("mildest", [-5.0, -0.1])
@pytest.mark.parametrize("kind", ["linear", "by channel", "delta rule", "delta rule by channel"])
def test_gradients_of_decays_add_up(kind, mildest, backend):
    """Their sums over tokens, by which a decay is learned, to a part of their norm: what the terms
    of each token are rounded by must not add up. As one sum over all terms they are 1e-3 off."""
    B, T, D = 4, 4096, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = torch.randn(4, B, T, 1, D, generator=generator)
    shape = (B, T, 1, D) if "channel" in kind else (B, T, 1)
    log_decay = mildest * torch.rand(shape, generator=generator)
    beta = torch.rand(B, T, 1, generator=generator)

    def gradient(dtype, backend):
        *inputs, strength, g, upstream = (x.to(dtype) for x in (q, k, v, beta, log_decay, dy))
        g.requires_grad_()
        if "delta" in kind:
            y = delta_rule(*inputs, strength, g, normalize_qk=True, backend=backend)
        else:
            options = {"feature_map": "identity", "normalize": False, "backend": backend}
            y = linear_attention(*inputs, g, **options)
        return torch.autograd.grad(y, g, upstream)[0].double()

    exact, actual = gradient(torch.float64, "chunked"), gradient(torch.float32, backend)
    error = (actual.sum(1) - exact.sum(1)).abs() / exact.square().sum(1).sqrt()
    assert error.max() < 2.5e-4


T_OF_SCANS, C = 2**16, 3  # where a float32 that adds up token by token is up to a percent off


def elementwise(numbers, log_decay, backend):
    return elementwise_scan(
        numbers["x"], log_decay, key_mask=numbers["mask"], return_state=True, backend=backend
    )


def selective(numbers, log_decay, backend):
    """Two states a channel, of which the second forgets twice as fast."""
    A = -torch.arange(1, 3, dtype=log_decay.dtype).expand(C, 2)
    dt = (-log_decay).clamp(max=1e4)
    of_states = torch.ones(1, T_OF_SCANS, 2, dtype=numbers["x"].dtype)
    x, mask = numbers["x"], numbers["mask"]
    return selective_scan(
        x, dt, A, of_states, of_states, key_mask=mask, return_state=True, backend=backend
    )


def rg_lru(numbers, log_decay, backend):
    """With decays of gates that are all open; sequences begin where tokens would be masked."""
    gates = torch.full((1, T_OF_SCANS, 1, C), 40.0, dtype=numbers["x"].dtype)
    gates = gates + 0 * log_decay[:, :, None]
    begins = torch.zeros(1, T_OF_SCANS, dtype=torch.bool)
    if numbers["mask"] is not None:
        begins = ~numbers["mask"]
    form = RG_LRU[backend]
    rate = log_decay[0, 0]
    return form(numbers["x"], gates, gates, rate, begins=begins, initial_state=None)


@pytest.mark.sample(3)
@every_backend
@pytest.mark.parametrize("decay", ["-1e-6", "-1e-3", "resets"])
@pytest.mark.parametrize("kind", ["alike", "random"])
@pytest.mark.parametrize("scan", [elementwise, selective, rg_lru])
def test_scans_of_channels_do_not_drift(scan, kind, decay, backend):
    """Values, states and gradients."""
    shape, generator = (1, T_OF_SCANS, C), torch.Generator().manual_seed(0)
    x = torch.full(shape, 0.1) if kind == "alike" else torch.rand(shape, generator=generator)
    log_decay, mask = torch.full(shape, -1e-4 if decay == "resets" else float(decay)), None
    if decay == "resets":
        log_decay[:, torch.randint(T_OF_SCANS, (20,), generator=generator)] = -1e30
        mask = torch.rand(shape[:2], generator=generator) < 0.999
    results = {}
    for dtype, form in ((torch.float32, backend), (torch.float64, "chunked")):
        leaves = [z.to(dtype).requires_grad_() for z in (x, log_decay)]
        y, state = scan({"x": leaves[0], "mask": mask}, leaves[1], form)
        gradients = torch.autograd.grad(y.sum(), leaves)
        results[dtype] = {"y": y, "state": state, "dx": gradients[0], "dlog_decay": gradients[1]}
    for name, exact in results[torch.float64].items():
        assert off_by(results[torch.float32][name], exact) < 4e-6, name


@pytest.mark.parametrize("T", [LONG, LONG + 1])
@pytest.mark.parametrize("scan", ["elementwise", "selective"])
def test_what_overflows_stays_infinite(scan, T):
    x = torch.ones(1, T, 1)
    x[0, 5] = torch.inf
    if scan == "elementwise":
        log_decay = torch.full_like(x, -1e-6)
        y = elementwise_scan(x, log_decay, backend="cpu")
        sums = torch.zeros_like(x)
        sums[0, :2] = 3e38
        of_sums = elementwise_scan(sums, torch.zeros_like(x), backend="cpu")
        assert of_sums[0, [1, 2, -1]].isinf().all()
    else:
        ones = torch.ones(1, T, 1)
        y = selective_scan(x, 1e-6 * ones, -torch.ones(1, 1), ones, ones, backend="cpu")
    assert y[0, :5].isfinite().all() and y[0, 6:].isinf().all()
