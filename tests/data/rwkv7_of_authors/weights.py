# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The weights of the model in reference.json, under the names of RWKV-7's authors."""

import torch
from torch import Tensor

V, C, L, H, F = 11, 128, 2, 2, 96  # vocabulary, channels, layers, heads, features of MLPs
RANKS = {"w": 4, "a": 3, "v": 2, "g": 5}
IDS = [1, 5, 9, 2, 7, 7, 3, 0, 10, 4, 6]


def shapes() -> dict[str, tuple[int, ...]]:
    norm = {"weight": (C,), "bias": (C,)}
    found: dict[str, tuple[int, ...]] = {"emb.weight": (V, C), "head.weight": (V, C)}
    found |= {f"ln_out.{x}": shape for x, shape in norm.items()}
    for layer in range(L):
        names = ("ln1", "ln2", "att.ln_x", *(["ln0"] if layer == 0 else []))
        of_layer = {f"{name}.{x}": shape for name in names for x, shape in norm.items()}
        of_layer |= {f"att.x_{name}": (1, 1, C) for name in "rwkvag"}
        of_layer |= {f"att.{name}": (1, 1, C) for name in ("w0", "a0", "v0", "k_k", "k_a")}
        of_layer |= {f"att.{name}1": (C, rank) for name, rank in RANKS.items()}
        of_layer |= {f"att.{name}2": (rank, C) for name, rank in RANKS.items()}
        matrices = ("receptance", "key", "value", "output")
        of_layer |= {f"att.{name}.weight": (C, C) for name in matrices}
        of_layer |= {"att.r_k": (H, C // H), "ffn.x_k": (1, 1, C)}
        of_layer |= {"ffn.key.weight": (F, C), "ffn.value.weight": (C, F)}
        found |= {f"blocks.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def weights() -> dict[str, Tensor]:
    tensors = {}
    for number, (name, shape) in enumerate(shapes().items()):
        size = 0.1 if len(shape) == 2 else 0.5
        i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        x = size * torch.sin(1.7 * number + 0.9 * i + 0.013 * i * i)
        is_norm = ".ln" in f".{name}" and name.endswith("weight")
        tensors[name] = (x + is_norm).view(shape).float()
    return tensors
