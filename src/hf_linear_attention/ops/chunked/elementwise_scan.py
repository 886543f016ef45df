# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan in pure PyTorch, on any device: all chunks of tokens at once, each by
halves; between chunks only the state passes.

Decays are multiplied with each other and with sums, never divided by: as each is at most 1, nothing
overflows, and one of 0 forgets all.

Shapes: B batch, T time, C channels, n chunks of L tokens, L a power of 2.
"""

import torch
from torch import Tensor

from ..any_length import has_any_length
from ..arguments import ElementwiseArguments
from ..chunks import CHUNK_SIZE, chunks_of, running
from ..numerics import accumulation_dtype, without_autocast
from ..tokens import behind


def chunked_elementwise_scan(
    arguments: ElementwiseArguments,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of whole sequences; arguments as in `elementwise_scan`, unchecked.

    Returns y (B, T, C) and the state (rows, C). Computes in float32, or float64 for float64 inputs.
    Differentiable any number of times.
    """
    x, log_decay, key_mask = arguments
    T = x.shape[1]
    C = CHUNK_SIZE if has_any_length() else min(CHUNK_SIZE, 1 << max(T - 1, 0).bit_length())
    layout = chunks_of(T, cu_seqlens, C)
    with without_autocast(x.device.type):  # it would take the sums to half precision
        inputs = [x.to(accumulation_dtype(x.dtype)), log_decay]
        if key_mask is not None:
            inputs = [torch.where(behind(key_mask, z), z, 0) for z in inputs]
        # of tokens that fill up a chunk both are 0: they write and forget nothing
        y, state = layout.carry(_scan, initial_state, *map(layout.split, inputs))
        y = layout.join(y)
        if key_mask is not None:
            y = torch.where(behind(key_mask, y), y, 0)
        return y.to(x.dtype), state


def chunked_elementwise_scan_step_(arguments: ElementwiseArguments, state: Tensor) -> Tensor:
    """One token of it, with the state updated in place; arguments as in `elementwise_scan_step_`,
    unchecked.
    """
    x, log_decay, key_mask = arguments
    y = after = torch.addcmul(x.to(state.dtype), log_decay.exp(), state)
    if key_mask is not None:
        y = torch.where(key_mask[:, None], after, 0)
        after = torch.where(key_mask[:, None], after, state)
    state.copy_(after)
    return y.to(x.dtype)


def _scan(initial: Tensor | None, x: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Through the chunks (B, n, L, C) of a sequence: y like x, and the last state (B, C)."""
    from_nothing = _from_nothing(x, log_decay.exp())
    # of all tokens of the chunk up to each; sums, since the gradient of products divides
    so_far = log_decay.cumsum(2)
    before, state = running(initial, from_nothing[:, :, -1], so_far[:, :, -1])
    return torch.addcmul(from_nothing, so_far.exp(), before[:, :, None]), state


def _from_nothing(x: Tensor, decay: Tensor) -> Tensor:
    """Each chunk's sums, where nothing was before it: those of pairs of tokens, which are a scan of
    half the length, are the sums at each second token, and give those between.
    """
    L = x.shape[2]
    if L == 1:
        return x
    first, second = slice(None, None, 2), slice(1, None, 2)
    of_pairs = torch.addcmul(x[:, :, second], decay[:, :, second], x[:, :, first])
    at_second = _from_nothing(of_pairs, decay[:, :, second] * decay[:, :, first])
    later = slice(2, None, 2)
    between = torch.addcmul(x[:, :, later], decay[:, :, later], at_second[:, :, :-1])
    at_first = torch.cat([x[:, :, :1], between], 2)
    return torch.stack([at_first, at_second], 3).flatten(2, 3)
