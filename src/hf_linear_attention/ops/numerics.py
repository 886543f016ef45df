# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How exact sums are: the dtypes that they are kept in, and what keeps autocast away from them; and
which derivatives compiled ops don't have.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

L2_NORM_EPS = 1e-6  # x / sqrt(sum(x^2) + eps), as Transformers norms queries and keys


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, denominators and sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def l2_normed(x: Tensor, eps: float = L2_NORM_EPS) -> Tensor:
    """x (..., K) divided by its norm, of which eps is part of the square."""
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def at_least_float32(x: Tensor) -> Tensor:
    """x in its accumulation dtype."""
    dtype = accumulation_dtype(x.dtype)
    return x if x.dtype is dtype else x.to(dtype)  # asked many times for every token


def bounded(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """x from low to high. The gradient at a bound is 1, as that of torch.clamp was before PyTorch
    2.14, where it is 0: what starts at a bound can be learned in either.
    """
    if low != -math.inf:
        x = torch.where(x < low, low, x)
    return x if high == math.inf else torch.where(x > high, high, x)


def without_excess(x: Tensor) -> Tensor:
    """x, which is at most 0 but for rounding, without what is more. The gradient is that of x."""
    return x - x.detach().clamp(min=0)


EARLY_POSITIONS = 4096


def angles_of(position_ids: Tensor, frequencies: Tensor) -> Tensor:
    """Positions (...) of whole numbers times frequencies (n,), in radians, float32 (..., n).

    Early ones are float32 products, as Transformers' are. Such a product is 0.03 off at the
    millionth position: later angles are computed in float64 and have no whole turns. MPS has no
    float64.
    """
    positions = position_ids[..., None]
    early = positions.float() * frequencies.float()
    if frequencies.device.type == "mps":
        return early
    late = (positions.double() * frequencies.double()).remainder(2 * math.pi).float()
    return torch.where(positions < EARLY_POSITIONS, early, late)


def rates_of(A_log: Tensor) -> Tensor:
    """-exp(A_log) in A_log's dtype. One of infinity times a step of 0 would be NaN, and so is the
    gradient of one close to it.
    """
    most = 0.7 * math.log(torch.finfo(A_log.dtype).max)
    return -bounded(A_log, high=most).exp()


def decay_of_steps(A_log: Tensor, steps: Tensor) -> Tensor:
    """-exp(A_log) steps (..., C), for A_log (H,), which C / H steps share; float32 or better."""
    rates = rates_of(at_least_float32(A_log))
    return (rates[:, None] * steps.unflatten(-1, (rates.numel(), -1))).flatten(-2)


class ExactBuffers(nn.Module):
    """Whose buffers no cast of the model rounds: nothing learned them, or will."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, exact in before.items():
            cast = self._buffers[name]
            if exact is not None and cast is not None and cast.is_floating_point():
                dtype = accumulation_dtype(cast.dtype)
                if cast.dtype is not dtype:
                    self._buffers[name] = exact.to(cast.device, dtype)
        return self


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether any of them has a gradient."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def is_transformed() -> bool:
    """Whether a function of torch.func, or forward-mode derivatives, are at work. Compiled ops know
    neither: the former raise, the latter would be zeros without a word.
    """
    return forward_ad._current_level >= 0 or _are_functorch_transforms_active()


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context for sums that autocast must not take to half precision."""
    # Meta tensors have no autocast; asking whether there is one breaks torch.compile in torch 2.10.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
