# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A process of compare_wheels.py: holds one version of the package and does as it is told.

It says how long its imports took, and then answers each line of JSON with another. It knows of the
package only what is public, so that versions with other insides can be compared.
"""

# ruff: noqa: E402, imports that are timed come first
import time

START = time.perf_counter()
import transformers.models.llama.modeling_llama  # noqa: F401, I001

AFTER_LLAMA = time.perf_counter()
import hf_linear_attention

END = time.perf_counter()
import copy
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    linear_attention,
    linear_attention_step_,
)
from identity import without_attention

RENAMED = {"self_attn.decay.query": "self_attn.query.weight"}  # by later versions
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """outputs: what both versions must agree in; run: what is timed."""

    outputs: Callable[[], Tensors]
    run: Callable[[], object] = lambda: None


class Model(NamedTuple):
    """A decoder: a preset and its size."""

    layers: int
    hidden_size: int
    heads: int
    preset: str = "katharopoulos"
    vocab_size: int = 1000


# ---- the op ----


def random_qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator) for _ in range(3))
    return q, k, v


def forward(*shape: int) -> Case:
    q, k, v = random_qkv(*shape)

    @torch.no_grad()
    def run() -> Tensor:
        return linear_attention(q, k, v, feature_map="elu+1")

    return Case(lambda: {"y": run()}, run)


def forward_and_backward(*shape: int) -> Case:
    leaves = [x.requires_grad_() for x in random_qkv(*shape)]
    dy = torch.ones(shape)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_attention(*leaves, feature_map="elu+1"), leaves, dy)

    return Case(lambda: dict(zip(("dq", "dk", "dv"), run(), strict=True)), run)


def step(B: int, H: int, D: int) -> Case:
    q, k, v = random_qkv(B, 9, H, D)
    with torch.no_grad():
        _, start = linear_attention(q, k, v, feature_map="elu+1", return_state=True)
    token = [x[:, -1].contiguous() for x in (q, k, v)]
    state = copy.deepcopy(start)

    @torch.no_grad()
    def outputs() -> Tensors:
        state = copy.deepcopy(start)
        y = linear_attention_step_(*token, state, feature_map="elu+1")
        return {"y": y, **{str(i): x for i, x in enumerate(state)}}

    @torch.no_grad()
    def run() -> Tensor:
        return linear_attention_step_(*token, state, feature_map="elu+1")

    return Case(outputs, run)


# ---- the model ----


def make_model(size: Model) -> LinearAttentionForCausalLM:
    """With random weights that depend on their names alone, not on the order of initialisation."""
    config = LinearAttentionConfig.from_preset(
        size.preset,
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=8 * size.hidden_size // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        **NO_SPECIAL_TOKENS,
    )
    torch.manual_seed(0)
    model = LinearAttentionForCausalLM(config).eval()
    for name, parameter in named_parameters(model):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.05, generator=generator)
    return model


def named_parameters(model: LinearAttentionForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """With the names that the newest version gives them."""
    for name, parameter in model.named_parameters():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        yield name, parameter


def random_tokens(size: Model, *shape: int) -> Tensor:
    return torch.randint(size.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def logits_and_gradients(**size) -> Case:
    """Not timed: of all at once, of a prompt and tokens after it, and of every weight."""
    model = make_model(Model(**size))
    tokens = random_tokens(Model(**size), 2, 70)

    def outputs() -> Tensors:
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        found = {f"gradient of {name}": p.grad for name, p in named_parameters(model)}
        found |= {"logits": output.logits.detach()}
        with torch.no_grad():
            read = model(tokens[:, :50], use_cache=True)
            cache, found["prompt"] = read.past_key_values, read.logits
            for i in range(50, 53):
                next_token = model(tokens[:, i : i + 1], past_key_values=cache)
                found[f"token {i}"] = next_token.logits
        return {name: x for name, x in found.items() if x is not None}

    return Case(outputs)


def token(is_identity: bool, context: int, **size) -> Case:
    """A token after a context, of the whole model, or of the model without its attention."""
    model = make_model(Model(**size))
    tokens = random_tokens(Model(**size), 1, context + 1)
    with torch.no_grad():
        start = model(tokens[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    cache = copy.deepcopy(start)

    @torch.no_grad()
    def forward(cache) -> Tensor:
        return model(tokens[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def outputs() -> Tensors:
        return {"logits": forward(copy.deepcopy(start))}

    if is_identity:
        model = without_attention(model)
    return Case(outputs, lambda: forward(cache))


def training_step(rows: int, length: int, **size) -> Case:
    model = make_model(Model(**size)).train()
    tokens = random_tokens(Model(**size), rows, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(lambda: {"loss": run(), "loss after a step": run()}, run)


MAKERS = {
    maker.__name__: maker
    for maker in (forward, forward_and_backward, step, logits_and_gradients, token, training_step)
}


# ---- the process ----


class Worker:
    def __init__(self):
        self.cases: dict[str, Case] = {}

    def prepare(
        self,
        case: str,
        maker: str,
        arguments: list,
        options: dict,
        is_timed: bool,
        file: str,
    ) -> dict:
        """Makes the case and writes its outputs to the file; the seconds of one call, if asked."""
        made = MAKERS[maker](*arguments, **options)
        torch.save(made.outputs(), file)
        if not is_timed:
            return {"seconds": 0}
        self.cases[case] = made
        return self.sample(case, 2)

    def sample(self, case: str, repeats: int) -> dict:
        """Seconds per call, after one that warms up."""
        run = self.cases[case].run
        run()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return {"seconds": (time.perf_counter() - start) / repeats}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not get between them
    os.dup2(2, 1)
    threads, folder = int(sys.argv[1]), Path(sys.argv[2])
    if not Path(hf_linear_attention.__file__).is_relative_to(folder):
        sys.exit(f"expected the package in {folder}, got {hf_linear_attention.__file__}")
    torch.set_num_threads(threads)

    def tell(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    tell({"import": END - START, "beyond Llama's": END - AFTER_LLAMA})
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        tell(getattr(worker, request.pop("do"))(**request))


if __name__ == "__main__":
    main()
