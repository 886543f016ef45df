# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`window_attention` on the CPU by PyTorch's flash attention, block by block of queries: scores
stay in the processor's caches, and memory for gradients grows as the tokens, not times the window.

Dao et al., "FlashAttention", arXiv 2205.14135. PyTorch's kernel gives the logarithms of the
denominators, but takes no gradients of them. Of a score s_j that sees values v_j, with p_j its
weight, y the output and l the logarithm,

    ds_j = p_j (dy.v_j - dy.y + dl)

so dl goes in as one more feature of dy where values have a 1 and y a 0.

Shapes as in windowed_softmax.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import has_compiled
from .checks import is_readable
from .numerics import at_least_float32
from .windowed_softmax import window_attention

IS_WANTED = has_compiled()
BLOCK = 128  # queries: more see more keys for nothing, fewer read keys more often
FEATURES = 8  # of a multiple of them products are fast

# q, k, v (B, H, R or S, D), an additive mask -> y and the logarithm of its denominator (B, H, R)
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes_flash(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `flash_window_attention` takes these."""
    return (
        IS_WANTED
        and q.shape[1] > 1
        and 0 not in q.shape
        and all(is_readable(x) for x in (q, keys, values))
        and not torch.compiler.is_exporting()
        and not torch.jit.is_tracing()
    )


def flash_window_attention(
    q: Tensor, keys: Tensor, values: Tensor, num_before: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """As `window_attention`, of tensors on the CPU; differentiable any number of times."""
    y, log_size = FlashWindow.apply(q, keys, values, num_before, window)
    return y, log_size


class FlashWindow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, num_before: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        (_, T, Hq, K), V = q.shape, values.shape[-1]
        D, parts = max(K, V), []
        blocks = Blocks(T, Hq // keys.shape[2], num_before, window)
        for rows, seen, mask in blocks.each(q):
            of_heads = blocks.stacked(q[:, rows], D), *by_heads(keys, values, seen, D)
            y, log_size = flash(*of_heads, attn_mask=mask, scale=K**-0.5)
            parts.append((blocks.apart(y[..., :V]), blocks.apart(log_size[..., None])))
        y, log_size = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        log_size = log_size[..., 0]
        ctx.save_for_backward(q, keys, values, num_before, y, log_size)
        ctx.window = window
        return y, log_size

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlog_size: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, num_before, y, log_size = ctx.saved_tensors
        if torch.is_grad_enabled():  # of gradients there will be gradients
            again = window_attention(q, keys, values, num_before, ctx.window)
            learned = [x for x in (q, keys, values) if x.requires_grad]
            found = iter(torch.autograd.grad(again, learned, (dy, dlog_size), create_graph=True))
            of_inputs = (next(found) if x.requires_grad else None for x in (q, keys, values))
            return *of_inputs, None, None
        (_, T, Hq, K), V = q.shape, values.shape[-1]
        D = -(-max(K, V + 1) // FEATURES) * FEATURES
        y, dy = F.pad(y, (0, D - V)), torch.cat([dy, dlog_size[..., None]], dim=-1)
        dy = F.pad(dy, (0, D - V - 1))
        values = F.pad(at_least_float32(values), (0, 1), value=1.0)
        dq_parts = []
        dkeys, dvalues = torch.zeros_like(keys, dtype=y.dtype), torch.zeros_like(values)
        blocks = Blocks(T, Hq // keys.shape[2], num_before, ctx.window)
        for rows, seen, mask in blocks.each(q):
            dy_i, q_i, y_i = (blocks.stacked(x[:, rows], D) for x in (dy, q, y))
            log_size_i = blocks.stacked(log_size[:, rows, :, None], 1)[..., 0]
            k_i, v_i = by_heads(keys, values, seen, D)
            dq_i, dk_i, dv_i = flash_backward(
                dy_i, q_i, k_i, v_i, y_i, log_size_i, 0.0, False, attn_mask=mask, scale=K**-0.5
            )
            dq_parts.append(blocks.apart(dq_i[..., :K]))
            dkeys[:, seen] += dk_i[..., :K].transpose(1, 2)
            dvalues[:, seen] += dv_i[..., : V + 1].transpose(1, 2)
        dq = torch.cat(dq_parts, dim=1)
        return *(dx.to(q.dtype) for dx in (dq, dkeys, dvalues[..., :V])), None, None


class Blocks:
    """Of queries, the G heads that share keys one below another: (B, S, Hq, D) <-> (B, Hkv, S G,
    D).
    """

    def __init__(self, T: int, G: int, num_before: Tensor, window: int):
        self.T, self.G, self.num_before, self.window = T, G, num_before, window

    def each(self, like: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """The block's tokens, the keys that they may see, and a mask for these, (1 or B, 1, S G,
        S + W) to be added, for one block after the other.
        """
        W, dtype = self.window, at_least_float32(like[:0]).dtype
        whole: dict[int, Tensor] = {}  # masks where there are tokens enough, by S
        for start in range(0, self.T, BLOCK):
            S = min(BLOCK, self.T - start)
            num_before = self.num_before[:, start : start + S]
            age = torch.arange(S)[:, None] + W - torch.arange(W + S)
            if num_before.min() < W - 1:
                mask = self._mask(age, W, num_before[..., None], dtype)
            else:
                if S not in whole:
                    whole[S] = self._mask(age, W, num_before.new_full((1, 1, 1), W), dtype)
                mask = whole[S]
            yield slice(start, start + S), slice(start, start + W + S), mask

    def _mask(self, age: Tensor, window: int, num_before: Tensor, dtype: torch.dtype) -> Tensor:
        seen = (age >= 0) & (age < window) & (age <= num_before)  # (B or 1, S, W + S)
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return mask.repeat_interleave(self.G, dim=1)[:, None]

    def stacked(self, x: Tensor, D: int) -> Tensor:
        x = widened(x, D).unflatten(2, (-1, self.G)).movedim(2, 1)
        return x.flatten(2, 3)

    def apart(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.G)).movedim(1, 2).flatten(2, 3)


def by_heads(keys: Tensor, values: Tensor, seen: slice, D: int) -> list[Tensor]:
    """Those of a block (B, Hkv, S, D), in place where they have D features."""
    return [widened(x[:, seen], D).transpose(1, 2) for x in (keys, values)]


def widened(x: Tensor, D: int) -> Tensor:
    """x with zeros as further features, D of them in all."""
    x = at_least_float32(x)
    return x if x.shape[-1] == D else F.pad(x, (0, D - x.shape[-1]))
