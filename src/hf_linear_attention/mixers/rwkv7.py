# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7 as a layer of a model: a delta rule whose tokens say for each channel how much is
forgotten, and how strongly what is found under a key is replaced. And the MLP that goes with it.

Both read each token beside the one before it. Values of all layers are mixed with the first one's.

Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", arXiv 2503.14456; sizes
and names as in flash-linear-attention, first values as in the authors' training code (RWKV-LM).

Shapes: B batch, T time (where sequences are packed: 1 row of all tokens), C hidden size, H heads, K
key dim, V value dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..cache.layer_state import LayerMemory
from ..fast.linear import project
from ..ops.numerics import accumulation_dtype
from ..ops.tokens import Tokens
from ..recurrences.delay import Delay, DelayInputs
from ..recurrences.dplr_delta_rule import DPLRInputs, DPLRRecurrence
from ..recurrences.interface import Recurrence
from .linear_attention import Heads
from .parts.rwkv7_tokens import Norm, activated, keys_of, mixed_tokens, mixed_values, read_out
from .parts.tensor_parallel import call, find_head_shard

OF_MLP = "mlp_token_before"  # a state of the layer, which the MLP changes
MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
# How the share of the token before grows over the channels of a layer, at first.
EXPONENTS = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}


def low_rank_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Features between the projections of low rank: fields of the config, or factors of sqrt(C),
    larger for larger heads, to a multiple of 32.
    """
    wider = config.linear_key_head_dim / 64
    factors = {
        "decay_low_rank_dim": 2.5 * wider,
        "a_low_rank_dim": 2.5 * wider,
        "v_low_rank_dim": 1.7 * wider,
        "gate_low_rank_dim": 5.0,
    }
    return {
        name: getattr(config, name) or max(32, round(factor * config.hidden_size**0.5 / 32) * 32)
        for name, factor in factors.items()
    }


@torch.no_grad()
def draw_orthogonal(weight: Tensor, gain: float = 1.0) -> None:
    """Writes a matrix with orthogonal rows or columns, in any dtype, if it was not loaded."""
    if not getattr(weight, "_is_hf_initialized", False):
        dtype = accumulation_dtype(weight.dtype)
        drawn = torch.empty_like(weight, dtype=dtype)
        weight.copy_(init.orthogonal_(drawn, gain=gain))


class LowRank(nn.Module):
    """W_b act(W_a x), (B, T, C) -> (B, T, features)"""

    def __init__(self, sizes: tuple[int, int, int], act: nn.Module):
        """sizes: of x, between, and of what comes out."""
        super().__init__()
        C, rank, size = sizes
        self.a_proj = nn.Linear(C, rank, bias=False)
        self.act = act
        self.b_proj = nn.Linear(rank, size, bias=False)

    def draw(self) -> None:
        """Writes both projections, so that all is the bias. Not `reset_parameters`: Transformers
        passes over modules of others that have no parameters of their own.
        """
        size, rank = self.b_proj.weight.shape
        init.zeros_(self.a_proj.weight)
        draw_orthogonal(self.b_proj.weight, 0.1 * max(1.0, math.sqrt(rank / size)))

    def product(self, x: Tensor) -> Tensor:
        return project(self.b_proj, self.act(project(self.a_proj, x)))

    def forward(self, x: Tensor) -> Any:
        return self.product(x)


class BiasedLowRank(LowRank):
    """As LowRank, and a bias, which others add: in float32 where the model is in half precision,
    for decays of many tokens are multiplied.
    """

    def __init__(self, sizes: tuple[int, int, int], act: nn.Module):
        super().__init__(sizes, act)
        dtype = accumulation_dtype(torch.get_default_dtype())
        self.bias = nn.Parameter(torch.zeros(sizes[-1], dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Also the bias, for a module's weights may be elsewhere but in its own forward."""
        return self.product(x), self.bias


class HeadsLayerNorm(nn.Module):
    """LayerNorm of each head of (B, T, H, V), with a weight and a bias for each channel of each."""

    has_parameters_per_head = True

    def __init__(self, num_heads: int, value_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads * value_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads * value_dim))

    def forward(self, y: Tensor) -> Tensor:
        return self.norm.of(y)

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.bias, self.eps)


class GatedHeadsLayerNorm(HeadsLayerNorm):
    """As HeadsLayerNorm, and what RWKV-7 does behind it. Transformers, which writes first weights,
    knows norms by their names.
    """

    def forward(  # type: ignore[override]
        self, y: Tensor, keys: tuple[Tensor, Tensor], v: Tensor, gate: Tensor, bonus: Tensor
    ) -> Tensor:
        """As `read_out`."""
        return read_out(y, keys, v, gate, bonus, self.norm)


class RWKV(nn.Module):
    """What layers of RWKV have in common: the token before, of theirs and of their MLP.

    recurrence: which a layer has besides.
    """

    recurrence: Recurrence

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_layers = config.num_hidden_layers
        self.heads = Heads.sharing_keys(config)
        self.delay = Delay("token_before", config.hidden_size)
        has_mlp = config.intermediate_size > 0
        self.of_mlp = (Delay(OF_MLP, config.hidden_size),) if has_mlp else ()

    @property
    def recurrences(self) -> list[Recurrence]:
        """All that the layer remembers, its MLP included."""
        return [self.delay, self.recurrence, *self.of_mlp]


class RWKV7(RWKV):
    """For each head S_t of (K, V), of r, w, k, v and a, each made of a token and the one before:

        S_t = (Diag(w_t) - (kappa_t a_t) kappa_t^T) S_(t-1) + k'_t v_t^T,  y_t = S_t^T r_t

    with kappa = k k_k, divided by its norm, k' = k (1 + (a - 1) k_a), and log w from -e^(-1/2) to
    0. Then come a norm of each head, a bonus for the token itself, and a gate.
    """

    x_r: Tensor
    initial_state: Tensor | None

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.heads
        C, H, K, V = config.hidden_size, heads.values, heads.key_dim, heads.value_dim
        bias, out_bias = config.attention_bias, config.attention_out_bias
        for name in MIXES:
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, C)))
        self.k_k = nn.Parameter(torch.empty(H * K))
        self.k_a = nn.Parameter(torch.empty(H * K))
        self.r_k = nn.Parameter(torch.empty(H, K))
        self.r_proj = nn.Linear(C, H * K, bias=bias)
        self.k_proj = nn.Linear(C, H * K, bias=bias)
        self.v_proj = nn.Linear(C, H * V, bias=bias)
        self.o_proj = nn.Linear(H * V, C, bias=out_bias)
        ranks = low_rank_sizes(config)
        self.w_lora = BiasedLowRank((C, ranks["decay_low_rank_dim"], H * K), nn.Tanh())
        self.a_lora = BiasedLowRank((C, ranks["a_low_rank_dim"], H * K), nn.Identity())
        if layer_idx > 0:
            self.v_lora = BiasedLowRank((C, ranks["v_low_rank_dim"], H * V), nn.Identity())
        self.g_lora = LowRank((C, ranks["gate_low_rank_dim"], H * V), nn.Sigmoid())
        self.g_norm = GatedHeadsLayerNorm(H, V, K * config.rms_norm_eps)
        first = nn.Parameter(torch.zeros(H, K, V)) if config.learn_initial_state else None
        self.register_parameter("initial_state", first)
        self.recurrence = DPLRRecurrence(
            *(H, K, V, config.learn_initial_state), in_fp64=config.state_in_fp64
        )
        self._reset_vectors()

    def reset_parameters(self) -> None:
        """Writes all of the layer: at first it adds nothing, for o_proj is 0. The model's
        `_init_weights` calls it.
        """
        self._reset_vectors()
        draw_orthogonal(self.r_proj.weight)
        draw_orthogonal(self.k_proj.weight, 0.1)
        draw_orthogonal(self.v_proj.weight)
        init.zeros_(self.o_proj.weight)
        for name in ("w", "a", "v", "g") if self.layer_idx > 0 else ("w", "a", "g"):
            getattr(self, f"{name}_lora").draw()
        if self.initial_state is not None:
            init.zeros_(self.initial_state)

    @torch.no_grad()
    def _reset_vectors(self) -> None:
        L, layer = self.num_layers, self.layer_idx
        depth, room = layer / max(L - 1, 1), 1 - layer / L
        of_channels = torch.arange(self.x_r.numel(), device="cpu") / self.x_r.numel()
        for name, exponent in EXPONENTS.items():
            init.copy_(getattr(self, name), 1 - of_channels.pow(exponent * room).view(1, 1, -1))
        at = torch.linspace(0, 1, self.k_k.numel(), device="cpu")  # of a key's channels
        K = self.heads.key_dim
        in_head = torch.linspace(-1, 1, K, device="cpu") if K > 1 else torch.zeros(1, device="cpu")
        zigzag = (in_head * in_head.abs()).repeat(self.heads.values)
        init.copy_(self.k_k, 0.71 - 0.1 * (at - 0.5))
        init.constant_(self.k_a, 1.02)
        init.constant_(self.r_k, -0.04)
        slow_to_fast = -6 + 6 * at.pow(1 + depth**0.3)
        init.copy_(self.w_lora.bias, slow_to_fast + 0.5 + 2.5 * zigzag)
        init.copy_(self.a_lora.bias, -0.19 + 0.3 * zigzag + 0.4 * (at - 0.5))
        if layer > 0:
            at = torch.linspace(0, 1, self.v_proj.out_features, device="cpu")
            init.copy_(self.v_lora.bias, 0.73 - 0.4 * (at - 0.5))
        init.constant_(self.g_norm.weight, ((layer + 1) / L) ** 0.7)

    def forward(
        self, hidden_states: Tensor, v_first: Tensor | None, tokens: Tokens, memory: LayerMemory
    ) -> tuple[Tensor, Tensor]:
        """hidden_states (B, T, C) and the first layer's values, None in the first -> (B, T, C), and
        these values, (1, B T, features) where sequences are packed.
        """
        x, _ = tokens.one_row(hidden_states)
        before = memory.run(self.delay, DelayInputs(x))
        mixes = [getattr(self, name) for name in MIXES]
        of_r, of_w, of_k, of_v, of_a, of_g = mixed_tokens(x, before, mixes)
        r, k, v = project(self.r_proj, of_r), project(self.k_proj, of_k), project(self.v_proj, of_v)
        shard = find_head_shard(k, self.k_proj, self.heads.values, "linear_num_value_heads")

        def own(x: Tensor, dim: int = 0) -> Tensor:
            """This rank's part of what all ranks have, by heads in dimension `dim`."""
            return x if shard is None else shard.take(x, dim)

        if self.layer_idx == 0:
            v_first = v
        else:
            assert v_first is not None
            share, of_share = self.v_lora(of_v)
            v = mixed_values(v, v_first, own(share, 2), own(of_share))
        (w, of_w), (a, of_a) = self.w_lora(of_w), self.a_lora(of_a)
        w, a = own(w, 2), own(a, 2)
        r, k, w, a = (self.by_heads(y, self.heads.key_dim) for y in (r, k, w, a))
        gate = own(self.g_lora(of_g), 2)
        v, gate = (self.by_heads(y, self.heads.value_dim) for y in (v, gate))
        keys = keys_of(k, w, a, (own(of_w), own(of_a)), (own(self.k_k), own(self.k_a)))
        first = None if self.initial_state is None else own(self.initial_state)
        of_tokens = r.to(v.dtype), keys.key, v, keys.erased, keys.written, keys.log_decay
        y = memory.run(self.recurrence, DPLRInputs(*of_tokens, first_state=first))
        y = call(self.g_norm, shard, y, (r, keys.key), v, gate, own(self.r_k))
        return project(self.o_proj, y).view(hidden_states.shape), v_first

    @staticmethod
    def by_heads(x: Tensor, dim: int) -> Tensor:
        """(B, T, features) -> (B, T, heads, dim)"""
        B, T, features = x.shape
        return x.view(B, T, features // dim, dim)


class ShiftedMLP(nn.Module):
    """W_down act(W_up (x_t + (x_(t-1) - x_t) x_k)): a token beside the one before, and no gate."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        C, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.room = 1 - layer_idx / config.num_hidden_layers
        self.x_k = nn.Parameter(torch.empty(C))
        self.up_proj = nn.Linear(C, size, bias=bias)
        self.down_proj = nn.Linear(size, C, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.delay = Delay(OF_MLP, C)
        self._reset_vectors()

    def reset_parameters(self) -> None:
        """Writes all of it: at first it adds nothing, for down_proj is 0. The model's
        `_init_weights` calls it.
        """
        self._reset_vectors()
        draw_orthogonal(self.up_proj.weight)
        init.zeros_(self.down_proj.weight)

    @torch.no_grad()
    def _reset_vectors(self) -> None:
        of_channels = torch.arange(self.x_k.numel(), device="cpu") / self.x_k.numel()
        init.copy_(self.x_k, 1 - of_channels.pow(self.room**4))

    def forward(self, hidden_states: Tensor, tokens: Tokens, memory: LayerMemory) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x, _ = tokens.one_row(hidden_states)
        before = memory.run(self.delay, DelayInputs(x))
        return self.mix(x, before).view(hidden_states.shape)

    def mix(self, x: Tensor, before: Tensor) -> Tensor:
        """x and the tokens before, (B, T, C) each -> (B, T, C)"""
        (x,) = mixed_tokens(x, before, [self.x_k])
        return project(self.down_proj, activated(project(self.up_proj, x), self.act_fn))
