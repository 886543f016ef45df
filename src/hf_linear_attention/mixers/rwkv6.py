# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-6 (Finch) as a layer of a model: linear attention whose tokens say for each channel how much
is forgotten, and how much of the token before each of their parts is made of. And the MLP that goes
with it, with a gate.

Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv
2404.05892; sizes as in flash-linear-attention, first values as in the authors' training code
(RWKV-LM).

Shapes: B batch, T time (where sequences are packed: 1 row of all tokens), C hidden size, H heads, K
key dim, V value dim, R features between projections.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers import initialization as init

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..ops.numerics import at_least_float32
from ..ops.tokens import Tokens
from ..recurrences.delay import DelayInputs
from ..recurrences.linear_attention import LinearInputs
from ..recurrences.read_first import ReadFirst
from .parts.tensor_parallel import call, find_head_shard
from .rwkv7 import RWKV, BiasedLowRank, HeadsLayerNorm, ShiftedMLP, draw_orthogonal

# How the share of the token before grows over the channels of a layer, at first.
EXPONENTS = {"r": 0.5, "w": 1.0, "k": 1.0, "v": 1.0, "g": 0.5}


def sizes_between(config: PreTrainedConfig) -> dict[str, int]:
    """Features between the projections of low rank: fields of the config, or the authors', which
    are twice as many from a hidden size of 4,096 on.
    """
    wider = 2 if config.hidden_size >= 4096 else 1
    sizes = {"proj_low_rank_dim": 32 * wider, "decay_low_rank_dim": 64 * wider}
    return {name: getattr(config, name) or size for name, size in sizes.items()}


class TokenMix(nn.Module):
    """Mixes of each token and the one before, as many as `EXPONENTS` names, by shares that both say
    for each channel: with m = tanh(A (x_t + (x_(t-1) - x_t) mu)), of R features for each of them,

        x_t + (x_(t-1) - x_t) (bias + B m)
    """

    def __init__(self, hidden_size: int, rank: int):
        super().__init__()
        n, C = len(EXPONENTS), hidden_size
        self.mu = nn.Parameter(torch.empty(C))
        self.bias = nn.Parameter(torch.empty(n, C))
        self.a_proj = nn.Linear(C, n * rank, bias=False)
        self.b = nn.Parameter(torch.empty(C, n * rank))  # of each R features: no single product

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        """x and the tokens before, (B, T, C) each -> five times (B, T, C)"""
        dtype, shape = x.dtype, (len(EXPONENTS), -1)
        low = project(self.a_proj, torch.lerp(x, before, self.mu.to(dtype))).tanh()
        b = self.b.to(dtype).unflatten(1, shape)
        shares = torch.einsum("btnr,cnr->nbtc", low.to(dtype).unflatten(2, shape), b)
        bias = self.bias.to(dtype)[:, None, None]
        return torch.lerp(x, before, shares + bias).unbind()


class RWKV6(RWKV):
    """For each head S_t of (K, V), of r, w, k, v and g, each made of a token and the one before:

        S_t = Diag(w_t) S_(t-1) + k_t v_t^T,  y_t = (S_(t-1) + Diag(u) k_t v_t^T)^T r_t

    with a bonus u, and log w = -exp(...). Then come a norm of each head, and the gate silu(g).
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.heads
        C, H, K, V = config.hidden_size, heads.values, heads.key_dim, heads.value_dim
        bias, sizes = config.attention_bias, sizes_between(config)
        self.x_mix = TokenMix(C, sizes["proj_low_rank_dim"])
        self.r_proj = nn.Linear(C, H * K, bias=bias)
        self.k_proj = nn.Linear(C, H * K, bias=bias)
        self.v_proj = nn.Linear(C, H * V, bias=bias)
        self.g_proj = nn.Linear(C, H * V, bias=bias)
        self.o_proj = nn.Linear(H * V, C, bias=config.attention_out_bias)
        self.w_lora = BiasedLowRank((C, sizes["decay_low_rank_dim"], H * K), nn.Tanh())
        self.bonus = nn.Parameter(torch.empty(H, K))
        self.g_norm = HeadsLayerNorm(H, V, config.output_norm_eps)
        self.recurrence = ReadFirst(H, K, V, normalize=False, in_fp64=config.state_in_fp64)
        self._reset_vectors()

    def reset_parameters(self) -> None:
        """Writes all of the layer: at first it adds nothing, for o_proj is 0. The model's
        `_init_weights` calls it.
        """
        self._reset_vectors()
        draw_orthogonal(self.r_proj.weight)
        draw_orthogonal(self.k_proj.weight, 0.1)
        draw_orthogonal(self.v_proj.weight)
        draw_orthogonal(self.g_proj.weight, 0.1)
        init.zeros_(self.o_proj.weight)
        for low_rank in (self.x_mix, self.w_lora):
            init.zeros_(low_rank.a_proj.weight)
        init.uniform_(self.w_lora.b_proj.weight, -0.01, 0.01)
        init.uniform_(self.x_mix.b, -0.01, 0.01)

    @torch.no_grad()
    def _reset_vectors(self) -> None:
        L, layer = self.num_layers, self.layer_idx
        depth, room = layer / max(L - 1, 1), 1 - layer / L
        C, decays = self.x_mix.mu.numel(), self.bonus.numel()
        of_channels = torch.arange(C, device="cpu") / C
        init.copy_(self.x_mix.mu, 1 - of_channels.pow(room))
        less = {"v": 0.3 * depth}
        shares = [1 - of_channels.pow(x * room) - less.get(n, 0) for n, x in EXPONENTS.items()]
        init.copy_(self.x_mix.bias, torch.stack(shares))
        at = torch.linspace(0, 1, decays, device="cpu")  # of a key's channels
        init.copy_(self.w_lora.bias, -6 + 5 * at.pow(0.7 + 1.3 * depth))
        zigzag = 0.1 * ((torch.arange(decays, device="cpu") + 1) % 3 - 1)
        init.copy_(self.bonus, (depth * (1 - at) + zigzag).view_as(self.bonus))
        init.constant_(self.g_norm.weight, ((layer + 1) / L) ** 0.7)

    def forward(
        self, hidden_states: Tensor, v_first: None, tokens: Tokens, memory: LayerMemory
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and nothing for the layers behind it."""
        x, _ = tokens.one_row(hidden_states)
        of_r, of_w, of_k, of_v, of_g = self.x_mix(x, memory.run(self.delay, DelayInputs(x)))
        r, k, v = project(self.r_proj, of_r), project(self.k_proj, of_k), project(self.v_proj, of_v)
        shard = find_head_shard(k, self.k_proj, self.heads.values, "linear_num_value_heads")
        w, bias = self.w_lora(of_w)
        log_decay: Tensor = -(at_least_float32(w) + bias).exp()
        bonus: Tensor = self.bonus
        if shard is not None:
            log_decay, bonus = shard.take(log_decay, 2), shard.take(bonus, 0)
        r, k, log_decay = (y.unflatten(2, (-1, self.heads.key_dim)) for y in (r, k, log_decay))
        v = v.unflatten(2, (-1, self.heads.value_dim))
        y = memory.run(self.recurrence, LinearInputs(r, k, v, log_decay))
        of_itself = (at_least_float32(r) * k * bonus).sum(-1, keepdim=True)
        y = call(self.g_norm, shard, y + of_itself * v).flatten(2).to(v.dtype)
        y = y * F.silu(project(self.g_proj, of_g))
        return project(self.o_proj, y).view(hidden_states.shape), None


class GatedShiftedMLP(ShiftedMLP):
    """sigmoid(W_r (x_t + (x_(t-1) - x_t) x_r)) times what RWKV-7's has."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        C = config.hidden_size
        self.x_r = nn.Parameter(torch.empty(C))
        self.r_proj = nn.Linear(C, C, bias=config.mlp_bias)
        self._reset_shares()

    def reset_parameters(self) -> None:
        """Writes all of it: at first it adds nothing, for down_proj is 0. The model's
        `_init_weights` calls it.
        """
        super().reset_parameters()
        init.zeros_(self.r_proj.weight)
        self._reset_shares()

    @torch.no_grad()
    def _reset_shares(self) -> None:
        of_channels = torch.arange(self.x_k.numel(), device="cpu") / self.x_k.numel()
        for x in (self.x_k, self.x_r):
            init.copy_(x, 1 - of_channels.pow(self.room))

    def mix(self, x: Tensor, before: Tensor) -> Tensor:
        """x and the tokens before, (B, T, C) each -> (B, T, C)"""
        gate = project(self.r_proj, torch.lerp(x, before, self.x_r.to(x.dtype))).sigmoid()
        return gate * super().mix(x, before)
