# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What RWKV-7 makes of its tokens between its products, and of what was read for them: each by one
operation of the compiled library, or by several of PyTorch's.

Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", arXiv 2503.14456.

Shapes: B batch, T time, H heads, K key dim, V value dim.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ReLUSquaredActivation

from ...ops.backends import native_op, takes_one_op
from ...ops.numerics import at_least_float32, l2_normed

compiled_token_mix = native_op("token_mix")
compiled_values = native_op("rwkv7_values")
compiled_keys = native_op("rwkv7_keys")
compiled_read = native_op("rwkv7_read")
compiled_squared_relu = native_op("squared_relu")

LARGEST_DECAY = math.exp(-0.5)  # of -log w: so w is at least 0.545
SMALLEST_NORM = 1e-12  # of a kappa; as of the authors, but differentiable at 0


def mixed_tokens(x: Tensor, before: Tensor, mixes: Sequence[Tensor]) -> Sequence[Tensor]:
    """x + (before - x) mix (..., C), for mixes of C numbers each."""
    mixes = [mix.to(x.dtype).view(-1) for mix in mixes]
    if takes_one_op(x, before, *mixes):
        return compiled_token_mix(x, before, mixes)
    return [torch.lerp(x, before, mix) for mix in mixes]


def mixed_values(v: Tensor, first: Tensor, share: Tensor, bias: Tensor) -> Tensor:
    """v + (first - v) sigmoid(share + bias), of values and the first layer's (B, T, features)."""
    first = first.to(v.dtype)
    if takes_one_op(v, first, share, floats=(bias,)):
        return compiled_values(v, first, share, bias.float())
    share = (at_least_float32(share) + bias).sigmoid()
    return torch.lerp(v, first, share.to(v.dtype))


class Keys(NamedTuple):
    """Of (B, T, H, K)."""

    log_decay: Tensor
    key: Tensor
    erased: Tensor
    written: Tensor


def keys_of(
    k: Tensor, w: Tensor, a: Tensor, biases: tuple[Tensor, Tensor], shares: tuple[Tensor, Tensor]
) -> Keys:
    """Of kappa = k k_k, divided by its norm in each head, and rate = sigmoid(a + its bias):
    k (1 + (rate - 1) k_a), which is written, and -kappa and kappa rate, under which is erased.

    k, w, a: (B, T, H, K).
    biases: of w and a, (H K,).
    shares: k_k and k_a, (H K,).
    """
    if takes_one_op(k, w, a, *shares, floats=biases):
        in_float = biases[0].float(), biases[1].float()
        eps = SMALLEST_NORM**2
        return Keys(*compiled_keys(k, w, a, in_float, shares, LARGEST_DECAY, eps))
    heads = k.shape[-2:]
    of_w, of_a, k_k, k_a = (x.view(heads) for x in (*biases, *shares))
    log_decay = (at_least_float32(w) + of_w).sigmoid() * -LARGEST_DECAY
    rate = (at_least_float32(a) + of_a).sigmoid()
    kappa = l2_normed(at_least_float32(k * k_k), SMALLEST_NORM**2)
    key = k * (1 + (rate - 1) * k_a)
    return Keys(log_decay, key.to(k.dtype), (-kappa).to(k.dtype), (kappa * rate).to(k.dtype))


class Norm(NamedTuple):
    """A LayerNorm of each head: its parameters for each channel of each, (H V,)."""

    weight: Tensor
    bias: Tensor
    eps: float

    def of(self, y: Tensor) -> Tensor:
        """(B, T, H, V), in float32 or better"""
        heads = y.shape[-2:]
        normed = F.layer_norm(at_least_float32(y), heads[-1:], eps=self.eps)
        return normed * self.weight.view(heads) + self.bias.view(heads)


def read_out(
    y: Tensor, keys: tuple[Tensor, Tensor], v: Tensor, gate: Tensor, bonus: Tensor, norm: Norm
) -> Tensor:
    """(LayerNorm of each head of y + v sum(r k r_k)) gate, (B, T, H V).

    y, v, gate: (B, T, H, V).
    keys: r and k, (B, T, H, K).
    bonus: r_k, (H, K).
    """
    r, k = keys
    if takes_one_op(y, r, k, v, gate, bonus, norm.weight, norm.bias):
        parameters = bonus.view(-1), norm.weight, norm.bias
        return compiled_read(y, keys, v, gate, parameters, norm.eps)
    sums = norm.of(y) + (at_least_float32(r) * k * bonus).sum(-1, keepdim=True) * v
    return (sums.to(v.dtype) * gate).flatten(2)


def activated(x: Tensor, act: nn.Module) -> Tensor:
    """act(x) (..., C), of an activation of Transformers'."""
    if isinstance(act, ReLUSquaredActivation) and takes_one_op(x):
        return compiled_squared_relu(x)
    return act(x)
