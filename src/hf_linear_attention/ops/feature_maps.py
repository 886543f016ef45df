# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Feature maps by name: pointwise ones, which the kernels apply, and modules, which run before.

Shapes: B batch, T time, Hq query heads, Hkv key-value heads, D head dim, F feature dim.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .numerics import ExactBuffers, accumulation_dtype, at_least_float32, without_autocast


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, exact for very negative x, too. Katharopoulos et al., arXiv 2006.16236."""
    # exp sees no positive number: its infinite gradient, times the zero of `where`, would be NaN.
    return torch.where(x > 0, x + 1, torch.where(x > 0, 0, x).exp())


# The kernels know them by these names.
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": elu_plus_one,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": lambda x: x * x.sigmoid(),
    "exp": torch.exp,
}
UNMAPPED = (None, "identity")  # what ops are told where q and k are taken as they are


class FeatureMap(nn.Module):
    """q (B, T, Hq, D), k (B, T, Hkv, D) -> phi(q) (B, T, Hq, F), phi(k) (B, T, Hkv, F).

    Every token by itself: cross attention maps q without k, and k without q (T = 0 for the other).

    A map that learns nothing and treats q and k alike only defines `phi`. The options that a config
    may set in `feature_map_kwargs` are the keyword-only arguments of `__init__`, whose others are
    num_heads, num_key_value_heads and head_dim. feature_dim, F, is head_dim where not given.
    """

    float16_is_enough = True  # for the features; otherwise attention runs in float32
    # For tensor parallelism: whether the first dimension of every parameter counts heads (True), or
    # all heads share them (False). None: a map with parameters has not said.
    has_parameters_per_head: bool | None = None

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        feature_dim: int | None = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.feature_dim = head_dim if feature_dim is None else feature_dim

    def reset_parameters(self) -> None:
        """Writes all parameters and buffers, by functions of `torch.nn.init` or
        `transformers.initialization`; the model's `_init_weights` calls it.
        """

    def phi(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.phi(q), self.phi(k)


class Softmax(FeatureMap):
    """softmax(x) over the features; F = D. So Shen et al., arXiv 1812.01243, map their queries."""

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int):
        super().__init__(num_heads, num_key_value_heads, head_dim)

    def phi(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


def _pairwise_products(x: Tensor) -> Tensor:
    """x_i x_j for i <= j, times sqrt(2) for i < j: (..., D) -> (..., D (D + 1) / 2)."""
    D = x.shape[-1]
    i, j = torch.triu_indices(D, D, device=x.device)
    return x[..., i] * x[..., j] * torch.where(i == j, x.new_ones(()), math.sqrt(2))


class Polynomial2(FeatureMap):
    """vec(x x^T), so that phi(q).phi(k) = (q.k)^2; F = D (D + 1) / 2.

    Kacham et al., "PolySketchFormer", arXiv 2310.01655, which sketches it; this is the exact one.
    """

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int):
        super().__init__(num_heads, num_key_value_heads, head_dim, head_dim * (head_dim + 1) // 2)

    def phi(self, x: Tensor) -> Tensor:
        return _pairwise_products(x)


class Taylor(FeatureMap):
    """[1, x / D^(1/4), vec(x x^T) / sqrt(2 D)]; phi(q).phi(k) = 1 + s + s^2 / 2, s = q.k / sqrt(D).

    F = 1 + D + D (D + 1) / 2. Arora et al., "Based", arXiv 2402.18668.
    """

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int):
        super().__init__(
            num_heads, num_key_value_heads, head_dim, 1 + head_dim + head_dim * (head_dim + 1) // 2
        )

    def phi(self, x: Tensor) -> Tensor:
        x = x * self.head_dim**-0.25
        return torch.cat([torch.ones_like(x[..., :1]), x, _pairwise_products(x) / math.sqrt(2)], -1)


class FavorPlus(ExactBuffers, FeatureMap):
    """(2m)^(-1/2) e^(-|x|^2 / 2) [e^(Wx), e^(-Wx)] with x scaled by D^(-1/4); F = 2m.

    phi(q).phi(k) estimates exp(q.k / sqrt(D)) without bias. W (m, D), shared by q, k and all heads,
    has orthogonal rows in blocks of D, as long as normal vectors are; it is not learned, and it is
    saved with the model. Training may `redraw` it. Choromanski et al., "Rethinking Attention with
    Performers", arXiv 2009.14794.

    As there, a query's features are divided by their largest: that cancels where attention is
    normalised, and without it the eps of the denominator would outweigh those of a long query.
    """

    float16_is_enough = False  # e^(-|k|^2 / 2) leaves its range at |k| = 6 or so
    projection: Tensor

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
    ):
        num_features = num_features or head_dim  # m
        super().__init__(num_heads, num_key_value_heads, head_dim, 2 * num_features)
        # float32 where the model is loaded in half precision: exponents need their digits
        dtype = accumulation_dtype(torch.get_default_dtype())
        self.register_buffer("projection", torch.empty(num_features, head_dim, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws W; the model's `_init_weights` calls it."""
        init.copy_(self.projection, self._draw())

    @torch.no_grad()
    def redraw(self) -> None:
        """Draws W anew, loaded or not.

        Raises:
            RuntimeError: the map is in eval mode, in which nothing changes.
        """
        if not self.training:
            raise RuntimeError("FAVOR+ features are redrawn in training only: call train() first")
        self.projection.copy_(self._draw())

    def _draw(self) -> Tensor:
        """A random W, drawn on the CPU, so that a seed gives the same one on every device."""
        m, D = self.projection.shape
        normal = torch.randn(-(-m // D), D, D, device="cpu", dtype=torch.float32)
        directions = torch.linalg.qr(normal)[0].mT.flatten(0, 1)[:m]
        lengths = torch.randn(m, D, device="cpu", dtype=torch.float32).norm(dim=-1, keepdim=True)
        return lengths * directions

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        phi_q, phi_k = self._log_phi(q), self._log_phi(k)
        phi_q = (phi_q - phi_q.amax(-1, keepdim=True)).exp()
        return self._narrow(phi_q, q.dtype), self._narrow(phi_k.exp(), k.dtype)

    def phi(self, x: Tensor) -> Tensor:
        return self._narrow(self._log_phi(x).exp(), x.dtype)

    def _log_phi(self, x: Tensor) -> Tensor:
        with without_autocast(x.device.type):  # exponents need their digits
            y = at_least_float32(x) * self.head_dim**-0.25
            projected = y @ self.projection.to(y.dtype).mT
            constant = (y.square().sum(-1, keepdim=True) + math.log(self.feature_dim)) / 2
            return torch.cat([projected - constant, -projected - constant], -1)

    @staticmethod
    def _narrow(features: Tensor, dtype: torch.dtype) -> Tensor:
        return features if dtype == torch.float16 else features.to(dtype)


class Dpfp(FeatureMap):
    """r_i r_(i+s) for shifts s = 1 ... nu, with r = [relu(x), relu(-x)]; F = 2 D nu.

    Deterministic parameter-free projection. Schlag et al., "Linear Transformers Are Secretly Fast
    Weight Programmers", arXiv 2102.11174.
    """

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int, *, nu: int = 1):
        super().__init__(num_heads, num_key_value_heads, head_dim, 2 * head_dim * nu)
        self.nu = nu

    def phi(self, x: Tensor) -> Tensor:
        r = torch.cat([x, -x], -1).relu()
        return torch.cat([r * r.roll(shift, -1) for shift in range(1, self.nu + 1)], -1)


class _LearnedPerHead(FeatureMap):
    """x (B, T, H, D) -> x W (B, T, H, m), with a matrix W (D, m) per head, for q and for k."""

    has_parameters_per_head = True

    def __init__(
        self, num_heads: int, num_key_value_heads: int, head_dim: int, m: int, feature_dim: int
    ):
        super().__init__(num_heads, num_key_value_heads, head_dim, feature_dim)
        self.q_weight = nn.Parameter(torch.empty(num_heads, head_dim, m))
        self.k_weight = nn.Parameter(torch.empty(num_key_value_heads, head_dim, m))

    @staticmethod
    def project(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bthd,hdm->bthm", x, weight)


class T2R(_LearnedPerHead):
    """relu(x W + b), W (D, m) and b (m) learned per head; F = m. Kasai et al., "T2R", arXiv
    2103.13076.
    """

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
    ):
        m = num_features or head_dim
        super().__init__(num_heads, num_key_value_heads, head_dim, m, m)
        self.q_bias = nn.Parameter(torch.empty(num_heads, m))
        self.k_bias = nn.Parameter(torch.empty(num_key_value_heads, m))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.q_weight, self.q_bias), (self.k_weight, self.k_bias)):
            init.normal_(weight, std=self.head_dim**-0.5)
            init.zeros_(bias)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            (self.project(q, self.q_weight) + self.q_bias).relu(),
            (self.project(k, self.k_weight) + self.k_bias).relu(),
        )


class Hedgehog(_LearnedPerHead):
    """[softmax(x W), softmax(-x W)], W (D, D) learned per head, at first the identity; F = 2 D.

    Zhang et al., "The Hedgehog & the Porcupine", arXiv 2402.04347.
    """

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int):
        super().__init__(num_heads, num_key_value_heads, head_dim, head_dim, 2 * head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        identity = torch.eye(self.head_dim, device="cpu")
        for weight in (self.q_weight, self.k_weight):
            init.copy_(weight, identity.expand(weight.shape))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.project(q, self.q_weight), self.project(k, self.k_weight)
        return self.phi(q), self.phi(k)

    def phi(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


MODULES: dict[str, type[FeatureMap]] = {
    "softmax": Softmax,
    "polynomial2": Polynomial2,
    "taylor": Taylor,
    "favor+": FavorPlus,
    "dpfp": Dpfp,
    "t2r": T2R,
    "hedgehog": Hedgehog,
}


REGISTERED_FEATURE_MAPS: dict[str, type[FeatureMap]] = {}  # by users


def register_feature_map(name: str, feature_map: type[FeatureMap]) -> None:
    """Makes a subclass of `FeatureMap` a choice for a config's `feature_map`, by that name.

    Saved models hold the name, not the class: whoever loads one registers it before.

    Raises:
        ValueError: the name belongs to the package, or feature_map is no subclass of FeatureMap.
    """
    if name in POINTWISE or name in MODULES:
        raise ValueError(f"name must not be one of the package's own feature maps, got {name!r}")
    if not (isinstance(feature_map, type) and issubclass(feature_map, FeatureMap)):
        raise ValueError(f"feature_map must be a subclass of FeatureMap, got {feature_map!r}")
    REGISTERED_FEATURE_MAPS[name] = feature_map


def check_feature_map(name: str, kwargs: Mapping[str, Any] | None = None) -> None:
    """Raises a ValueError that lists the choices where a config's values are wrong."""
    if name not in (*POINTWISE, *MODULES, *REGISTERED_FEATURE_MAPS):
        choices = ", ".join(map(repr, (*POINTWISE, *MODULES, *REGISTERED_FEATURE_MAPS)))
        raise ValueError(
            f"feature_map must be one of {choices}, got {name!r} (if it is one of your own, call "
            f"hf_linear_attention.register_feature_map({name!r}, ...) first)"
        )
    options = []
    if name not in POINTWISE:
        parameters = inspect.signature(_module_class(name)).parameters.values()
        options = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
    for option, value in (kwargs or {}).items():
        if option not in options:
            choices = ", ".join(map(repr, options)) or "nothing"
            raise ValueError(f"feature_map_kwargs of {name!r} may hold {choices}, got {option!r}")
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if name in MODULES and (not is_integer or value < 1):
            raise ValueError(
                f"feature_map_kwargs[{option!r}] must be an integer of at least 1, got {value!r}"
            )


def build_feature_map(config: PreTrainedConfig) -> FeatureMap | None:
    """The module of config.feature_map; None for a pointwise one, which goes by its name."""
    kwargs = config.feature_map_kwargs or {}
    check_feature_map(config.feature_map, kwargs)
    if config.feature_map in POINTWISE:
        return None
    module = _module_class(config.feature_map)
    heads = config.linear_num_value_heads, config.linear_num_key_heads
    return module(*heads, config.linear_key_head_dim, **kwargs)


def _module_class(name: str) -> type[FeatureMap]:
    return MODULES[name] if name in MODULES else REGISTERED_FEATURE_MAPS[name]
