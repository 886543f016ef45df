# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The public functions: argument checks and the choice of a backend.

Shapes: B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed
sequences.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunked import (
    LinearAttentionState,
    accumulation_dtype,
    chunked_linear_attention,
    chunked_step_,
)
from .feature_maps import POINTWISE

# A copy of this file travels with every checkpoint; the kernels and the reference stay in the
# installed package.
OPS_INTERFACE_VERSION = 1
WHY_NO_COMPILED_OPS: str | None = None
try:
    from hf_linear_attention import _ops

    if _ops.INTERFACE_VERSION != OPS_INTERFACE_VERSION:
        raise ImportError(
            "the kernels of the installed hf-linear-attention have interface version "
            f"{_ops.INTERFACE_VERSION}, and this code needs {OPS_INTERFACE_VERSION}"
        )
except ImportError as error:
    WHY_NO_COMPILED_OPS = str(error)

WHY_NO_REFERENCE: str | None = None
try:
    from hf_linear_attention.reference import reference_linear_attention
except ImportError as error:
    WHY_NO_REFERENCE = str(error)

CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the kernels
DTYPES = (*CUDA_DTYPES, torch.float64)
FEATURE_MAP_INDEX: dict[str | None, int] = {
    None: 0,
    **{name: index for index, name in enumerate(POINTWISE)},
}
FORCED_BACKEND = os.environ.get("HF_LINEAR_ATTENTION_BACKEND") or None  # read once, at import


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    feature_map: str | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LinearAttentionState | tuple[Tensor, Tensor | None] | None = None,
    return_state: bool = False,
    normalize: bool = True,
    eps: float = 1e-6,
    is_causal: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    """Linear attention over whole sequences: for each head, with phi the feature map,

        S_t = exp(log_decay_t) S_{t-1} + phi(k_t) v_t^T
        z_t = exp(log_decay_t) z_{t-1} + phi(k_t)
        y_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + eps)          (the division only with `normalize`)

    Args:
        q, k, v: (B, T, Hq, K), (B, T, Hkv, K), (B, T, Hkv, V), of one dtype: float32, bfloat16,
            float16 or float64. Hkv divides Hq; query head h reads key-value head h // (Hq // Hkv).
            Any strides. On CUDA a NaN or an infinity in v can reach outputs a little before its
            token, as tensor cores multiply it by the zeros that keep later tokens out.
        log_decay: (B, T, Hkv), at most 0; -inf forgets everything. Only with `is_causal`. On CUDA
            its sign is not checked, because looking would wait for the device.
        feature_map: name of a pointwise phi, or None where q and k are mapped already.
        key_mask: (B, T), bool or 0/1, false for padding: such a token is neither written nor
            forgotten, its output and all its gradients are 0, and whatever its inputs hold (NaN,
            too) reaches nothing.
        cu_seqlens: (N + 1,) int32 or int64, bounds of N sequences packed in one row (B = 1): 0,
            ..., T. No state crosses a bound. On CUDA its values are not checked, either.
        initial_state: state to continue from, (kv, z) of shapes (B, Hkv, K, V) and (B, Hkv, K), N
            rows with `cu_seqlens`; float32, or float64 for float64 inputs; z is None without
            `normalize`.
        return_state: also return the state after the last token.
        is_causal: False reads, at every token, the sum over the whole sequence.
        backend: "cuda", "cpu", "chunked" or "reference"; None takes the first of `BACKENDS` that
            runs on q's device, or the one that the environment variable HF_LINEAR_ATTENTION_BACKEND
            named when this was imported.

    Returns:
        y (B, T, Hq, V) of q's dtype, or (y, LinearAttentionState) with `return_state`. Sums, states
        and denominators are kept in float32, or float64 for float64 inputs.

    Raises:
        ValueError: an argument is wrong; it says which, what was expected and what came.
        RuntimeError: the backend asked for can't run here; it says why.

    Source: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236; decay as in RetNet,
    arXiv 2307.08621.
    """
    chosen = choose_backend(backend, q.device.type, q.dtype)
    _check_tensors(q, k, v, 4)
    rows = q.shape[0]
    if cu_seqlens is not None:
        _check_cu_seqlens(
            cu_seqlens, q, readable=chosen.reads_cu_seqlens or _is_readable(cu_seqlens)
        )
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if initial_state is not None:
        _check_state(initial_state, "initial_state", k, v, rows, normalize)
    key_mask = _check_key_mask(key_mask, q)
    log_decay = _check_log_decay(log_decay, k, key_mask)
    if log_decay is not None and not is_causal:
        raise ValueError(
            "log_decay must be None with is_causal=False, where no token comes before another"
        )
    _check_options(feature_map, eps)
    y, state = chosen.run(
        q,
        k,
        v,
        log_decay,
        feature_map=feature_map,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        normalize=normalize,
        eps=eps,
        is_causal=is_causal,
    )
    return (y, state) if return_state else y


def linear_attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState | tuple[Tensor, Tensor | None],
    log_decay: Tensor | None = None,
    *,
    feature_map: str | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One token of `linear_attention` for every row, without gradient; `state` changes in place.

    Args:
        q, k, v: (B, Hq, K), (B, Hkv, K), (B, Hkv, V).
        state: contiguous kv (B, Hkv, K, V) and z (B, Hkv, K), float32, or float64 for float64
            inputs; z is None without `normalize`.
        log_decay, key_mask: (B, Hkv) and (B,).
        The others: as in `linear_attention`.

    Returns:
        y (B, Hq, V) of q's dtype.

    Raises:
        ValueError, RuntimeError: as `linear_attention`; RuntimeError also where a gradient would be
            needed.
    """
    if torch.is_grad_enabled() and _needs_grad(q, k, v, log_decay, *state):
        raise RuntimeError(
            "linear_attention_step_ updates its state in place and has no gradient: "
            "call it under torch.no_grad(), or use linear_attention"
        )
    step_ = choose_backend(backend, q.device.type, q.dtype).step_
    return step_(q, k, v, state, log_decay, feature_map, normalize, eps, key_mask)


class Backend(NamedTuple):
    """One implementation. `run` is given checked arguments; `step_` checks its own."""

    name: str
    device_types: tuple[str, ...]  # empty: any
    dtypes: tuple[torch.dtype, ...]  # empty: all
    why_missing: str | None  # None: it is here
    reads_cu_seqlens: bool  # on the host, so their values may be checked on any device
    run: Callable[..., tuple[Tensor, LinearAttentionState]]
    step_: Callable[..., Tensor]
    why_not_here: Callable[[], str | None] = lambda: None  # asked about tensors of device_types

    def why_not(self, device_type: str, dtype: torch.dtype) -> str | None:
        """Why this backend can't run on tensors like these; None where it can."""
        if self.device_types and device_type not in self.device_types:
            return (
                f"it runs on {' and '.join(self.device_types)} tensors, and q is on {device_type}"
            )
        if self.why_missing is not None:
            return self.why_missing
        if self.dtypes and dtype not in self.dtypes:
            return f"it has no {str(dtype).removeprefix('torch.')}"
        return self.why_not_here()


def choose_backend(
    name: str | None, device_type: str, dtype: torch.dtype = torch.float32
) -> Backend:
    """The first backend for tensors like these, or the one named here or by FORCED_BACKEND.

    Raises:
        ValueError: there is no such backend. RuntimeError: it can't run here.
    """
    name = name or FORCED_BACKEND
    if name is None:
        for backend in BACKENDS:  # chunked always runs, so reference is never reached
            if backend.why_not(device_type, dtype) is None:
                return backend
    for backend in BACKENDS:
        if backend.name == name:
            reason = backend.why_not(device_type, dtype)
            if reason is not None:
                raise RuntimeError(f"backend {name!r} can't run: {reason}")
            return backend
    choices = ", ".join(repr(backend.name) for backend in BACKENDS)
    where = "HF_LINEAR_ATTENTION_BACKEND" if name == FORCED_BACKEND else "backend"
    raise ValueError(f"{where} must be one of {choices}, got {name!r}")


def backend_report() -> dict[str, str | None]:
    """Every backend in order of preference, with the reason why it can't run here, or None."""
    report = {backend.name: backend.why_missing for backend in BACKENDS}
    if report["cuda"] is None:
        report["cuda"] = _why_not_this_gpu()
    return report


@torch.compiler.assume_constant_result
def _why_not_this_gpu() -> str | None:
    return _ask_about_this_gpu()


@functools.cache  # inside, since torch.compile looks through it
def _ask_about_this_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return _ops.why_no_kernels_for(torch.cuda.get_device_capability())


def _run_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    feature_map: str | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: tuple[Tensor, Tensor | None] | None,
    normalize: bool,
    eps: float,
    is_causal: bool,
) -> tuple[Tensor, LinearAttentionState]:
    kv, z = (None, None) if initial_state is None else initial_state
    index = FEATURE_MAP_INDEX[feature_map]
    y, _, kv, z = _ops.forward(
        q, k, v, log_decay, key_mask, cu_seqlens, kv, z, index, normalize, eps, is_causal
    )
    return y, LinearAttentionState(kv, z if normalize else None)


def _step_compiled_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
) -> Tensor:
    # This runs once per layer and token: what the kernel refuses is explained only afterwards.
    kv, z = state
    if not eps >= 0:  # the kernel takes any
        _check_options(feature_map, eps)
    try:
        if log_decay is not None and log_decay.dtype is not kv.dtype:
            log_decay = log_decay.to(kv.dtype)
        if key_mask is not None and key_mask.dtype is not torch.bool:
            key_mask = _check_key_mask(key_mask, q)
        index = FEATURE_MAP_INDEX[feature_map]
        return _ops.step_(q, k, v, log_decay, key_mask, kv, z, index, normalize, eps)
    except (RuntimeError, KeyError):
        _check_step(q, k, v, state, log_decay, feature_map, normalize, eps, key_mask)
        raise


def _step_chunked_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
) -> Tensor:
    log_decay, key_mask = _check_step(
        q, k, v, state, log_decay, feature_map, normalize, eps, key_mask
    )
    return chunked_step_(
        q, k, v, state, log_decay, feature_map=feature_map, eps=eps, key_mask=key_mask
    )


def _run_reference(*args: Any, **kwargs: Any) -> tuple[Tensor, LinearAttentionState]:
    y, (kv, z) = reference_linear_attention(*args, **kwargs)
    return y, LinearAttentionState(kv, z)


def _step_reference_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
) -> Tensor:
    log_decay, key_mask = _check_step(
        q, k, v, state, log_decay, feature_map, normalize, eps, key_mask
    )
    y, after = reference_linear_attention(
        q[:, None],
        k[:, None],
        v[:, None],
        None if log_decay is None else log_decay[:, None],
        feature_map=feature_map,
        key_mask=None if key_mask is None else key_mask[:, None],
        initial_state=state,
        normalize=normalize,
        eps=eps,
    )
    for old, new in zip(state, after, strict=True):
        if old is not None and new is not None:
            old.copy_(new)
    return y[:, 0]


WHY_NO_CUDA = WHY_NO_COMPILED_OPS
if WHY_NO_CUDA is None and not _ops.has_cuda():
    WHY_NO_CUDA = "this build has no CUDA kernels"

BACKENDS = (
    Backend(
        *("cuda", ("cuda",), CUDA_DTYPES, WHY_NO_CUDA, False, _run_compiled, _step_compiled_),
        why_not_here=_why_not_this_gpu,
    ),
    Backend("cpu", ("cpu",), (), WHY_NO_COMPILED_OPS, False, _run_compiled, _step_compiled_),
    Backend("chunked", (), (), None, True, chunked_linear_attention, _step_chunked_),
    Backend("reference", (), (), WHY_NO_REFERENCE, True, _run_reference, _step_reference_),
)


def _needs_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _is_readable(tensor: Tensor) -> bool:
    """Whether looking at values costs no synchronisation and breaks no compilation."""
    return (
        tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, dims: int) -> None:
    """Shapes, dtypes and devices of q, k, v: (B, T, H, D) for 4 dims, (B, H, D) for 3."""
    layout = "(B, T, H, D)" if dims == 4 else "(B, H, D)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(
                f"{name} must have the {dims} dimensions {layout}, got shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{name} must have q's {'B and T' if dims == 4 else 'B'} {tuple(q.shape[:-2])}, "
                f"got shape {tuple(x.shape)}"
            )
        if x.shape[-2] < 1 or x.shape[-1] < 1:
            raise ValueError(
                f"{name} must have at least one head and one feature, got shape {tuple(x.shape)}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's {q.shape[-1]} features, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have k's {k.shape[-2]} heads, got {v.shape[-2]}")
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"q must have a multiple of k's {k.shape[-2]} heads, got {q.shape[-2]}")


def _check_log_decay(log_decay: Tensor | None, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """log_decay in the accumulation dtype, of k's shape without its last dimension."""
    if log_decay is None:
        return None
    if log_decay.shape != k.shape[:-1]:
        raise ValueError(
            f"log_decay must have shape {tuple(k.shape[:-1])}, got {tuple(log_decay.shape)}"
        )
    if log_decay.device != k.device:
        raise ValueError(f"log_decay must be on q's device {k.device}, got {log_decay.device}")
    if log_decay.dtype not in DTYPES:
        raise ValueError(
            f"log_decay must be float32, bfloat16, float16 or float64, got {log_decay.dtype}"
        )
    if _is_readable(log_decay):
        positive = log_decay.detach() > 0
        if key_mask is not None:
            positive = positive & key_mask[..., None]
        if positive.any():
            raise ValueError(f"log_decay must be at most 0, got {log_decay[positive].max().item()}")
    return log_decay.to(accumulation_dtype(k.dtype))


def _check_key_mask(key_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """key_mask as bool, of q's shape without its last two dimensions."""
    if key_mask is None:
        return None
    if key_mask.shape != q.shape[:-2]:
        raise ValueError(
            f"key_mask must have shape {tuple(q.shape[:-2])}, got {tuple(key_mask.shape)}"
        )
    if key_mask.device != q.device:
        raise ValueError(f"key_mask must be on q's device {q.device}, got {key_mask.device}")
    if key_mask.dtype == torch.bool:
        return key_mask
    if _is_readable(key_mask):
        wrong = key_mask[(key_mask != 0) & (key_mask != 1)]
        if wrong.numel() > 0:
            raise ValueError(f"key_mask must hold bool or 0 and 1, got {wrong[0].item()}")
    return key_mask != 0


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, readable: bool) -> None:
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens must come with a batch of one packed row, got q of shape {tuple(q.shape)}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (N + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on q's device {q.device}, got {cu_seqlens.device}")
    if readable:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != q.shape[1] or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens must rise from 0 to T = {q.shape[1]} without falling, got {bounds}"
            )


def _check_state(
    state: tuple[Tensor, Tensor | None], name: str, k: Tensor, v: Tensor, rows: int, normalize: bool
) -> None:
    kv, z = state
    if normalize and z is None:
        raise ValueError(f"{name}.z must be a tensor with normalize=True, got None")
    if not normalize and z is not None:
        raise ValueError(
            f"{name}.z must be None with normalize=False, got a tensor of shape {tuple(z.shape)}"
        )
    dtype = accumulation_dtype(k.dtype)
    shape = (rows, k.shape[-2], k.shape[-1], v.shape[-1])
    for part, x, expected in (("kv", kv, shape), ("z", z, shape[:-1])):
        if x is None:
            continue
        if tuple(x.shape) != expected:
            raise ValueError(f"{name}.{part} must have shape {expected}, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise ValueError(f"{name}.{part} must be {dtype} for {k.dtype} inputs, got {x.dtype}")
        if x.device != k.device:
            raise ValueError(f"{name}.{part} must be on q's device {k.device}, got {x.device}")


def _check_options(feature_map: str | None, eps: float) -> None:
    if feature_map is not None and feature_map not in POINTWISE:
        raise ValueError(
            f"feature_map must be None or one of {', '.join(map(repr, POINTWISE))} "
            f"(other maps are applied to q and k before), got {feature_map!r}"
        )
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")


def _check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    log_decay: Tensor | None,
    feature_map: str | None,
    normalize: bool,
    eps: float,
    key_mask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Everything about one token's arguments; returns log_decay and key_mask in the dtypes that
    backends take.
    """
    _check_tensors(q, k, v, 3)
    _check_state(state, "state", k, v, q.shape[0], normalize)
    for name, x in zip(("kv", "z"), state, strict=True):
        if x is not None and not x.is_contiguous():
            raise ValueError(f"state.{name} must be contiguous, got strides {x.stride()}")
    key_mask = _check_key_mask(key_mask, q)
    log_decay = _check_log_decay(log_decay, k, key_mask)
    _check_options(feature_map, eps)
    return log_decay, key_mask
