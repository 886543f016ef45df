# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What converting a softmax model cost: an honest table of the original and of what became of it.

    python examples/convert_report.py --original llama --output_dir outputs/report \
        --models "untrained=linear/untrained" "after stage 1=linear/stage1" "after stage 2=linear"

Compares the models in these folders with the original and with what needs no training: its window
with sinks and TOVA, both with as many keys as the converted models' windows have. Writes report.md,
report.png and report.json: bits per byte and perplexity of held-out text, answers to questions
about what stood far above (recall_texts.py) that are given by greedy decoding, tokens per second
and bytes remembered by length of context. A model with a chat template is asked as in a chat, too
(chat_measures.py), and talks.md has what it says. What is in report.json already is not measured
again.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import evaluate
import matplotlib
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_linear_attention  # noqa: F401  # registers its models
from chat_measures import KNOWN, hide_codes, known_answers, talk
from hf_linear_attention import SinkCache, TOVACache
from hf_linear_attention.conversion.model_files import read
from model_measures import PROMPT, Contender, nats_per_token, recall, speed_and_memory
from recall_texts import Questions, ask, ask_alone
from text_blocks import InputError, pack
from train_causal_lm import METRIC, DataArguments, HelpFormatter

matplotlib.use("Agg")  # draws without a display

ORIGINAL, SINKS, TOVA = "original", "original, window and sinks", "original, TOVA"
RECALL = {"needle": 1, "MQAR": 4}  # pairs in a text, all of which are asked for
ALONE, PAIRS_ALONE = "pairs alone", 16  # in comments without a text


@dataclass
class ReportArguments:
    """What is compared, and how thoroughly."""

    original: str = field(
        metadata={"help": "The softmax model: a folder, a name on the Hub, or a GGUF file."}
    )
    models: list[str] = field(
        default_factory=list,
        metadata={"help": "Models made of it, each as NAME=FOLDER, in the order of the table."},
    )
    output_dir: str = field(default="outputs/report", metadata={"help": "Where the report goes."})
    window_size: int = field(
        default=64, metadata={"help": "Keys of the baselines' windows, the current one included."}
    )
    window_sinks: int = field(default=4, metadata={"help": "First tokens that these keep."})
    questions: int = field(
        default=100, metadata={"help": "Answers that are asked for, of each kind."}
    )
    contexts: list[int] = field(
        default_factory=lambda: [1000, 16_000, 100_000],
        metadata={"help": "Tokens of context after which models are timed."},
    )
    code_lengths: list[int] = field(
        default_factory=lambda: [1024, 4096],
        metadata={"help": "Tokens of texts in which a chat model is to find a code."},
    )
    codes: int = field(default=10, metadata={"help": "Codes that are asked for in each length."})
    seed: int = field(
        default=42, metadata={"help": "Which documents are held out: as in training."}
    )

    def folders(self) -> dict[str, str]:
        """By name."""
        if any("=" not in model for model in self.models):
            raise InputError(f"--models must be NAME=FOLDER each, got {self.models}")
        return dict(model.split("=", 1) for model in self.models)


@dataclass(frozen=True)
class HeldOut:
    """What all models are tested on.

    blocks: (B, T) tokens.
    num_bytes: of their text, but for the first token of each.
    codes: by tokens of their texts, for chat models.
    """

    blocks: torch.Tensor
    num_bytes: list[int]
    questions: dict[str, Questions]
    documents: Dataset
    tokenizer: PreTrainedTokenizerBase
    codes: dict[str, Questions]


def hold_out(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    args: ReportArguments,
) -> HeldOut:
    questions = args.questions
    lengths = args.code_lengths if tokenizer.chat_template else []
    blocks = torch.tensor(pack(documents, tokenizer, block_size)["input_ids"][:])
    texts = tokenizer.batch_decode(
        blocks[:, 1:], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return HeldOut(
        blocks,
        [len(text.encode()) for text in texts],
        {
            kind: ask(documents, tokenizer, block_size, pairs, -(-questions // pairs))
            for kind, pairs in RECALL.items()
        }
        | {ALONE: ask_alone(tokenizer, PAIRS_ALONE, -(-questions // PAIRS_ALONE))},
        documents,
        tokenizer,
        {str(n): hide_codes(documents, tokenizer, n, args.codes) for n in lengths},
    )


def measure(contender: Contender, held_out: HeldOut, contexts: list[int]) -> dict[str, Any]:
    nats = nats_per_token(contender, held_out.blocks)
    bits = evaluate.load(str(METRIC)).compute(
        predictions=nats.sum(1).double().tolist(), references=held_out.num_bytes
    )
    row = {
        **bits,
        "perplexity": math.exp(nats.double().mean()),
        "recall": {kind: recall(contender, asked) for kind, asked in held_out.questions.items()},
        "contexts": {str(n): speed_and_memory(contender, n) for n in contexts},
    }
    tokenizer = held_out.tokenizer
    if tokenizer.chat_template:
        row["known"] = known_answers(contender, tokenizer)
        row["codes"] = {n: recall(contender, asked) for n, asked in held_out.codes.items()}
        row["talk"] = [list(turn) for turn in talk(contender, tokenizer, held_out.documents)]
    return row


def caches(args: ReportArguments) -> dict[str, Callable | None]:
    """The original's rows of the table: the cache that it reads with; None: its own."""
    kept = args.window_size - 1 + args.window_sinks  # beside the token that is read
    return {
        ORIGINAL: None,
        SINKS: functools.partial(SinkCache, kept, args.window_sinks),
        TOVA: functools.partial(TOVACache, kept),
    }


def load(folder: str) -> PreTrainedModel:
    try:
        return read(AutoModelForCausalLM, folder, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise InputError(f"no model can be loaded from {folder}: {error}") from error


class Measurements:
    """report.json: what was measured, by the model's name."""

    def __init__(self, path: Path, setup: dict[str, Any]):
        """Of another setup nothing is taken over."""
        self.path, self.setup = path, setup
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["setup"] == setup:
                self.rows = saved["rows"]

    def take(self, name: str, folder: str, make: Callable[[], dict[str, Any]]) -> None:
        """Has this model of this folder measured, where it was not yet."""
        model = {"folder": folder, "saved": _saved(folder)}
        if self.rows.get(name, {}).get("model") == model:
            return
        self.rows[name] = {"model": model, **make()}
        print(f"{name}: {self.rows[name]}", flush=True)
        document = {"setup": self.setup, "rows": self.rows}
        self.path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _saved(folder: str) -> list[int]:
    """When the weights in a folder were saved; nothing where there is none."""
    return [file.stat().st_mtime_ns for file in sorted(Path(folder).glob("*.safetensors"))]


# ---- the table and the plot ----


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of Markdown, one for each model. The gap is that in bits per byte between the original
    and its window: 100 % of it is closed by the original, 0 % by the window.
    """
    original, window = (rows[name]["bits_per_byte"] for name in (ORIGINAL, SINKS))
    contexts, kinds = (list(rows[ORIGINAL][name]) for name in ("contexts", "recall"))
    codes = list(rows[ORIGINAL].get("codes", ()))
    titles = [
        "",
        "bits per byte",
        "more than the original",
        "gap closed",
        "perplexity",
        *(f"recall, {kind}" for kind in kinds),
        *(f"code in {int(n):,} tokens" for n in codes),
        *([f"of {len(KNOWN)} answers"] if codes else []),
        *(f"tokens/s after {int(n):,}" for n in contexts),
        *(f"kB after {int(n):,}" for n in contexts),
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, row in rows.items():
        bits = row["bits_per_byte"]
        cells = [
            name,
            f"{bits:.3f}",
            f"{bits / original - 1:+.1%}",
            "" if window == original else f"{(window - bits) / (window - original):.0%}",
            f"{row['perplexity']:.2f}",
            *(f"{row['recall'][kind]:.0%}" for kind in kinds),
            *(f"{row['codes'][n]:.0%}" for n in codes),
            *([str(sum(row["known"].values()))] if codes else []),
            *(f"{row['contexts'][n]['tokens_per_second']:.2g}" for n in contexts),
            *(f"{row['contexts'][n]['cache_bytes'] / 1000:,.0f}" for n in contexts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def explain(args: ReportArguments, held_out: HeldOut) -> str:
    """How the table was measured."""
    B, T = held_out.blocks.shape
    return (
        f"Held-out text: {sum(held_out.num_bytes):,} bytes in {B} blocks of {T} tokens. Recall: "
        f"the share of answers right by greedy decoding, in texts of {T} tokens. The pairs stand "
        "in their first half: 1 for a needle, 4 for MQAR, all of which are asked for; pairs alone "
        f"are {PAIRS_ALONE} in comments, with no text between. The window "
        f"has {args.window_size} tokens and {args.window_sinks} first ones, TOVA keeps as many "
        "keys; both read token by token. Times: one row, float32, "
        f"{torch.get_num_threads()} thread(s), the fastest of several samples. What softmax layers "
        f"remember of more than {PROMPT:,} tokens was filled with random keys and values."
    )


def talks(rows: dict[str, dict[str, Any]]) -> str:
    """The user's words, and below each the answers of all models."""
    text = ["# What the models say", ""]
    for turn, (asked, _) in enumerate(rows[ORIGINAL]["talk"]):
        text += [f"**{asked}**", ""]
        text += [
            f"- *{name}*: {' '.join(row['talk'][turn][1].split())}" for name, row in rows.items()
        ]
        text += [""]
    return "\n".join(text)


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 3 + 0.5 * len(rows)), layout="constrained")
    draw(axes.flat, rows)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw(axes: Iterable[Any], rows: dict[str, dict[str, Any]]) -> None:
    """On four axes: bits per byte; recall; bytes and tokens per second by context."""
    bits, answers, memory, speed = axes
    names = list(rows)[::-1]
    values = [rows[name]["bits_per_byte"] for name in names]
    bits.barh(names, values, color=[f"C{name in (ORIGINAL, SINKS, TOVA):d}" for name in names])
    bits.axvline(rows[ORIGINAL]["bits_per_byte"], color="k", lw=0.8)
    bits.set(title="bits per byte of held-out text", xlim=(0.97 * min(values), 1.01 * max(values)))
    kinds = list(rows[ORIGINAL]["recall"])
    height = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        places = [y + 0.4 - height * (i + 0.5) for y in range(len(names))]
        answers.barh(places, [rows[n]["recall"][kind] for n in names], 0.9 * height, label=kind)
    answers.set(title="recall by greedy decoding", xlim=(0, 1.02), yticks=range(len(names)))
    answers.set_yticklabels(names)
    answers.legend(fontsize="small")
    for axis, what, title in (
        (memory, "cache_bytes", "bytes remembered"),
        (speed, "tokens_per_second", "tokens per second"),
    ):
        for name, row in rows.items():
            contexts, measured = row["contexts"].keys(), row["contexts"].values()
            axis.loglog(list(map(int, contexts)), [x[what] for x in measured], ".-", label=name)
        axis.set(title=title, xlabel="tokens of context")
        axis.grid(alpha=0.3)
    speed.legend(fontsize="x-small")


def write_report(args: ReportArguments, data_args: DataArguments) -> dict[str, dict[str, Any]]:
    """Measures what is missing, writes the three files, and returns the rows by name."""
    folders = args.folders()
    tokenizer = read(AutoTokenizer, args.original)
    _, documents = data_args.load(args.seed)
    held_out = hold_out(documents, tokenizer, data_args.block_size, args)
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    setup = {
        "original": args.original,
        "window_size": args.window_size,
        "window_sinks": args.window_sinks,
        "block_size": data_args.block_size,
        "held_out_bytes": sum(held_out.num_bytes),
        "questions": args.questions,
        "contexts": args.contexts,
        "codes": [args.codes, *held_out.codes],
        "threads": torch.get_num_threads(),
    }
    measurements = Measurements(output_dir / "report.json", setup)
    original = load(args.original)
    for name, new_cache in caches(args).items():
        contender = Contender(original, new_cache)
        measurements.take(
            name, args.original, lambda c=contender: measure(c, held_out, args.contexts)
        )
    for name, folder in folders.items():
        measurements.take(
            name, folder, lambda f=folder: measure(Contender(load(f)), held_out, args.contexts)
        )
    rows = {name: measurements.rows[name] for name in (*caches(args), *folders)}
    text = ["# What converting cost", "", *table(rows), "", explain(args, held_out), ""]
    text += ["![Bits per byte, recall, memory and speed](report.png)", ""]
    (output_dir / "report.md").write_text("\n".join(text), encoding="utf-8")
    if tokenizer.chat_template:
        (output_dir / "talks.md").write_text(talks(rows), encoding="utf-8")
    plot(rows, output_dir / "report.png")
    print("\n".join(text[2:-3]) + f"\nwrote {output_dir}/report.md, .png and .json")
    return rows


def main(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Writes the report, and returns its rows by name."""
    parser = HfArgumentParser(
        (ReportArguments, DataArguments), description=__doc__, formatter_class=HelpFormatter
    )
    try:
        parsed = parser.parse_args_into_dataclasses(arguments)
    except ValueError as error:  # from a dataclass that checks itself
        parser.error(str(error))
    return write_report(*parsed)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
