# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Writes tests/data/fla: small checkpoints made, and saved, by flash-linear-attention, and what it
computes with them. Run it by hand, where flash-linear-attention 0.6.0 with triton 3.9.0 is:

    python tests/support/fla_folders.py kernels [CASE ...]
    python tests/support/fla_folders.py loops [CASE ...]

`kernels` makes the folders and runs fla as it is, with its Triton kernels, in Triton's interpreter,
in float32; Mamba-3's are those of mamba_ssm, whose folder mamba_ssm/ops/triton/mamba3 has to be
there, too, as of its commit e9594ce. `loops` runs the same modules in float64: their kernels are
replaced by fla's own naive functions (`fla/ops/*/naive.py`), and norms, activations and Mamba-3 by
the formulas of their docstrings, which the kernels' numbers confirm. Triton is a gigabyte, so that
tests read what it has written.
"""

import contextlib
import functools
import importlib
import math
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[1] / "data" / "fla"
T = 12
GRADIENTS = (  # whose gradients are stored, too
    *("gated_deltanet", "gated_deltaproduct", "comba", "precond_gated_deltanet", "gla"),
    *("mamba3", "rwkv6"),
)
WITH_GRADIENT = (  # beginnings of their names
    *("model.layers.0.attn", "model.layers.0.ffn", "backbone.layers.0.mixer"),
    "model.embeddings.weight",
)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "intermediate_size": 24}
HEADS = {"num_heads": 2}
HYBRID = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}


class Case(NamedTuple):
    """A model's class, without its end, and the fields of its config."""

    kind: str
    fields: dict[str, Any]


CASES: dict[str, Case] = {
    "gated_deltanet": Case(
        "GatedDeltaNet",
        {**SIZES, **HEADS, "head_dim": 8, "num_v_heads": 4, "intermediate_size": None},
    ),
    "gated_deltanet_hybrid": Case(
        "GatedDeltaNet",
        {
            **SIZES,
            **HEADS,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "expand_v": 1,
            "allow_neg_eigval": True,
            "output_gate_activation": "sigmoid",
            "attn": [
                {**HYBRID, "rope_theta": 500.0},
                {**HYBRID, "layers": [2], "window_size": 5, "rope_theta": 500.0},
            ],
            "tie_word_embeddings": True,
        },
    ),
    "gated_deltanet_plain": Case(
        "GatedDeltaNet",
        {**SIZES, **HEADS, "head_dim": 8, "use_gate": False, "norm_eps": 1e-3, "fuse_norm": False},
    ),
    "delta_net": Case("DeltaNet", {**SIZES, **HEADS}),
    "delta_net_gated": Case(
        "DeltaNet",
        {
            **SIZES,
            **HEADS,
            "use_gate": True,
            "allow_neg_eigval": True,
            "expand_k": 0.5,
            "conv_size": 3,
            "attn": HYBRID,
        },
    ),
    "gated_deltaproduct": Case(
        "GatedDeltaProduct",
        {
            **SIZES,
            **HEADS,
            "head_dim": 4,
            "num_householder": 3,
            "use_forget_gate": True,
            "allow_neg_eigval": True,
        },
    ),
    "gated_deltaproduct_plain": Case(
        "GatedDeltaProduct",
        {
            **SIZES,
            **HEADS,
            "head_dim": 8,
            "expand_v": 0.5,
            "num_householder": 2,
            "use_output_gate": False,
            "conv_size": 3,
            "attn": HYBRID,
        },
    ),
    "comba": Case("Comba", {**SIZES, **HEADS, "head_dim": 4, "num_v_heads": 4}),
    "comba_plain": Case(
        "Comba",
        {
            **SIZES,
            **HEADS,
            "head_dim": 8,
            "expand_v": 1,
            "use_output_gate": False,
            "conv_size": 3,
            "norm_eps": 1e-3,
            "attn": HYBRID,
        },
    ),
    "precond_gated_deltanet": Case(
        "PrecondGatedDeltaNet",
        {**SIZES, **HEADS, "head_dim": 4, "num_v_heads": 4, "allow_neg_eigval": True},
    ),
    "precond_gated_deltanet_plain": Case(
        "PrecondGatedDeltaNet",
        {
            **SIZES,
            **HEADS,
            "head_dim": 8,
            "expand_v": 1,
            "use_gate": False,
            "conv_size": 3,
            "squash_x": 1.9,
            "squash_eps": 1e-3,
            "attn": HYBRID,
        },
    ),
    "precond_kda": Case("PrecondKDA", {**SIZES, **HEADS, "head_dim": 8}),
    "precond_kda_bounded": Case(
        "PrecondKDA",
        {
            **SIZES,
            **HEADS,
            "head_dim": 8,
            "expand_v": 0.5,
            "squash_x": 1.9,
            "safe_gate": True,
            "lower_bound": -5.0,
            "attn": HYBRID,
        },
    ),
    "gla": Case("GLA", {**SIZES, **HEADS, "norm_eps": 1e-3}),
    "gla_hybrid": Case(
        "GLA",
        {**SIZES, "num_heads": 2, "num_kv_heads": 1, "use_short_conv": True, "attn": HYBRID},
    ),
    "gla_plain": Case(
        "GLA",
        {**SIZES, **HEADS, "use_output_gate": False, "elementwise_affine": False},
    ),
    "gla_unfused": Case("GLA", {**SIZES, **HEADS, "fuse_norm": False, "feature_map": "relu"}),
    "retnet": Case("RetNet", {**SIZES, **HEADS, "norm_eps": 1e-3}),
    "retnet_hybrid": Case(
        "RetNet", {**SIZES, "num_heads": 2, "attn": {"layers": [0], "num_heads": 2}}
    ),
    "linear_attn": Case("LinearAttention", {**SIZES, **HEADS, "feature_map": "elu"}),
    "linear_attn_shared": Case(
        "LinearAttention",
        {**SIZES, "num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "expand_v": 2},
    ),
    "hgrn2": Case("HGRN2", {**SIZES, "expand_ratio": 8, "norm_eps": 1e-3}),
    "hgrn2_hybrid": Case(
        "HGRN2", {**SIZES, "expand_ratio": 8, "num_hidden_layers": 3, "attn": HYBRID}
    ),
    "hgrn": Case("HGRN", SIZES),
    "hgrn_hybrid": Case("HGRN", {**SIZES, "num_hidden_layers": 3, "attn": HYBRID}),
    "kda": Case("KDA", {**SIZES, **HEADS, "head_dim": 8}),
    "kda_bounded": Case(
        "KDA",
        {
            **SIZES,
            **HEADS,
            "head_dim": 8,
            "num_v_heads": 4,
            "safe_gate": True,
            "lower_bound": -5.0,
            "attn": HYBRID,
        },
    ),
    # One group of heads: of G, fla's PyTorch code gives head h the group h % G. The kernels of
    # mamba_ssm, which it calls on GPUs, give it the group h // (H / G), as everybody else does.
    "mamba2": Case(
        "Mamba2",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "vocab_size": 40,
            "head_dim": 8,
            "state_size": 8,
            "norm_eps": 1e-3,
        },
    ),
    "mamba3": Case(
        "Mamba3",
        {
            **{"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8},
            **{"state_size": 8, "norm_eps": 1e-3, "n_groups": 2},
        },
    ),
    "mamba3_biases": Case(
        "Mamba3",
        {
            **{"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8},
            **{"state_size": 4, "expand": 1, "rope_fraction": 1.0, "A_floor": 0.1},
            **{"use_bias": True, "residual_in_fp32": False, "tie_word_embeddings": True},
        },
    ),
    "rwkv6": Case(
        "RWKV6",
        {**SIZES, **HEADS, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5, "norm_eps": 1e-3},
    ),
    "rwkv6_wide": Case(
        "RWKV6",
        {
            **{**SIZES, **HEADS, "intermediate_size": None, "fuse_norm": False},
            **{"expand_k": 1, "expand_v": 1.5, "hidden_ratio": 2},
            **{"proj_low_rank_dim": 2, "gate_low_rank_dim": 4, "tie_word_embeddings": True},
        },
    ),
    "transformer": Case(
        "Transformer",
        {**SIZES, "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0},
    ),
    "transformer_norms": Case(
        "Transformer", {**SIZES, "num_heads": 2, "qk_norm": True, "norm_eps": 1e-3}
    ),
    "transformer_window": Case(
        "Transformer",
        {**SIZES, "num_heads": 2, "window_size": 5, "tie_word_embeddings": True},
    ),
}


# ---- models ----


def config_of(case: Case) -> Any:
    return getattr(importlib.import_module("fla.models"), f"{case.kind}Config")(**case.fields)


def model_class(case: Case) -> Any:
    return getattr(importlib.import_module("fla.models"), f"{case.kind}ForCausalLM")


def make_folder(name: str) -> None:
    """Draws weights that leave nothing at its first value, and saves them as bfloat16."""
    case = CASES[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    model = model_class(case)(config_of(case))
    with torch.no_grad():
        for path, x in model.named_parameters():
            if path.endswith(("A_log", "dt_bias")):
                x += 0.1 * torch.randn_like(x)
            elif x.dim() == 1:
                x.copy_(("norm" in path or path.endswith(".D")) + 0.3 * torch.randn_like(x))
            elif "embeddings" in path:
                x.copy_(torch.randn_like(x))
            else:
                x.copy_(torch.randn_like(x) * x[0].numel() ** -0.5)
    shutil.rmtree(ROOT / name, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(ROOT / name)
    (ROOT / name / "generation_config.json").unlink()


def load(name: str, dtype: torch.dtype) -> Any:
    return model_class(CASES[name]).from_pretrained(ROOT / name, dtype=dtype).eval()


# ---- attention, which fla asks flash-attn for ----


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """As flash_attn_func: (B, T, H, D) -> (B, T, H, D)."""
    assert causal
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    age = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = age >= 0
    if window_size[0] >= 0:
        seen &= age <= window_size[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def stand_in_for_cuda() -> None:
    layers: Any = importlib.import_module("fla.layers.mamba3")
    layers.Mamba3.forward = without_cuda
    layers.mamba3_siso_combined = mamba3_of_kernels
    torch.cuda.get_device_capability = lambda *args: (8, 0)  # which its kernels ask for


def stand_in_for_flash_attn() -> None:
    importlib.import_module("fla.layers.attn").flash_attn_func = attend


# ---- fla in float64 ----


class InFloat64(TorchFunctionMode):
    """Where code asks for float32 it gets float64."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {
            key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def rms_norm(self: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
    x = x if residual is None else x + residual
    y = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
    y = y if self.weight is None else y * self.weight
    return (y, x) if prenorm else y


def gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    act = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}[self.activation]
    return rms_norm(self, x) * act(gate)


def convolution(self: Any, x: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    y = convolve(x, self.weight.squeeze(1), self.bias)
    return (y if self.activation is None else F.silu(y)), None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    size = weight.shape[-1]
    x = F.pad(x.transpose(1, 2), (size - 1, 0))
    return F.conv1d(x, weight[:, None], bias, groups=len(weight)).transpose(1, 2)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Any = None, **kwargs: Any) -> Any:
    return F.silu(convolve(x, weight, bias)), None


def l2(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **kwargs) -> Any:
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k = (l2(x).repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    beta = (1 + allow_neg_eigval) * beta.sigmoid()
    return naive_recurrent_gated_delta_rule(q, k, v, beta, naive_gdn_gate(g, A_log, dt_bias))


def delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel, **kwargs) -> Any:
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    assert use_qk_l2norm_in_kernel
    y, _ = delta_rule_recurrence(*(x.transpose(1, 2) for x in (l2(q), l2(k), v, beta)))
    return y.transpose(1, 2), None


def product(q, k, v, g, beta, num_householder, **kwargs) -> Any:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    y, _ = naive_recurrent_gated_delta_product(
        *(l2(q), l2(k), v, g, beta, q.shape[-1] ** -0.5), num_householder=num_householder
    )
    return y, None


def comba(q, k, v, p, g, beta, **kwargs) -> Any:
    """As its kernels: fla's `naive_recurrent_comba` asks the state after its decay instead."""
    from fla.ops.comba.naive import naive_chunk_comba

    q, k, p = (l2(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, p))
    return naive_chunk_comba(q, k, v, p, g, beta)


def gla(q, k, v, gk=None, g=None, **kwargs) -> Any:
    from fla.ops.gla.naive import naive_recurrent_gla

    return naive_recurrent_gla(q, k, v, g if gk is None else gk)


def retention(q, k, v, **kwargs) -> Any:
    from fla.ops.retention.naive import naive_retention

    return naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None


def linear_attention(q, k, v, normalize, **kwargs) -> Any:
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    return naive_recurrent_linear_attn(q, k, v, normalize=normalize)


def hgrn(x, g, **kwargs) -> Any:
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    return naive_recurrent_hgrn(x, g)


def kda(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, lower_bound, **kwargs) -> Any:
    from fla.ops.kda.naive import naive_recurrent_kda

    g = kda_gate(g, A_log, dt_bias, lower_bound)
    return naive_recurrent_kda(l2(q), l2(k), v, g, (1 + allow_neg_eigval) * beta.sigmoid())


def kda_gate(g, A_log, dt_bias, lower_bound, **kwargs) -> Tensor:
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

    if lower_bound is None:
        return naive_kda_gate(g, A_log, dt_bias)
    return naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)


def precond(q, k, v, g, g_atk, beta, beta_atk, x, eps, log_atk_scale, **kwargs) -> Any:
    """Of both layers: the other's loop normalises queries and keys once more."""
    from fla.ops.precond_kda.naive import naive_recurrent_precond_kda

    groups = v.shape[2] // k.shape[2]
    q, k = (l2(y).repeat_interleave(groups, 2) for y in (q, k))
    g_atk, beta_atk = (y.repeat_interleave(groups, 2) for y in (g_atk, beta_atk))
    g = g if g.dim() == 4 else g[..., None].expand_as(k)
    return naive_recurrent_precond_kda(
        *(q, k, v, g, g_atk, beta_atk, beta),
        x=x,
        eps=eps,
        log_atk_scale=log_atk_scale.repeat_interleave(groups, 0),
    )


def rwkv6(r, k, v, w, u, scale, **kwargs) -> Any:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    y, _ = naive_recurrent_rwkv6(*(x.transpose(1, 2) for x in (r, k, v, w)), u, scale)
    return y.transpose(1, 2), None


def layer_norm(self: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
    x = x if residual is None else x + residual
    y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
    return (y, x) if prenorm else y


def group_norm(self: Any, x: Tensor) -> Tensor:
    y = F.group_norm(x.flatten(0, 1), self.num_groups, self.weight, self.bias, self.eps)
    return y.view(x.shape)


def token_shift(x: Tensor, cu_seqlens: Any = None) -> Tensor:
    from fla.modules.token_shift import token_shift_ref

    return token_shift_ref(x, cu_seqlens)


def mamba3(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, **kwargs) -> Tensor:
    """From its docstring, for fla has no loop of it; checked with the kernels of mamba_ssm, and to
    2e-14 with the loop of its tests.
    """
    (B, T, H, V_), K_ = V.shape, K.shape[-1]
    q, k = (x.repeat_interleave(H // x.shape[2], 2) for x in (Q, K))
    q, k, share = q + Q_bias, k + K_bias, Trap.sigmoid()
    angle, S = 0.0, V.new_zeros(B, H, K_, V_)
    k_before, v_before, y = V.new_zeros(B, H, K_), V.new_zeros(B, H, V_), []
    for t in range(T):
        dt, decay = DT[:, :, t, None, None], ADT[:, :, t, None, None].exp()
        own = share[:, :, t, None, None]
        angle = angle + math.pi * Angles[:, t].tanh() * dt[..., 0]
        q_t, k_t = turn(q[:, t], angle), turn(k[:, t], angle)
        S = decay * S + (1 - own) * dt * decay * k_before[..., None] * v_before[:, :, None]
        S = S + own * dt * k_t[..., None] * V[:, t, :, None]
        y.append((q_t[..., None] * S).sum(2) + D[:, None] * V[:, t])
        k_before, v_before = k_t, V[:, t]
    return torch.stack(y, 1) * F.silu(Z)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    size = 2 * angle.shape[-1]
    turned = torch.view_as_complex(x[..., :size].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle))
    return torch.cat([turned.flatten(-2), x[..., size:]], -1)


def mamba3_of_kernels(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, **kwargs) -> Tensor:
    """mamba_ssm's mamba3_siso_combined in float32, where that casts to bfloat16. What it computes
    by PTX, which Triton's interpreter can't, is computed by Triton's own functions.
    """
    where = "mamba_ssm.ops.triton.mamba3"
    kernel = importlib.import_module(f"{where}.mamba3_siso_fwd")
    angles = importlib.import_module(f"{where}.angle_dt")
    for module in (kernel, angles):
        for name, function in by_triton().items():
            if hasattr(module, name):
                setattr(module, name, function)
    sums = angles.angle_dt_fwd(Angles, DT, chunk_size=64)
    given = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, sums, D, Z)
    return kernel.mamba3_siso_fwd(*given, chunk_size=64)[0]


def by_triton() -> dict[str, Any]:
    import triton
    import triton.language as language

    global tl  # where the interpreter looks for it
    tl = language

    def cos_approx(x):
        return tl.cos(x)

    def sin_approx(x):
        return tl.sin(x)

    def tanh_approx(x):
        return 2 * tl.sigmoid(2 * x) - 1

    def sigmoid_approx(x):
        return tl.sigmoid(x)

    def silu(x):
        return x * tl.sigmoid(x)

    functions = cos_approx, sin_approx, tanh_approx, sigmoid_approx, silu
    return {function.__name__: triton.jit(function) for function in functions}


def without_cuda(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None, None]:
    """Mamba3.forward, which looks for CUDA first."""
    return self.cuda_kernels_forward(hidden_states)[0], None, None


def norm_then_linear(x, norm_weight, norm_bias, weight, bias, eps=1e-5) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if norm_weight is None else y * norm_weight
    return F.linear(y, weight, bias)


def mamba_norm(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    from fla.modules.layernorm_gated import rms_norm_ref

    options = {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
    return rms_norm_ref(x, self.weight, None, z, self.eps, **options)


REPLACED: dict[str, dict[str, Any]] = {
    "fla.modules.layernorm:RMSNorm": {"forward": rms_norm},
    "fla.modules:FusedRMSNormGated": {"forward": gated_norm},
    "fla.modules:ShortConvolution": {"forward": convolution},
    "fla.modules.mlp:SwiGLULinear": {
        "forward": lambda self, x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
    },
    "fla.modules.layernorm_gated:RMSNormGated": {"forward": mamba_norm},
    "fla.layers.gated_deltanet": {
        "causal_conv1d": causal_conv1d,
        "chunk_gated_delta_rule": gated_delta_rule,
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
    },
    "fla.layers.delta_net": {
        "chunk_delta_rule": delta_rule,
        "fused_recurrent_delta_rule": delta_rule,
    },
    "fla.layers.gated_deltaproduct": {"chunk_gated_delta_product": product},
    "fla.layers.comba": {"chunk_comba": comba},
    "fla.layers.precond_gated_deltanet": {"chunk_precond_gated_delta_rule": precond},
    "fla.layers.precond_kda": {"chunk_precond_kda": precond, "fused_kda_gate": kda_gate},
    "fla.layers.gla": {
        "chunk_gla": gla,
        "fused_recurrent_gla": gla,
        "ACT2FN": {"swish": F.silu, "relu": F.relu},
    },
    "fla.layers.multiscale_retention": {
        "chunk_retention": retention,
        "fused_recurrent_retention": retention,
    },
    "fla.modules.rotary.ops": {
        "rotary_embedding": lambda x, cos, sin, **kwargs: importlib.import_module(
            "fla.modules.rotary.ops"
        ).rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]]),
    },
    "fla.layers.linear_attn": {
        "chunk_linear_attn": linear_attention,
        "fused_recurrent_linear_attn": linear_attention,
        "elu_p1": lambda x: F.elu(x) + 1,
    },
    "fla.layers.hgrn2": {
        "chunk_gla": gla,
        "fused_recurrent_gla": gla,
        "swish": F.silu,
        "rms_norm_linear": norm_then_linear,
    },
    "fla.layers.hgrn": {
        "chunk_hgrn": hgrn,
        "fused_recurrent_hgrn": hgrn,
        "swiglu": lambda x, y: F.silu(x) * y,
    },
    "fla.layers.mamba3": {"mamba3_siso_combined": mamba3},
    "fla.layers.mamba2": {"ACT2FN": {"silu": F.silu}},
    "fla.modules.layernorm:LayerNorm": {"forward": layer_norm},
    "fla.modules.layernorm:GroupNorm": {"forward": group_norm},
    "fla.layers.rwkv6": {
        "chunk_rwkv6": rwkv6,
        "fused_recurrent_rwkv6": rwkv6,
        "token_shift": token_shift,
        "ACT2FN": {"swish": F.silu},
    },
    "fla.models.rwkv6.modeling_rwkv6": {
        "token_shift": token_shift,
        "ACT2FN": {"sqrelu": lambda x: F.relu(x).square()},
    },
    "fla.layers.kda": {"chunk_kda": kda, "fused_recurrent_kda": kda},
}


def use_loops() -> None:
    for where, members in REPLACED.items():
        module, _, name = where.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, name) if name else owner
        for member, replacement in members.items():
            getattr(owner, member)
            setattr(owner, member, replacement)
    keep_angles_in_float32()
    linear_attn = importlib.import_module("fla.layers.linear_attn").LinearAttention
    made = linear_attn.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if kwargs["feature_map"] == "elu":
            self.feature_map_q = self.feature_map_k = lambda x: F.elu(x) + 1

    linear_attn.__init__ = init


def keep_angles_in_float32() -> None:
    """Sines of positions: fla computes them in float32 whatever the model's dtype."""
    rotary = importlib.import_module("fla.modules.rotary.ops").RotaryEmbedding
    update = rotary._update_cos_sin_cache

    @functools.wraps(update)
    def update_in_float32(self: Any, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        with torch._C.DisableTorchFunction():
            update(self, seqlen, device, torch.float32)
        self._cos_cached, self._sin_cached = self._cos_cached.double(), self._sin_cached.double()

    rotary._update_cos_sin_cache = update_in_float32


# ---- what is written ----


def expected(name: str) -> Path:
    return ROOT / name / "expected.safetensors"


def write_kernels(name: str) -> None:
    make_folder(name)
    ids = torch.randint(40, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = load(name, torch.float32)(ids, use_cache=False).logits
    save_file({"input_ids": ids, "kernels": logits.contiguous()}, expected(name))


def write_loops(name: str) -> None:
    model = load(name, torch.float32)
    tensors = load_file(expected(name))
    ids = tensors["input_ids"]
    with contextlib.ExitStack() as stack:
        for x in model.parameters():
            x.data = x.data.double()
        stack.enter_context(InFloat64())
        logits = model(ids, use_cache=False).logits
    print(name, "kernels and loops differ by", (logits - tensors["kernels"]).abs().max().item())
    tensors["logits"] = logits.detach().contiguous()
    if name in GRADIENTS:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for path, x in model.named_parameters():
            if path.startswith(WITH_GRADIENT):
                assert isinstance(x, nn.Parameter) and x.grad is not None
                tensors[f"gradient:{path}"] = x.grad.contiguous()
    save_file(tensors, expected(name))


def main() -> None:
    how, *names = sys.argv[1:]
    if how == "kernels":
        os.environ["TRITON_INTERPRET"] = "1"
        autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
        autotuner._bench = lambda self, *args, **kwargs: [1.0]  # nothing to time there
    stand_in_for_flash_attn()
    stand_in_for_cuda()
    if how == "loops":
        use_loops()
    for name in names or CASES:
        {"kernels": write_kernels, "loops": write_loops}[how](name)


if __name__ == "__main__":
    main()
