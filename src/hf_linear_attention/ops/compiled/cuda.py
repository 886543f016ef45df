# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Whether the CUDA kernels of this build run on a device."""

import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import LinearArguments
from . import linear_attention
from .library import cuda_architectures

NO_CUDA = ("this build has no CUDA kernels", "torch finds no CUDA device")  # nothing to warn of
_found: dict[int | None, str | None] = {}  # answers of why_not_on_cuda


@torch.compiler.assume_constant_result
def why_not_on_cuda(index: int | None) -> str | None:
    """Why these kernels can't run on the CUDA device of this index (None: the current one), or None
    where they can.

    Whether a driver takes them is seen only by a call: the first question makes a tiny one. A GPU
    that is here and can't run them is worth one warning.
    """
    if index in _found:
        return _found[index]
    why_not = _why_not_by_build(index)
    if why_not is None:
        if index is None:
            return why_not_on_cuda(torch.cuda.current_device())
        if torch.cuda.is_current_stream_capturing():
            return None  # nobody can wait for a result now; the next question makes the call
        why_not = _why_a_call_fails(torch.device("cuda", index))
    _found[index] = why_not
    if index is not None and why_not not in (None, *NO_CUDA):
        warnings.warn(f"linear attention is slower on cuda:{index}: {why_not}", stacklevel=2)
    return why_not


def has_cuda() -> bool:
    """Whether this build has CUDA kernels."""
    return bool(cuda_architectures())


def _why_not_by_build(index: int | None) -> str | None:
    if not has_cuda():
        return NO_CUDA[0]
    if not torch.cuda.is_available():
        return NO_CUDA[1]
    return why_no_kernels_for(torch.cuda.get_device_capability(index))


def why_no_kernels_for(capability: tuple[int, int]) -> str | None:
    """Why this build's CUDA kernels can't run on a device of this compute capability."""
    major, minor = capability
    for name in cuda_architectures():
        kind, number = name.rstrip("af").split("_")
        built = int(number[:-1]), int(number[-1])
        exactly = name.endswith("a")
        if (
            capability == built
            or not exactly
            and (
                capability > built if kind == "compute" else major == built[0] and minor > built[1]
            )
        ):
            return None
    return (
        f"this build's CUDA kernels are for {', '.join(cuda_architectures())}, and the device has "
        f"compute capability {major}.{minor}"
    )


def _why_a_call_fails(device: torch.device) -> str | None:
    """What a call on one number says, such as that the driver is older than the CUDA runtime of
    this build; None where it gives a result.
    """
    # Whoever asks may be tracing, where calls only look real.
    with _disable_current_modes(), torch.no_grad():
        x = torch.ones(1, 1, 1, 1, device=device)
        try:
            y, _ = linear_attention.forward(LinearArguments(x, x, x, normalize=False))
            y.item()  # waits
        except torch.OutOfMemoryError:  # that says nothing about the kernels
            raise
        except RuntimeError as error:
            return f"its kernels fail on {device}: {error}"
    return None
