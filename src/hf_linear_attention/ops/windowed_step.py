# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The window's compiled ops, and for which tensors they are: on the CPU, where no gradient is
wanted.
"""

import torch
from torch import Tensor

from .backends import has_compiled, native_op
from .checks import is_traced
from .numerics import is_transformed, needs_grad

IS_WANTED = has_compiled()
window_step_ = native_op("window_step_")
join_with_sums = native_op("join_with_sums")


def takes_window_step(q: Tensor, window: Tensor, num_sinks: int) -> bool:
    """Whether `window_step_` takes a token with such queries, and counts that far."""
    W = window.shape[1]
    return (
        IS_WANTED
        and q.is_cpu
        and q.dtype is window.dtype
        and W * (W + num_sinks + 1) <= 2**24
        and not is_transformed()
    )


def takes_join(y: Tensor, sums: Tensor, log_factor: Tensor) -> bool:
    """Whether `join_with_sums` takes these, of a token."""
    return (
        IS_WANTED
        and y.is_cpu
        and y.shape[1] == 1
        and not is_traced()
        and not is_transformed()
        and not (torch.is_grad_enabled() and needs_grad(y, sums, log_factor))
    )
