# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Language models of one size: 12 layers, hidden size 768, 12 heads, 32,000 tokens, about 110M
weights beside the input embeddings. Mamba2 has no MLP, so it gets twice as many layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from hf_linear_attention import LinearAttentionConfig, pack_int4_weights
from hf_linear_attention.fast import linear, quantized
from hf_linear_attention.ops import backends

logging.set_verbosity_error()  # that Mamba2 lacks its CUDA kernels is no news on a CPU

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LONGEST = 2**17


class Size(NamedTuple):
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


SIZE = Size(768, 2048, 12, 12, 32000)
SMALLEST = Size(32, 64, 2, 2, 100)


def make_config(name: str, size: Size = SIZE) -> PreTrainedConfig:
    llama_like = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        **NO_SPECIAL_TOKENS,
    }
    if name == "ours":
        return LinearAttentionConfig.from_preset("katharopoulos", **llama_like)
    if name == "Llama":
        return LlamaConfig(max_position_embeddings=LONGEST, **llama_like)
    if name == "GPT-2":
        return GPT2Config(
            vocab_size=size.vocab_size,
            n_embd=size.hidden_size,
            n_layer=size.layers,
            n_head=size.heads,
            n_positions=LONGEST,
            **NO_SPECIAL_TOKENS,
        )
    if name == "Mamba2":
        return Mamba2Config(
            vocab_size=size.vocab_size,
            hidden_size=size.hidden_size,
            num_hidden_layers=2 * size.layers,
            num_heads=2 * size.heads,
            head_dim=size.head_dim,
            n_groups=1,
            **NO_SPECIAL_TOKENS,
        )
    raise ValueError(f"name must be 'ours', 'Llama', 'GPT-2' or 'Mamba2', got {name!r}")


def make_model(name: str, dtype: torch.dtype = torch.float32, size: Size = SIZE) -> PreTrainedModel:
    """A model with random weights, the same every time, in evaluation mode."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(name, size), dtype=dtype).eval()


def make_quantised(bits: int, size: Size = SIZE) -> PreTrainedModel:
    """Ours in bfloat16, whose few rows products of integers take. Embeddings stay."""
    model = make_model("ours", torch.bfloat16, size)
    quantise(model, bits, size.hidden_size)
    return model


def quantise(model: nn.Module, bits: int, inputs: int) -> None:
    """Gives linear layers torchao's weights: of 8 bits, with a scale for each output, or of 4, with
    scales and zero points for each 64 inputs, of which there are at least so many: 4.5 bits a
    weight, as llama.cpp's Q4_0 has them.
    """
    from torchao.quantization import (
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    if bits == 8:
        quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    else:
        groups = PerGroup(min(64, inputs))
        quantize_(model, IntxWeightOnlyConfig(torch.int4, groups, scale_dtype=torch.bfloat16))
        pack_int4_weights(model)


def lengthen(layer: DynamicLayer, tokens: int) -> None:
    """Adds random keys and values, as if so many more had been read."""
    rows, heads, _, features = layer.keys.shape
    more = layer.keys.new_empty(2, rows, heads, tokens, features).normal_()
    layer.keys = torch.cat([layer.keys, more[0]], 2)
    layer.values = torch.cat([layer.values, more[1]], 2)


def random_tokens(size: Size, *shape: int) -> Tensor:
    return torch.randint(size.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def weights_of_a_token(model: PreTrainedModel) -> list[Tensor]:
    """What one token must read: all weights, except a table of which it reads a row."""
    tables = [
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    ]
    head = model.get_output_embeddings().weight
    return [w for w in model.parameters() if id(w) not in tables or w is head]


def count_weights(model: PreTrainedModel) -> int:
    return sum(w.numel() for w in weights_of_a_token(model))


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(bytes_of(w) for w in weights_of_a_token(model))


def bytes_of(weight: Tensor) -> int:
    """Also of a tensor that is made of others, as torchao's are."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).nbytes for name in names)


@contextmanager
def plain_loop() -> Iterator[None]:
    """Meanwhile, linear attention is computed by the reference backend."""
    with mock.patch.object(backends, "FORCED_BACKEND", "reference"):
        yield


def cache_bytes(name: str, context: int, size: Size = SIZE) -> int:
    """What our model or Llama remembers of `context` tokens of one row, in float32."""
    per_head = {
        "ours": (size.head_dim + 1) * size.head_dim,  # S and z
        "Llama": 2 * size.head_dim * context,  # keys and values
    }
    return 4 * size.layers * size.heads * per_head[name]


@contextmanager
def torchao_products() -> Iterator[None]:
    """Meanwhile, torchao multiplies by its weights of 8 bits itself."""
    with mock.patch.object(quantized, "IS_COMPILED", False):
        yield


@contextmanager
def torch_products() -> Iterator[None]:
    """Meanwhile, our linear layers multiply as torch.nn.Linear does."""
    with mock.patch.object(linear, "IS_COMPILED", False):
        yield
