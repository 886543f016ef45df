# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Inputs for the tests of linear attention, and how far results may be from the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from by_name import by_name
from hf_linear_attention.ops.linear_attention import LinearAttentionState
from hf_linear_attention.ops.loops import reference_linear_attention
from hf_linear_attention.ops.numerics import accumulation_dtype

reference = by_name("linear_attention", reference_linear_attention)

# Against the reference in float64 on the same (rounded) inputs.
TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}


@dataclass(frozen=True)
class Case:
    """One call of linear_attention. Dims as in its docstring; lengths are of packed sequences."""

    B: int = 2
    T: int = 70
    Hq: int = 2
    Hkv: int = 2
    K: int = 7
    V: int = 5
    feature_map: str | None = "elu+1"
    decay: str | None = None  # "mild", "resets" (to -inf and close to it)
    mask: str | None = None  # "left", "right", "middle", "all"
    lengths: tuple[int, ...] | None = None
    initial: bool = False
    normalize: bool = True
    is_causal: bool = True
    strided: bool = False
    eps: float = 1e-6

    def __str__(self) -> str:
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != Case.__dataclass_fields__[name].default
        }
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


def make_inputs(
    case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 1
) -> dict[str, Any]:
    """The keyword arguments of linear_attention for a case, the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        if not case.strided:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)
        # Heads before time, every second feature, and one more than asked for on both sides.
        B, T, H, D = shape
        big = torch.randn(B, H, T + 2, 2 * D + 2, generator=generator, dtype=torch.float64)
        return big[:, :, 1:-1, 1:-1:2].transpose(1, 2)

    def cast(x: Tensor, to: torch.dtype) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=to, device=device).copy_(x)

    B, T, Hq, Hkv, K, V = case.B, case.T, case.Hq, case.Hkv, case.K, case.V
    acc = accumulation_dtype(dtype)
    inputs: dict[str, Any] = {
        "q": cast(normal(B, T, Hq, K), dtype),
        "k": cast(normal(B, T, Hkv, K), dtype),
        "v": cast(normal(B, T, Hkv, V), dtype),
        "feature_map": case.feature_map,
        "normalize": case.normalize,
        "is_causal": case.is_causal,
        "eps": case.eps,
    }
    if case.decay is not None:
        log_decay = -torch.rand(B, T, Hkv, generator=generator, dtype=torch.float64)
        if case.decay == "resets":
            log_decay[:, ::11] = -torch.inf
            log_decay[:, 5::13, 0] = -1e5
            log_decay[:, 3::17] = -30
        inputs["log_decay"] = cast(log_decay, acc)
    if case.mask is not None:
        key_mask = torch.ones(B, T, dtype=torch.bool)
        for b in range(B):
            if case.mask == "left":
                key_mask[b, : 3 + 20 * b] = False
            elif case.mask == "right":
                key_mask[b, T - 3 - 20 * b :] = False
            elif case.mask == "middle":
                key_mask[b] = torch.rand(T, generator=generator) < 0.6
            else:
                key_mask[b] = b > 0
        inputs["key_mask"] = key_mask.to(device)
    if case.lengths is not None:
        inputs["cu_seqlens"] = torch.tensor((0, *case.lengths)).cumsum(0).int().to(device)
    if case.initial:
        rows = B if case.lengths is None else len(case.lengths)
        kv = torch.randn(rows, Hkv, K, V, generator=generator, dtype=torch.float64)
        z = torch.rand(rows, Hkv, K, generator=generator, dtype=torch.float64)
        inputs["initial_state"] = LinearAttentionState(
            cast(kv, acc), cast(z, acc) if case.normalize else None
        )
    return inputs


def to_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs for the reference, bit for bit, on the CPU."""

    def convert(x: Any) -> Any:
        if isinstance(x, tuple):
            return LinearAttentionState(*map(convert, x))
        if not isinstance(x, Tensor):
            return x
        return x.detach().cpu().double() if x.is_floating_point() else x.cpu()

    return {name: convert(x) for name, x in inputs.items()}


def require_grad(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Makes leaves, by name, of all inputs that have a gradient."""
    kv, z = inputs.get("initial_state") or (None, None)
    named = {name: inputs.get(name) for name in ("q", "k", "v", "log_decay")}
    named |= {"initial kv": kv, "initial z": z}
    return {name: x.requires_grad_() for name, x in named.items() if x is not None}


def run_with_gradients(function, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """y, the final state, and the gradients of a weighted sum of them, all by name.

    `function` returns (y, state). The weights depend on the shapes alone.
    """
    leaves = require_grad(inputs)
    y, (kv, z) = function(**inputs)
    results = {"y": y, "final kv": kv}
    if z is not None:
        results["final z"] = z
    loss = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).cos()
        loss = loss + (x.double().cpu() * weights).sum()
    for x in leaves.values():
        loss = loss + 0 * torch.nan_to_num(x, neginf=0).sum().double().cpu()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results |= {f"d {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach().cpu() for name, x in results.items()}


def expected(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What the reference makes of these inputs in float64, with gradients."""
    return run_with_gradients(reference, to_float64(inputs))


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype):
    """Compares by name; gradients and states, which are sums, by their own size."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        target = expected[name]
        tolerance = dict(TOLERANCE[dtype])
        if name != "y" and target.numel() > 0:
            tolerance["atol"] *= max(1.0, target.abs().max().item())
        torch.testing.assert_close(
            x.double(), target, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
