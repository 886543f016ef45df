# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The gated delta rule's contenders, inputs and check for bench_cuda.py, in bfloat16.

Keys and queries come with norm 1, and fla's kernels take them so, too. Shapes are (B, T, H, D), as
many heads of q and k as of v.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_linear_attention import delta_rule, delta_rule_step_
from hf_linear_attention.reference.delta_rule import reference_delta_rule

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = None

SEQUENCES = [(1, 8192, 16, 128), (4, 2048, 16, 128)]
TOKENS = [(32, 1, 32, 128), (256, 1, 32, 128)]
TINY_SEQUENCES, TINY_TOKENS = [(1, 64, 2, 16)], [(2, 1, 2, 16)]
Inputs = tuple[Tensor, ...]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, log_decay)


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, log_decay, backend="chunked")


def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return chunk_gated_delta_rule(q, k, v, log_decay, beta.to(q.dtype))[0]


def our_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> Tensor:
    return delta_rule_step_(q, k, v, beta, state, log_decay)


def chunked_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> Tensor:
    return delta_rule_step_(q, k, v, beta, state, log_decay, backend="chunked")


FORWARD: dict[str, Callable[..., Tensor]] = {"ours": ours, "chunked": chunked}
STEP: dict[str, Callable[..., Tensor]] = {"ours": our_step, "chunked": chunked_step}
if chunk_gated_delta_rule is not None:
    FORWARD["fla"] = fla


def sequence(shape: tuple[int, ...], device: str) -> Inputs:
    """q, k, v, beta and log decays per head."""
    B, T, H, D = shape
    q, k, v = torch.randn(3, B, T, H, D, device=device).unbind()
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta = torch.rand(B, T, H, device=device)
    log_decay = F.logsigmoid(torch.randn(B, T, H, device=device) + 4)
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), beta, log_decay


def token_and_state(shape: tuple[int, ...], device: str) -> Inputs:
    B, _, H, D = shape
    token = (x[:, 0].contiguous() for x in sequence(shape, device))
    return *token, torch.randn(B, H, D, D, device=device)


def exact(inputs: Inputs) -> Tensor:
    """In float64, by the loop."""
    q, k, v, beta, log_decay = (x.double() for x in inputs)
    plain = dict(key_mask=None, cu_seqlens=None, initial_state=None)
    options = dict(scale=q.shape[-1] ** -0.5, normalize_qk=False, delta=True)
    return reference_delta_rule(q, k, v, beta, log_decay, **plain, **options)[0]
