# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Recurrences by ONNX's operators: what a layer computes while it is written down as a graph.

Operators know no padding. Tokens that a mask hides are therefore behind the real ones of their row
(`Order`), where they write nothing and forget nothing.

Shapes: B batch, T time, Hq heads of queries, Hk of keys, Hv of values and states, K key dim, V
value dim, C channels, W tokens that a window keeps.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations import sdpa_attention

from ..model.auto import functions_in_module
from ..ops.numerics import L2_NORM_EPS, at_least_float32
from ..ops.tokens import behind
from ..recurrences.convolution import ConvolutionInputs, ConvolutionWindow
from ..recurrences.delta_product import ProductInputs, ProductRecurrence
from ..recurrences.delta_rule import DeltaInputs, DeltaRecurrence
from ..recurrences.elementwise_scan import ElementwiseInputs, ElementwiseRecurrence
from ..recurrences.linear_attention import LinearInputs, LinearRecurrence

MICROSOFT = "com.microsoft"


class Order(NamedTuple):
    """The tokens of each row, the real ones first."""

    column: Tensor  # (B, T) int64: where each stands in the input
    place: Tensor  # (B, T) int64: of each column, where its token is
    num_real: Tensor  # (B, 1) int64
    is_real: Tensor  # (B, T) bool, in this order

    @classmethod
    def of(cls, mask: Tensor) -> "Order":
        """Of a mask (B, T) of int64, 1 for real tokens and 0 for others."""
        num_real = mask.sum(1, keepdim=True)
        hidden = num_real + (1 - mask).cumsum(1) - 1
        place = torch.where(mask == 1, mask.cumsum(1) - 1, hidden)
        columns = torch.arange(mask.shape[1]).expand_as(mask)
        column = torch.zeros_like(mask).scatter(1, place, columns)
        return cls(column, place, num_real, columns < num_real)

    def last(self, x: Tensor, size: int) -> Tensor:
        """The last of (B, size + T, ...), where T tokens are behind `size` others, up to the last
        real one: (B, size, ...).
        """
        return take(x, self.num_real + torch.arange(size))


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, T, ...) at index (B, n): (B, n, ...)."""
    shape = *index.shape, *x.shape[2:]
    args = x, index[:, :, None]
    return torch.onnx.ops.symbolic(
        "GatherND", args, {"batch_dims": 1}, dtype=x.dtype, shape=shape, version=13
    )


def rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """As Transformers' `apply_rotary_pos_emb`, by the operator RotaryEmbedding: q and k (B, H, T,
    D), or (B, T, H, D) for unsqueeze_dim=2, with their first R features turned by cos and sin (B,
    T, R).
    """
    R = cos.shape[-1]
    cos, sin = (x[..., : R // 2].to(q.dtype) for x in (cos, sin))
    turned = []
    for x in (q, k):
        x = x if unsqueeze_dim == 1 else x.transpose(1, 2)
        y = torch.onnx.ops.symbolic(
            "RotaryEmbedding",
            (x, cos, sin),
            {"rotary_embedding_dim": R},
            dtype=x.dtype,
            shape=x.shape,
            version=23,
        )
        turned.append(y if unsqueeze_dim == 1 else y.transpose(1, 2))
    q, k = turned
    return q, k


ROTATION = {"apply_rotary_pos_emb": rotated}


def shared_keys() -> AbstractContextManager[None]:
    """While it lasts, PyTorch's attention gets keys that heads share as they are: ONNX's has such,
    PyTorch would copy them for each head.
    """
    return functions_in_module(sdpa_attention, {"use_gqa_in_sdpa": lambda *args: True})


def l2_normed(x: Tensor) -> Tensor:
    """As `ops.numerics.l2_normed`, by the operator RMSNormalization. Written out, it would lose
    its epsilon to onnxscript, for which 1e-8 is 0.
    """
    K = x.shape[-1]
    args = x, torch.full((K,), K**-0.5, dtype=x.dtype)
    return torch.onnx.ops.symbolic(
        "RMSNormalization",
        args,
        {"axis": -1, "epsilon": L2_NORM_EPS / K},
        dtype=x.dtype,
        shape=x.shape,
        version=23,
    )


def hide(x: Tensor, is_real: Tensor) -> Tensor:
    """x (B, T, ...) with 0 for tokens that are not."""
    return torch.where(behind(is_real, x), x, 0)


class Step(NamedTuple):
    """What a recurrence gives: outputs (B, T, ...), and the state after them."""

    y: Tensor
    state: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    is_real: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
) -> Step:
    """The operator LinearAttention, all float32.

    q (B, T, Hq, K), k (B, T, Hk, K), v (B, T, Hv, V); state (B, Hv, K, V); log_decay (B, T, Hv) or
    with K; beta (B, T, Hv), for the delta rule. -> y (B, T, Hq or Hv, V)
    """
    (B, T, Hv, V), Hk, Hq = v.shape, k.shape[2], q.shape[2]
    # The operator of the standard has no keys and queries that values share.
    k = k.repeat_interleave(Hv // Hk, 2) if Hk < Hv else k
    q = q.repeat_interleave(Hv // Hq, 2) if Hq < Hv else q
    rules = ("linear", "gated") if beta is None else ("delta", "gated_delta")
    per_token = [None if x is None else hide(x, is_real).flatten(2) for x in (log_decay, beta)]
    if beta is None:  # else a value is written by its beta
        v = hide(v, is_real)
    y, after = torch.onnx.ops.symbolic_multi_out(
        f"{MICROSOFT}::LinearAttention",
        (q.flatten(2), k.flatten(2), v.flatten(2), state, *per_token),
        {
            "q_num_heads": q.shape[2],
            "kv_num_heads": Hv,
            "update_rule": rules[log_decay is not None],
            "scale": scale,
        },
        dtypes=(torch.float32, torch.float32),
        shapes=((B, T, q.shape[2] * V), tuple(state.shape)),
        version=1,
    )
    return Step(y.unflatten(2, (q.shape[2], V)), after)


def by_linear_attention(
    recurrence: LinearRecurrence, inputs: LinearInputs, state: Tensor, order: Order
) -> Step:
    """The sum that normalises is one more column of values, all 1."""
    q, k = recurrence.mapped(inputs.q), recurrence.mapped(inputs.k)
    v = at_least_float32(inputs.v)
    if recurrence.normalize:
        v = F.pad(v, (0, 1), value=1.0)
    if inputs.write_strength is not None:
        v = v * inputs.write_strength[..., None]
    y, after = attend(q, k, v, state, order.is_real, inputs.log_decay, None, 1.0)
    if recurrence.normalize:
        y = y[..., :-1] / (y[..., -1:] + recurrence.eps)
    return Step(y.to(inputs.v.dtype), after)


def by_delta_rule(
    recurrence: DeltaRecurrence, inputs: DeltaInputs, state: Tensor, order: Order
) -> Step:
    q, k, v, beta, log_decay = inputs
    q, k = l2_normed(at_least_float32(q)), l2_normed(at_least_float32(k))
    scale = recurrence.key_dim**-0.5
    args = at_least_float32(v), state, order.is_real, log_decay, beta, scale
    y, after = attend(q, k, *args)
    return Step(y.to(v.dtype), after)


def by_delta_product(
    recurrence: ProductRecurrence, inputs: ProductInputs, state: Tensor, order: Order
) -> Step:
    n = inputs.num_steps
    of_steps = order._replace(is_real=order.is_real.repeat_interleave(n, 1))
    y, after = by_delta_rule(recurrence.rule, inputs.steps(), state, of_steps)
    return Step(y[:, n - 1 :: n], after)


def by_elementwise_scan(
    recurrence: ElementwiseRecurrence, inputs: ElementwiseInputs, state: Tensor, order: Order
) -> Step:
    """Every channel is a head with one feature, whose key is 1."""
    x = at_least_float32(inputs.x)[..., None]
    one = torch.ones_like(x)
    y, after = attend(one, one, x, state, order.is_real, inputs.log_decay, None, 1.0)
    return Step(y.squeeze(-1).to(inputs.x.dtype), after)


def by_convolution(
    recurrence: ConvolutionWindow, inputs: ConvolutionInputs, state: Tensor, order: Order
) -> Step:
    """The operator CausalConvWithState, whose state would be that after hidden tokens, too.

    state: (B, C, W)
    """
    x, weight, bias = inputs
    by_channel = x.transpose(1, 2)
    y, _ = torch.onnx.ops.symbolic_multi_out(
        f"{MICROSOFT}::CausalConvWithState",
        (by_channel, weight, bias, state),
        {"activation": recurrence.activation or "none"},
        dtypes=(x.dtype, x.dtype),
        shapes=(tuple(by_channel.shape), tuple(state.shape)),
        version=1,
    )
    seen = torch.cat([state.transpose(1, 2), x], 1)
    after = order.last(seen, recurrence.kernel_size - 1).transpose(1, 2)
    return Step(y.transpose(1, 2), after)


class Form(NamedTuple):
    """Of a recurrence as a graph has it.

    shape: of its state, of all rows but the batch.
    """

    run: Callable[[Any, Any, Tensor, Order], Step]
    shape: Callable[[Any], tuple[int, ...]]


FORMS: dict[type, Form] = {
    LinearRecurrence: Form(
        by_linear_attention, lambda r: (r.num_heads, r.key_dim, r.value_dim + r.normalize)
    ),
    DeltaRecurrence: Form(by_delta_rule, lambda r: (r.num_heads, r.key_dim, r.value_dim)),
    ProductRecurrence: Form(
        by_delta_product, lambda r: (r.rule.num_heads, r.rule.key_dim, r.rule.value_dim)
    ),
    ElementwiseRecurrence: Form(by_elementwise_scan, lambda r: (r.num_heads * r.head_dim, 1, 1)),
    ConvolutionWindow: Form(by_convolution, lambda r: (r.channels, r.kernel_size - 1)),
}
