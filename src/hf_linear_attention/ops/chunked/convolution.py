# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution in pure PyTorch, on any device: by its own convolution, once every real
token lies right after its predecessors.

Shapes: B batch, T time, C channels, S tokens of a state, N packed sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..arguments import IS_SILU, ConvolutionArguments
from ..numerics import accumulation_dtype, without_autocast
from ..tokens import sequence_of_each_token


def chunked_short_convolution(
    arguments: ConvolutionArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution of whole sequences; arguments as in `short_convolution`, unchecked.

    Returns y (B, T, C) and the state (B or N, S, C). Computes in float32, or float64 for float64
    inputs. Differentiable any number of times.
    """
    x, weight, bias, key_mask, activation = arguments
    (B, T, C), kernel_size = x.shape, weight.shape[1]
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = x.new_zeros(rows, kernel_size - 1, C)
    if T == 0:
        return x.clone(), initial_state.clone()
    S = initial_state.shape[1]
    dtype = accumulation_dtype(x.dtype)
    if key_mask is not None:
        x = torch.where(key_mask[..., None], x, 0)
    in_order, layout = _in_order(x, initial_state, key_mask, cu_seqlens)
    with without_autocast(x.device.type):  # it would take the sums to half precision
        u = F.conv1d(
            in_order[:, S - kernel_size + 1 :].to(dtype).transpose(1, 2),
            weight[:, None].to(dtype),
            None if bias is None else bias.to(dtype),
            groups=C,
        ).transpose(1, 2)
        y = (F.silu(u) if IS_SILU[activation] else u).to(x.dtype)
    if layout is None:
        return y, in_order[:, T:].clone(memory_format=torch.contiguous_format)
    y = y.gather(1, (layout.place - S)[..., None].expand(x.shape))
    if key_mask is not None:
        y = torch.where(key_mask[..., None], y, 0)
    last = layout.end[..., None] - S + torch.arange(S, device=x.device)  # (B, sequences, S)
    state = in_order.gather(1, last.flatten(1)[..., None].expand(-1, -1, C))
    return y, state.view(rows, S, C)


def chunked_short_convolution_step_(arguments: ConvolutionArguments, state: Tensor) -> Tensor:
    """One token of it, with the state updated in place; arguments as in `short_convolution_step_`,
    unchecked.
    """
    x, weight, bias, key_mask, activation = arguments
    dtype = accumulation_dtype(x.dtype)
    tokens = torch.cat([state, x[:, None]], dim=1)
    window = tokens[:, tokens.shape[1] - weight.shape[1] :]
    u = (window.to(dtype) * weight.t().to(dtype)).sum(1)
    if bias is not None:
        u = u + bias.to(dtype)
    y, after = (F.silu(u) if IS_SILU[activation] else u).to(x.dtype), tokens[:, 1:]
    if key_mask is not None:
        y = torch.where(key_mask[:, None], y, 0)
        after = torch.where(key_mask[:, None, None], after, state)
    state.copy_(after)
    return y


class _Layout(NamedTuple):
    place: Tensor  # (B, T): where each token of x is in order
    end: Tensor  # (B, sequences in a row): behind each one's last real token


def _in_order(
    x: Tensor, initial_state: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, _Layout | None]:
    """All tokens, each real one right after its predecessors: for each sequence of a row its
    initial state (S tokens), its real tokens, and its padding. Where they are, if not simply in x's
    order behind the state.
    """
    if key_mask is None and cu_seqlens is None:
        return torch.cat([initial_state, x], dim=1), None
    B, T, C = x.shape
    S, device = initial_state.shape[1], x.device
    if cu_seqlens is None:
        bounds = torch.tensor([0, T], device=device)
        sequence = torch.zeros(T, dtype=torch.long, device=device)
    else:
        bounds, sequence = cu_seqlens.long(), sequence_of_each_token(cu_seqlens, T)
    real = x.new_ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    real_before = F.pad(real.long().cumsum(1), (1, 0))  # (B, T + 1)
    starts = bounds[:-1]
    start = starts[sequence]  # (T,)
    rank = real_before[:, :-1] - real_before[:, start]  # of a real token among those of its own
    counts = real_before[:, bounds[1:]] - real_before[:, starts]
    token = torch.arange(T, device=device) - start
    rank = torch.where(real, rank, counts[:, sequence] + token - rank)  # padding goes behind
    behind_states = starts + S * torch.arange(1, len(bounds), device=device)  # (sequences,)
    place = behind_states[sequence] + rank
    of_states = (behind_states[:, None] - S + torch.arange(S, device=device)).flatten()
    in_order = x.new_zeros(B, T + len(of_states), C)
    in_order = in_order.index_copy(1, of_states, initial_state.reshape(B, -1, C))
    in_order = in_order.scatter(1, place[..., None].expand(x.shape), x)
    return in_order, _Layout(place, behind_states + counts)
