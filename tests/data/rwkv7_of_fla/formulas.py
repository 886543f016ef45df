# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The weights of the model in reference.json, and what its gradients are multiplied by."""

import torch


def weight(number: int, like: torch.Tensor, name: str) -> torch.Tensor:
    """Of the parameter of that number, in the order of their names."""
    i = torch.arange(like.numel(), dtype=torch.float64)
    x = 0.5 * torch.sin(1.7 * number + 0.9 * i + 0.013 * i * i)
    is_norm = "norm" in name and name.endswith("weight")
    return (x + is_norm).view(like.shape)


def probe(number: int, like: torch.Tensor) -> torch.Tensor:
    i = torch.arange(like.numel(), dtype=torch.float64)
    return torch.cos(0.7 * number + 0.3 * i).view(like.shape)
