# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention over the last tokens and over a few first ones, in blocks, with the sizes of
its denominators: parts of attention are joined by them under one.

Shapes: B batch, T time, W tokens of a window, N first tokens ("sinks"), Hq query heads, Hkv
key-value heads, G = Hq / Hkv, K key dim, V value dim; S tokens of a block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .any_length import first_tokens, has_any_length, num_chunks
from .checks import is_traced
from .numerics import at_least_float32

LEAST_BLOCK = 64  # tokens, where the window is smaller
PIECE = 4096  # tokens at a time, so that memory for scores has a limit where nobody trains
HIDDEN = -1e30  # for a score: its weight is 0, and no gradient is infinite


def join(y: Tensor, log_size: Tensor, other: Tensor, other_log_size: Tensor) -> Tensor:
    """Two attentions over different tokens (..., V) under one denominator: each is weighted by its
    own, whose logarithm (...,) is given. -inf stands for no tokens.
    """
    gap = (log_size - other_log_size)[..., None]
    return y * gap.sigmoid() + other * (-gap).sigmoid()


def window_attention(
    q: Tensor, keys: Tensor, values: Tensor, num_before: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every token over the last `window` ones, itself included.

    Args:
        q: (B, T, Hq, K).
        keys, values: (B, W + T, Hkv, K) and (B, W + T, Hkv, V): W tokens before those of q, and
            these.
        num_before: (B or 1, T), how many tokens there are before each. Of the others nothing is
            seen.

    Returns:
        y (B, T, Hq, V) and the logarithm of its denominator (B, T, Hq), float32 or better. Memory
        grows as T W, not as T^2, and without gradients as T.
    """
    T = q.shape[1]
    if is_traced() or T <= PIECE:
        return _in_blocks(q, keys, values, num_before, window)
    parts = [
        _in_blocks(
            q[:, start : start + PIECE],
            keys[:, start : start + window + PIECE],
            values[:, start : start + window + PIECE],
            num_before[:, start : start + PIECE],
            window,
        )
        for start in range(0, T, PIECE)
    ]
    y, log_size = (torch.cat(of_all, dim=1) for of_all in zip(*parts, strict=True))
    return y, log_size


def _in_blocks(
    q: Tensor, keys: Tensor, values: Tensor, num_before: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """`window_attention` of blocks of tokens, all at once."""
    (_, T, Hq, K), Hkv, W = q.shape, keys.shape[2], window
    S = max(W, LEAST_BLOCK)  # a block of queries sees W + S keys
    if T == 1 or not is_traced():  # a graph of several tokens is for other lengths, too
        S = min(S, max(T, 1))
    n = num_chunks(T, S) if has_any_length() else max(-(-T // S), 1)
    num_before = F.pad(num_before, (0, n * S - T)).unflatten(1, (n, S))
    q = _padded(at_least_float32(q) * K**-0.5, n * S)
    q = q.unflatten(1, (n, S)).unflatten(3, (Hkv, Hq // Hkv)).permute(0, 1, 3, 4, 2, 5)
    keys, values = (
        _padded(at_least_float32(x), W + n * S).unfold(1, W + S, S) for x in (keys, values)
    )
    scores = (q.flatten(3, 4) @ keys).unflatten(3, (-1, S))  # (B, n, Hkv, G, S, W + S)
    age = torch.arange(S, device=q.device)[:, None] + W
    age = age - torch.arange(W + S, device=q.device)
    seen = (age >= 0) & (age < W) & (age <= num_before[..., None])  # (B or 1, n, S, W + S)
    scores = scores.masked_fill(~seen[:, :, None, None], HIDDEN)
    log_size = scores.logsumexp(-1)
    weights = (scores - log_size[..., None]).exp()
    y = (weights.flatten(3, 4) @ values.transpose(-1, -2)).unflatten(3, (-1, S))
    y = y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
    log_size = log_size.permute(0, 1, 4, 2, 3).flatten(3, 4).flatten(1, 2)
    if has_any_length():
        return first_tokens(y, T), first_tokens(log_size, T)
    return y[:, :T], log_size[:, :T]


def attention_to(q: Tensor, kv: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention to a few tokens.

    Args:
        q: (B, T, Hq, K).
        kv: their keys and values (B, N, Hkv, K + V), or for every token others, (B, T, N, Hkv,
            K + V).
        seen: (B or 1, T, N) bool, which of them each token sees.

    Returns:
        as `window_attention`; the logarithm is about -1e30 where a token sees none.
    """
    K, Hkv = q.shape[-1], kv.shape[-2]
    keys, values = at_least_float32(kv).split([K, kv.shape[-1] - K], dim=-1)
    q = (at_least_float32(q) * K**-0.5).unflatten(2, (Hkv, -1))
    of_each = "bnh" if kv.dim() == 4 else "btnh"
    scores = torch.einsum(f"bthgk,{of_each}k->bthgn", q, keys)
    scores = scores.masked_fill(~seen[:, :, None, None], HIDDEN)
    log_size = scores.logsumexp(-1)
    weights = (scores - log_size[..., None]).exp()
    y = torch.einsum(f"bthgn,{of_each}v->bthgv", weights, values)
    return y.flatten(2, 3), log_size.flatten(2, 3)


def _padded(x: Tensor, length: int) -> Tensor:
    """x (B, T, ...) with so many tokens, zeros behind its own."""
    return F.pad(x, (*[0, 0] * (x.dim() - 2), 0, length - x.shape[1]))
