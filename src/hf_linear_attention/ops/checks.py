# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the public functions check of their arguments, whatever the recurrence.

Shapes: B batch, T time, Hq query heads, Hk key heads, Hv value heads, K key dim, V value dim, N
packed sequences.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .numerics import accumulation_dtype, is_transformed
from .tokens import behind

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_readable(tensor: Tensor) -> bool:
    """Whether looking at values costs no synchronisation, and breaks no graph and no transform."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in (Tensor, Parameter)
        and not torch.compiler.is_compiling()
        and not is_transformed()
    )


def can_look_at(tensor: Tensor, T: int) -> bool:
    """Whether values may be read: not in a compiled graph, nor for one token where a GPU waits."""
    return not torch.compiler.is_compiling() and (T > 1 or tensor.device.type == "cpu")


def is_traced() -> bool:
    """Whether a graph is being made, by the compiler or for export: no value can be read."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def check_tokens(input_ids: Tensor, embeddings: Any) -> None:
    """Raises an IndexError, as PyTorch does, where a token has no row in the table of embeddings.
    To be asked only when that has failed: on a GPU it takes the time of all work before it.
    """
    rows = embeddings.weight.shape[0]
    if input_ids.numel() > 0 and not 0 <= input_ids.min() <= input_ids.max() < rows:
        raise IndexError(
            f"input_ids must be from 0 to {rows - 1}, the rows of the table of embeddings, got "
            f"{input_ids.min()} to {input_ids.max()}"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor, dims: int) -> None:
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
    Hq, Hk, Hv = (x.shape[-2] for x in (q, k, v))
    if Hv % Hk != 0:
        raise ValueError(f"v must have a multiple of k's {Hk} heads, got {Hv}")
    if Hq % Hv != 0 and Hv % Hq != 0:
        raise ValueError(f"q must have a multiple of v's {Hv} heads or divide them, got {Hq}")


def check_channels(x: Tensor, layout: tuple[str, ...]) -> None:
    """An x of these dimensions, the last of which is of channels."""
    if x.dim() != len(layout):
        names = f"({', '.join(layout)})"
        raise ValueError(
            f"x must have the {len(layout)} dimensions {names}, got shape {tuple(x.shape)}"
        )
    if x.shape[-1] < 1:
        raise ValueError(f"x must have at least one channel, got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, bfloat16, float16 or float64, got {x.dtype}")


def check_per_token(
    name: str, x: Tensor, q: Tensor, *shapes: tuple[int, ...], of: str = "q"
) -> Tensor:
    """x in the accumulation dtype, of one of these shapes; of: q's name."""
    if tuple(x.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on {of}'s device {q.device}, got {x.device}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
    return x.to(accumulation_dtype(q.dtype))


def check_log_decay(
    log_decay: Tensor | None, q: Tensor, v: Tensor, key_mask: Tensor | None
) -> Tensor | None:
    """log_decay in the accumulation dtype: one for each of v's heads, or one for each of their K
    channels.
    """
    if log_decay is None:
        return None
    per_head = tuple(v.shape[:-1])
    checked = check_per_token("log_decay", log_decay, q, per_head, (*per_head, q.shape[-1]))
    check_not_positive("log_decay", log_decay, key_mask)
    return checked


def check_not_positive(name: str, x: Tensor, key_mask: Tensor | None) -> None:
    """Where x, (B, T, ...) or (B, ...) as key_mask says, is readable: none of it is above 0."""
    if not is_readable(x) or x.numel() == 0 or x.detach().max() <= 0:
        return
    positive = x.detach() > 0  # NaN is not, nor is what the mask hides
    if key_mask is not None:
        positive = positive & behind(key_mask, positive)
    if positive.any():
        raise ValueError(f"{name} must be at most 0, got {x[positive].max().item()}")


def check_stable(A: Tensor, dt: Tensor, key_mask: Tensor | None) -> None:
    """Where they are readable: A (channels, N) is at most 0, and dt of real tokens at least 0, so
    that no state grows.
    """
    if is_readable(A) and (A.detach() > 0).any():
        raise ValueError(f"A must be at most 0, got {A.max().item()}")
    if is_readable(dt):
        real = dt.detach()
        if key_mask is not None:
            real = torch.where(behind(key_mask, real), real, 0)
        if real.numel() > 0 and (least := real.min().item()) < 0:
            raise ValueError(f"dt must be at least 0, got {least}")


def check_key_mask(
    key_mask: Tensor | None, q: Tensor, name: str = "q", features: int = 2
) -> Tensor | None:
    """key_mask as bool, of q's shape without its last dimensions, the `features`; name: q's."""
    if key_mask is None:
        return None
    expected = tuple(q.shape[:-features])
    if tuple(key_mask.shape) != expected:
        raise ValueError(f"key_mask must have shape {expected}, got {tuple(key_mask.shape)}")
    if key_mask.device != q.device:
        raise ValueError(f"key_mask must be on {name}'s device {q.device}, got {key_mask.device}")
    if key_mask.dtype == torch.bool:
        return key_mask
    if is_readable(key_mask):
        wrong = key_mask[(key_mask != 0) & (key_mask != 1)]
        if wrong.numel() > 0:
            raise ValueError(f"key_mask must hold bool or 0 and 1, got {wrong[0].item()}")
    return key_mask != 0


def check_cu_seqlens(
    cu_seqlens: Tensor, q: Tensor, readable: bool, name: str = "q", may_end_early: bool = False
) -> None:
    """Bounds of packed sequences; their values only where they are readable. name: q's.
    may_end_early: there may be tokens behind the last sequence.
    """
    if q.shape[0] != 1:
        raise ValueError(
            "cu_seqlens must come with a batch of one packed row, "
            f"got {name} of shape {tuple(q.shape)}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (N + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens must be on {name}'s device {q.device}, got {cu_seqlens.device}"
        )
    if readable:
        bounds, T = cu_seqlens.tolist(), q.shape[1]
        ends = bounds[-1] <= T if may_end_early else bounds[-1] == T
        if bounds[0] != 0 or not ends or bounds != sorted(bounds):
            end = f"at most T = {T}" if may_end_early else f"T = {T}"
            raise ValueError(f"cu_seqlens must rise from 0 to {end} without falling, got {bounds}")


def check_state(
    name: str, state: Tensor, q: Tensor, expected: tuple[int, ...], of: str = "q"
) -> None:
    """A tensor of a state: its shape, the accumulation dtype, q's device; of: q's name."""
    dtype = accumulation_dtype(q.dtype)
    if tuple(state.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(state.shape)}")
    if state.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} for {q.dtype} inputs, got {state.dtype}")
    if state.device != q.device:
        raise ValueError(f"{name} must be on {of}'s device {q.device}, got {state.device}")
