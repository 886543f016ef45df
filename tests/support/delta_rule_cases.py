# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Inputs for the tests of the delta rule's compiled ops: ops/compiled/delta_rule.py."""

from dataclasses import dataclass

import torch

from hf_linear_attention.ops.numerics import accumulation_dtype


@dataclass(frozen=True)
class Case:
    """One call. Dims as in ops/compiled/delta_rule.py; lengths are of packed sequences."""

    B: int = 2
    T: int = 37
    Hq: int = 2
    Hk: int = 2
    Hv: int = 2
    K: int = 16
    V: int = 32
    decay: str | None = "head"
    beta: bool = True
    delta: bool = True
    erase: bool = False  # an erase key, with delta
    along: bool = False  # what it finds is added along another direction, without beta
    mask: bool = False
    lengths: tuple[int, ...] | None = None
    initial: bool = True
    normalize_qk: bool = True
    layout: str = "plain"  # "strided": heads before time, every second feature; "expanded"

    def __str__(self):
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != Case.__dataclass_fields__[name].default
        }
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


def surrounded_by_nan(x):
    """The same numbers, heads before time and every second feature, in memory that else is NaN."""
    B, T, *heads = x.shape
    sizes = [B, heads[0], T + 2, *(2 * D + 2 for D in heads[1:])]
    big = torch.full(sizes, torch.nan, dtype=x.dtype)
    inner = big[:, :, 1:-1].movedim(2, 1)
    inner = inner[..., 1:-1:2] if heads[1:] else inner
    return inner.copy_(x)


def make_inputs(case, dtype):
    """The arguments of forward for a case: leading ones by position, the others by name."""
    g = torch.Generator().manual_seed(2)
    acc = accumulation_dtype(dtype)

    def normal(*shape, to=dtype):
        x = torch.randn(*shape, generator=g, dtype=torch.float64).to(to)
        if case.layout == "expanded" and len(shape) == 4:
            x = x[:, :, :1].expand(shape)
        return surrounded_by_nan(x) if case.layout == "strided" else x

    B, T, Hv = case.B, case.T, case.Hv
    q, k = normal(B, T, case.Hq, case.K), normal(B, T, case.Hk, case.K)
    v = normal(B, T, Hv, case.V)
    if not case.normalize_qk:  # keys of norm 1 or so, or states grow without end
        k = k * case.K**-0.5
    beta = 2 * torch.sigmoid(normal(B, T, Hv, to=acc)) if case.beta else None
    sizes = {None: None, "head": (B, T, Hv), "channel": (B, T, Hv, case.K)}[case.decay]
    log_decay = None if sizes is None else -normal(*sizes, to=acc).abs() / 4
    erase_key = add_along = key_mask = cu_seqlens = initial_state = None
    if case.erase and case.delta:
        erase_key = normal(B, T, Hv, case.K, to=acc) * case.K**-0.5
    if case.along and case.delta:
        beta, add_along = None, normal(B, T, Hv, case.K, to=acc) * case.K**-0.5
    if case.mask:
        key_mask = torch.rand(B, T, generator=g) < 0.6
        for x in (q, k, v, beta, log_decay, erase_key, add_along):
            if x is not None and case.layout != "expanded":
                x[~key_mask] = torch.nan
    rows = B
    if case.lengths is not None:
        cu_seqlens = torch.tensor((0, *case.lengths)).cumsum(0).int()
        rows = len(case.lengths)
    if case.initial:
        initial_state = torch.randn(rows, Hv, case.K, case.V, generator=g, dtype=torch.float64)
        initial_state = initial_state.to(acc)
    return (q, k, v, beta, log_decay), {
        "erase_key": erase_key,
        "add_along": add_along,
        "key_mask": key_mask,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "scale": 0.3,
        "normalize_qk": case.normalize_qk,
        "delta": case.delta,
    }


def in_float64(x):
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x
