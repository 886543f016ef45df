# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The short convolution as layers ask for it, by PyTorch alone."""

from torch import Tensor

from ....ops.arguments import ConvolutionArguments
from ....ops.chunked.convolution import chunked_short_convolution, chunked_short_convolution_step_


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor]:
    """Over whole sequences x (B, T, C), with a weight (C, kernel size): y and the state (B, S, C),
    the last tokens.
    """
    arguments = ConvolutionArguments(x, weight, bias, key_mask, activation)
    return chunked_short_convolution(arguments, cu_seqlens, initial_state)


def short_convolution_step_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None,
    key_mask: Tensor | None,
) -> Tensor:
    """One token x (B, C); `state` changes in place."""
    arguments = ConvolutionArguments(x, weight, bias, key_mask, activation)
    return chunked_short_convolution_step_(arguments, state)
