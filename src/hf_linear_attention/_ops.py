# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the code in checkpoints saved by version 0.1.0 asks the installed package for.

Nobody else uses it. That code came before ops had versions: it wants this module, demands that its
INTERFACE_VERSION equals 1, and gives feature maps by their position in the list of then. It gets
version 1 of today's ops. It also imports `reference_linear_attention` from `reference`.
"""

from torch import Tensor

from .ops.compiled import OPS
from .ops.compiled.cuda import has_cuda, why_not_on_cuda

INTERFACE_VERSION = 1
FEATURE_MAPS = ("identity", "elu+1", "relu", "relu2", "silu", "exp")  # of 0.1.0, whatever comes

linear = OPS["linear", 1]
onednn_linear = OPS["onednn_linear", 1]
rms_norm = OPS["rms_norm", 1]
_forward = OPS["linear_attention", 1]
_step_ = OPS["linear_attention_step_", 1]

__all__ = [
    "INTERFACE_VERSION",
    "forward",
    "has_cuda",
    "linear",
    "onednn_linear",
    "rms_norm",
    "step_",
    "why_no_kernels_for",
]


def why_no_kernels_for(capability: tuple[int, int]) -> str | None:
    """Why the CUDA kernels can't run on the current device, which is that of this capability."""
    return why_not_on_cuda(None)


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
) -> tuple[Tensor, None, Tensor, Tensor | None]:
    """Linear attention over whole sequences; returns y, nothing for the denominators, kv and z."""
    y, (kv, z) = _forward(
        q,
        k,
        v,
        log_decay,
        feature_map=FEATURE_MAPS[feature_map],
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        initial_state=None if initial_kv is None else (initial_kv, initial_z),
        normalize=normalize,
        eps=eps,
        is_causal=is_causal,
    )
    return y, None, kv, z


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
    """One token for every row; kv and z are updated in place."""
    name = FEATURE_MAPS[feature_map]
    return _step_(q, k, v, log_decay, key_mask, kv, z, name, normalize, eps)
