# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Time cut into chunks, which is how PyTorch computes a recurrence fast.

Within a chunk, tokens meet as in masked attention; between chunks, only the state passes.
Shapes: B batch, T time, N packed sequences, n chunks of C tokens, H heads, K channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .any_length import first_tokens, has_any_length, num_chunks, scan_chunks

CHUNK_SIZE = 64  # a power of two
# Through more of them a float32 state would drift: equal summands are all rounded alike.
MANY_CHUNKS = 128
LOWEST_LOG_DECAY = -1e30  # forgets everything, as -inf does, and can still be added up

# (initial state (B, ...) or None, tensors (B, n, ...) or None of the chunks of a sequence) -> what
# chunks read of the states before them, (B, n, ...), and the last state.
Carry = Callable[..., tuple[Tensor, Tensor]]


class Padded:
    """(B, T, ...) <-> (B, n, C, ...): each row of the batch is one sequence, in whole chunks."""

    def __init__(self, T: int, C: int):
        self.C = max(C, 1)
        self.T, self.n = T, -(-T // self.C)
        if has_any_length():
            self.n = num_chunks(T, self.C)

    def split(self, x: Tensor) -> Tensor:
        padding = self.n * self.C - self.T
        if has_any_length() or padding > 0:
            x = nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (self.n, self.C))

    def join(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        return first_tokens(x, self.T) if has_any_length() else x[:, : self.T]

    def carry(
        self, how: Carry, initial: Tensor | None, *of_chunks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return how(initial, *of_chunks)


class Packed:
    """(1, T, ...) <-> (1, n, C, ...): sequences end to end, each one in whole chunks of its own."""

    def __init__(self, cu_seqlens: Tensor, T: int, C: int):
        N = max(cu_seqlens.shape[0] - 1, 1)
        # No longer than sequences are on average: less padding. A power of two, as some halve it.
        C = min(C, 1 << (max(16, T // N).bit_length() - 1))
        lengths = cu_seqlens.diff().long()
        chunks = (lengths + C - 1) // C
        first_places = (chunks.cumsum(0) - chunks) * C - cu_seqlens[:-1]
        shifts = first_places.repeat_interleave(lengths, output_size=T)
        self.places = torch.arange(T, device=lengths.device) + shifts
        self.C, self.chunks = C, chunks.tolist()

    def split(self, x: Tensor) -> Tensor:
        n = sum(self.chunks)
        padded = x.new_zeros(1, n * self.C, *x.shape[2:]).index_copy(1, self.places, x)
        return padded.unflatten(1, (n, self.C))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).index_select(1, self.places)

    def carry(
        self, how: Carry, initial: Tensor | None, first: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        N = len(self.chunks)
        sequences = zip(  # split: N slices would cost N zeroed gradients
            [None] * N if initial is None else initial.split(1),
            *([None] * N if x is None else x.split(self.chunks, 1) for x in (first, *others)),
            strict=True,
        )
        read, final = [], []
        for sequence in sequences:
            before, after = how(*sequence)
            read.append(before)
            final.append(after)
        if not final:  # N = 0
            before, after = how(None, first, *others)
            return before, after[:0]
        return torch.cat(read, 1), torch.cat(final)


def chunks_of(T: int, cu_seqlens: Tensor | None, chunk_size: int) -> Padded | Packed:
    """How sequences of T tokens, or packed ones, are cut."""
    if cu_seqlens is not None:
        return Packed(cu_seqlens, T, chunk_size)
    return Padded(T, chunk_size)


def sums_between(g: Tensor) -> Tensor:
    """out[..., t, j] = g[j + 1] + ... + g[t], and -inf for j > t: (..., C) -> (..., C, C).

    Added up for each pair: a difference of two running sums loses digits after a strong decay.
    """
    C = g.shape[-1]
    causal = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    sums = torch.where(causal.tril(-1), g[..., :, None], 0).cumsum(-2)
    return torch.where(causal, sums, -torch.inf)


def dtype_between(chunks: int, x: Tensor) -> torch.dtype:
    """The dtype of states that go from one of so many chunks to the next, of inputs like x."""
    if has_any_length():
        return x.dtype
    return torch.float64 if chunks > MANY_CHUNKS and x.device.type != "mps" else x.dtype


def running(
    initial: Tensor | None,
    added: Tensor,
    log_leave: Tensor | None = None,
    mixed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States between chunks: S_{i+1} = exp(log_leave_i) S_i - mixed_i S_i + added_i, of many in
    float64, where the device has that.

    Args:
        initial: (B, ..., K, V) or None for zeros.
        added, log_leave, mixed: (B, n, ..., K, V), (B, n, ..., 1 or K, 1), (B, n, ..., K, K).

    Returns:
        S_0, ..., S_{n-1} as added, and S_n.
    """
    n, dtype = added.shape[1], added.dtype
    kept = dtype_between(n, added)
    if initial is None:
        state = added.new_zeros(added.shape[:1] + added.shape[2:], dtype=kept)
    else:  # the result must not be the caller's tensor where n is 0
        state = initial.to(kept, copy=True)
    leave = None if log_leave is None else log_leave.to(kept).exp()

    def step(
        state: Tensor, new: Tensor, left: Tensor | None, mix: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        before = state.to(dtype)
        if mix is not None:
            new = new - mix @ before
        return new + state if left is None else torch.addcmul(new, state, left), before

    if has_any_length():
        before, state = scan_chunks(step, state, added, leave, mixed)
        return before, state.to(dtype)
    # unbind: n slices would each cost a gradient of all n
    of_chunks = ([None] * n if x is None else x.unbind(1) for x in (added, leave, mixed))
    read = []
    for of_chunk in zip(*of_chunks, strict=True):
        state, before = step(state, *of_chunk)
        read.append(before)
    return torch.stack(read, 1) if read else added, state.to(dtype)
