# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The gated delta rule's contenders, inputs and check for bench_cuda.py, in bfloat16.

Keys and queries come with norm 1, and fla's kernels take them so, too. Shapes are (B, T, H, D), as
many heads of q and k as of v, or fewer.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cuda_linear import Errors, check, verify_all
from cuda_shapes import Inputs, Shape, num_bytes
from hf_linear_attention import delta_rule, delta_rule_step_
from hf_linear_attention.ops.arguments import DeltaArguments
from hf_linear_attention.ops.loops.delta_rule import reference_delta_rule

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = None
FLA_SHARES_KEYS = "HV" in (getattr(chunk_gated_delta_rule, "__doc__", None) or "")

# Those of FlashQLA's benchmark with PUBLISHED figures, and two of fla's.
SEQUENCES = [
    Shape(1, 8192, 16, 128),
    Shape(1, 32768, 16, 128),
    Shape(1, 8192, 32, 128, keys=16),
    Shape(1, 8192, 64, 128, keys=16),
    Shape(1, 8192, 96, 128),
    Shape(4, 2048, 16, 128),
]
# Milliseconds, forward, on an H200 in CUDA graphs, with an initial state:
# benchmark/benchmark_results_H200.txt of QwenLM/FlashQLA at 6e5d2ea, with fla 0.5.1 and FlashInfer
# 0.6.13; and of forward and backward, the sum of both.
PUBLISHED = {
    "gated delta": {
        SEQUENCES[0]: {"FlashQLA": 0.178, "FlashInfer": 0.418, "fla": 0.334},
        SEQUENCES[1]: {"FlashQLA": 0.498, "FlashInfer": 1.650, "fla": 1.275},
        SEQUENCES[2]: {"FlashQLA": 0.280, "FlashInfer": 0.394, "fla": 0.472},
        SEQUENCES[3]: {"FlashQLA": 0.397, "FlashInfer": 0.392, "fla": 0.814},
    },
    "gated delta + bwd": {SEQUENCES[2]: {"FlashQLA": 1.069, "fla": 1.916}},
}
TOKENS = [Shape(B, 1, 32, 128) for B in (1, 8, 32, 256)]
TINY_SEQUENCES, TINY_TOKENS = [Shape(1, 64, 4, 16, keys=2)], [Shape(2, 1, 2, 16)]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, log_decay)


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, log_decay, backend="chunked")


def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    if not FLA_SHARES_KEYS:  # an older version, whose callers have to do this
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
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


def sequence(shape: Shape, device: str) -> Inputs:
    """q, k, v, beta and log decays per head."""
    B, T, H, D = shape.sizes
    q, k = torch.randn(2, B, T, shape.keys or H, D, device=device).unbind()
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v = torch.randn(B, T, H, D, device=device)
    beta = torch.rand(B, T, H, device=device)
    log_decay = F.logsigmoid(torch.randn(B, T, H, device=device) + 4)
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), beta, log_decay


def token_and_state(shape: Shape, device: str) -> Inputs:
    B, _, H, D = shape.sizes
    token = (x[:, 0].contiguous() for x in sequence(shape, device))
    return *token, torch.randn(B, H, D, D, device=device)


def step_bytes(inputs: Inputs) -> int:
    """What a step reads and writes at least: a token, its output, and the state, twice."""
    *token, state = inputs
    return num_bytes((*token, token[2])) + 2 * num_bytes((state,))


def verify(D: int, device: str) -> Errors:
    """Relative errors of all contenders on a smaller problem, against the loop in float64."""
    errors: Errors = {}
    for heads, keys in (("", None), (", shared keys", 2)):
        inputs = sequence(Shape(1, 200, 4, D, keys), device)
        q, k, v, beta, log_decay = (x.double() for x in inputs)
        arguments = DeltaArguments(q, k, v, beta, log_decay, scale=D**-0.5)
        wanted = reference_delta_rule(arguments)[0]

        def errors_of(
            name: str,
            run: Callable[..., Tensor],
            *,
            inputs: Inputs = inputs,
            wanted: Tensor = wanted,
            heads: str = heads,
        ) -> Errors:
            return {f"{name}{heads}": check(name, run(*inputs), wanted)}

        errors |= verify_all("gated delta rule of ", FORWARD, errors_of)
    return errors
