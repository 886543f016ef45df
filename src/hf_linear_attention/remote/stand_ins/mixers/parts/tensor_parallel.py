# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Heads are all here: to share them among ranks needs the package."""

from typing import Any

from torch import Tensor, nn

HeadShard = Any  # the heads of a rank


class TensorParallelPlan(dict):
    """Nothing is shared."""


def find_head_shard(x: Tensor, projection: nn.Module, *heads: Any) -> None:
    """Raises a NotImplementedError where x is not all that a projection gives."""
    if x.shape[-1] != projection.out_features:
        raise NotImplementedError("tensor parallelism needs the package hf-linear-attention")


def call(module: nn.Module, shard: None, *args: Any) -> Any:
    return module(*args)
