# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss of a language model on the CPU: its compiled ops and their fakes."""

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from .library import ops, register_fake

_cross_entropy = ops.cross_entropy.default
_cross_entropy_backward = ops.cross_entropy_backward.default
_registrations = torch.library.Library("hf_linear_attention", "FRAGMENT")  # undone when this goes


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)[label] of each row, on the CPU. Its gradient is by
    `cross_entropy_backward`.

    Args:
        logits: (N, V), float32, bfloat16, float16 or float64.
        labels: (N,), int64, from 0 to V - 1, or ignore_index for a row whose loss is 0.

    Returns:
        losses (N,), and log sum exp(logits) (N,), both in the accumulation dtype, in which all is
        computed.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _cross_entropy(logits.contiguous(), labels.contiguous(), ignore_index)


def cross_entropy_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, normalizers: Tensor, ignore_index: int
) -> Tensor:
    """The gradient of logits (N, V), of their dtype, from that of the losses (N,): softmax - 1 for
    the label, rounded once; zeros in rows that have none.

    Args:
        normalizers: (N,), as `cross_entropy` gave them.

    Raises:
        RuntimeError: an argument is wrong; it says which and how.
    """
    return _cross_entropy_backward(
        dlosses.contiguous(), logits.contiguous(), labels.contiguous(), normalizers, ignore_index
    )


@register_fake("cross_entropy", _registrations)
def _fake_cross_entropy(logits, labels, ignore_index):
    numbers = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    return numbers, torch.empty_like(numbers)


@register_fake("cross_entropy_backward", _registrations)
def _fake_cross_entropy_backward(dlosses, logits, labels, normalizers, ignore_index):
    return logits.new_empty(logits.shape)
