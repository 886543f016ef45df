# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Log decays by name: modules from hidden states to g (B, T, Hkv), at most 0, or None.

Shapes: B batch, T time, Hkv key-value heads, D head dim, N packed sequences. h = 0 ... Hkv - 1
counts heads, l layers (L of them).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init


class Decay(nn.Module):
    """Hidden states (B, T, hidden) -> log decay (B, T, Hkv), or None where nothing is forgotten."""

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
        self.values = self.per_head(config.num_key_value_heads, layer_idx, config.num_hidden_layers)
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
    """-2^(-8 (h+1) / Hkv) (1 - l / (L - 1 + 1e-5) + 1e-5). MiniMax-01, arXiv 2501.08313."""

    @staticmethod
    def per_head(num_heads: int, layer_idx: int, num_layers: int) -> list[float]:
        by_layer = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
        return [-(2.0 ** (-8 * (h + 1) / num_heads)) * by_layer for h in range(num_heads)]


class PerHead(Decay):
    """-softplus(theta_h), learned; at first RetNet's values."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.theta = nn.Parameter(torch.empty(config.num_key_value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes theta; the model's `_init_weights` calls it."""
        rates = -torch.tensor(RetNet.per_head(self.theta.numel(), 0, 1), device="cpu")
        init.copy_(self.theta, _inverse_softplus(rates))

    def forward(self, hidden_states: Tensor) -> Tensor:
        log_decay = -nn.functional.softplus(_at_least_float32(self.theta))
        return log_decay.expand(*hidden_states.shape[:2], -1)


class PerToken(Decay):
    """-exp(A_h) softplus(w_h.x_t + b_h), learned: each token says how much is forgotten.

    Initialised as there: exp(A) uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1].
    Dao and Gu, "Transformers are SSMs" (Mamba-2), arXiv 2405.21060.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.dt_proj = nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(config.num_key_value_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_key_value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws A_log and dt_bias; the model's `_init_weights` calls it. dt_proj is any Linear."""
        H = self.A_log.numel()
        dt = torch.exp(torch.empty(H, device="cpu").uniform_(math.log(0.001), math.log(0.1)))
        init.copy_(self.dt_bias, _inverse_softplus(dt))
        init.copy_(self.A_log, torch.empty(H, device="cpu").uniform_(1, 16).log())

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = _at_least_float32(self.dt_proj(hidden_states))
        return -_at_least_float32(self.A_log).exp() * nn.functional.softplus(x + self.dt_bias)


class Aaren(Decay):
    """m_(t-1) - m_t, m_t being the largest score until t: softmax attention of one learned query.

    The scores are s_t = query.k_t / sqrt(D). With exp(s_t - m_t) for phi(k_t), and 1 for phi(q_t),
    the state holds the sums of exp(s_j - m_t) v_j and of exp(s_j - m_t), in which no exponent is
    positive; m is a part of the state. Feng et al., "Attention as an RNN", arXiv 2405.13956.
    """

    has_parameters_per_head = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.query = nn.Parameter(torch.empty(config.num_key_value_heads, config.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the query; the model's `_init_weights` calls it."""
        init.normal_(self.query)

    def forward(  # of keys, not of hidden states
        self,
        k: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_max: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """k (B, T, Hkv, D) -> phi(k) (B, T, Hkv, 1), the log decay and m (B, T, Hkv) both.

        key_mask (B, T) is False for padding, cu_seqlens (N + 1,) are the bounds of packed sequences
        in one row, past_max (B, Hkv) is m before k. All in float32, or float64 for float64 keys.
        """
        dtype = torch.promote_types(k.dtype, torch.float32)
        # not a matrix product, which autocast would take to half precision
        scores = (k.to(dtype) * self.query.to(dtype)).sum(-1) * k.shape[-1] ** -0.5
        with torch.no_grad():  # the output does not depend on m
            if key_mask is not None:
                scores_seen = scores.masked_fill(~key_mask[..., None], -torch.inf)
            else:
                scores_seen = scores
            if past_max is None:
                past_max = scores.new_full((k.shape[0], k.shape[2]), -torch.inf)
            if cu_seqlens is None:
                running = torch.cat([past_max[:, None], scores_seen], 1).cummax(1).values
                before, now = running[:, :-1], running[:, 1:]
            else:
                before, now = _running_max_within(scores_seen, cu_seqlens)
            # Nothing comes before the first token that is not padding: nothing to forget.
            log_decay = torch.where(before == -torch.inf, 0, before - now)
        weights = scores - now
        if key_mask is not None:
            weights = weights.masked_fill(~key_mask[..., None], -torch.inf)
        return weights.exp()[..., None], log_decay, now


def _running_max_within(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of x (1, T, H) before each token and up to it, in its packed sequence; -inf where
    there is none.
    """
    T = x.shape[1]
    tokens = torch.arange(T, device=x.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens[1:], tokens, right=True)]
    past = (tokens - starts)[:, None]  # tokens of the same sequence before each
    now, reach = x, 1
    while reach < T:  # each has the maximum over `reach` tokens; now over twice as many
        now = torch.where(past >= reach, torch.maximum(now, now.roll(reach, 1)), now)
        reach *= 2
    return torch.where(past >= 1, now.roll(1, 1), -torch.inf), now


DECAYS: dict[str, type[Decay]] = {
    "none": NoDecay,
    "retnet": RetNet,
    "lightning": Lightning,
    "per_head": PerHead,
    "per_token": PerToken,
    "aaren": Aaren,
}


REGISTERED: dict[str, type[Decay]] = {}  # by users


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
    REGISTERED[name] = decay


def check_decay(name: str) -> None:
    """Raises a ValueError that lists the choices where a config's decay is wrong."""
    if name not in (*DECAYS, *REGISTERED):
        choices = ", ".join(map(repr, (*DECAYS, *REGISTERED)))
        raise ValueError(
            f"decay must be one of {choices}, got {name!r} (if it is one of your own, call "
            f"hf_linear_attention.register_decay({name!r}, ...) first)"
        )


def build_decay(config: PreTrainedConfig, layer_idx: int) -> Decay:
    """The module of config.decay for one layer."""
    check_decay(config.decay)
    name = config.decay
    return (DECAYS[name] if name in DECAYS else REGISTERED[name])(config, layer_idx)


def _inverse_softplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
