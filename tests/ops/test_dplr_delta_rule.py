# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule with a transition diagonal plus low rank: against its definition, written out."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linear_attention import (
    delta_rule,
    delta_rule_step_,
    dplr_delta_rule,
    dplr_delta_rule_step_,
)

BACKENDS = ["cpu", "chunked", "reference"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
STATE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}
OF_TOKENS = ("q", "k", "v", "a", "b", "log_decay")


def make_inputs(
    B: int = 2, T: int = 70, H: int = 2, K: int = 7, V: int = 5, dtype=torch.float64, **options
) -> dict:
    """As RWKV-7 makes them; a decay per channel."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kappa = F.normalize(normal(B, T, H, K), dim=-1)
    tensors = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "a": -kappa,
        "b": kappa * normal(B, T, H, K).sigmoid(),
        "log_decay": -0.6 * normal(B, T, H, K).sigmoid(),
    }
    half = dtype in (torch.bfloat16, torch.float16)
    acc = torch.float32 if half else dtype
    cast = {name: x.to(acc if name == "log_decay" else dtype) for name, x in tensors.items()}
    return cast | options


def by_definition(
    q, k, v, a, b, log_decay=None, *, scale=None, key_mask=None, initial_state=None
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^g) S + b (a^T S) + k v^T, token by token in float64."""
    B, T, H, K = q.shape
    q, k, v, a, b = (x.double() for x in (q, k, v, a, b))
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(T):
        decay = 1.0 if log_decay is None else log_decay[:, t].double().exp().view(B, H, -1, 1)
        transition = torch.einsum("bhi,bhj->bhij", b[:, t], a[:, t])
        after = decay * S + transition @ S + k[:, t, :, :, None] * v[:, t, :, None]
        y = (K**-0.5 if scale is None else scale) * (q[:, t, :, None] @ after)[:, :, 0]
        if key_mask is not None:
            is_real = key_mask[:, t, None, None]
            after = torch.where(is_real[..., None], after, S)
            y = torch.where(is_real, y, 0)
        S = after
        outputs.append(y)
    return torch.stack(outputs, 1), S


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= tolerance, error


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_are_those_of_the_definition(dtype, backend):
    for sizes in ({}, {"K": 64, "V": 64, "T": 150}, {"T": 1, "H": 3}, {"B": 1, "K": 33, "V": 40}):
        inputs = make_inputs(dtype=dtype, **sizes)
        B, _, H, K = inputs["q"].shape
        state = make_inputs(T=K, K=inputs["v"].shape[-1], H=H, B=B)["q"].movedim(1, 2).contiguous()
        inputs["initial_state"] = state.to(inputs["log_decay"].dtype)
        y, after = dplr_delta_rule(**inputs, return_state=True, backend=backend)
        expected, expected_state = by_definition(**inputs)
        assert y.dtype == dtype and after.dtype == inputs["log_decay"].dtype
        assert_close(y, expected, TOLERANCE[dtype])
        assert_close(after, expected_state, STATE_TOLERANCE[dtype])


@every_backend
def test_gradients_are_those_of_the_definition(backend):
    for decay in (True, False):
        inputs = make_inputs(T=20)
        if not decay:
            del inputs["log_decay"]
        found = []
        for function in (by_definition, dplr_delta_rule):
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            options = {} if function is by_definition else {"backend": backend}
            if options:
                options["return_state"] = True
            y, state = function(**leaves, **options)
            found.append(torch.autograd.grad(y.cos().sum() + state.sin().sum(), leaves.values()))
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@every_backend
def test_decays_of_a_head_and_ends_of_decays(backend):
    inputs = make_inputs()
    inputs["log_decay"] = inputs["log_decay"][..., 0].clone()
    inputs["log_decay"][:, ::7] = -torch.inf
    inputs["log_decay"][:, 3::5] = 0
    y, state = dplr_delta_rule(**inputs, return_state=True, backend=backend)
    expected, expected_state = by_definition(**inputs)
    assert_close(y, expected, 1e-12)
    assert_close(state, expected_state, 1e-12)


@every_backend
def test_padding_is_neither_written_forgotten_nor_read(backend):
    inputs = make_inputs()
    key_mask = torch.arange(70) % 5 != torch.arange(2)[:, None]
    expected, expected_state = by_definition(**inputs, key_mask=key_mask)
    for name in OF_TOKENS:
        inputs[name][~key_mask] = torch.nan
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    y, state = dplr_delta_rule(**leaves, key_mask=key_mask, return_state=True, backend=backend)
    assert_close(y, expected, 1e-12)
    assert_close(state, expected_state, 1e-12)
    for x in torch.autograd.grad(y.sum() + state.sum(), leaves.values()):
        assert x.isfinite().all() and not x[~key_mask].any()


@every_backend
def test_packed_sequences_are_separate_ones(backend):
    inputs = make_inputs(B=1)
    bounds = [0, 3, 3, 41, 70]
    state = make_inputs(B=4, T=7, K=5)["q"].movedim(1, 2).contiguous()
    y, after = dplr_delta_rule(
        **inputs,
        cu_seqlens=torch.tensor(bounds),
        initial_state=state,
        return_state=True,
        backend=backend,
    )
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if start == end:
            torch.testing.assert_close(after[n], state[n])
            continue
        alone = {name: x[:, start:end] for name, x in inputs.items()}
        expected, expected_state = by_definition(**alone, initial_state=state[n : n + 1])
        assert_close(y[:, start:end], expected, 1e-12)
        assert_close(after[n : n + 1], expected_state, 1e-12)


@every_backend
def test_steps_in_slots_are_the_whole(backend):
    inputs = make_inputs(T=9)
    expected, expected_state = by_definition(**inputs)
    slots = torch.full((5, 2, 7, 5), torch.nan, dtype=torch.float64)
    indices = torch.tensor([3, 1], dtype=torch.int32)
    slots[indices.long()] = 0
    for t in range(9):
        y = dplr_delta_rule_step_(
            **{name: x[:, t] for name, x in inputs.items()},
            state=slots,
            state_indices=indices,
            backend=backend,
        )
        assert_close(y, expected[:, t], 1e-12)
    assert_close(slots[indices.long()], expected_state, 1e-12)
    assert slots[[0, 2, 4]].isnan().all()


def test_with_one_direction_it_is_the_delta_rule_with_an_erase_key():
    inputs = make_inputs()
    erase_key, decay = -inputs["a"] / inputs["log_decay"].exp(), inputs.pop("log_decay")
    expected = dplr_delta_rule(**{**inputs, "b": inputs["k"]}, log_decay=decay)
    q, k, v = (inputs[name] for name in "qkv")
    ones = torch.ones(v.shape[:-1], dtype=v.dtype)
    torch.testing.assert_close(delta_rule(q, k, v, ones, decay, erase_key=erase_key), expected)


def test_wrong_arguments_are_named():
    inputs = make_inputs(T=4)
    for changed, message in (
        ({"a": inputs["a"][:, :3]}, r"a must have shape \(2, 4, 2, 7\), got \(2, 3, 2, 7\)"),
        ({"b": inputs["b"].int()}, "b must be float32"),
        ({"k": inputs["k"][:, :, :1]}, "k must have q's 2 heads, got 1"),
        ({"log_decay": -inputs["log_decay"]}, "log_decay must be at most 0"),
        ({"initial_state": torch.zeros(2, 2, 7, 5)}, "initial_state must be torch.float64"),
        ({"backend": "cuda"}, "q is on cpu"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            dplr_delta_rule(**{**inputs, **changed})
    token = {name: x[:, 0].requires_grad_() for name, x in inputs.items()}
    with pytest.raises(RuntimeError, match="has no gradient"):
        dplr_delta_rule_step_(**token, state=torch.zeros(2, 2, 7, 5, dtype=torch.float64))


def test_an_erase_key_is_refused_by_name():
    inputs = make_inputs(T=4)
    q, k, v, decay = (inputs[name] for name in ("q", "k", "v", "log_decay"))
    ones = torch.ones(v.shape[:-1], dtype=v.dtype)
    with pytest.raises(ValueError, match=r"erase_key must have shape \(2, 4, 2, 7\), got"):
        delta_rule(q, k, v, ones, decay, erase_key=k[:, :1])


@every_backend
def test_what_is_not_there_is_named(backend):
    inputs = make_inputs(T=4)
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=f"{name} must be a tensor of shape .*got None"):
            dplr_delta_rule(**{**inputs, name: None}, backend=backend)


def test_other_arguments_beside_an_erase_key_are_named():
    inputs = make_inputs(T=4)
    q, k, v, decay = (inputs[name] for name in ("q", "k", "v", "log_decay"))
    ones, state = torch.ones(v.shape[:-1], dtype=v.dtype), torch.zeros(2, 2, 7, 5).double()
    for changed, message in (
        ({"log_decay": decay[:, :3]}, "log_decay must have shape"),
        ({"key_mask": torch.ones(2, 3)}, "key_mask must have shape"),
        ({"v": v[0, 0, 0]}, "v must have the 4 dimensions"),
        ({"k": k[:, :, :0]}, "k must have at least one head"),
    ):
        given = {"q": q, "k": k, "v": v, "beta": ones, "log_decay": decay, **changed}
        with pytest.raises(ValueError, match=message):
            delta_rule(**given, erase_key=k)
    token = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0], "beta": ones[:, 0], "state": state}
    with pytest.raises(ValueError, match="log_decay must have shape"):
        delta_rule_step_(**token, log_decay=decay[:, 0, :1], erase_key=k[:, 0])
