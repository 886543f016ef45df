# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Language models of one size: 12 layers, hidden size 768, 12 heads, 32,000 tokens, about 110M
weights beside the input embeddings. Mamba2 has no MLP, so it gets twice as many layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    PreTrainedModel,
)
from transformers.utils import logging

from hf_linear_attention import LinearAttentionConfig, linear
from hf_linear_attention.recurrence_linear import LinearRecurrence

logging.set_verbosity_error()  # that Mamba2 lacks its CUDA kernels is no news on a CPU

VOCAB_SIZE = 32000
LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LONGEST = 2**17


def make_config(name: str, layers: int):
    if name == "ours":
        return LinearAttentionConfig(num_hidden_layers=layers, **LLAMA_LIKE, **NO_SPECIAL_TOKENS)
    if name == "Llama":
        return LlamaConfig(
            num_hidden_layers=layers,
            max_position_embeddings=LONGEST,
            **LLAMA_LIKE,
            **NO_SPECIAL_TOKENS,
        )
    if name == "GPT-2":
        return GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=768,
            n_layer=layers,
            n_head=12,
            n_positions=LONGEST,
            **NO_SPECIAL_TOKENS,
        )
    if name == "Mamba2":
        return Mamba2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=768,
            num_hidden_layers=2 * layers,
            num_heads=24,
            n_groups=1,
            **NO_SPECIAL_TOKENS,
        )
    raise ValueError(f"name must be 'ours', 'Llama', 'GPT-2' or 'Mamba2', got {name!r}")


def make_model(name: str, dtype: torch.dtype = torch.float32, layers: int = 12) -> PreTrainedModel:
    """A model with random weights, the same every time, in evaluation mode."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(name, layers), dtype=dtype).eval()


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes that one token must read: all weights, except a table of which it reads a row."""
    tables = [
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    ]
    head = model.get_output_embeddings().weight
    return sum(w.nbytes for w in model.parameters() if id(w) not in tables or w is head)


@contextmanager
def torch_products() -> Iterator[None]:
    """Meanwhile, our linear layers multiply as torch.nn.Linear does."""
    with mock.patch.object(linear, "IS_COMPILED", False):
        yield


@contextmanager
def identity_attention() -> Iterator[None]:
    """Meanwhile, linear attention answers v, without reading q and k or writing a state: what is
    left is the cost of the model around it.
    """

    def run(self, inputs, state, tokens):
        return inputs["v"], {}

    def step_(self, inputs, state, tokens):
        return inputs["v"]

    def start(self, inputs):
        return {}

    with mock.patch.multiple(LinearRecurrence, run=run, step_=step_, start=start):
        yield
