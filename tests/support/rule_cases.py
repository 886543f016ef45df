# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Inputs for the tests of the delta rules, and of linear attention in its general form: decays per
channel, write strengths, value heads that share key heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hf_linear_attention
from hf_linear_attention import LinearAttentionState
from hf_linear_attention.ops.numerics import accumulation_dtype


@dataclass(frozen=True)
class RuleCase:
    """One call. Dims as in delta_rule's docstring; lengths are of packed sequences."""

    op: str = "delta_rule"  # or "linear_attention", or "dplr_delta_rule" of as many heads each
    B: int = 2
    T: int = 70
    Hq: int = 2
    Hk: int = 2
    Hv: int = 2
    K: int = 7
    V: int = 5
    decay: str | None = "head"  # "channel"
    resets: bool = False  # decays of -inf and close to it
    strength: str = "one"  # beta or write strengths in (0, 1); "two": in (0, 2); "ends": 0, 1 and 2
    mask: str | None = None  # "left", "right", "middle", "all"
    lengths: tuple[int, ...] | None = None
    initial: bool = False
    strided: bool = False
    normalize_qk: bool = True  # of the delta rule
    zero_keys: bool = False
    erase: str | None = None  # heads of erase keys, of the delta rule: "keys" or "values"
    scale: float | None = None
    feature_map: str | None = None  # of linear attention
    normalize: bool = False
    is_causal: bool = True

    def __str__(self) -> str:
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != RuleCase.__dataclass_fields__[name].default
        }
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"

    @property
    def function(self):
        return getattr(hf_linear_attention, self.op)

    @property
    def has_small_keys(self) -> bool:
        return not self.normalize_qk or self.op == "dplr_delta_rule"

    @property
    def strength_name(self) -> str:
        return {"delta_rule": "beta", "linear_attention": "write_strength"}[self.op]


# What both are, beside their own.
_SHARED = [
    RuleCase(),
    RuleCase(T=0, initial=True),
    RuleCase(T=1, decay="channel"),
    RuleCase(B=0, decay="channel"),
    RuleCase(decay=None),
    RuleCase(decay="channel", T=150, initial=True),
    RuleCase(K=1, V=1, decay="channel"),
    RuleCase(K=40, V=33, B=1),
    RuleCase(K=33, V=40, B=1, decay="channel"),
    # heads
    RuleCase(Hv=4, decay="channel"),
    RuleCase(Hv=6, Hk=2, Hq=2, mask="middle", initial=True),
    RuleCase(Hv=4, Hk=1, Hq=2, decay=None),
    RuleCase(Hv=4, Hk=2, Hq=1, strided=True),
    RuleCase(Hq=4, Hv=2, Hk=1, initial=True, decay="channel"),
    # decays
    RuleCase(resets=True, T=150, initial=True),
    RuleCase(resets=True, decay="channel", mask="middle", initial=True),
    RuleCase(resets=True, decay="channel", T=150, K=20),
    # strengths
    RuleCase(strength="two"),
    RuleCase(strength="ends", decay="channel", initial=True),
    # padding and packing
    RuleCase(mask="left", decay="channel"),
    RuleCase(mask="right"),
    RuleCase(mask="all", initial=True),
    RuleCase(B=1, T=150, lengths=(150,)),
    RuleCase(B=1, T=150, lengths=(0, 1, 64, 0, 65, 20, 0), decay="channel"),
    RuleCase(B=1, T=150, lengths=(3, 70, 77), initial=True, Hv=4, mask="middle", resets=True),
    RuleCase(B=1, T=0, lengths=(0, 0), initial=True),
    RuleCase(B=1, T=0, lengths=()),
    # strides
    RuleCase(strided=True, Hv=4, decay="channel", mask="left", initial=True),
    RuleCase(zero_keys=True, decay="channel"),
]
_DELTA = [
    RuleCase(normalize_qk=False, strength="one", decay="channel"),
    RuleCase(normalize_qk=False, decay=None, scale=0.3, T=30),
    RuleCase(erase="values"),
    RuleCase(erase="keys", decay=None, Hv=4, T=150, initial=True),
    RuleCase(erase="values", decay="channel", Hv=4, Hq=1, mask="middle", initial=True),
    RuleCase(erase="keys", decay="channel", resets=True, T=150, strength="two"),
    RuleCase(erase="values", resets=True, mask="left", strided=True, Hq=4),
    RuleCase(erase="keys", B=1, T=150, lengths=(0, 1, 64, 0, 65, 20, 0), decay="channel"),
    RuleCase(erase="values", T=0, initial=True),
    RuleCase(erase="values", T=1, decay="channel", K=40, V=33),
]
_LINEAR = [
    RuleCase(normalize=True, decay="channel", feature_map="elu+1", initial=True),
    RuleCase(normalize=True, feature_map="exp", mask="middle", Hv=4, lengths=None),
    RuleCase(feature_map="silu", decay="channel", Hq=4, mask="left"),
    RuleCase(normalize=True, feature_map="elu+1", decay="channel", B=1, T=80, lengths=(20, 0, 60)),
    RuleCase(normalize=True, feature_map="elu+1", mask="all", decay="channel"),
    RuleCase(is_causal=False, decay=None, Hv=4, mask="middle"),
    RuleCase(is_causal=False, decay=None, normalize=True, feature_map="elu+1", initial=True),
]
CASES = _SHARED + _DELTA
CASES += [replace(case, op="linear_attention") for case in _SHARED + _LINEAR]


def make_inputs(
    case: RuleCase, dtype: torch.dtype = torch.float64, seed: int = 1, device: str = "cpu"
) -> dict[str, Any]:
    """The keyword arguments of a case's function, the same numbers for every dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    B, T, K, V = case.B, case.T, case.K, case.V
    acc = accumulation_dtype(dtype)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(heads: int, dim: int) -> Tensor:
        # With `strided`, heads before time, every second feature, and more than asked for.
        big = torch.randn(B, heads, T + 2, 2 * dim + 2, generator=generator, dtype=torch.float64)
        x = big.to(dtype)[:, :, 1:-1, 1:-1:2].transpose(1, 2)
        return x if case.strided else x.contiguous()

    strength = {
        "one": rand(B, T, case.Hv),
        "two": 2 * rand(B, T, case.Hv),
        "ends": (3 * rand(B, T, case.Hv)).floor(),
    }[case.strength]
    inputs: dict[str, Any] = {
        "q": normal(case.Hq, K),
        "k": normal(case.Hk, K) * (K**-0.5 if case.has_small_keys else 1.0),
        "v": normal(case.Hv, V),
    }
    if case.op == "dplr_delta_rule":  # as RWKV-7 makes them
        kappa = F.normalize(normal(case.Hk, K).double(), dim=-1)
        inputs |= {"a": -kappa.to(dtype), "b": (kappa * rand(*kappa.shape)).to(dtype)}
    else:
        inputs[case.strength_name] = strength.to(acc)
    if case.zero_keys:
        inputs["k"][:, ::3] = 0
        inputs["q"][:, 1::3] = 0
    if case.op == "delta_rule" and case.erase is not None:
        inputs["erase_key"] = normal({"keys": case.Hk, "values": case.Hv}[case.erase], K) * K**-0.5
    if case.op == "delta_rule":
        inputs |= {"normalize_qk": case.normalize_qk, "scale": case.scale}
    if case.op == "linear_attention":
        names = ("feature_map", "normalize", "is_causal")
        inputs |= {name: getattr(case, name) for name in names}
    if case.decay is not None:
        log_decay = -rand(B, T, case.Hv, *([K] if case.decay == "channel" else []))
        if case.resets:
            log_decay[:, ::11] = -torch.inf
            log_decay[:, 5::13, 0] = -1e5
            log_decay[:, 3::17] = -30
            if case.decay == "channel":
                log_decay[:, 7::9, :, ::2] = -torch.inf
        inputs["log_decay"] = log_decay.to(acc)
    if case.mask is not None:
        inputs["key_mask"] = make_mask(case, rand)
    if case.lengths is not None:
        inputs["cu_seqlens"] = torch.tensor((0, *case.lengths)).cumsum(0).int()
    if case.initial:
        rows = B if case.lengths is None else len(case.lengths)
        kv = rand(rows, case.Hv, K, V).to(acc)
        z = rand(rows, case.Hv, K).to(acc) if case.normalize else None
        is_linear = case.op == "linear_attention"
        inputs["initial_state"] = LinearAttentionState(kv, z) if is_linear else kv
    return inputs if device == "cpu" else on_device(inputs, device)


def on_device(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """The same with all tensors there."""

    def move(x: Any) -> Any:
        if isinstance(x, LinearAttentionState):
            return LinearAttentionState(*map(move, x))
        return x.to(device) if isinstance(x, Tensor) else x

    return {name: move(x) for name, x in inputs.items()}


def make_mask(case: RuleCase, rand) -> Tensor:
    B, T = case.B, case.T
    position, row = torch.arange(T).expand(B, T), torch.arange(B)[:, None]
    return {
        "left": position >= 3 + 20 * row,
        "right": position < T - 3 - 20 * row,
        "middle": rand(B, T) < 0.6,
        "all": (row > 0).expand(B, T),
    }[case.mask or ""].contiguous()


def strided(x: Tensor) -> Tensor:
    """x, its dimensions in reverse order in memory, with NaN between."""
    big = torch.full([2 * n + 2 for n in reversed(x.shape)], torch.nan, dtype=x.dtype)
    view = big[tuple(slice(1, 2 * n + 1, 2) for n in reversed(x.shape))]
    return view.permute(*reversed(range(x.dim()))).copy_(x)


def tensors_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """All inputs that have a gradient, by name."""
    named = {}
    for name, x in inputs.items():
        parts = {f"{name}.{i}": part for i, part in enumerate(x)} if isinstance(x, tuple) else {}
        for part_name, part in (parts or {name: x}).items():
            if isinstance(part, Tensor) and part.is_floating_point():
                named[part_name] = part
    return named


def with_tensors(inputs: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The inputs with others in the places of those that tensors_of names."""

    def place(name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            parts = (place(f"{name}.{i}", part) for i, part in enumerate(x))
            return LinearAttentionState(*parts)
        return tensors.get(name, x)

    return {name: place(name, x) for name, x in inputs.items()}


def to_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same numbers for the reference."""
    return with_tensors(inputs, {name: x.double() for name, x in tensors_of(inputs).items()})


def states_of(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [x for x in state if x is not None]


def run_with_gradients(
    function: Callable[..., Any], inputs: dict[str, Any], backend: str | None
) -> dict[str, Tensor]:
    """y, the final state, and the gradients of a weighted sum of them, all by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors_of(inputs).items()}
    y, state = function(**with_tensors(inputs, leaves), return_state=True, backend=backend)
    results = {"y": y} | {f"final {i}": x for i, x in enumerate(states_of(state))}
    loss = torch.zeros((), dtype=torch.float64, device=y.device)
    for x in results.values():
        weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).cos()
        loss = loss + (x.double() * weights.to(x.device)).sum()
    for x in leaves.values():  # so that all are part of it
        loss = loss + 0 * torch.nan_to_num(x, neginf=0).sum().double()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results |= {f"d {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in results.items()}
