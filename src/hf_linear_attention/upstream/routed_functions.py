# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The functions that Transformers routes to fla, causal-conv1d and mamba_ssm where these are
installed, by our ops, under the same signatures and with the answers of Transformers' PyTorch
forms.

What one of ours has no op for (a gradient through a token that changes a state in place, a state
in half precision, ...) it hands to Transformers' form of PyTorch, its first argument.

Shapes: B batch, T time, C channels, H heads, G groups of heads, K key dim, V value dim, N sums of a
state for each channel.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..ops.convolution import short_convolution, short_convolution_step_
from ..ops.delta_rule import delta_rule
from ..ops.linear_attention import linear_attention, linear_attention_step_
from ..ops.numerics import accumulation_dtype, at_least_float32, needs_grad
from ..ops.selective_scan import selective_scan, selective_scan_step_
from .bounds import BOUNDS, bounds_for_layers

SILU = ("silu", "swish")
# Bounds of the packed sequences that the layer at work was given. (Not all layers hand them on to
# all of their functions.)
bounds_of_layer: ContextVar[Tensor | None] = ContextVar("bounds of a layer", default=None)


def bounds_now() -> Tensor | None:
    """None in a compiled graph, where layers refuse packed sequences."""
    return None if torch.compiler.is_compiling() else bounds_of_layer.get()


def _bounds(kwargs: Mapping[str, Any], B: int, T: int) -> Tensor | None:
    """Those of the layer, or what the function itself was given, of sequences in B T tokens."""
    bounds = bounds_now()
    if bounds is None:
        bounds = kwargs.get("cu_seqlens")
    return bounds_for_layers(kwargs if bounds is None else {BOUNDS: bounds}, B, T)


def causal_conv1d_fn(
    upstream: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """hidden_states (B, C, T) and weight (C, taps) -> (B, C, T), in memory as they lie."""
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    bounds, silu = _bounds(kwargs, *x.shape[:2]), activation in SILU
    y, _ = short_convolution(
        _one_row(x, bounds),
        weight,
        bias,
        activation="silu" if silu else None,
        cu_seqlens=bounds,
        return_state=True,
    )
    y = y.reshape(x.shape).transpose(1, 2)
    if activation is not None and not silu:
        y = ACT2FN[activation](y)
    y = y.to(hidden_states.dtype)
    return y.contiguous() if hidden_states.is_contiguous() else y


def causal_conv1d_update(
    upstream: Callable[..., Any],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """hidden_states (B, C, 1) and conv_state (B, C, taps), which changes in place -> (B, C, 1)"""
    if (
        hidden_states.shape[-1] != 1
        or not hidden_states.dtype == conv_state.dtype == weight.dtype
        or conv_state.shape[-1] < weight.shape[-1] - 1
        or _is_differentiated(hidden_states, conv_state, weight, bias)
    ):
        return upstream(hidden_states, conv_state, weight, bias, activation)
    silu = activation in SILU
    y = short_convolution_step_(
        hidden_states[:, :, 0],
        weight,
        bias,
        conv_state.transpose(1, 2),
        activation="silu" if silu else None,
    )
    if activation is not None and not silu:
        y = ACT2FN[activation](y)
    return y[:, :, None]


def chunk_gated_delta_rule(
    upstream: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query and key (B, T, Hk, K), value (B, T, Hv, V), g and beta (B, T, Hv) -> (B, T, Hv, V) and
    the state (B, Hv, K, V)
    """
    return _delta_rule(
        *(query, key, value, g, beta, initial_state, output_final_state),
        use_qk_l2norm_in_kernel,
        kwargs,
    )


def fused_recurrent_gated_delta_rule(
    upstream: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same."""
    return _delta_rule(
        *(query, key, value, g, beta, initial_state, output_final_state),
        use_qk_l2norm_in_kernel,
        kwargs,
    )


def fused_recurrent_kda(
    upstream: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same, with g (B, T, Hv, K)."""
    return _delta_rule(
        *(query, key, value, g, beta, initial_state, output_final_state),
        use_qk_l2norm_in_kernel,
        kwargs,
    )


def mamba_chunk_scan_combined(
    upstream: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """hidden_states (B, T, H, V), dt (B, T, H), A and D (H,), B and C (B, T, G, K) -> (B, T, H, V)
    and the state (B, H, V, K), which lies in memory as (B, H, K, V)
    """
    bounds = _bounds(kwargs, *hidden_states.shape[:2])
    dtype = _common_dtype(hidden_states, B, C)
    if not dt_softplus and dt_limit[0] < 0 and bounds is None:  # step sizes could be negative
        given = hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states
        return upstream(*given, dt_softplus, dt_limit, return_final_states)
    dt = at_least_float32(_step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit))
    state = None
    if initial_states is not None:
        state = initial_states.transpose(-1, -2).to(accumulation_dtype(dtype)).contiguous()
    q, k, v = (_one_row(x.to(dtype), bounds) for x in (C, B, hidden_states))
    y, (kv, _) = linear_attention(
        q,
        k,
        v,
        _one_row(A.to(dt.dtype) * dt, bounds),
        write_strength=_one_row(dt, bounds),
        normalize=False,
        cu_seqlens=bounds,
        initial_state=None if state is None else (state, None),
        return_state=True,
    )
    y = y.reshape(hidden_states.shape)
    if D is not None:
        y = torch.addcmul(y, hidden_states.to(dtype), D[..., None].to(dtype))
    y = y.to(hidden_states.dtype)
    return (y, kv.transpose(-1, -2)) if return_final_states else y


def selective_state_update_of_mamba2(
    upstream: Callable[..., Any],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """state (B, H, V, K), which changes in place; hidden_states, dt and z (B, H, V), A (H, V, K), B
    and C (B, G, K), D and dt_bias (H, V) -> (B, H, V)
    """
    one_each = dt[..., 0], A[:, 0, 0], None if dt_bias is None else dt_bias[:, 0]
    if (
        not all(map(_is_expanded, (dt, A, A.transpose(-1, -2), dt_bias)))
        or not dt_softplus  # step sizes could be negative
        or not hidden_states.dtype == B.dtype == C.dtype
        or state.dtype != accumulation_dtype(hidden_states.dtype)
        or _is_differentiated(state, hidden_states, dt, A, B, C, D, dt_bias, z)
    ):
        return upstream(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
    step_sizes = at_least_float32(_step_sizes(one_each[0], one_each[2], dt_softplus))
    kv = state.transpose(-1, -2)
    lies_as_ours = kv.is_contiguous()
    kv = kv.contiguous()  # beam search leaves another layout
    y = linear_attention_step_(
        *(C, B, hidden_states, (kv, None)),
        one_each[1].to(step_sizes.dtype) * step_sizes,
        write_strength=step_sizes,
        normalize=False,
    )
    if not lies_as_ours:
        state.copy_(kv.transpose(-1, -2))
    if D is not None:
        y = (y + hidden_states * D).to(y.dtype)
    return (y if z is None else y * F.silu(z)).to(hidden_states.dtype)


def selective_scan_fn(
    upstream: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """hidden_states, dt and z (B, C, T), A (C, N), B and C (B, N, T), D and delta_bias (C,) -> (B,
    C, T) and the state (B, C, N)
    """
    bounds = _bounds(kwargs, hidden_states.shape[0], hidden_states.shape[2])
    if not delta_softplus and bounds is None:  # step sizes could be negative
        given = hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state
        return upstream(*given, use_mambapy, use_associative_scan)
    x, write, read = (y.to(hidden_states.dtype).transpose(1, 2) for y in (hidden_states, B, C))
    step_sizes = at_least_float32(_step_sizes(dt.transpose(1, 2), delta_bias, delta_softplus))
    y, state = selective_scan(
        _one_row(x, bounds),
        _one_row(step_sizes, bounds),
        A,
        _one_row(write, bounds),
        _one_row(read, bounds),
        D,
        cu_seqlens=bounds,
        return_state=True,
    )
    y = y.reshape(x.shape).transpose(1, 2)
    y = (y if z is None else y * F.silu(z)).to(hidden_states.dtype)
    return (y, state) if return_last_state else y


def selective_state_update_of_mamba(
    upstream: Callable[..., Any],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """state (B, C, N), which changes in place; hidden_states, dt and z (B, C), A (C, N), B and C
    (B, N), D and dt_bias (C,) -> (B, C)
    """
    if (
        not dt_softplus  # step sizes could be negative
        or not hidden_states.dtype == B.dtype == C.dtype
        or state.dtype != accumulation_dtype(hidden_states.dtype)
        or _is_differentiated(state, hidden_states, dt, A, B, C, D, dt_bias, z)
    ):
        return upstream(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
    step_sizes = at_least_float32(_step_sizes(dt, dt_bias, dt_softplus))
    y = selective_scan_step_(hidden_states, step_sizes, A, B, C, D, state)
    return (y if z is None else y * F.silu(z)).to(hidden_states.dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalize_qk: bool,
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    bounds, dtype = _bounds(kwargs, *query.shape[:2]), _common_dtype(query, key, value)
    if initial_state is not None:
        initial_state = initial_state.to(accumulation_dtype(dtype))
    q, k, v = (_one_row(x.to(dtype), bounds) for x in (query, key, value))
    y, state = delta_rule(
        q,
        k,
        v,
        _one_row(beta, bounds),
        _one_row(g, bounds),
        normalize_qk=normalize_qk,
        cu_seqlens=bounds,
        initial_state=initial_state,
        return_state=True,
    )
    return y.reshape(value.shape).to(query.dtype), state if output_final_state else None


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _one_row(x: Tensor, bounds: Tensor | None) -> Tensor:
    """x (B, T, ...), as ops take packed sequences: (1, B T, ...)."""
    return x if bounds is None else x.flatten(0, 1)[None]


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _is_expanded(x: Tensor | None) -> bool:
    """Whether x is the same along its last dimension, as it lies in memory."""
    return x is None or x.shape[-1] == 1 or x.stride(-1) == 0


def _is_differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and needs_grad(*tensors)
