# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A program that uses this package, and prints what that has changed in Transformers, as JSON:
names of attributes of its modules, classes and objects, and of entries of its tables; and for each
the file, if it is a function.

Objects have the names of their classes. What is not there: attributes of modules that nobody had
imported before, what Transformers imports or remembers itself when it is first needed, and what
Python adds to classes that are looked at.
"""

import importlib
import json
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.cli.serve import Serve
from transformers.utils.import_utils import _LazyModule

ROOT = Path(__file__).parents[2]
# Modules whose names the package could change, beside those that the lines above import.
USED = (
    *(f"cli.serving.{x}" for x in ("chat_completion", "completion", "response", "server")),
    *(f"models.{x}.modeling_{x}" for x in ("lfm2", "mamba", "mamba2", "minimax", "qwen3_5")),
    *(f"models.{x}encoder_decoder.modeling_{x}encoder_decoder" for x in ("", "speech_", "vision_")),
    "generation.continuous_batching.continuous_api",
    "trainer",
)
BY_PYTHON = ("__slotnames__", "__annotations__")
# What Transformers notes of each class of models, or reads when it is first asked.
NOTES = ("_CanRecordRegistry", "_CAN_RECORD_REGISTRY", "_cache", "_cached_value")

Holder = tuple[str, Any, dict[str, Any]]  # its name, itself and what it held


def is_theirs(module: str) -> bool:
    return module.split(".")[0] == "transformers"


def contents(holder: Any) -> dict[str, Any]:
    """What it holds, by how one writes that behind its name."""
    items = dict.items(holder) if isinstance(holder, dict) else ()
    found = {f"[{getattr(key, '__name__', key)}]": value for key, value in list(items)}
    return found | {f".{name}": x for name, x in list(getattr(holder, "__dict__", {}).items())}


def holders() -> list[Holder]:
    """Modules, classes, tables and objects of Transformers."""
    found: dict[int, Holder] = {}
    waiting: deque[Holder] = deque()

    def add(name: str, holder: Any) -> None:
        if id(holder) not in found:
            found[id(holder)] = name, holder, contents(holder)
            waiting.append(found[id(holder)])

    for name in filter(is_theirs, list(sys.modules)):
        add(name, sys.modules[name])
    while waiting:  # tables in the modules of which they are variables come first
        name, holder, held = waiting.popleft()
        for key, value in held.items():
            if isinstance(value, type):
                if is_theirs(value.__module__):
                    add(value.__qualname__, value)
            elif type(value) is not ModuleType and is_theirs(type(value).__module__):
                add(type(value).__name__, value)
            elif isinstance(value, dict) and not key.startswith(".__"):
                add(key[1:] if isinstance(holder, ModuleType) else name + key, value)
    return list(found.values())


def changes(before: list[Holder]) -> Iterator[tuple[str, Any]]:
    """Names, and what is there now."""
    nothing = object()
    for name, holder, then in before:
        now = contents(holder)
        for key in {**then, **now}:
            value = now.get(key, nothing)
            is_lazy = isinstance(holder, _LazyModule) and key[1:] in holder.__all__
            is_lazy = key not in then and (is_lazy or isinstance(value, ModuleType))
            is_note = name.startswith(NOTES) or key.endswith(BY_PYTHON + NOTES)
            if value is not then.get(key, nothing) and not (is_lazy or is_note):
                yield name + key, value


def serve(folder: Path) -> None:
    import soak_server

    soak_server.save_model(folder)
    address = SimpleNamespace(folder=folder, port=soak_server.free_port())
    options = {"continuous_batching": True, "device": "cpu", "host": "127.0.0.1"}
    server = Serve(str(folder), **options, port=address.port, cb_num_blocks=1, non_blocking=True)
    while not server.server.started:
        time.sleep(0.01)
    client = soak_server.Client(address, random.Random(0))
    assert client.ask(soak_server.Question("w1", []), 1)
    server.kill_server()


def use() -> None:
    """The package's doors to Transformers."""
    from hf_linear_attention import SinkCache, use_kernels
    from hf_linear_attention.releases import CACHE
    from upstream_models import tiny_upstream

    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder))
        AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[1, 2, 3]])
    softmax = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2))
    softmax.generate(prompt, max_new_tokens=2, **{CACHE: SinkCache(8)})
    for name in ("qwen3_5_text", "mamba2", "minimax", "lfm2", "mamba"):
        model = tiny_upstream(name)
        report = use_kernels(model)
        model.generate(prompt, max_new_tokens=3)
        model(prompt, labels=prompt).loss.backward()
        report.undo()


def code_of(value: Any) -> str | None:
    """The file of a function."""
    function = getattr(value, "__func__", value)
    return Path(function.__code__.co_filename).stem if isinstance(function, FunctionType) else None


if __name__ == "__main__":
    for module in USED:
        importlib.import_module(f"transformers.{module}")
    sys.path.insert(0, str(ROOT / "scripts"))
    start = holders()
    use()
    from hf_linear_attention import use_kernels_everywhere
    from hf_linear_attention.model import auto

    auto.add_attention("hf_linear_attention_in_vllm", use)  # as its plugin does
    table = {"linear_attention": object}  # as the engine does, while it makes a cache
    with use_kernels_everywhere(), auto.allocators_of_paged_cache(table):
        found = [(name, code_of(value)) for name, value in changes(start)]
    print(json.dumps(found))
