# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The selective scan in pure PyTorch, on any device: what tokens do to the state is worked out for
a chunk of them at once, and so is what they read; between, a token is one operation.

Products of matrices, as for other recurrences, do not help: each sum of each channel has a decay of
its own.

Shapes: batch, T time, channels, N sums of a state, n chunks of L tokens, rows of states: as many as
there are sequences.
"""

import functools

import torch
from torch import Tensor

from ..any_length import has_any_length, scan_chunks
from ..arguments import SelectiveArguments
from ..chunks import chunks_of, dtype_between
from ..numerics import accumulation_dtype, without_autocast
from ..tokens import behind

CHUNK_SIZE = 32


def chunked_selective_scan(
    arguments: SelectiveArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of whole sequences; arguments as in `selective_scan`, unchecked.

    Returns y (batch, T, channels) and the state (rows, channels, N). Computes in float32, or
    float64 for float64 inputs. Differentiable any number of times.
    """
    x, dt, A, B, C, D, key_mask = arguments
    dtype = accumulation_dtype(x.dtype)
    L = CHUNK_SIZE if has_any_length() else min(CHUNK_SIZE, max(x.shape[1], 1))
    layout = chunks_of(x.shape[1], cu_seqlens, L)
    with without_autocast(x.device.type):  # it would take the sums to half precision
        inputs = [z.to(dtype) for z in (x, dt, B, C)]
        if key_mask is not None:
            inputs = [torch.where(behind(key_mask, z), z, 0) for z in inputs]
        of_chunks = (layout.split(z) for z in inputs)  # (batch, n, L, channels or N)
        y, state = layout.carry(functools.partial(_scan, A), initial_state, *of_chunks)
        y = layout.join(y)
        if D is not None:
            y = y + D * inputs[0]
        if key_mask is not None:
            y = torch.where(key_mask[..., None], y, 0)
        return y.to(x.dtype), state


def chunked_selective_scan_step_(arguments: SelectiveArguments, state: Tensor) -> Tensor:
    """One token of it, with the state updated in place; arguments as in `selective_scan_step_`,
    unchecked.
    """
    x, dt, A, B, C, D, key_mask = arguments
    x_t, B_t, C_t = (z.to(state.dtype) for z in (x, B, C))
    write = (dt * x_t)[..., None] * B_t[:, None]
    after = torch.addcmul(write, (dt[..., None] * A).exp(), state)
    y = (after * C_t[:, None]).sum(-1)
    if D is not None:
        y = y + D * x_t
    if key_mask is not None:
        y = torch.where(key_mask[:, None], y, 0)
        after = torch.where(key_mask[:, None, None], after, state)
    state.copy_(after)
    return y.to(x.dtype)


def _scan(
    A: Tensor, initial: Tensor | None, x: Tensor, dt: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """Through the chunks of a sequence: what they read (batch, n, L, channels), and the last state.

    Tokens that fill up a chunk have dt = 0: they write and forget nothing.
    """
    sums, dtype = dtype_between(x.shape[1], x), x.dtype
    A = A.to(sums)
    if initial is None:
        state = A.new_zeros(x.shape[0], *A.shape)
    else:  # the result must not be the caller's tensor where n is 0
        state = initial.to(sums, copy=True)

    def step(state: Tensor, *of_chunk: Tensor) -> tuple[Tensor, Tensor]:
        x_i, dt_i, B_i, C_i = (z.to(sums) for z in of_chunk)
        decay = (dt_i[..., None] * A).exp()  # (batch, L, channels, N)
        write = (dt_i * x_i)[..., None] * B_i[:, :, None]
        states = []
        for of_token, forget in zip(write.unbind(1), decay.unbind(1), strict=True):
            state = torch.addcmul(of_token, forget, state)
            states.append(state)
        return state, (torch.stack(states, 1) @ C_i[..., None])[..., 0].to(dtype)

    if has_any_length():
        y, state = scan_chunks(step, state, x, dt, B, C)
        return y, state.to(dtype)
    read = []
    # unbind: n slices would each cost a gradient of all n
    for of_chunk in zip(*(z.unbind(1) for z in (x, dt, B, C)), strict=True):
        state, y = step(state, *of_chunk)
        read.append(y)
    return torch.stack(read, 1) if read else x, state.to(dtype)
