# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The arguments of each op as its backends take them: of whole sequences, or of one token, and then
without T.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, C
channels, N sums of a state for each channel.
"""

from typing import NamedTuple

from torch import Tensor


class LinearArguments(NamedTuple):
    """Of `linear_attention`."""

    q: Tensor  # (B, T, Hq, K)
    k: Tensor  # (B, T, Hk, K)
    v: Tensor  # (B, T, Hv, V)
    log_decay: Tensor | None = None  # (B, T, Hv) or (B, T, Hv, K)
    write_strength: Tensor | None = None  # (B, T, Hv)
    key_mask: Tensor | None = None  # (B, T)
    feature_map: str | None = None
    normalize: bool = True
    eps: float = 1e-6
    is_causal: bool = True


class DeltaArguments(NamedTuple):
    """Of `delta_rule`; without `delta`, beta v is written, whatever the state holds."""

    q: Tensor  # (B, T, Hq, K)
    k: Tensor  # (B, T, Hk, K)
    v: Tensor  # (B, T, Hv, V)
    beta: Tensor | None = None  # (B, T, Hv); None: ones
    log_decay: Tensor | None = None  # (B, T, Hv) or (B, T, Hv, K)
    key_mask: Tensor | None = None  # (B, T)
    scale: float = 1.0
    normalize_qk: bool = False
    delta: bool = True
    erase_key: Tensor | None = None  # (B, T, Hv, K); None: k
    add_along: Tensor | None = None  # likewise; erase_key then asks before the decay; no beta


IS_SILU = {"silu": True, None: False}  # by activation


class ConvolutionArguments(NamedTuple):
    """Of `short_convolution`."""

    x: Tensor  # (B, T, C)
    weight: Tensor  # (C, kernel size)
    bias: Tensor | None = None  # (C,)
    key_mask: Tensor | None = None  # (B, T)
    activation: str | None = "silu"


class ElementwiseArguments(NamedTuple):
    """Of `elementwise_scan`."""

    x: Tensor  # (B, T, C)
    log_decay: Tensor  # (B, T, C)
    key_mask: Tensor | None = None  # (B, T)


class SelectiveArguments(NamedTuple):
    """Of `selective_scan`."""

    x: Tensor  # (B, T, C)
    dt: Tensor  # (B, T, C)
    A: Tensor  # (C, N)
    B: Tensor  # (B, T, N)
    C: Tensor  # (B, T, N)
    D: Tensor | None = None  # (C,)
    key_mask: Tensor | None = None  # (B, T)
