# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Backends: the compiled kernels on CUDA or the CPU, PyTorch in chunks, or a plain loop.

Each op has a table from a backend's name to what that backend has for it.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .numerics import is_transformed, needs_grad

WHY_NO_NATIVE: str | None = None
try:
    from . import compiled
except ImportError as error:
    WHY_NO_NATIVE = str(error)

FORCED_BACKEND = os.environ.get("HF_LINEAR_ATTENTION_BACKEND") or None  # read once, at import


@dataclass(frozen=True)
class Missing:
    """In the place of what is not here; calling it raises a RuntimeError."""

    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self.reason)


def native_op(name: str) -> Callable[..., Any]:
    """A function of the compiled library, or what stands for it as `Missing`."""
    return compiled.OPS[name] if WHY_NO_NATIVE is None else Missing(WHY_NO_NATIVE)


cpu_instruction_set = native_op("cpu_instruction_set")


def instruction_set() -> str:
    """Which one the compiled kernels use on this CPU; empty where none runs here."""
    try:
        return cpu_instruction_set()
    except RuntimeError:
        return ""


T = TypeVar("T")


def if_compiled(implementation: T) -> T | Missing:
    """For an op's table: an implementation by compiled functions, or why there are none."""
    return implementation if WHY_NO_NATIVE is None else Missing(WHY_NO_NATIVE)


def has_compiled() -> bool:
    """Whether compiled functions of the CPU are there, and wanted, for what PyTorch does too."""
    return FORCED_BACKEND in (None, "cpu") and WHY_NO_NATIVE is None


ARE_WANTED = has_compiled()
ONE_OP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes_one_op(x: Tensor, *alike: Tensor, floats: tuple[Tensor, ...] = ()) -> bool:
    """Whether several operations on the CPU, element by element, may be one of the library's: no
    gradient is wanted of these, nor a graph, and all but x are contiguous: `alike` in x's dtype,
    `floats` in this or float32.
    """
    others = *alike, *floats
    return (
        ARE_WANTED
        and x.is_cpu
        and x.dtype in ONE_OP_DTYPES
        and all(type(y) is Tensor or type(y) is nn.Parameter for y in (x, *others))
        and all(y.dtype is x.dtype for y in alike)
        and all(y.dtype in (x.dtype, torch.float32) for y in floats)
        and all(y.is_contiguous() for y in others)
        and not (torch.is_grad_enabled() and needs_grad(x, *others))
        and not torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not is_transformed()
    )


class Implementation(NamedTuple):
    """What a backend has for an op. Its arguments are a NamedTuple of ops/arguments.py."""

    run: Callable[..., tuple[Any, Any]]  # (arguments, cu_seqlens, initial_state) -> y and the state
    step_: Callable[..., Any]  # (arguments, state) -> y of one token; the state changes in place
    checks: bool = False  # it takes arguments as they come, and raises where one is wrong
    finds_slots: bool = False  # step_ takes state_indices, too
    reads_cu_seqlens: bool = False  # on the host, so their values may be checked on any device
    # (arguments, cu_seqlens, state, state_indices, is_new) -> y; the state changes in its slots.
    # None: states are copied out of their slots and back.
    run_in_slots: Callable[..., Any] | None = None


def kernels(name: str, find_slots: bool = False) -> Implementation | Missing:
    """What the compiled library has for an op; find_slots: over sequences, too."""
    in_slots = native_op(f"{name}_") if find_slots else None
    run, step_ = native_op(name), native_op(f"{name}_step_")
    return if_compiled(Implementation(run, step_, True, True, run_in_slots=in_slots))


class Backend(NamedTuple):
    """Where ops run, and on which tensors."""

    name: str
    device_types: tuple[str, ...] = ()  # empty: any
    dtypes: tuple[torch.dtype, ...] = ()  # empty: all
    why_missing: str | None = None  # None: it is here
    # Asked about the index of a device of device_types, where not all of these will do.
    why_not_on: Callable[[int | None], str | None] | None = None

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend can't run on tensors like these; None where it can."""
        if self.device_types and device.type not in self.device_types:
            return (
                f"it runs on {' and '.join(self.device_types)} tensors, and q is on {device.type}"
            )
        return self.why_not_there(device, dtype)

    def why_not_there(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """As why_not, of devices of device_types."""
        if self.why_missing is not None:
            return self.why_missing
        if self.dtypes and dtype not in self.dtypes:
            return f"it has no {str(dtype).removeprefix('torch.')}"
        if self.device_types and is_transformed():
            return "it has no forward-mode derivatives, and none by torch.func"
        return None if self.why_not_on is None else self.why_not_on(device.index)


_why_not_on_cuda = native_op("why_not_on_cuda")
BACKENDS = (  # in order of preference
    Backend(
        "cuda",
        device_types=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_missing=_why_not_on_cuda.reason if isinstance(_why_not_on_cuda, Missing) else None,
        why_not_on=_why_not_on_cuda,
    ),
    Backend("cpu", device_types=("cpu",), why_missing=WHY_NO_NATIVE),
    Backend("chunked"),
    Backend("reference"),
)


def choose(
    implementations: Mapping[str, T | Missing],
    name: str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> T:
    """What the first backend that runs on tensors like these has for an op, or the one named here
    or by FORCED_BACKEND.

    Raises:
        ValueError: there is no such backend. RuntimeError: it can't run here, and says why.
    """
    if name is not None or FORCED_BACKEND is not None:
        return _named(implementations, name or FORCED_BACKEND, device, dtype)
    device_type = device.type  # asked for once, since this runs for every layer and token
    for backend in BACKENDS:
        if backend.device_types:
            if device_type not in backend.device_types:
                continue
        elif WHY_NO_NATIVE is not None:  # chunked, which always runs: reference is never reached
            _warn_of_no_kernels()
        found = implementations[backend.name]
        if not isinstance(found, Missing) and backend.why_not_there(device, dtype) is None:
            return found
    raise AssertionError("chunked runs everywhere")


_has_warned = False


def _warn_of_no_kernels() -> None:
    """Once, where the package is installed without them; without the package nobody expects any."""
    global _has_warned
    if _has_warned or torch.compiler.is_compiling() or "hf_linear_attention" not in sys.modules:
        return
    _has_warned = True
    warnings.warn(
        "hf-linear-attention is installed without compiled kernels, and PyTorch computes, several "
        "times slower: `python -m hf_linear_attention` says why. "
        "HF_LINEAR_ATTENTION_BACKEND=chunked silences this.",
        stacklevel=2,
    )


def _named(
    implementations: Mapping[str, T | Missing],
    name: str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> T:
    for backend in BACKENDS:
        if backend.name == name:
            reason = backend.why_not(device, dtype)
            found = implementations[name]
            if reason is None:
                if not isinstance(found, Missing):
                    return found
                reason = found.reason
            raise RuntimeError(f"backend {name!r} can't run: {reason}")
    choices = ", ".join(repr(backend.name) for backend in BACKENDS)
    where = "HF_LINEAR_ATTENTION_BACKEND" if name == FORCED_BACKEND else "backend"
    raise ValueError(f"{where} must be one of {choices}, got {name!r}")


def forced_backend() -> str | None:
    """The one that runs where none is named."""
    return FORCED_BACKEND


def choose_backend(
    name: str | None, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Backend:
    """`choose` for an op that every backend has; returns the backend itself."""
    themselves = {backend.name: backend for backend in BACKENDS}
    return choose(themselves, name, torch.device(device), dtype)


def backend_report() -> dict[str, str | None]:
    """Every backend in order of preference, with the reason why it can't run here, or None."""
    report = {backend.name: backend.why_missing for backend in BACKENDS}
    if report["cuda"] is None:
        report["cuda"] = _why_not_on_cuda(None)
    return report
