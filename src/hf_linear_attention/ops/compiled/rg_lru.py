# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The RG-LRU: what calls its compiled ops, their fakes and their gradients.

Shapes: B batch, T time, C channels in H heads of P.
"""

import torch
from torch import Tensor

from .gradients import register_gradient
from .library import contiguous, ops, register_fake

_forward = ops.rg_lru.default
_backward = ops.rg_lru_backward.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def forward(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    rate: Tensor,
    *,
    begins: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) sigmoid(input_gate_t) x_t, a_t = exp(rate
    sigmoid(recurrent_gate_t)), and without the root, and h_(t-1), where a sequence begins.
    Differentiable once; the root's derivative is at most 1,000.

    Args:
        x: (B, T, C), with any strides.
        input_gate, recurrent_gate: (B, T, H, P) of x's dtype, with any strides.
        rate: (C,) of the accumulation dtype, none above 0; -inf forgets all, whatever the gate.
        begins: (B, T) bool.
        initial_state: (B, C) of the accumulation dtype.

    Returns:
        y = h (B, T, C) of x's dtype and the state, as initial_state. All is computed in the
        accumulation dtype, and y rounded once.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    optional = (contiguous(z) for z in (begins, initial_state))
    return _forward(x, input_gate, recurrent_gate, rate.contiguous(), *optional)


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


@register_fake("rg_lru", _registrations)
def _fake_forward(x, input_gate, recurrent_gate, rate, begins, initial_state):
    return x.new_empty(x.shape), rate.new_empty(x.shape[0], x.shape[2])


@register_fake("rg_lru_backward", _registrations)
def _fake_backward(dy, dstate, y, x, input_gate, recurrent_gate, rate, begins, initial_state):
    of_inputs = (z.new_empty(z.shape) for z in (x, input_gate, recurrent_gate))
    of_states = rate.new_empty(x.shape[0], x.shape[2])
    dinitial_state = rate.new_empty(0) if initial_state is None else torch.empty_like(of_states)
    return *of_inputs, of_states, dinitial_state


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(output[0], *inputs)


def _differentiate(ctx, dy, dstate):
    *of_tokens, drate, dinitial_state = _backward(dy, contiguous(dstate), *ctx.saved_tensors)
    return *of_tokens, drate.sum(0), None, dinitial_state


register_gradient(
    _registrations,
    "rg_lru",
    "RG-LRU",
    _keep_for_backward,
    _differentiate,
    "set HF_LINEAR_ATTENTION_BACKEND=chunked",
)
