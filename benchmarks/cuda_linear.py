# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention's contenders, inputs and checks for bench_cuda.py, in bfloat16.

With the feature map elu+1 and a normaliser, as our layers have it by default; and plain, with
neither, as kernels are published: for the former fla does both in further passes over q, k and y.
Shapes are (B, T, H, D).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuda_shapes import Inputs, Shape, num_bytes
from hf_linear_attention import LinearAttentionState, linear_attention, linear_attention_step_
from hf_linear_attention.ops.arguments import LinearArguments
from hf_linear_attention.ops.loops import reference_linear_attention

try:
    from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn

    WHY_NO_FLA = None
except ImportError as error:
    WHY_NO_FLA = str(error)

# The first six are those of fla's benchmark.
SEQUENCES = [
    Shape(1, 8192, 96, 128),
    Shape(2, 16384, 16, 128),
    Shape(4, 2048, 16, 128),
    Shape(4, 4096, 64, 128),
    Shape(8, 2048, 32, 256),
    Shape(8, 1024, 8, 64),
    Shape(8, 4096, 16, 64),
    Shape(1, 16384, 8, 64),
    Shape(1, 32768, 32, 128),
    Shape(1, 65536, 8, 64),
]
PLAIN = SEQUENCES[:4]
TOKENS = [Shape(1, 1, 12, 64), Shape(8, 1, 16, 128), Shape(32, 1, 16, 64), Shape(256, 1, 16, 128)]
TINY_SEQUENCES, TINY_TOKENS = [Shape(1, 64, 2, 16)], [Shape(2, 1, 2, 16)]
EPS = 1e-6
TOLERANCE = 2e-2  # relative, of the norm


# ---- contenders: functions of q, k, v (B, T, H, D), or of one token and its state ----


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu+1", eps=EPS)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu+1", eps=EPS, backend="chunked")


def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kernel = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def our_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, normalize=False)


def chunked_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, normalize=False, backend="chunked")


def fla_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]


def our_step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    state = LinearAttentionState(kv, z)
    return linear_attention_step_(q, k, v, state, feature_map="elu+1", eps=EPS)


def chunked_step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    state = LinearAttentionState(kv, z)
    return linear_attention_step_(q, k, v, state, feature_map="elu+1", eps=EPS, backend="chunked")


def fla_step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    """Without the normaliser, which it has no state for."""
    q, k, v = (F.elu(q) + 1)[:, None], (F.elu(k) + 1)[:, None], v[:, None]
    y, state = fused_recurrent_linear_attn(
        q, k, v, scale=1.0, initial_state=kv, output_final_state=True, normalize=False
    )
    kv.copy_(state)
    return y[:, 0]


Contenders = dict[str, Callable[..., Tensor]]
FORWARD: Contenders = {"ours": ours, "chunked": chunked, "SDPA": sdpa}
PLAIN_FORWARD: Contenders = {"ours": our_plain, "chunked": chunked_plain}
STEP: Contenders = {"ours": our_step, "chunked": chunked_step}
if WHY_NO_FLA is None:
    FORWARD["fla"] = fla
    PLAIN_FORWARD["fla"] = fla_plain
    STEP["fla"] = fla_step


# ---- inputs ----


def sequence(shape: Shape, device: str) -> Inputs:
    B, T, H, D = shape.sizes
    return tuple(torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for _ in range(3))


def token_and_state(shape: Shape, device: str) -> Inputs:
    B, _, H, D = shape.sizes
    q, k, v = (torch.randn(B, H, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v, torch.randn(B, H, D, D, device=device), torch.rand(B, H, D, device=device) + D


def step_bytes(inputs: Inputs) -> int:
    """What a step reads and writes at least: a token, its output, and the state, twice."""
    q, k, v, kv, z = inputs
    return num_bytes((q, k, v, v)) + 2 * num_bytes((kv, z))


# ---- right before fast: relative errors of all contenders, on smaller problems ----

OWN = ("ours", "chunked")  # which have to be right; others that are not are left out
LEFT_OUT: dict[str, str] = {}  # why
Errors = dict[str, float]


class WrongResultError(Exception):
    """A contender's result is too far from that in float64."""


def check(name: str, actual: Tensor, expected: Tensor) -> float:
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:  # NaN, too
        raise WrongResultError(
            f"{name} is wrong: relative error {error:.1e}, allowed {TOLERANCE:.0e}"
        )
    return error


def verify_all(
    kind: str,
    contenders: Contenders,
    errors_of: Callable[[str, Callable[..., Tensor]], Errors],
) -> Errors:
    """What errors_of says of each; one of others' that fails or is wrong is taken away."""
    errors: Errors = {}
    for name, run in list(contenders.items()):
        try:
            errors |= errors_of(f"{kind}{name}", run)
        except Exception as error:
            if name in OWN:
                raise
            LEFT_OUT[f"{kind}{name}"] = f"{type(error).__name__}: {error}"
            print(f"without {kind}{name}: {LEFT_OUT[f'{kind}{name}']}")
            del contenders[name]
    return errors


def verify(D: int, device: str) -> Errors:
    inputs = sequence(Shape(1, 500, 2, D), device)
    double = [x.double().requires_grad_() for x in inputs]
    y, _ = reference_linear_attention(LinearArguments(*double, feature_map="elu+1", eps=EPS))
    plain, _ = reference_linear_attention(LinearArguments(*double, normalize=False))
    softmax = sdpa_in_double(*double)

    def against(wanted: Tensor) -> Callable[[str, Callable[..., Tensor]], Errors]:
        def errors_of(name: str, run: Callable[..., Tensor]) -> Errors:
            of = softmax if name == "SDPA" else wanted
            leaves = [x.detach().requires_grad_() for x in inputs]
            got = run(*leaves)
            errors = {f"{name} forward": check(name, got, of)}
            got_gradients = torch.autograd.grad(got.double().square().sum(), leaves)
            gradients = torch.autograd.grad(of.square().sum(), double, retain_graph=True)
            for x, got_x, wanted_x in zip("qkv", got_gradients, gradients, strict=True):
                errors[f"{name} d{x}"] = check(f"{name}'s d{x}", got_x, wanted_x)
            return errors

        return errors_of

    errors = verify_all("", FORWARD, against(y))
    return errors | verify_all("plain ", PLAIN_FORWARD, against(plain))


def sdpa_in_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@torch.no_grad()
def verify_steps(D: int, device: str) -> Errors:
    q, k, v, kv, z = token_and_state(Shape(2, 1, 2, D), device)
    phi_q, phi_k = F.elu(q.double()) + 1, F.elu(k.double()) + 1
    after = kv.double() + phi_k[..., None] * v.double()[..., None, :]
    numerator = torch.einsum("bhk,bhkv->bhv", phi_q, after)
    den = (phi_q * (z + phi_k)).sum(-1, keepdim=True) + EPS

    def errors_of(name: str, run: Callable[..., Tensor]) -> Errors:
        state = kv.clone()
        y = run(q, k, v, state, z.clone())
        wanted = numerator if name == "step of fla" else numerator / den
        return {name: check(name, y, wanted), f"{name}, state": check(name, state, after)}

    return verify_all("step of ", STEP, errors_of)
