# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The command `python -m hf_linear_attention speedup MODEL`: the gain of `use_kernels` with a model
on this machine.

It runs the same work before and after, in turns, and compares the answers.

Shapes: B = 1 row, T tokens, V size of the vocabulary.
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ..releases import CACHE_NAMES
from ..upstream.use_kernels import use_kernels

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
COMPARED_TOKENS = 128  # of which all logits are compared
# By how much logits may differ, relative in the Euclidean norm, for rounding alone.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SECONDS = 10.0  # for the rounds of one kind of work
MAX_ROUNDS = 100

STATE_NAMES = (*CACHE_NAMES, "state")  # RWKV has a list of states in place of a cache

Run = Callable[[], object]


# ---- the work ----


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weights and buffers with the model, and so their gradients."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(x): x for x in shared})


def read_prompt(model: PreTrainedModel, ids: Tensor) -> Run:
    """Reads ids (1, T) into a new cache, for the logits of the last."""
    return partial(_read, model, ids, _only_last(model))


def next_token(model: PreTrainedModel, ids: Tensor) -> Run:
    """Reads the last token again and again, after ids (1, T)."""
    options = _only_last(model)
    _, cache = _read_into_cache(model, ids, options)
    return partial(_read, model, ids[:, -1:], options | cache)


def training_step(model: PreTrainedModel, ids: Tensor) -> Run:
    """The loss of ids (1, T) and all gradients, without an optimizer, which is the same for all."""

    def step() -> None:
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.eval()
        model.zero_grad(set_to_none=True)

    return step


def is_trainable(dtype: torch.dtype) -> bool:
    """Whether gradients take no hours: torch's in bfloat16 take a hundred times as long as in
    float32 where the processor has no products for it.
    """
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


WORK: dict[str, Callable[[PreTrainedModel, Tensor], Run]] = {
    "prompt": read_prompt,
    "token": next_token,
    "training step": training_step,
}


def answers(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits (1, T, V) of ids (1, T), the last of them read by itself, after the others."""
    prompt, cache = _read_into_cache(model, ids[:, :-1], {})
    last = _read(model, ids[:, -1:], cache)
    return torch.cat([prompt.logits, last.logits], dim=1)


@torch.no_grad()
def _read(model: PreTrainedModel, ids: Tensor, options: Mapping[str, Any]) -> Any:
    return model(input_ids=ids, use_cache=True, **options)


def _only_last(model: PreTrainedModel) -> dict[str, Any]:
    """Asks for the last logits alone, where a model can be asked."""
    name = "logits_to_keep"
    return {name: 1} if name in inspect.signature(model.forward).parameters else {}


def _read_into_cache(
    model: PreTrainedModel, ids: Tensor, options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What ids give, and the argument by which the next ones go on."""
    cache = cache_to_begin_with(model, ids)
    output = _read(model, ids, {**options, **cache})
    if (returned := cache_in(output)) is not None:
        cache = {cache_argument(model): returned}
    return output, cache


def cache_to_begin_with(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """None, but for a model that returns none, as those whose states are on their modules: it is
    given the one that goes on, as generate() does.
    """
    if cache_in(_read(model, ids[:, :2], {})) is not None:
        return {}
    return {cache_argument(model): DynamicCache(config=model.config.get_text_config())}


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the argument that takes a cache.

    Raises:
        ValueError: there is none.
    """
    parameters = inspect.signature(model.forward).parameters
    argument = next((name for name in STATE_NAMES if name in parameters), None)
    if argument is None:
        raise ValueError(f"{type(model).__name__} takes no cache by any of the names {STATE_NAMES}")
    return argument


def cache_in(output: Any) -> Any:
    """The cache that a forward returned; None where it returned none."""
    return next((output[name] for name in STATE_NAMES if output.get(name) is not None), None)


# ---- how long, how much, how exact ----


class Times(NamedTuple):
    """Seconds, of the fastest run each."""

    before: float
    after: float


def times(before: Run, after: Run, seconds: float) -> Times:
    """Both take turns until `seconds` are over, at least once."""
    fastest = [math.inf, math.inf]
    end = time.perf_counter() + seconds
    for _ in range(MAX_ROUNDS):
        for i, run in enumerate((before, after)):
            start = time.perf_counter()
            run()
            fastest[i] = min(fastest[i], time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return Times(*fastest)


def peak_mib(run: Run) -> float | None:
    """MiB that a run needs beyond what is in memory before it; None where Linux's /proc is
    missing. Less exact where much was in use before and freed.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    give_memory_back()  # so that it counts when it is used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = _memory_kib("VmRSS")
    run()
    return (_memory_kib("VmHWM") - before) / 1024


def give_memory_back() -> None:
    """To the system, what is not in use. Linux only."""
    gc.collect()
    with contextlib.suppress(ImportError):  # where the kernels were not built
        from ..ops.compiled import library

        library.free_kept_memory()
    ctypes.CDLL(None).malloc_trim(0)


def _memory_kib(name: str) -> int:
    match = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


class Answers(NamedTuple):
    """How much logits (1, T, V) of two models differ."""

    error: float  # relative, in the Euclidean norm
    same_tokens: int  # places where both hold the same token for the likeliest
    T: int
    are_same: bool  # but for rounding

    def __str__(self) -> str:
        verdict = "the same but for rounding" if self.are_same else "NOT the same"
        return (
            f"{verdict}: logits differ by {self.error:.0e} of their size, and the likeliest next "
            f"token is the same after {self.same_tokens} of {self.T} tokens"
        )


def compare_answers(before: Tensor, after: Tensor) -> Answers:
    expected, actual = before.float(), after.float()
    error = ((actual - expected).norm() / expected.norm()).item()
    same = (expected.argmax(-1) == actual.argmax(-1)).sum().item()
    return Answers(error, int(same), before.shape[1], error <= TOLERANCE[before.dtype])


# ---- the command ----


def main(arguments: list[str]) -> None:
    """Prints what `use_kernels` gains. Ends the program, with status 1, where it can't, and where
    the answers differ.
    """
    flags = parse(arguments)
    say(f"loading {flags.model}")
    before = load(flags.model, DTYPES[flags.dtype])
    after = twin(before)
    report = use_kernels(after)
    if not report.changed:
        sys.exit(f"use_kernels changes nothing in {flags.model}:\n{report}")
    print(f"{report}\n", flush=True)
    vocab_size = before.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, flags.tokens), generator=generator)
    say("comparing the answers")
    compared = compare_answers(
        *(answers(model, ids[:, :COMPARED_TOKENS]) for model in (before, after))
    )
    lines = measure(before, after, ids)
    print(f"{'':28}{'before':>12}{'after':>12}", *lines, sep="\n")
    print(f"\nanswers {compared}")
    print(f"{before.dtype}, threads: {torch.get_num_threads()}, times of the fastest run each")
    if not compared.are_same:
        sys.exit(1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention speedup",
        description="What use_kernels gains with a model of Transformers, on this CPU.",
    )
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's")
    parser.add_argument(
        "--tokens", type=int, default=512, help="of the prompt and of a training step; at least 2"
    )
    flags = parser.parse_args(arguments)
    if flags.tokens < 2:
        parser.error(f"--tokens must be at least 2, got {flags.tokens}")
    return flags


def say(what: str) -> None:
    """What goes on, beside the output."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def say_if_no_folder(name: str) -> None:
    """The Hub may take a minute to be found missing."""
    if not os.path.exists(name):
        say(f"there is no folder {name} here: asking the Hub")


def load(name: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """Of a folder or a name on the Hub. Ends the program where there is no such model."""
    say_if_no_folder(name)
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    except (OSError, ValueError) as error:
        sys.exit(f"{name} can't be loaded: {error}")


def measure(before: PreTrainedModel, after: PreTrainedModel, ids: Tensor) -> list[str]:
    """A line for each kind of work, and one for the memory of a training step."""
    T = ids.shape[1]
    titles = {
        "prompt": f"prompt of {T} tokens",
        "token": f"a token after {T}",
        "training step": f"training step of {T} tokens",
    }
    lines = []
    for name, prepare in WORK.items():
        if name == "training step" and not is_trainable(before.dtype):
            lines.append(
                f"{titles[name]}: left out, for this processor has no products of bfloat16; "
                "--dtype float32 has it"
            )
            continue
        say(f"{titles[name]}, before and after")
        runs = [prepare(model, ids) for model in (before, after)]
        peaks = [peak_mib(run) for run in runs] if name == "training step" else []
        lines.append(line(titles[name], times(runs[0], runs[1], SECONDS), in_seconds))
        if peaks and None not in peaks:
            lines.append(line("  its memory", peaks, in_mib))
    return lines


def line(title: str, pair: Sequence[Any], show: Callable[[float], str]) -> str:
    before, after = pair
    gain = f"{before / after:8.1f}x" if after > 0 else ""
    return f"{title:28}{show(before):>12}{show(after):>12}{gain}"


def in_seconds(x: float) -> str:
    return f"{x:.2f} s" if x >= 1 else f"{x * 1e3:.1f} ms"


def in_mib(x: float) -> str:
    return f"{x:.0f} MiB"
