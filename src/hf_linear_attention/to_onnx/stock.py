# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' own recurrent models as graphs: their code runs, and the functions in which it
reads tokens one after the other, the same that `use_kernels` changes, are the operators of a graph.

Shapes: B batch, T time, C channels, H heads, G groups of heads that share keys, K key dim, V value
dim.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from ..model.auto import experts_by, functions_in_module
from ..model.configuration import LinearAttentionConfig
from ..recurrences.convolution import ConvolutionInputs, ConvolutionWindow
from ..recurrences.delta_rule import DeltaInputs, DeltaRecurrence
from ..recurrences.linear_attention import LinearInputs, LinearRecurrence
from ..releases import CACHE_NAMES
from .experts import by_experts, check_experts, is_mixture
from .operators import ROTATION
from .states import GraphCache, names_of

# Model types whose graphs the tests have run. Others may have layers that look back by themselves.
STOCK = (
    *("qwen3_5_text", "olmo_hybrid", "mamba2", "bamba", "falcon_h1", "nemotron_h", "zamba2"),
    *("granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "kimi_linear"),
    "minimax",
)


class StockCache(GraphCache):
    """With the interface of Transformers' caches. Layers get no states from it: the functions do,
    which know from it whose layer they are in.
    """

    layer = 0

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> None:
        self.layer = layer_idx

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> None:
        self.layer = layer_idx

    def update_conv_state(self, x: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """x (B, C, T), without the tokens before."""
        return x

    def update_recurrent_state(self, state: Tensor, *args: Any, **kwargs: Any) -> None:
        """It was written by the function that gave it."""

    # ---- in the place of functions of the models' modules, by their names there ----

    def causal_conv1d_fn(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states (B, C, T), weight (C, kernel size) -> (B, C, T)"""
        channels, size = weight.shape
        window = ConvolutionWindow("conv", channels, size, activation=activation)
        inputs = ConvolutionInputs(hidden_states.transpose(1, 2), weight[:, None], bias)
        return self.run(window, inputs, names_of("conv", self.layer)).transpose(1, 2)

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """query and key (B, T, heads, K), value (B, T, H, V), beta (B, T, H), g (B, T, H) or with K
        -> (B, T, H, V), and once more in the place of a state, which is written and which layers
        cast.
        """
        assert use_qk_l2norm_in_kernel, "the layers of STOCK have no norm of their own"
        rule = DeltaRecurrence(value.shape[2], key.shape[3], value.shape[3])
        inputs = DeltaInputs(query, key, value, beta.float(), g.float())
        y = self.run(rule, inputs, names_of("recurrent", self.layer))
        return y, y

    def mamba2_chunk_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, H, V), dt (B, T, H), A (H,), B and C (B, T, G, K), D and dt_bias
        (H,) -> (B, T, H, V) float32, and no state, for it is written.
        """
        dt = softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit).float()
        x = hidden_states.float()
        sums = LinearRecurrence(x.shape[2], B.shape[3], x.shape[3], normalize=False)
        inputs = LinearInputs(C.float(), B.float(), x, A.float() * dt, dt)
        y = self.run(sums, inputs, names_of("ssm", self.layer))
        return y + D[:, None] * x, None

    def lightning_attention(
        self,
        layer: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """MiniMax's layer: hidden_states (B, T, hidden size) -> the same, and no state."""
        H, D = layer.num_attention_heads, layer.head_dim
        qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (H, 3 * D))
        log_decay = -layer.slope_rate.float().view(1, 1, H).expand(qkv.shape[:3])
        q, k, v = qkv.float().split(D, dim=-1)
        inputs = LinearInputs(q, k, v, log_decay)
        sums = LinearRecurrence(H, D, D, normalize=False)
        y = self.run(sums, inputs, names_of("recurrent", layer.layer_idx))
        y = layer.norm(y.to(hidden_states.dtype).flatten(2))
        return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * y), None

    @contextlib.contextmanager
    def in_place_of_functions(self, model: PreTrainedModel, masks: dict[str, Tensor]) -> Iterator:
        """While it lasts, all models of the module of this one call these, and get these masks."""
        module = sys.modules[type(model).__module__]
        functions: dict[str, Any] = {
            "create_causal_mask": lambda **kwargs: masks["full_attention"],
            "create_recurrent_attention_mask": lambda **kwargs: None,  # `Order` hides tokens
            "causal_conv1d_fn": self.causal_conv1d_fn,
            "torch_chunk_gated_delta_rule": self.gated_delta_rule,
            "chunk_kimi_delta_attention": self.gated_delta_rule,
            "mamba2_chunk_scan": self.mamba2_chunk_scan,
            "MiniMaxCache": StockCache,  # whose instances that model takes
            **ROTATION,
        }
        # Time, height and width of positions are the same for text.
        of_text = {"recomposition_frequencies": lambda self, x: torch.cat([x[0], x[0]], -1)}
        kinds = {type(part) for part in model.modules() if hasattr(part, *of_text)}
        layers = getattr(module, "MiniMaxLightningAttention", None)  # None has no forward
        forward = {"forward": lambda *args, **kwargs: self.lightning_attention(*args, **kwargs)}
        with (
            functions_in_module(module, functions),
            functions_in_module(layers, forward),
            experts_by(by_experts, model.config),
            contextlib.ExitStack() as stack,
        ):
            for kind in kinds:
                stack.enter_context(functions_in_module(kind, of_text))
            yield


def check_type(model_type: str) -> None:
    """Raises a ValueError where no model of a type has a graph."""
    known = LinearAttentionConfig.model_type, *STOCK
    if model_type not in known:
        raise ValueError(
            f"model_type must be one of {', '.join(map(repr, known))} for ONNX, got {model_type!r}"
        )


def check_stock(model: PreTrainedModel) -> None:
    """Raises a ValueError where there is no graph of a model of Transformers."""
    config: Any = model.config
    check_type(config.model_type)
    is_ours = config.model_type == LinearAttentionConfig.model_type
    if is_ours or model.get_output_embeddings() is None:
        wanted = "LinearAttentionForCausalLM" if is_ours else "causal language model"
        raise ValueError(f"model must be a {wanted} for ONNX, got a {type(model).__name__}")
    if config.model_type == "minimax" and config.sliding_window is not None:
        raise ValueError(f"sliding_window must be None for ONNX, got {config.sliding_window}")
    for module in model.modules():
        if not type(module).__module__.startswith(("torch.", "transformers.")):
            raise ValueError(
                "model must be as Transformers loads it, without use_kernels, got one with a "
                f"{type(module).__name__} of {type(module).__module__}"
            )
        if is_mixture(module):
            check_experts(module)


def logits_of(model: PreTrainedModel, cache: StockCache, **inputs: Tensor) -> Tensor:
    """Of a model that takes some of these inputs."""
    taken = inspect.signature(model.forward).parameters
    name = next(name for name in CACHE_NAMES if name in taken)
    inputs = {x: given for x, given in inputs.items() if x in taken}
    return model(**inputs, **{name: cache}, use_cache=True).logits
