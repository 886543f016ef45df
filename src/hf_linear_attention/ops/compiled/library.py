# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The compiled library: loading it, and what it says of itself."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import DTYPES, check_key_mask

T = TypeVar("T", bound=Callable[..., Any])
LIBRARY_PATH = Path(__file__).parents[2] / "_C.so"


def load() -> ctypes.CDLL:
    """Loads the ops into torch, and the library's own few functions for Python.

    Raises:
        ImportError: the library is missing, is for another processor, or torch does not take it; it
            says why.
    """
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"the native library was not built ({LIBRARY_PATH} is missing). Installing with "
            "HF_LINEAR_ATTENTION_REQUIRE_NATIVE=1 shows why. It takes a wheel that has it, or a "
            "C++ compiler; for macOS and Windows it is built with that setting only, untried"
        )
    try:
        torch.ops.load_library(str(LIBRARY_PATH))
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(
            "the native library, which needs torch >= 2.10, can't be loaded with "
            f"torch {torch.__version__}: {reason}"
        ) from error
    library.hfla_registration_error.restype = ctypes.c_char_p
    library.hfla_cpu_instruction_set.restype = ctypes.c_char_p
    library.hfla_cpu_instruction_sets_built.restype = ctypes.c_char_p
    library.hfla_cuda_architectures.restype = ctypes.c_char_p
    library.hfla_feature_maps.restype = ctypes.c_char_p
    library.hfla_recordable_operations.restype = ctypes.c_char_p
    library.hfla_kept_bytes.restype = ctypes.c_int64
    library.hfla_free_kept_memory.restype = None
    library.hfla_delete_recording.argtypes = (ctypes.c_int64,)
    library.hfla_delete_recording.restype = None
    reason = library.hfla_registration_error()
    if reason is not None:
        raise ImportError(
            f"torch refused the ops of {LIBRARY_PATH} (is another copy loaded?): {reason.decode()}"
        )
    why_not = ctypes.c_char_p()
    forced = os.environ.get("HF_LINEAR_ATTENTION_CPU_ISA")  # is refused where it is used
    if library.hfla_cpu_instruction_set(ctypes.byref(why_not)) is None and not forced:
        assert why_not.value is not None
        raise ImportError(why_not.value.decode())
    return library


_library = load()
ops = torch.ops.hf_linear_attention


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """An optional argument as the ops take those that may not have any strides."""
    return None if tensor is None else tensor.contiguous()


def register_fake(name: str, library: torch.library.Library) -> Callable[[T], T]:
    """Says what an op of ours gives, as `torch.library.register_fake` does, for tensors that are on
    one device: PyTorch asks this of others, too, where one has no data.
    """

    def register(fake: T) -> T:
        def checked(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            devices = list(dict.fromkeys(str(x.device) for x in tensors))
            if len(devices) > 1:
                raise RuntimeError(
                    f"hf_linear_attention::{name}: all tensors must be on one device, got tensors "
                    f"on {' and '.join(devices)}"
                )
            return fake(*args, **kwargs)

        torch.library.register_fake(f"hf_linear_attention::{name}", checked, lib=library)
        return fake

    return register


def as_mask(
    key_mask: Tensor | None, x: Tensor, name: str = "q", features: int = 2
) -> Tensor | None:
    """key_mask as the ops take it: of x, called `name`, without its last dimensions, `features`."""
    if key_mask is not None and key_mask.dtype is not torch.bool:
        key_mask = check_key_mask(key_mask, x, name, features)
    return contiguous(key_mask)


def as_bounds(cu_seqlens: Tensor | None) -> Tensor | None:
    """cu_seqlens as the ops take it."""
    if cu_seqlens is None:
        return None
    return (cu_seqlens.int() if cu_seqlens.dtype is torch.int64 else cu_seqlens).contiguous()


def as_dtype(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x as the ops take it; as it is where it is no float, so that they refuse it."""
    return x if x is None or x.dtype is dtype or x.dtype not in DTYPES else x.to(dtype)


def cpu_instruction_set() -> str:
    """The instruction set that the CPU kernels use here, such as "avx2".

    Raises:
        RuntimeError: HF_LINEAR_ATTENTION_CPU_ISA names one that was not built or can't run here.
    """
    why_not = ctypes.c_char_p()
    name = _library.hfla_cpu_instruction_set(ctypes.byref(why_not))
    if name is None:
        assert why_not.value is not None
        raise RuntimeError(why_not.value.decode())
    return name.decode()


def cpu_instruction_sets_built() -> list[str]:
    """All that this build could use, best first."""
    return _library.hfla_cpu_instruction_sets_built().decode().split(", ")


def why_no_op_runs() -> str | None:
    """Which variable of the environment has a value that every op on the CPU refuses, and how; None
    where they run.
    """
    x = torch.ones(1)
    try:
        ops.rms_norm.default(x[None], x, 0.0)
    except RuntimeError as error:
        return str(error).removeprefix("hf_linear_attention::rms_norm: ")
    return None


def kept_bytes() -> int:
    """How much memory of earlier results on the CPU is kept for the next ones, no tensor on it.

    At most HF_LINEAR_ATTENTION_KEPT_MB (256 by default) megabytes of 2^20 bytes.
    """
    return _library.hfla_kept_bytes()


def free_kept_memory() -> None:
    """Gives all of it back. The ops do so themselves with what has been kept for 10 seconds."""
    _library.hfla_free_kept_memory()


def feature_maps() -> tuple[str, ...]:
    """The names of the feature maps that the kernels know, in the order of their enum."""
    return tuple(_library.hfla_feature_maps().decode().split(", "))


def recordable_operations() -> tuple[str, ...]:
    """The names of what `run_recording` can call, in the order of the numbers that it knows."""
    return tuple(_library.hfla_recordable_operations().decode().split(", "))


def delete_recording(number: int) -> None:
    """Gives back what a recording of `make_recording` keeps."""
    _library.hfla_delete_recording(number)


def cuda_architectures() -> list[str]:
    """What the CUDA kernels were compiled for, such as ["sm_90", "compute_80"]; "compute" is PTX,
    which the driver compiles for newer devices. Empty where this build has none.
    """
    names = _library.hfla_cuda_architectures().decode()
    return names.split(", ") if names else []
