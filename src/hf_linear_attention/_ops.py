# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The compiled ops: loads the native library and gives its ops fakes and gradients.

The only file that registers anything with torch. Importing it raises ImportError, with the reason,
where the library was not built or can't be loaded.

Shapes: B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed
sequences. Sums, states, denominators and log decays are in the accumulation dtype: float32, or
float64 for float64 inputs.
"""

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

INTERFACE_VERSION = (
    1  # of this module; code saved with a checkpoint asks for the one that it was written for
)
LIBRARY_PATH = Path(__file__).with_name("_C.so")


def _load_library() -> ctypes.CDLL:
    """Loads the ops into torch, and the library's own few functions for Python."""
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"the native library was not built ({LIBRARY_PATH} is missing). Installing with "
            "HF_LINEAR_ATTENTION_REQUIRE_NATIVE=1 shows why; it needs Linux and a C++ compiler"
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
    library.hfla_kept_bytes.restype = ctypes.c_int64
    library.hfla_free_kept_memory.restype = None
    reason = library.hfla_registration_error()
    if reason is not None:
        raise ImportError(
            f"torch refused the ops of {LIBRARY_PATH} (is another copy loaded?): {reason.decode()}"
        )
    return library


_library = _load_library()
FEATURE_MAPS = tuple(_library.hfla_feature_maps().decode().split(", "))  # the ops take the index
_forward = torch.ops.hf_linear_attention.linear_attention.default
_backward = torch.ops.hf_linear_attention.linear_attention_backward.default
_step_ = torch.ops.hf_linear_attention.linear_attention_step_.default
_linear = torch.ops.hf_linear_attention.linear.default
_rms_norm = torch.ops.hf_linear_attention.rms_norm.default
_rms_norm_forward = torch.ops.hf_linear_attention.rms_norm_forward.default
_rms_norm_backward = torch.ops.hf_linear_attention.rms_norm_backward.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes
# An op of our own around PyTorch's, which has no gradient and does not compile for training.
_registrations.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_registrations.impl(
    "onednn_linear",
    lambda x, w, bias: torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], ""),
    "CPU",
)
_onednn_linear = torch.ops.hf_linear_attention.onednn_linear.default


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


def kept_bytes() -> int:
    """How much memory of earlier results on the CPU is kept for the next ones, no tensor on it.

    At most HF_LINEAR_ATTENTION_KEPT_MB (256 by default) megabytes of 2^20 bytes.
    """
    return _library.hfla_kept_bytes()


def free_kept_memory() -> None:
    """Gives all of it back. The ops do so themselves with what has been kept for 10 seconds."""
    _library.hfla_free_kept_memory()


def cuda_architectures() -> list[str]:
    """What the CUDA kernels were compiled for, such as ["sm_90a", "compute_80"]; "compute" is PTX,
    which the driver compiles for newer devices. Empty where this build has none.
    """
    names = _library.hfla_cuda_architectures().decode()
    return names.split(", ") if names else []


def has_cuda() -> bool:
    """Whether this build has CUDA kernels."""
    return bool(cuda_architectures())


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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_kv: Tensor | None,
    initial_z: Tensor | None,
    feature_map: int,
    normalize: bool,
    eps: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Linear attention over whole sequences, differentiable once.

    Args:
        q, k, v: (B, T, Hq, K), (B, T, Hkv, K), (B, T, Hkv, V), of one dtype, with any strides.
        log_decay: (B, T, Hkv) in the accumulation dtype, at most 0.
        key_mask: (B, T) bool.
        cu_seqlens: (N + 1,) int32.
        initial_kv, initial_z: (B or N, Hkv, K, V), (B or N, Hkv, K) in the accumulation dtype.
        feature_map: index in FEATURE_MAPS.

    Returns:
        y (B, T, Hq, V), den (B, T, Hq), kv and z (as initial_kv and initial_z). Without
        `normalize`, den and z have shape (0,).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _forward(
        q,
        k,
        v,
        log_decay,
        _contiguous(key_mask),
        _contiguous(cu_seqlens),
        _contiguous(initial_kv),
        _contiguous(initial_z),
        feature_map,
        normalize,
        eps,
        is_causal,
    )


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    kv: Tensor,
    z: Tensor | None,
    feature_map: int,
    normalize: bool,
    eps: float,
) -> Tensor:
    """One token for every row; kv and z are updated in place. It has no gradient.

    Args:
        q, k, v: (B, Hq, K), (B, Hkv, K), (B, Hkv, V), of one dtype, with any strides.
        log_decay: (B, Hkv) in the accumulation dtype, at most 0.
        key_mask: (B,) bool.
        kv, z: (B, Hkv, K, V), (B, Hkv, K) in the accumulation dtype, contiguous; z is None without
            `normalize`.
        feature_map: index in FEATURE_MAPS.

    Returns:
        y (B, Hq, V).

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    y = _step_(q, k, v, log_decay, _contiguous(key_mask), kv, z, feature_map, normalize, eps)
    # Lets autograd notice when a backward pass still needs the state as it was.
    torch.autograd.graph.increment_version((kv,) if z is None else (kv, z))
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` for few rows, on the CPU. It has no gradient.

    Args:
        x, weight, bias: (..., in), (out, in), (out,), of one dtype: float32, bfloat16, float16 or
            float64. weight and bias are contiguous.

    Returns:
        y (..., out). Sums are in the accumulation dtype, and rounded once.

    Raises:
        RuntimeError: an argument is wrong, or a gradient would be needed; it says which and how.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise RuntimeError(
            "the compiled linear has no gradient: call it under torch.no_grad(), or use "
            "torch.nn.functional.linear"
        )
    return _linear(x.contiguous(), weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` in float32 on the CPU, by oneDNN; differentiable.

    PyTorch multiplies float32 matrices by MKL, which leaves AVX-512 aside on AMD's processors;
    oneDNN, which comes with PyTorch too, takes half the time there.

    Args:
        x, weight, bias: (..., in), (out, in), (out,) float32, of any strides.

    Returns:
        y (..., out).
    """
    return _onednn_linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) on the CPU, the mean over the last dimension.

    Differentiable; second derivatives are left to PyTorch.

    Args:
        x, weight: (..., C), (C,), of one dtype: float32, bfloat16, float16 or float64.

    Returns:
        y (..., C). It is computed in the accumulation dtype; x / sqrt(...) is rounded to x's dtype
        before it is multiplied, as in Transformers' LlamaRMSNorm.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _rms_norm_forward(x.contiguous(), weight.contiguous(), eps)[0]
    return _rms_norm(x.contiguous(), weight.contiguous(), eps)  # which costs less to call


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# ---- fakes: shapes and dtypes of the results, for torch.compile and meta tensors ----


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("hf_linear_attention::linear_attention", lib=_registrations)
def _fake_forward(
    q,
    k,
    v,
    log_decay,
    key_mask,
    cu_seqlens,
    initial_kv,
    initial_z,
    feature_map,
    normalize,
    eps,
    is_causal,
):
    B, T, Hq, K = q.shape
    Hkv, V = v.shape[2:]
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    acc = _accumulation_dtype(q.dtype)
    y = q.new_empty(B, T, Hq, V)
    den = q.new_empty((B, T, Hq) if normalize else (0,), dtype=acc)
    kv = q.new_empty(rows, Hkv, K, V, dtype=acc)
    z = q.new_empty((rows, Hkv, K) if normalize else (0,), dtype=acc)
    return y, den, kv, z


@torch.library.register_fake("hf_linear_attention::linear_attention_backward", lib=_registrations)
def _fake_backward(
    dy, dkv, dz, q, k, v, log_decay, key_mask, cu_seqlens, initial_kv, initial_z, *others
):
    acc = _accumulation_dtype(q.dtype)

    def gradient_of(x):
        return q.new_empty(0, dtype=acc) if x is None else x.new_empty(x.shape)

    return tuple(map(gradient_of, (q, k, v, log_decay, initial_kv, initial_z)))


@torch.library.register_fake("hf_linear_attention::linear_attention_step_", lib=_registrations)
def _fake_step_(q, k, v, log_decay, key_mask, kv, z, feature_map, normalize, eps):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.register_fake("hf_linear_attention::onednn_linear", lib=_registrations)
@torch.library.register_fake("hf_linear_attention::linear", lib=_registrations)
def _fake_linear(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("hf_linear_attention::rms_norm", lib=_registrations)
def _fake_rms_norm(x, weight, eps):
    return x.new_empty(x.shape)


@torch.library.register_fake("hf_linear_attention::rms_norm_forward", lib=_registrations)
def _fake_rms_norm_forward(x, weight, eps):
    rows = math.prod(x.shape[:-1])
    return x.new_empty(x.shape), x.new_empty(rows, dtype=_accumulation_dtype(x.dtype))


@torch.library.register_fake("hf_linear_attention::rms_norm_backward", lib=_registrations)
def _fake_rms_norm_backward(dy, x, weight, inverse_rms):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


# ---- gradients ----


def _keep_for_backward(ctx, inputs, output):
    *tensors, feature_map, normalize, eps, is_causal = inputs
    _, den, _, z = output
    ctx.options = feature_map, normalize, eps, is_causal
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*((den,) if normalize else (den, z)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dden, dkv, dz):
    if dy is None and dkv is None and dz is None:
        return (None,) * len(ctx.needs_input_grad)
    dq, dk, dv, dlog_decay, dinitial_kv, dinitial_z = _backward(
        dy, _contiguous(dkv), _contiguous(dz), *ctx.saved_tensors, *ctx.options
    )
    no_options = (None,) * len(ctx.options)
    gradients = (dq, dk, dv, dlog_decay, None, None, dinitial_kv, dinitial_z, *no_options)
    return tuple(
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=True)
    )


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "the compiled linear attention can be differentiated once only; "
        'for second derivatives pass backend="chunked" to linear_attention'
    )


torch.library.register_autograd(
    "hf_linear_attention::linear_attention",
    _differentiate,
    setup_context=_keep_for_backward,
    lib=_registrations,
)
torch.library.register_autograd(
    "hf_linear_attention::linear_attention_backward", _refuse_second_derivative, lib=_registrations
)


def _keep_for_linear_backward(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_linear(ctx, dy):
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    dy_rows = dy.flatten(0, -2)
    return (
        _onednn_linear(dy, weight.t(), None) if needs_x else None,
        _onednn_linear(dy_rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
        dy_rows.sum(0) if needs_bias else None,
    )


torch.library.register_autograd(
    "hf_linear_attention::onednn_linear",
    _differentiate_linear,
    setup_context=_keep_for_linear_backward,
    lib=_registrations,
)


def _keep_for_rms_norm_backward(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    _, inverse_rms = output
    ctx.save_for_backward(x, weight, inverse_rms)
    ctx.mark_non_differentiable(inverse_rms)
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx, dy, dinverse_rms):
    if dy is None:
        return None, None, None
    x, weight, inverse_rms = ctx.saved_tensors
    if torch.is_grad_enabled():  # a second derivative may be wanted
        dx, dweight = _differentiable_rms_norm_backward(dy, x, weight, ctx.eps)
    else:
        dx, dweight = _rms_norm_backward(dy.contiguous(), x, weight, inverse_rms)
    needs_x, needs_weight, _ = ctx.needs_input_grad
    return dx if needs_x else None, dweight if needs_weight else None, None


def _differentiable_rms_norm_backward(dy, x, weight, eps):
    acc = _accumulation_dtype(x.dtype)
    inverse_rms = torch.rsqrt(x.to(acc).square().mean(-1, keepdim=True) + eps)
    n = x.to(acc) * inverse_rms
    g = weight.to(acc) * dy.to(acc)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * inverse_rms
    dweight = (dy.to(acc) * n).sum_to_size(weight.shape)
    return dx.to(x.dtype), dweight.to(weight.dtype)


torch.library.register_autograd(
    "hf_linear_attention::rms_norm_forward",
    _differentiate_rms_norm,
    setup_context=_keep_for_rms_norm_backward,
    lib=_registrations,
)
