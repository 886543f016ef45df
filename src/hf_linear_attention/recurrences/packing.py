# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Where the sequences begin that a model's arguments say are packed into its rows.

Transformers' collators say it in three ways: with bounds, with the number of each token's sequence,
or with positions that begin again.

Shapes: B rows, T tokens of each, N sequences packed into all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.checks import can_look_at


def find_bounds(
    B: int,
    T: int,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor | None:
    """Bounds (N + 1,) int32 in all B T tokens, by the first of these that is given: the bounds, the
    numbers (B or 1, T), or positions (B or 1, T); None where rows hold one sequence each.
    """
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q.to(torch.int32)
    if seq_idx is not None:
        begins = seq_idx.diff(dim=-1) != 0
    elif position_ids is not None:
        begins = position_ids.diff(dim=-1) != 1
    else:
        return None
    return bounds_where(begins, B, T) if begins.any() else None


def bounds_where(begins: Tensor, B: int, T: int) -> Tensor:
    """From begins (B or 1, T - 1), whether a sequence does after each token; each row does."""
    begins = F.pad(begins.expand(B, T - 1), (1, 0), value=True)
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=B * T).to(torch.int32)


def check_packing(B: int, T: int, cu_seq_lens_q: Any = None, seq_idx: Any = None) -> None:
    """Raises a ValueError where a caller gives no bounds of B T tokens, or no numbers of them."""
    if cu_seq_lens_q is not None:
        shape = shape_of(cu_seq_lens_q)
        if not isinstance(shape, tuple) or len(shape) != 1 or shape[0] == 0:
            raise ValueError(
                f"cu_seq_lens_q must be a tensor (number of sequences + 1,), got {shape}"
            )
        if cu_seq_lens_q.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cu_seq_lens_q must be int32 or int64, got {cu_seq_lens_q.dtype}")
        if can_look_at(cu_seq_lens_q, 1):
            found = cu_seq_lens_q.tolist()
            if found[0] != 0 or found[-1] != B * T or found != sorted(found):
                raise ValueError(
                    f"cu_seq_lens_q must rise from 0 to B T = {B * T} without falling, got {found}"
                )
    elif seq_idx is not None:
        check_rows("seq_idx", seq_idx, B, T)


def check_rows(name: str, given: Any, B: int, T: int) -> None:
    """Raises a ValueError where that is no tensor of a number for each token."""
    if shape_of(given) not in ((B, T), (1, T)):
        raise ValueError(
            f"{name} must be a tensor (B or 1, T) with B = {B} and T = {T}, got {shape_of(given)}"
        )


def shape_of(given: Any) -> Any:
    """For an error: a tensor's shape, or the type of anything else."""
    return tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
