# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What lies between the products of an RWKV-7 layer, on the CPU, without gradient: the compiled ops
and their fakes. The formulas are those of mixers/parts/rwkv7_tokens.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import ops, register_fake

_token_mix = ops.token_mix.default
_values = ops.rwkv7_values.default
_keys = ops.rwkv7_keys.default
_read = ops.rwkv7_read.default
_squared_relu = ops.squared_relu.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def token_mix(x: Tensor, before: Tensor, mixes: Sequence[Tensor]) -> Tensor:
    """x + (before - x) mix for each of n mixes (C,): (..., C) -> (n, ..., C)."""
    return _token_mix(x.contiguous(), before.contiguous(), list(mixes))


def rwkv7_values(v: Tensor, first: Tensor, share: Tensor, bias: Tensor) -> Tensor:
    """v + (first - v) sigmoid(share + bias), (B, T, features), of a bias of float32."""
    return _values(v.contiguous(), first.contiguous(), share.contiguous(), bias)


def rwkv7_keys(
    k: Tensor,
    w: Tensor,
    a: Tensor,
    biases: tuple[Tensor, Tensor],
    shares: tuple[Tensor, Tensor],
    largest: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log decays in float32, keys, minus kappa, and kappa times its rate, each (B, T, H, K).

    k, w, a: (B, T, H, K).
    biases: of w and a, (H K,) float32.
    shares: k_k and k_a, (H K,) of k's dtype.
    """
    return _keys(k.contiguous(), w.contiguous(), a.contiguous(), *biases, *shares, largest, eps)


def rwkv7_read(
    y: Tensor,
    keys: tuple[Tensor, Tensor],
    v: Tensor,
    gate: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor],
    eps: float,
) -> Tensor:
    """(B, T, H V) of y, v and gate (B, T, H, V), r and k (B, T, H, K), and of r_k (H K,) and the
    norm's weight and bias (H V,), all of one dtype.
    """
    tensors = (x.contiguous() for x in (y, *keys, v, gate))
    return _read(*tensors, *parameters, eps)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, (..., C)."""
    return _squared_relu(x.contiguous())


@register_fake("squared_relu", _registrations)
def _fake_squared_relu(x):
    return x.new_empty(x.shape)


@register_fake("token_mix", _registrations)
def _fake_token_mix(x, before, mixes):
    return x.new_empty(len(mixes), *x.shape)


@register_fake("rwkv7_values", _registrations)
def _fake_values(v, first, share, bias):
    return v.new_empty(v.shape)


@register_fake("rwkv7_keys", _registrations)
def _fake_keys(k, w, a, w_bias, a_bias, k_k, k_a, largest, eps):
    log_decay = k.new_empty(k.shape, dtype=torch.float32)
    return log_decay, *(k.new_empty(k.shape) for _ in range(3))


@register_fake("rwkv7_read", _registrations)
def _fake_read(y, r, k, v, gate, r_k, weight, bias, eps):
    return y.new_empty(*y.shape[:2], y.shape[2] * y.shape[3])
