# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tokens of rows in another order, in which padding comes first.

Shapes: B batch, T time.
"""

from torch import Tensor
from torch.nn import functional as F


def padding_first(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (B, past + T, ...) with the tokens that key_mask (B, T) hides moved to the front, so that
    the last ones are real as long as there are any.
    """
    if key_mask is None:
        return x
    is_real = F.pad(key_mask, (x.shape[1] - key_mask.shape[1], 0), value=True)
    return take_tokens(x, padding_first_order(is_real))


def padding_first_order(key_mask: Tensor) -> Tensor:
    """The order (B, T) that puts tokens which key_mask (B, T) hides in front of the others."""
    return key_mask.int().argsort(dim=1, stable=True)


def take_tokens(x: Tensor, order: Tensor) -> Tensor:
    """x (B, T, ...) at the tokens that `order` (B, n) names."""
    index = order.view(*order.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(*order.shape, *x.shape[2:]))
