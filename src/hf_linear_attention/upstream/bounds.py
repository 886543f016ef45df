# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bounds of sequences packed in a row, as layers receive them.

Shapes: B batch, T time, N sequences.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.checks import is_readable

BOUNDS = "cu_seq_lens_q"  # the argument that models hand on to their layers
TOLD = (BOUNDS, "seq_idx")  # what layers read among their other arguments


class MaskAndBounds(NamedTuple):
    """What those models hand on in place of a mask."""

    mask: Tensor | None  # (B, T)
    bounds: Tensor  # (N + 1,)


def bounds_for_layers(kwargs: Mapping[str, Any], B: int, T: int) -> Tensor | None:
    """The bounds (N + 1,) of packed sequences in all B T tokens, int32, as `cu_seq_lens_q` or
    `seq_idx` say; None where neither is given.
    """
    bounds = kwargs.get(BOUNDS)
    if bounds is not None:
        return bounds.flatten().to(torch.int32)
    seq_idx = kwargs.get("seq_idx")
    return None if seq_idx is None else bounds_where_changed(seq_idx.diff(dim=-1) != 0, B, T)


def check_bounds(kwargs: Mapping[str, Any], B: int, T: int) -> None:
    """Of bounds that a model is given, in the words of that call.

    Raises:
        ValueError: they are no bounds of B T tokens.
    """
    bounds = kwargs.get(BOUNDS)
    if bounds is None:
        return
    if bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{BOUNDS} must be int32 or int64, got {bounds.dtype}")
    if is_readable(bounds):
        found = bounds.flatten().tolist()
        if found[:1] != [0] or found[-1] != B * T or found != sorted(found):
            raise ValueError(
                f"{BOUNDS} must rise from 0 to B T = {B * T} without falling, got {found}"
            )


def bounds_where_changed(is_new: Tensor, B: int, T: int) -> Tensor:
    """Bounds in all B T tokens from is_new (B or 1, T - 1), whether a sequence begins after each
    token; rows always begin one.
    """
    begins = F.pad(is_new.expand(B, T - 1), (1, 0), value=True)
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=B * T).to(torch.int32)
