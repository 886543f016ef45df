# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Log decays by name: modules from hidden states to g, at most 0, (B, T, H) or for every channel of
keys (B, T, H, K), or None. Some give the keys, too.

Shapes: B batch, T time, H heads of states (`config.num_state_heads`), K key dim. h = 0 ... H - 1
counts heads, l layers (L of them).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from ...fast.linear import project
from ...ops.backends import native_op, takes_one_op
from ...ops.numerics import (
    accumulation_dtype,
    at_least_float32,
    bounded,
    decay_of_steps,
    without_excess,
)
from .tensor_parallel import HeadShard

compiled_decay_steps = native_op("decay_steps")


class Decay(nn.Module):
    """Hidden states (B, T, hidden) -> log decay (B, T, H), or None where nothing is forgotten;
    `per_channel` ones (B, T, H, K).

    Where it `gives_keys`: projected keys (B, T, H, K) of this rank's heads, and which heads these
    are, None for all -> keys as the recurrence takes them, and log decay (B, T, H, K).
    """

    per_channel: ClassVar[bool] = False
    gives_keys: ClassVar[bool] = False

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()

    def reset_parameters(self) -> None:
        """Writes all parameters and buffers, by functions of `torch.nn.init` or
        `transformers.initialization`; the model's `_init_weights` calls it.
        """


class NoDecay(Decay):
    """Nothing is forgotten. Katharopoulos et al., arXiv 2006.16236."""

    def forward(self, hidden_states: Tensor) -> None:
        return None


class FixedDecay(Decay):
    """One constant per head, expanded without a copy; not saved, because the config gives it."""

    log_decay: Tensor

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.values = self.per_head(config.num_state_heads, layer_idx, config.num_hidden_layers)
        self.register_buffer(
            "log_decay", torch.tensor(self.values, dtype=torch.float32), persistent=False
        )

    @staticmethod
    def per_head(num_heads: int, layer_idx: int, num_layers: int) -> list[float]:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Writes the constants; the model's `_init_weights` calls it."""
        init.copy_(self.log_decay, torch.tensor(self.values, dtype=torch.float32, device="cpu"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        # A cast of the model, to bfloat16, say, must not round the constants.
        device = self.log_decay.device
        self.log_decay = torch.tensor(self.values, dtype=torch.float32, device=device)
        return self

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.log_decay.expand(*hidden_states.shape[:2], -1)


class RetNet(FixedDecay):
    """log(1 - 2^(-5-h)). Sun et al., "Retentive Network", arXiv 2307.08621."""

    @staticmethod
    def per_head(num_heads: int, layer_idx: int, num_layers: int) -> list[float]:
        return [math.log1p(-(2.0 ** (-5 - h))) for h in range(num_heads)]


class Lightning(FixedDecay):
    """-2^(-8 (h+1) / H) (1 - l / (L - 1 + 1e-5) + 1e-5). MiniMax-01, arXiv 2501.08313."""

    @staticmethod
    def per_head(num_heads: int, layer_idx: int, num_layers: int) -> list[float]:
        by_layer = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
        return [-(2.0 ** (-8 * (h + 1) / num_heads)) * by_layer for h in range(num_heads)]


class PerHead(Decay):
    """-softplus(theta_h), learned; at first RetNet's values."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.theta = nn.Parameter(torch.empty(config.num_state_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes theta; the model's `_init_weights` calls it."""
        rates = -torch.tensor(RetNet.per_head(self.theta.numel(), 0, 1), device="cpu")
        init.copy_(self.theta, inverse_softplus(rates))

    def forward(self, hidden_states: Tensor) -> Tensor:
        log_decay = -nn.functional.softplus(at_least_float32(self.theta))
        return log_decay.expand(*hidden_states.shape[:2], -1)


class PerToken(Decay):
    """-exp(A_h) softplus(w_h.x_t + b_h), learned: each token says how much is forgotten.

    Initialised as there: exp(A) uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1].
    Dao and Gu, "Transformers are SSMs" (Mamba-2), arXiv 2405.21060.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.dt_proj = nn.Linear(config.hidden_size, config.num_state_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(config.num_state_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_state_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws A_log and dt_bias; the model's `_init_weights` calls it. dt_proj is any Linear."""
        draw_steps(self.dt_bias, self.A_log)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return decay_steps(project(self.dt_proj, hidden_states), self.dt_bias, self.A_log)[1]


class Kimi(Decay):
    """-exp(A_h) softplus(W_b W_a x_t + b), learned, one for each channel of a key; W_a leaves as
    many features as a value has. Initialised as PerToken. Kimi Team, "Kimi Linear",
    arXiv 2510.26692.
    """

    per_channel = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        H, K, rank = (
            config.num_state_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        self.f_a_proj = nn.Linear(config.hidden_size, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, H * K, bias=False)
        # float32 where the model is loaded in half precision, as in Transformers' Kimi Linear
        dtype = accumulation_dtype(torch.get_default_dtype())
        self.dt_bias = nn.Parameter(torch.empty(H * K, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(H))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws A_log and dt_bias; the model's `_init_weights` calls it."""
        draw_steps(self.dt_bias, self.A_log)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, H, K)"""
        x = project(self.f_b_proj, project(self.f_a_proj, hidden_states))
        _, log_decay = decay_steps(x, self.dt_bias, self.A_log)
        return log_decay.unflatten(-1, (self.A_log.numel(), -1))


class BoundedKimi(Kimi):
    """b sigmoid(exp(A_h) (W_b W_a x_t + c)), with the config's decay_lower_bound b: no token
    forgets more than that. As flash-linear-attention's `safe_gate`.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.lower_bound = config.decay_lower_bound

    def reset_parameters(self) -> None:
        """Writes A_log and dt_bias, as there; the model's `_init_weights` calls it."""
        draw_steps(self.dt_bias, self.A_log)
        init.zeros_(self.A_log)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, H, K)"""
        x = project(self.f_b_proj, project(self.f_a_proj, hidden_states))
        x = (at_least_float32(x) + self.dt_bias).unflatten(-1, (self.A_log.numel(), -1))
        return self.lower_bound * (at_least_float32(self.A_log).exp()[:, None] * x).sigmoid()


class GatedPerChannel(Decay):
    """log sigmoid(x W1 W2 + b) / 16, learned, W1 to 16 features: each token says how much of every
    channel is forgotten. Yang et al., "Gated Linear Attention", arXiv 2312.06635, section 4.4.
    """

    RANK = 16
    TEMPERATURE = 16  # so that little is forgotten at first
    per_channel = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.key_dim = config.linear_key_head_dim
        self.gk_proj = nn.Sequential(
            nn.Linear(config.hidden_size, self.RANK, bias=False),
            nn.Linear(self.RANK, config.num_state_heads * self.key_dim),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, H, K)"""
        x = hidden_states
        for linear in self.gk_proj:
            x = project(linear, x)
        x = at_least_float32(x).unflatten(-1, (-1, self.key_dim))
        return nn.functional.logsigmoid(x) / self.TEMPERATURE


class HGRN2(Decay):
    """log f, f = b + (1 - b) sigmoid(x), for projected keys x and the layer's lower bound b, and
    the keys 1 - f: what is forgotten makes room for what is written. In the first layer b is 0.
    Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", arXiv 2404.07904, section 3.
    """

    per_channel = True
    gives_keys = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        # Of the model, which is no part of the layer, as it would be outside of a tuple.
        self.lower_bounds: tuple[Callable[[int], Tensor], ...] = ()

    def forward(self, k: Tensor, shard: HeadShard | None = None) -> tuple[Tensor, Tensor]:
        """Projected keys (B, T, H, K) -> keys and log decays (B, T, H, K)."""
        x = at_least_float32(k)
        log_decay = nn.functional.logsigmoid(x)
        for of_layers in self.lower_bounds:
            bound = of_layers(self.layer_idx).to(x.device, x.dtype)
            if shard is not None:
                bound = shard.take(bound, 0)
            # in logs, so that a small f is exact; 0 and 1 have none that could be computed with
            limits = torch.finfo(torch.float32)
            bound = bounded(bound, limits.tiny, 1 - limits.eps)
            log_decay = torch.logaddexp(bound.log(), torch.log1p(-bound) + log_decay)
            log_decay = without_excess(log_decay)
        return -torch.expm1(log_decay), log_decay


class LowerBounds(nn.Module):
    """Of what HGRN2's layers remember: b_l, the sum of softmax(Gamma)_1 ... softmax(Gamma)_l over
    layers, for each channel. So they rise from layer to layer, the first having none.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.shape = config.num_state_heads, config.linear_key_head_dim
        self.weight = nn.Parameter(torch.empty(config.num_hidden_layers, math.prod(self.shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes Gamma; the model's `_init_weights` calls it."""
        init.zeros_(self.weight)

    def forward(self, layer_idx: int) -> Tensor:
        """b of a layer, (H, K)."""
        shares = at_least_float32(self.weight).softmax(0)
        return shares[1 : layer_idx + 1].cumsum(0)[-1].view(self.shape)


def has_lower_bounds(config: PreTrainedConfig) -> bool:
    """Whether there are HGRN2's layers."""
    return issubclass(decay_class(config.decay), HGRN2)


def share_lower_bounds(model: nn.Module, config: PreTrainedConfig) -> LowerBounds | None:
    """What HGRN2's layers have in common, for `model.lower_bounds`, where they look for it: PEFT
    may put something else there. None without such layers behind the first.
    """
    decays = [x for x in model.modules() if isinstance(x, HGRN2) and x.layer_idx > 0]
    for decay in decays:
        decay.lower_bounds = (functools.partial(lower_bound_of, model),)
    return LowerBounds(config) if decays else None


def lower_bound_of(model: Any, layer_idx: int) -> Tensor:
    return model.lower_bounds(layer_idx)


DECAYS: dict[str, type[Decay]] = {
    "none": NoDecay,
    "retnet": RetNet,
    "lightning": Lightning,
    "per_head": PerHead,
    "per_token": PerToken,
    "kda": Kimi,
    "kda_bounded": BoundedKimi,
    "gla": GatedPerChannel,
    "hgrn2": HGRN2,
}


REGISTERED_DECAYS: dict[str, type[Decay]] = {}  # by users


def register_decay(name: str, decay: type[Decay]) -> None:
    """Makes a subclass of `Decay` a choice for a config's `decay`, by that name.

    Saved models hold the name, not the class: whoever loads one registers it before.

    Raises:
        ValueError: the name belongs to the package, or decay is no subclass of Decay.
    """
    if name in DECAYS:
        raise ValueError(f"name must not be one of the package's own decays, got {name!r}")
    if not (isinstance(decay, type) and issubclass(decay, Decay)):
        raise ValueError(f"decay must be a subclass of Decay, got {decay!r}")
    REGISTERED_DECAYS[name] = decay


def check_decay(name: str) -> None:
    """Raises a ValueError that lists the choices where a config's decay is wrong."""
    if name not in (*DECAYS, *REGISTERED_DECAYS):
        choices = ", ".join(map(repr, (*DECAYS, *REGISTERED_DECAYS)))
        raise ValueError(
            f"decay must be one of {choices}, got {name!r} (if it is one of your own, call "
            f"hf_linear_attention.register_decay({name!r}, ...) first)"
        )


def build_decay(config: PreTrainedConfig, layer_idx: int) -> Decay:
    """The module of config.decay for one layer."""
    return decay_class(config.decay)(config, layer_idx)


def decay_class(name: str) -> type[Decay]:
    """The class of a config's decay, whose name it has been checked for."""
    return {**REGISTERED_DECAYS, **DECAYS}[name]


def draw_steps(dt_bias: Tensor, A_log: Tensor) -> None:
    """Writes what makes softplus(dt_bias) log-uniform in [0.001, 0.1], exp(A_log) in [1, 16]."""
    dt = torch.empty(dt_bias.shape, device="cpu").uniform_(math.log(0.001), math.log(0.1)).exp()
    init.copy_(dt_bias, inverse_softplus(dt))
    init.copy_(A_log, torch.empty(A_log.shape, device="cpu").uniform_(1, 16).log())


def decay_steps(
    x: Tensor, dt_bias: Tensor, A_log: Tensor, rounds: bool = False
) -> tuple[Tensor, Tensor]:
    """Steps softplus(x + dt_bias) (B, T, C) and their log decays, in float32 or better."""
    if takes_one_op(x, floats=(dt_bias, A_log)):
        return compiled_decay_steps(x, dt_bias, A_log, rounds)
    if rounds:  # all of it to x's dtype, as Transformers does
        steps = at_least_float32(nn.functional.softplus(x + dt_bias.to(x.dtype)))
    else:
        steps = nn.functional.softplus(at_least_float32(x) + dt_bias)
    return steps, decay_of_steps(A_log, steps)


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y, for y > 0."""
    return y + torch.log(-torch.expm1(-y))
