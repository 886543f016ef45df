# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Backends' functions of arguments, bounds and a state, called with all of these by name."""

from collections.abc import Callable
from typing import Any

from hf_linear_attention.ops.arguments import (
    ConvolutionArguments,
    DeltaArguments,
    ElementwiseArguments,
    LinearArguments,
    SelectiveArguments,
)

ARGUMENTS = {
    "linear_attention": LinearArguments,
    "delta_rule": DeltaArguments,
    "short_convolution": ConvolutionArguments,
    "elementwise_scan": ElementwiseArguments,
    "selective_scan": SelectiveArguments,
}


def by_name(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the op over sequences; the first arguments may have no name."""

    def call(*tensors, cu_seqlens=None, initial_state=None, **others):
        options = {x: others.pop(x) for x in ("chunk_size",) if x in others}
        arguments = ARGUMENTS[op](*tensors, **others)
        return function(arguments, cu_seqlens, initial_state, **options)

    return call
