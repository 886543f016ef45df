# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7 of the same weights: ours, llama.cpp, and the packages that it is published for, rwkv and
rwkv7-hf.

    pip install --no-deps rwkv==0.8.32 rwkv7-hf==0.9.0; python benchmarks/bench_checkpoints.py
    python benchmarks/bench_checkpoints.py --full    # 1,024 tokens in place of 256, some minutes

--llama names the Python of an environment that has llama.cpp, as for bench_peers.py.

Weights are random, of the shape of the published 0.1B in float32: 12 layers of 768, heads of 64,
65,536 words. They are written once, under flash-linear-attention's names, which rwkv7-hf loads, and
under the authors', which rwkv loads with its strategy "cpu fp32"; ours loads either. A package that
is not installed takes no part. Before timing, logits of all are compared with ours.

A prompt is one row, of which the last logits are asked. A token is the mean of 16 behind one. A
training step is one row's loss and all gradients; rwkv has none.
"""

import copy
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from harness import Report, Work, check_close, keep_freed_memory, parser, sample_of
from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    export_checkpoint,
    from_checkpoint,
)
from hf_linear_attention.checkpoints.rwkv_file import FORMS, name_of
from llama_cpp_models import LlamaCpp
from models import count_weights, quantise

OURS, RWKV, RWKV7_HF, LLAMA = "ours", "rwkv", "rwkv7-hf", "llama.cpp"
KINDS = {"": "F32", ", 8 bits": "Q8_0"}  # of llama.cpp's weights, by a panel's name
TOLERANCE, OF_8_BITS = 1e-3, 0.1
STEPS = 16  # tokens of a sample
VERIFIED = 40  # tokens
# The names of the authors, of which `name_of` makes the others.
OF_MODEL = ("emb.weight", "ln_out.weight", "ln_out.bias", "head.weight")
OF_LAYER = (
    *(f"{norm}.{x}" for norm in ("ln0", "ln1", "ln2", "att.ln_x") for x in ("weight", "bias")),
    *(f"att.x_{name}" for name in "rwkvag"),
    *("att.r_k", "att.k_k", "att.k_a", "ffn.x_k"),
    *(f"att.{name}.weight" for name in ("receptance", "key", "value", "output")),
    *(f"att.{name}{i}" for name in "wavg" for i in "012"),
    *("ffn.key.weight", "ffn.value.weight"),
)


class Setting(NamedTuple):
    layers: int
    channels: int
    words: int
    tokens: int  # of a prompt, and of a training step
    budget: float  # seconds for the rounds of a case


SETTINGS = {
    "smallest": Setting(layers=2, channels=128, words=64, tokens=24, budget=0),
    "short": Setting(layers=12, channels=768, words=65536, tokens=256, budget=20),
    "full": Setting(layers=12, channels=768, words=65536, tokens=1024, budget=60),
}


def make_model(setting: Setting) -> LinearAttentionForCausalLM:
    """With weights that show mistakes: as they start, nothing would be added to embeddings."""
    torch.manual_seed(0)
    config = LinearAttentionConfig.from_preset(
        "rwkv7",
        vocab_size=setting.words,
        hidden_size=setting.channels,
        intermediate_size=4 * setting.channels,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.channels // 64,
    )
    model = LinearAttentionForCausalLM(config)
    for name, x in model.named_parameters():
        if name.endswith("proj.weight"):
            torch.nn.init.normal_(x, std=x.shape[1] ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model.eval()


def write_file(weights: dict[str, Tensor], layers: int, path: Path) -> None:
    """As the authors write theirs."""
    named = [*OF_MODEL, *(f"blocks.{i}.{name}" for i in range(layers) for name in OF_LAYER)]
    tensors = {}
    for own in named:
        x = weights.get(name_of(own))
        if x is not None:  # a norm, or a mix of values, that a layer has not; a gate's bias
            is_turned = any(
                form is Tensor.t and re.search(ends, own) for ends, form in FORMS.items()
            )
            tensors[own] = x.t().contiguous() if is_turned else x
    assert len(tensors) == len(weights)
    torch.save(tensors, path)


class Contender(NamedTuple):
    """What is timed of a package, of token ids."""

    logits: Callable[[list[int]], Tensor]  # of all of them
    prompt: Callable[[list[int]], object]
    tokens: Callable[[], float]  # seconds per token
    train: Callable[[Tensor], object] | None


def of_transformers(model: Any) -> Contender:
    """Of a model with Transformers' interface."""
    cache: dict[str, Any] = {}

    @torch.no_grad()
    def read(ids: list[int], **options: Any) -> Any:
        return model(torch.tensor([ids]), use_cache=True, **options)

    def tokens() -> float:
        output = read([1])
        name = next(x for x in ("cache", "past_key_values") if output.get(x) is not None)
        cache[name] = output[name]
        start = time.perf_counter()
        for token in range(STEPS):
            output = read([token + 1], **cache)
            cache[name] = output[name]
        return (time.perf_counter() - start) / STEPS

    def train(ids: Tensor) -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return Contender(
        lambda ids: read(ids).logits[0],
        lambda ids: read(ids, logits_to_keep=1),
        tokens,
        train,
    )


def of_rwkv(path: Path) -> Contender:
    os.environ["RWKV_V7_ON"] = "1"
    from rwkv import model as package

    model = package.RWKV(str(path.with_suffix("")), "cpu fp32")

    def tokens() -> float:
        _, state = model.forward([1], None)
        start = time.perf_counter()
        for token in range(STEPS):
            _, state = model.forward([token + 1], state)
        return (time.perf_counter() - start) / STEPS

    return Contender(
        lambda ids: model.forward(ids, None, full_output=True)[0],
        lambda ids: model.forward(ids, None),
        tokens,
        None,
    )


class Models(NamedTuple):
    """Contenders by the bits of their weights, and llama.cpp with both."""

    contenders: dict[str, dict[str, Contender]]  # by the keys of KINDS
    llama: LlamaCpp | None


def models_in(folder: Path, setting: Setting, report: Report) -> Models:
    """Each from the checkpoint that is published for it."""
    export_checkpoint(make_model(setting), folder / "fla")
    path = folder / "model.pth"
    write_file(load_file(folder / "fla" / "model.safetensors"), setting.layers, path)
    model = from_checkpoint(str(path)).eval()
    found = {OURS: of_transformers(model)}
    if find_spec("rwkv7_hf") is not None:
        from rwkv7_hf.modeling_rwkv7 import RWKV7ForCausalLM

        found[RWKV7_HF] = of_transformers(RWKV7ForCausalLM.from_pretrained(folder / "fla").eval())
    if find_spec("rwkv") is not None:
        found[RWKV] = of_rwkv(path)
    of_8_bits = copy.deepcopy(model)
    quantise(of_8_bits, 8, setting.channels)
    python, llama = report.flags.llama, None
    if python is not None:
        save = partial(export_checkpoint, model)
        llama = LlamaCpp(python, model, [*KINDS.values()], save)
    absent = [name for name in (RWKV7_HF, RWKV) if name not in found]
    report.notes += [f"without {name}" for name in [*absent, *([LLAMA] * (llama is None))]]
    report.notes.append(f"{count_weights(model):,} weights in products")
    return Models({"": found, ", 8 bits": {OURS: of_transformers(of_8_bits)}}, llama)


def verify(report: Report, models: Models, ids: list[int]) -> None:
    expected = models.contenders[""][OURS].logits(ids)
    for bits, contenders in models.contenders.items():
        tolerance = TOLERANCE if not bits else OF_8_BITS
        for name, contender in contenders.items():
            error = check_close(name + bits, contender.logits(ids), expected, tolerance)
            report.errors[f"{name}{bits}, beside ours"] = error
    if models.llama is not None:
        for kind, error in models.llama.verify(rows=1).items():
            report.errors[f"{LLAMA}, {kind}, beside ours"] = error


def measure(report: Report, setting: Setting, models: Models) -> None:
    T, llama = setting.tokens, models.llama
    ids = torch.randint(1, setting.words, (T,)).tolist()
    verify(report, models, ids[:VERIFIED])

    def add(panel: str, case: str, samples: dict[str, Callable[[], float]]) -> None:
        timings = report.time(samples, setting.budget)
        report.add(panel, case, T, timings, dict.fromkeys(samples, Work(None, None)))

    for bits, kind in KINDS.items():
        each = models.contenders[bits].items()
        prompts = {n: sample_of(lambda c=c: c.prompt(ids)) for n, c in each}
        tokens = {name: c.tokens for name, c in each}
        with nullcontext() if llama is None else llama.prepared(kind, torch.tensor([ids]), T):
            if llama is not None:
                prompts[LLAMA] = partial(llama.sample_prompt, kind)
                tokens[LLAMA] = partial(llama.sample, kind)
            add(f"RWKV-7{bits}, prompt", f"{T} tokens", prompts)
            add(f"RWKV-7{bits}, a token", "1 row", tokens)
    batch = torch.tensor([ids])
    each = models.contenders[""].items()
    trained = {n: sample_of(lambda c=c: c.train(batch)) for n, c in each if c.train is not None}
    add("RWKV-7, training step", f"{T} tokens", trained)


def main() -> None:
    assert __doc__ is not None
    keep_freed_memory()
    arguments = parser(__doc__)
    arguments.add_argument("--llama", type=Path, help="a Python with llama-cpp-python, a contender")
    report = Report("checkpoints", "tokens", OURS, arguments.parse_args())
    setting = SETTINGS[report.flags.setting]
    with tempfile.TemporaryDirectory() as folder:
        models = models_in(Path(folder), setting, report)
    measure(report, setting, models)
    if models.llama is not None:
        models.llama.close()
    report.save()


if __name__ == "__main__":
    main()
