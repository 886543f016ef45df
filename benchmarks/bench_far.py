# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a trained model knows of its language after many tokens: bits per byte, by position.

    python benchmarks/bench_far.py outputs/demo [OTHER ...]          # up to 10^5 tokens, in minutes
    python benchmarks/bench_far.py outputs/demo [OTHER ...] --full   # up to 10^6, an hour

The folders have models, each with its tokenizer (`examples/train_causal_lm.py` writes some). Each
reads Python sources, piece by piece with its cache, and at every length the same text once more:
first a lead, so that what lies just behind is the same everywhere, and then a probe, whose bits are
counted. What it reads on is as if there had been no probe. Also with states in float64. Nothing is
timed.
"""

import copy
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from harness import commit, parser, plotter, write_result
from hf_linear_attention import LinearAttentionForCausalLM
from hf_linear_attention.releases import CACHE

PIECE = 1024
LENGTHS = {
    "smallest": (64, 256),
    "short": (1000, 10_000, 100_000),
    "full": (1000, 10_000, 100_000, 1_000_000),
}
LEAD = {"smallest": 32, "short": 900, "full": 900}  # tokens
PROBE = {"smallest": 64, "short": 16_384, "full": 16_384}


def texts(package: str) -> Iterator[str]:
    for path in sorted((Path(sysconfig.get_path("purelib")) / package).rglob("*.py")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def tokens_of(tokenizer: Any, package: str, count: int) -> Tensor:
    """(1, count) of a package's sources, from the start again if there are too few."""
    ids: list[int] = []
    while len(ids) < count:
        before = len(ids)
        for text in texts(package):
            ids += tokenizer(text)["input_ids"]
            if len(ids) >= count:
                break
        if len(ids) == before:
            raise SystemExit(f"{package} has no sources to read here")
    return torch.tensor([ids[:count]])


def read(model: Any, ids: Tensor, cache: Any) -> tuple[Any, float]:
    """The cache behind the tokens (1, T), and the bits of all but the first."""
    bits, last = 0.0, None
    for piece in ids.split(PIECE, 1):
        output = model(piece, use_cache=True, **{CACHE: cache})
        logits, cache = output.logits.float(), output[CACHE]
        if last is not None:
            logits = torch.cat([last, logits], 1)
            piece = torch.cat([piece[:, :1], piece], 1)
        bits += F.cross_entropy(logits[0, :-1], piece[0, 1:], reduction="sum").item() / math.log(2)
        last = logits[:, -1:]
    return cache, bits


@torch.no_grad()
def rows_of(folder: Path, states: str, setting: str) -> Iterator[dict[str, Any]]:
    """A row for each length."""
    model = LinearAttentionForCausalLM.from_pretrained(folder, state_in_fp64=states == "float64")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = LENGTHS[setting]
    stream = tokens_of(tokenizer, "torch", lengths[-1])
    again = tokens_of(tokenizer, "transformers", LEAD[setting] + PROBE[setting])
    lead, probe = again.split([LEAD[setting], PROBE[setting]], 1)
    num_bytes = len(tokenizer.decode(probe[0, 1:]).encode())
    cache, position = None, 0
    for length in lengths:
        cache, _ = read(model, stream[:, position : length - LEAD[setting]], cache)
        position = length - LEAD[setting]
        behind, _ = read(model, lead, copy.deepcopy(cache))
        _, bits = read(model, probe, behind)
        yield {
            "model": folder.name,
            "states": states,
            "tokens": length,
            "bits_per_byte": bits / num_bytes,
        }


def main() -> None:
    assert __doc__ is not None
    flags = parser(__doc__)
    flags.add_argument("models", nargs="+", type=Path, help="folders of models")
    arguments = flags.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for folder in arguments.models:
        for states in ("float32", "float64"):
            for row in rows_of(folder, states, arguments.setting):
                rows.append(row)
                print(
                    f"{row['model']}, states in {states}: {row['bits_per_byte']:.4f} bits per byte "
                    f"after {row['tokens']:,} tokens",
                    flush=True,
                )
    figures = {"is_complete": True, "commit": commit(), "rows": rows}
    path = write_result(arguments.results, "far", arguments.setting, [], figures)
    draw(rows, path.with_suffix(".png"))
    print(f"wrote {path} and .png")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    pyplot = plotter()
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        for states, style in (("float32", "-"), ("float64", ":")):
            points = [
                (row["tokens"], row["bits_per_byte"])
                for row in rows
                if (row["model"], row["states"]) == (name, states)
            ]
            label = f"{name}, states in {states}"
            axis.plot(
                *zip(*points, strict=True), style, marker="o", color=f"C{number}", label=label
            )
    axis.set(xscale="log", xlabel="tokens before", ylabel="bits per byte")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
