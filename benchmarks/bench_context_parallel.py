# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A training step whose sequence is shared by ranks, beside one process that reads all of it.

    python benchmarks/bench_context_parallel.py              # 65,536 tokens, two ranks
    python benchmarks/bench_context_parallel.py --ranks 4 --tokens 16384 --order head_tail

Every process has one thread. They take turns: a round is a step of the one process, then one of all
ranks together. Times are the smallest of the rounds; peak memory is that of a step, beyond weights,
of the rank that needs most; and what a rank sends, forward and backward, is counted.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    split_sequence,
)
from hf_linear_attention.extras import speedup
from hf_linear_attention.recurrences.sequence_parallel import AllGather
from processes import Worker

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "fuse_linear_cross_entropy": True,
}
PRESETS = {
    "gated_deltanet": {"num_attention_heads": 2, "linear_key_head_dim": 64},
    "mamba2": {"linear_num_value_heads": 4, "linear_key_head_dim": 64},
    "gla": {"num_attention_heads": 2},
}


class Process:
    """One of the processes, which does as it is asked."""

    def __init__(self, preset: str, tokens: int, rank: int, ranks: int, order: str, meeting: str):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = LinearAttentionConfig.from_preset(preset, **{**SIZES, **PRESETS[preset]})
        self.model = LinearAttentionForCausalLM(config).train()
        ids = torch.randint(config.vocab_size, (1, tokens))
        self.batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        self.run: Callable[..., Any] = self.model
        if ranks > 1:
            where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": ranks}
            dist.init_process_group("gloo", **where)
            self.batch = split_sequence(self.batch, order=order)
            self.run = DistributedDataParallel(self.model)

    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        loss = self.run(**self.batch).loss
        loss.backward()
        took = time.perf_counter() - start
        norm = torch.stack([x.grad.norm() for x in self.model.parameters()]).norm().item()
        self.model.zero_grad()
        return {"seconds": took, "loss": loss.item(), "norm": norm}

    def peak(self) -> dict[str, float]:
        """MiB."""
        return {"mib": speedup.peak_mib(self.step) or 0.0}

    def sent(self) -> dict[str, float]:
        """Bytes that this rank gives the others in a step, but for DDP's."""
        with counted() as numbers:
            self.step()
        return {"bytes": sum(numbers)}


@contextmanager
def counted():
    """The bytes of what is gathered, and of its gradients."""
    numbers: list[int] = []
    forward, backward = AllGather.forward, AllGather.backward

    def count_forward(ctx, x, group):
        numbers.append(x.nbytes)
        return forward(ctx, x, group)

    def count_backward(ctx, dgathered):
        numbers.append(dgathered.nbytes // len(dgathered) * (len(dgathered) - 1))
        return backward(ctx, dgathered)

    count = {"forward": staticmethod(count_forward), "backward": staticmethod(count_backward)}
    with mock.patch.multiple(AllGather, **count):
        yield numbers


def serve(arguments: list[str]) -> None:
    """Does what lines of JSON ask for."""
    preset, tokens, rank, ranks, order, meeting = arguments
    process = Process(preset, int(tokens), int(rank), int(ranks), order, meeting)
    for line in sys.stdin:
        print(json.dumps(getattr(process, json.loads(line)["do"])()), flush=True)


def started(preset: str, flags: argparse.Namespace, ranks: int, meeting: Path) -> list[Worker]:
    command = [sys.executable, __file__, "--serve", preset, flags.tokens]
    others = [ranks, flags.order, meeting]
    threads = {"OMP_NUM_THREADS": "1"}
    return [Worker([*command, rank, *others], threads) for rank in range(ranks)]


def ask(workers: list[Worker], do: str) -> list[dict[str, float]]:
    """All at once."""
    for worker in workers:
        assert worker.process.stdin is not None
        print(json.dumps({"do": do}), file=worker.process.stdin, flush=True)
    return [worker.answer(do) for worker in workers]


def measure(preset: str, flags: argparse.Namespace, folder: Path) -> str:
    """A line of the table."""
    one = started(preset, flags, 1, folder / "nobody")
    ranks = started(preset, flags, flags.ranks, folder / preset)
    steps: dict[str, list[float]] = {"one": [], "ranks": []}
    for _ in range(flags.rounds):
        (alone,), together = ask(one, "step"), ask(ranks, "step")
        for rank in together:
            for name in ("loss", "norm"):
                assert abs(rank[name] / alone[name] - 1) < 1e-3, (preset, name, rank, alone)
        steps["one"].append(alone["seconds"])
        steps["ranks"].append(max(rank["seconds"] for rank in together))
    peak = ask(one, "peak")[0]["mib"], max(rank["mib"] for rank in ask(ranks, "peak"))
    sent = max(rank["bytes"] for rank in ask(ranks, "sent")) / SIZES["num_hidden_layers"]
    for worker in (*one, *ranks):
        worker.close()
    seconds = min(steps["one"]), min(steps["ranks"])
    cells = [
        preset,
        *(f"{x:.2f}" for x in (*seconds, seconds[1] / seconds[0])),
        *(f"{x:.0f}" for x in peak),
        f"{peak[1] / peak[0]:.2f}",
        f"{sent / 1024:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


COLUMNS = ("preset", "one process, s", "ranks, s", "ratio")
COLUMNS += ("MiB", "MiB of a rank", "ratio", "KiB sent, a layer")


def main() -> None:
    if "--serve" in sys.argv:
        return serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--order", choices=("contiguous", "head_tail"), default="contiguous")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    flags = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for preset in flags.presets:
            print(measure(preset, flags, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
