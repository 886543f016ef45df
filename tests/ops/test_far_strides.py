# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tensors whose numbers lie more than 2^31 apart, as those of very long sequences do: in a file
that has memory only where it is written.
"""

import pytest
import torch
from torch import Tensor

from hf_linear_attention.ops.delta_rule import delta_rule
from hf_linear_attention.ops.elementwise_scan import elementwise_scan
from hf_linear_attention.ops.linear_attention import linear_attention

B, T, H, D = 2, 3, 2, 5
FAR = 2**30 + 7  # of tokens; of rows three times as much


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decays(*shape: int) -> Tensor:
    return -normal(*shape).abs()


@pytest.fixture
def far_apart(tmp_path):
    """A tensor (B, T, ...) with its tokens far apart."""

    def move(x: Tensor, number: int) -> Tensor:
        size = B * T * FAR + x[0, 0].numel()
        file = torch.from_file(
            str(tmp_path / str(number)), shared=True, size=size, dtype=torch.float32
        )
        strides = (T * FAR, FAR, *x[0, 0].contiguous().stride())
        return file.as_strided(x.shape, strides).copy_(x)

    return move


WHOLE = {
    "linear_attention": (linear_attention, [normal(B, T, H, D)] * 3, {}),
    "normalised with decays": (
        linear_attention,
        [normal(B, T, H, D)] * 3,
        {"log_decay": decays(B, T, H)},
    ),
    "decays by channel": (
        linear_attention,
        [normal(B, T, H, D)] * 3,
        {"log_decay": decays(B, T, H, D), "normalize": False, "feature_map": "identity"},
    ),
    "delta_rule": (
        delta_rule,
        [*[normal(B, T, H, D)] * 3, normal(B, T, H).sigmoid(), decays(B, T, H)],
        {},
    ),
    "elementwise_scan": (elementwise_scan, [normal(B, T, D), decays(B, T, D)], {}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_tokens_may_be_far_apart(name, far_apart):
    """Values and gradients."""
    op, tensors, options = WHOLE[name]

    def run(place):
        given = [*tensors, *(x for x in options.values() if isinstance(x, Tensor))]
        leaves = [place(x, i).requires_grad_() for i, x in enumerate(given)]
        names = [key for key, x in options.items() if isinstance(x, Tensor)]
        named = options | dict(zip(names, leaves[len(tensors) :], strict=True))
        y = op(*leaves[: len(tensors)], **named)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    near = run(lambda x, _: x.clone())
    for actual, expected in zip(run(far_apart), near, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
