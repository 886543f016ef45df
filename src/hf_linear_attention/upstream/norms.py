# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Root-mean-square norms of Transformers' recurrent models: plain ones, and those with a gate.

They answer as Transformers' own but for rounding, which takes place where theirs does, unless
inputs and weights differ in their dtypes (`rms_norm`). What the compiled norm does not know, as
quantised weights, goes the usual way.

Shapes: C channels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..fast.rms_norm import rms_norm, takes
from ..ops.numerics import at_least_float32


class UpstreamNorm(nn.Module):
    """What all have: a weight (C,)."""

    weight: nn.Parameter
    variance_epsilon: float

    def is_ours(self, x: Tensor) -> bool:
        """Whether the compiled norm takes x (..., C)."""
        return takes(x, self.weight)


class PlainNorm(UpstreamNorm):
    """weight * (x / rms(x)), rounded before the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C), as all here."""
        if not self.is_ours(hidden_states):
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class LateRoundedNorm(UpstreamNorm):
    """weight * (x / rms(x)), rounded behind the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.is_ours(hidden_states):
            return super().forward(hidden_states)
        return unrounded(hidden_states, self.weight, self.variance_epsilon).to(hidden_states.dtype)


class OneMoreNorm(UpstreamNorm):
    """(1 + weight) * (x / rms(x)), rounded at the end."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ours(x):
            return super().forward(x)
        return unrounded(x, 1 + at_least_float32(self.weight), self.eps).to(x.dtype)


class OneMoreNormOfGroups(UpstreamNorm):
    """The same, of each group of channels by itself, where there are groups."""

    eps: float
    group_size: int | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ours(x):
            return super().forward(x)
        y = of_groups(at_least_float32(x), self.group_size or x.shape[-1], self.eps)
        return (y * (1 + at_least_float32(self.weight))).to(x.dtype)


class NormThenGate(UpstreamNorm):
    """A plain norm, then a gate behind its activation."""

    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        if not self.is_ours(hidden_states):
            return super().forward(hidden_states, gate)
        y = rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return (y * ACT2FN[self.activation](at_least_float32(gate))).to(hidden_states.dtype)


class LateRoundedNormThenGate(UpstreamNorm):
    """The same, rounded once, at the end."""

    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        if not self.is_ours(hidden_states):
            return super().forward(hidden_states, gate)
        y = unrounded(hidden_states, self.weight, self.variance_epsilon)
        return (y * ACT2FN[self.activation](at_least_float32(gate))).to(hidden_states.dtype)


class GateThenNorm(UpstreamNorm):
    """SiLU of a gate, then a norm of each group of channels, rounded before the weight."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if not self.is_ours(hidden_states):
            return super().forward(hidden_states, gate)
        y = at_least_float32(hidden_states)
        if gate is not None:
            y = y * F.silu(at_least_float32(gate))
        size = getattr(self, "group_size", y.shape[-1])  # before 5.21 mostly all are one group
        if size == y.shape[-1] and y.dtype == hidden_states.dtype:
            return rms_norm(y, self.weight, self.variance_epsilon)
        y = of_groups(y, size, self.variance_epsilon)
        return self.weight * y.to(hidden_states.dtype)


class NormOfFalcon(UpstreamNorm):
    """A norm of each group of channels, and SiLU of a gate before or behind it, rounded at the
    end.
    """

    n_groups: int
    norm_before_gate: bool

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if not self.is_ours(hidden_states):
            return super().forward(hidden_states, gate)
        y = at_least_float32(hidden_states)
        factor = 1 if gate is None else F.silu(at_least_float32(gate))
        if not self.norm_before_gate:
            y = y * factor
        y = of_groups(y, y.shape[-1] // self.n_groups, self.variance_epsilon)
        y = at_least_float32(self.weight) * y
        if self.norm_before_gate:
            y = y * factor
        return y.to(hidden_states.dtype)


class NormOfXLSTM(UpstreamNorm):
    """weight * (x / rms(x)), rounded before the weight."""

    eps: float
    bias: nn.Parameter | None
    force_float32_reductions: bool

    def is_ours(self, x: Tensor) -> bool:
        is_exact = self.force_float32_reductions or at_least_float32(x) is x
        has_weight_only = self.weight is not None and self.bias is None
        return is_exact and has_weight_only and super().is_ours(x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ours(x):
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)


class LayerNormOfHeads(NormOfXLSTM):
    """The same of (..., H, C / H), of each head by itself and less its mean; then (..., C)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ours(x):
            return super().forward(x)
        y = F.layer_norm(at_least_float32(x), (x.shape[-1],), eps=self.eps)
        return y.to(x.dtype).flatten(-2) * self.weight


def unrounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)) in float32 or better."""
    return rms_norm(at_least_float32(x), at_least_float32(weight), eps)


def of_groups(x: Tensor, group_size: int, eps: float) -> Tensor:
    """x (..., C) / rms(x), of each group of channels by itself."""
    ones = torch.ones(group_size, dtype=x.dtype, device=x.device)
    return rms_norm(x.unflatten(-1, (-1, group_size)), ones, eps).flatten(-2)
