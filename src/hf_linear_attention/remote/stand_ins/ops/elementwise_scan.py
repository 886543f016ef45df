# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The elementwise scan as layers ask for it, by PyTorch alone."""

from torch import Tensor

from ....ops.arguments import ElementwiseArguments
from ....ops.chunked.elementwise_scan import (
    chunked_elementwise_scan,
    chunked_elementwise_scan_step_,
)
from ....ops.numerics import at_least_float32


def elementwise_scan(
    x: Tensor,
    log_decay: Tensor,
    *,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t) h_{t-1} + x_t of (B, T, C), and the last, (B, C). Qin et al.,
    arXiv 2311.04823, eq. 4.
    """
    arguments = ElementwiseArguments(x, at_least_float32(log_decay), key_mask)
    return chunked_elementwise_scan(arguments, cu_seqlens, initial_state)


def elementwise_scan_step_(
    x: Tensor, log_decay: Tensor, state: Tensor, *, key_mask: Tensor | None
) -> Tensor:
    """One token of it, (B, C); `state` changes in place."""
    arguments = ElementwiseArguments(x, at_least_float32(log_decay), key_mask)
    return chunked_elementwise_scan_step_(arguments, state)
