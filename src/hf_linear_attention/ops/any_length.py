# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Graphs for any number of tokens, as torch.export makes them: of chunks there is no loop then, but
a scan, and no number of them is known.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan


def has_any_length() -> bool:
    """Whether such a graph is being made."""
    return torch.compiler.is_exporting()


def num_chunks(T: int, C: int) -> int:
    """Chunks of C for T tokens: two at least, for one would be special."""
    return (T + 2 * C - 1) // C


def first_tokens(x: Tensor, T: int) -> Tensor:
    """x (B, T or more, ...) -> (B, T, ...): that a slice would lie within x can't be proven."""
    return x.index_select(1, torch.arange(T, device=x.device))


def scan_chunks(
    step: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *of_chunks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """step(state, *of_chunk), which gives the next state and an output, of each chunk (B, ...), for
    None of None, one after the other: the outputs (B, n, ...) and the last state.
    """
    given = [x for x in of_chunks if x is not None]

    def of_one(state: Tensor, of_chunk: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rest = iter(of_chunk)
        after, output = step(state, *(None if x is None else next(rest) for x in of_chunks))
        return after, output.clone()  # no output may be an input

    state, outputs = scan(of_one, state, [x.movedim(1, 0) for x in given])
    return outputs.movedim(0, 1), state
