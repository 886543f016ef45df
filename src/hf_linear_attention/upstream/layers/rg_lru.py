# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RecurrentGemma's recurrent block in Transformers: a short convolution and the RG-LRU, a gated sum
for each channel. Transformers keeps the states on the modules, and so does this.

A token at position 0 begins a sequence, whatever is before it in its row: the end of another one,
or padding, which generate() puts at position 0, too. Transformers has it so for the sum; here
neither do windows of the convolution reach over it, and they go on from one piece of a sequence to
the next.

Source: De et al., "Griffin", arXiv 2402.19427, section 2.4.

Shapes: B batch, T time, C channels, H heads of P channels, W tokens that the convolution keeps.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.accelerate import force_accelerate_hooks

from ...ops.backends import Missing, choose, native_op
from ...ops.checks import is_readable
from ...ops.convolution import short_convolution
from ...ops.elementwise_scan import elementwise_scan
from ...ops.numerics import accumulation_dtype, at_least_float32
from .parts import ReplacedLayer

FORGETS_ALL = -1e30  # a log decay: finite, as it is multiplied with gradients


class OnModules(ReplacedLayer):
    """What keeps its states itself, and takes back no tokens. Transformers' convolution begins
    again with each piece, and sees padding.
    """

    takes_tokens_back = False
    is_cached = False

    @property
    def mended(self) -> set[str]:
        return {"padding", "pieces"}


class GatedUnit(OnModules):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t), a_t = exp(-8 softplus(parameter) r_t), channel
    by channel, with gates i_t and r_t of each head's x_t; at position 0, h_t = i_t x_t.

    Gates are in float32 or better.
    """

    num_attention_heads: int
    recurrent_param: Tensor  # (C,)
    input_gate_weight: Tensor  # (H, P, P)
    input_gate_bias: Tensor  # (H, P)
    recurrent_gate_weight: Tensor
    recurrent_gate_bias: Tensor
    recurrent_states: Tensor | None  # (B, C)

    def forward(self, activations: Tensor, position_ids: Tensor) -> Tensor:
        """activations (B, T, C), positions (B or 1, T) -> (B, T, C)"""
        x, sums = activations, accumulation_dtype(activations.dtype)
        before = self.recurrent_states
        if before is not None:
            before = before.to(x.device, sums)
        y, self.recurrent_states = choose(IMPLEMENTATIONS, None, x.device, x.dtype)(
            x,
            self.gate(x, self.input_gate_weight, self.input_gate_bias),
            self.gate(x, self.recurrent_gate_weight, self.recurrent_gate_bias),
            -8.0 * F.softplus(at_least_float32(self.recurrent_param)).to(sums),
            begins=(position_ids == 0).expand(x.shape[:2]),
            initial_state=before,
        )
        return y

    def reorder_states(self, rows: Tensor) -> None:
        """Each row goes on from the state of another, as beams do."""
        if self.recurrent_states is not None:
            self.recurrent_states = self.recurrent_states[rows.to(self.recurrent_states.device)]

    def gate(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """What each head's channels of x (B, T, C) are projected to: (B, T, H, P), of x's dtype."""
        by_heads = x.unflatten(-1, (self.num_attention_heads, -1))
        projected = torch.baddbmm(bias[:, None], by_heads.flatten(0, 1).transpose(0, 1), weight)
        return projected.transpose(0, 1).view(by_heads.shape).to(x.dtype)  # from (H, B T, P)


def rg_lru_by_scan(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    rate: Tensor,
    *,
    begins: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `native.rg_lru.forward`, in PyTorch around the elementwise scan. Differentiable any number
    of times.
    """
    # There is a module of the class of this, so this is loaded.
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

    i_gate, r_gate = (gate.flatten(2).to(rate.dtype) for gate in (input_gate, recurrent_gate))
    i, root_of_r = i_gate.sigmoid(), (F.logsigmoid(r_gate) / 2).exp()
    # An infinite rate forgets all, whatever r was rounded to, and by the root of r no gradient is
    # multiplied with a large rate alone.
    forgets_all, begins = rate == -torch.inf, begins[..., None]
    finite = rate.masked_fill(forgets_all, 0)
    log_decay = torch.where(forgets_all, FORGETS_ALL, finite * root_of_r * root_of_r)
    root = SqrtBoundDerivative.apply(-torch.expm1(2 * log_decay))
    y, state = elementwise_scan(
        x * i.to(x.dtype) * torch.where(begins, 1, root).to(x.dtype),
        log_decay.masked_fill(begins, -torch.inf),
        initial_state=initial_state,
        return_state=True,
    )
    return y, state


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]] | Missing] = {
    "cuda": Missing("the RG-LRU has no CUDA kernels"),
    "cpu": native_op("rg_lru"),
    "chunked": rg_lru_by_scan,
    "reference": rg_lru_by_scan,
}


class RecurrentBlock(OnModules):
    """The convolution of one branch of the hidden states, then the RG-LRU; the other branch is a
    gate.
    """

    linear_x: nn.Module
    linear_y: nn.Module
    linear_out: nn.Module
    act_fn: nn.Module
    conv_1d: nn.Conv1d
    rg_lru: GatedUnit
    conv1d_state: Tensor | None  # (B, C, W)

    @force_accelerate_hooks("conv_1d")  # its weights are read without calling it
    def forward(
        self,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """input_states (B, T, hidden), positions (B or 1, T) -> the same, and no weights."""
        gate = self.act_fn(self.linear_y(input_states))
        x = self.linear_x(input_states)
        state = self.conv1d_state  # empty ones that the model makes may have too few channels
        if not use_cache or state is None or state.mT.shape[::2] != x.shape[::2]:
            self.conv1d_state = self.rg_lru.recurrent_states = None
        x, state = self.convolved(x, position_ids)
        x = self.rg_lru(x, position_ids)
        if use_cache:
            self.conv1d_state = state
        else:
            self.rg_lru.recurrent_states = None
        return self.linear_out(x * gate), None

    def reorder_states(self, rows: Tensor) -> None:
        """As of the RG-LRU, which is asked by itself."""
        if self.conv1d_state is not None:
            self.conv1d_state = self.conv1d_state[rows.to(self.conv1d_state.device)]

    def convolved(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, C), each token with those before it in its sequence, and the state after it."""
        weight, bias = self.conv_1d.weight[:, 0], self.conv_1d.bias
        (B, T, C), W, positions = x.shape, weight.shape[1] - 1, position_ids[..., None]
        if self.conv1d_state is None:
            before = x.new_zeros(B, W, C)
        else:
            before = torch.where(positions[:, :1] == 0, 0, self.conv1d_state.mT.to(x))
        if is_readable(position_ids):
            begins = position_ids.expand(B, T) == 0
            y = by_sequences(x, weight, bias, begins, before)
        else:
            together = torch.cat([before, x], 1)
            y = torch.zeros_like(x) if bias is None else bias
            for lag in range(W + 1):
                earlier = together[:, W - lag : W - lag + T] * weight[:, W - lag]
                y = y + torch.where(positions >= lag, earlier, 0)
        lags = torch.arange(W, 0, -1, device=x.device)[:, None] - 1  # from the last token
        last = torch.cat([before[:, T:], x[:, max(T - W, 0) :]], 1)
        state = torch.where(positions[:, -1:] >= lags, last, 0)
        return y.to(x.dtype), state.mT


def by_sequences(
    x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, before: Tensor
) -> Tensor:
    """The short convolution of x (B, T, C), whose rows go on from `before` (B, W, C), and have
    sequences that begin where `begins` (B, T), which is readable, says.
    """
    (B, T, C), bounds = x.shape, None
    if begins[:, 1:].any():  # all in one row
        starts = begins.index_fill(1, begins.new_zeros(1, dtype=torch.long), True)
        starts = starts.flatten().nonzero()[:, 0]
        bounds = torch.cat([starts, starts.new_tensor([B * T])])
        first = (starts % T == 0).nonzero()[:, 0]  # of its row of x
        nothing = x.new_zeros(len(starts), *before.shape[1:])
        x, before = x.reshape(1, B * T, C), nothing.index_copy(0, first, before)
    y, _ = short_convolution(
        *(x, weight, bias),
        activation=None,
        cu_seqlens=bounds,
        initial_state=before,
        return_state=True,
    )
    return y.reshape(B, T, C)
