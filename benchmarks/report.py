# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Writes the newest results into docs/results.md, and what the README shows of them.

    python benchmarks/report.py

Of each benchmark it takes the newest full set of each processor in benchmarks/results/, or the
newest short ones where there is no full one. Tables go between two comments that name them, those
of converted models into docs/converting.md. The README's table and the pictures in docs/ are of
the newest set alone: five models' times for a token in token.png, memory and time against the
context in context.png, and the gain for Transformers' models in use_kernels.png.
"""

import json
import os
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import QUIET, RESULTS, plotter
from models import cache_bytes

ROOT = RESULTS.parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGE = DOCS / "results.md"
CONVERTING = DOCS / "converting.md"
BARS = DOCS / "token.png"
PICTURE = DOCS / "context.png"
GAINS = DOCS / "use_kernels.png"
TITLES = {
    "compare": "The presets",
    "ops": "The op",
    "products": "Matrix products",
    "decode": "Generation",
    "training": "Training step",
    "upstream": "Transformers' own models",
    "peers": "Beside llama.cpp",
    "converted": "A converted model, by context",
    "checkpoints": "RWKV-7 beside its packages",
    "onnx": "Graphs on ONNX Runtime",
    "rg_lru": "RecurrentGemma's recurrent layers",
    "serving": "Many clients at once",
    "decode_race": "A token by its trace",
    "long": "After many tokens",
    "far": "Trained models after many tokens",
}
CONVERSION = "conversion"  # whose page is another
PANELS = {  # how those begin that the page shows; the files have all
    "ops": ("forward, float32", "forward + backward, float32"),
    "decode": (
        "generate(), 1 row, float32",
        "generate(), 1 row, bfloat16",
        "generate(), 8 rows, float32",
        "generate(), 32 rows, float32",
        "generate(), bits of weights",
        "forward, bits of weights",
        "prompt, float32",
    ),
    "decode_race": ("",),  # all
    "peers": ("",),
    "converted": ("",),
    "checkpoints": ("",),
    "onnx": ("",),
    "training": ("training step",),
    "rg_lru": ("RG-LRU", "block"),
    "serving": ("HTTP", "one process", "long prompt"),
}
CHOICES = {  # the systems in the README's table, and what for
    "gated_deltanet": "**Start here**, the config's default. Good at all, at constant memory",
    "rwkv7": "The best on text, with layers of its own",
    "gated_deltaproduct": "States to be followed: parities, permutations",
    "kda": "The surest recall at constant memory, a little behind on text",
    "qwen3_next": "Recall within the trained length; its memory grows, a quarter of softmax's",
    "gla": "Faster training, without recall",
    "katharopoulos": "The paper's exact form, the simplest and fastest",
    "softmax": "For comparison: softmax attention, as in Llama",
}


Result = tuple[Path, dict[str, Any]]  # a file and what it holds


def newest_results() -> dict[str, list[Result]]:
    """By benchmark: one of each processor that it was run on, the newest first."""
    found = [(path, json.loads(path.read_text())) for path in RESULTS.glob("*.json")]
    found = [item for item in found if item[1]["is_complete"]]
    found.sort(key=lambda item: item[1]["date"], reverse=True)
    newest = {}
    for bench in (*TITLES, CONVERSION):
        of_bench = [item for item in found if item[1]["bench"] == bench]
        full = [item for item in of_bench if item[1]["is_full"]]
        by_processor: dict[str, Result] = {}
        for item in full or of_bench:
            by_processor.setdefault(item[1]["machine"]["cpu"], item)
        if by_processor:
            newest[bench] = list(by_processor.values())
    return newest


def sections(results: list[Result]) -> str:
    return "\n\n".join(section(*result) for result in results)


def section(path: Path, document: dict[str, Any]) -> str:
    special = {
        "compare": section_of_systems,
        "products": section_of_products,
        "upstream": section_of_gains,
        "long": section_of_errors,
        "far": section_of_positions,
        CONVERSION: section_of_conversion,
    }
    return special.get(document["bench"], section_of_times)(path, document)


def place(document: dict[str, Any]) -> str:
    """Where and when that was measured."""
    machine = document["machine"]
    return (
        f"{machine['cpu']}, threads: {machine['threads']}, kernels for {machine['kernels']}, "
        f"PyTorch {machine['torch']}, Transformers {machine['transformers']}, "
        f"commit {document['commit']}, {document['date'][:10]}."
    )


def plot(path: Path) -> str:
    """The address of a result's plot, as the page has it."""
    return beside(path, ".png")


def beside(path: Path, suffix: str) -> str:
    """The address of the file of that kind of a result."""
    return os.path.relpath(path.with_suffix(suffix), DOCS)


def section_of_times(path: Path, document: dict[str, Any]) -> str:
    bench = document["bench"]
    title = TITLES[bench]
    headline = [row for row in document["rows"] if row["panel"].startswith(PANELS[bench])]
    lines = [
        f"**{title}**: median ms, and in brackets how many times as long as "
        f"{document['baseline']}. {place(document)}{disturbance_of(headline)}",
        "",
        *tables(headline, document["baseline"]),
        f"![{title}: times on logarithmic axes]({plot(path)})",
    ]
    return "\n".join(lines)


def disturbance_of(rows: list[dict[str, Any]]) -> str:
    """A sentence where others disturbed the measurement."""
    disturbance = max(row["disturbance"] for row in rows)
    if disturbance <= QUIET:
        return ""
    return f" Other processes took up to {disturbance:.0%} of the machine."


def by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict]]:
    """By panel and case: each contender's row."""
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["panel"], row["case"]), {})[row["contender"]] = row
    return cases


def tables(rows: list[dict[str, Any]], baseline: str) -> list[str]:
    """One table after the other, each of cases that share contenders beside the baseline."""
    groups: list[tuple[set[str], list[dict[str, Any]]]] = []
    for contenders in by_case(rows).values():
        others = set(contenders) - {baseline}
        if not groups or not groups[-1][0] & others:
            groups.append((set(), []))
        groups[-1][0].update(others)
        groups[-1][1].extend(contenders.values())
    return [line for _, group in groups for line in (*table(group, baseline), "")]


def table(rows: list[dict[str, Any]], baseline: str) -> list[str]:
    """A line for each case, a column for each contender."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    lines = [f"| | {' | '.join(contenders)} |", "|---" * (1 + len(contenders)) + "|"]
    for (panel, case), by_contender in by_case(rows).items():
        cells = [cell(by_contender.get(name), baseline) for name in contenders]
        title = re.sub(r", \d+ rows?", "", panel)  # which the case names, too
        lines.append(f"| {title}: {case} | {' | '.join(cells)} |")
    return lines


def cell(row: dict[str, Any] | None, baseline: str) -> str:
    if row is None:
        return ""
    time = digits(row["milliseconds"])
    return time if row["contender"] == baseline else f"{time} ({row['ratio']:.1f}×)"


def digits(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def section_of_products(path: Path, document: dict[str, Any]) -> str:
    rows = document["rows"]
    lines = [
        f"**{TITLES['products']}**: median ms of ours; in brackets the share of what the machine "
        "does at best, in reading or in multiply-adds of float32, whichever is larger, and how "
        f"many times as long PyTorch's product takes. {place(document)}{disturbance_of(rows)}",
        "",
        *products_table(rows),
        "",
        f"![{TITLES['products']}: times on logarithmic axes]({plot(path)})",
    ]
    return "\n".join(lines)


def products_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each kind and number of rows, a column for each format of numbers."""
    cells: dict[str, dict[str, str]] = {}
    for (panel, case), contenders in by_case(rows).items():
        kind, numbers, _ = panel.split(", ")
        cells.setdefault(f"{kind}: {case}", {})[numbers] = product_cell(contenders)
    formats = list(dict.fromkeys(numbers for line in cells.values() for numbers in line))
    return [
        f"| | {' | '.join(formats)} |",
        "|---" * (1 + len(formats)) + "|",
        *(
            f"| {name} | {' | '.join(line.get(numbers, '') for numbers in formats)} |"
            for name, line in cells.items()
        ),
    ]


def product_cell(contenders: dict[str, dict[str, Any]]) -> str:
    ours, theirs = contenders["ours"], contenders.get("PyTorch")
    share = max(ours["share_of_bandwidth"] or 0, ours["share_of_peak"] or 0)
    ratio = f", {theirs['ratio']:.1f}×" if theirs else ""
    return f"{digits(ours['milliseconds'])} ({share:.0%}{ratio})"


def section_of_gains(path: Path, document: dict[str, Any]) -> str:
    rows = document["rows"]
    lines = [
        f"**{TITLES['upstream']}**: median ms before→after `use_kernels`, how many times as fast "
        "that is, and the share of matrix products in both; then MiB of a training step. "
        f"[The file]({beside(path, '.json')}) also has the gain where one kind of module stays as "
        f"it was, and the shares of all parts. {place(document)}{disturbance_of(rows)}",
        "",
        *gains_table(rows, document["notes"]),
        "",
        f"![{TITLES['upstream']}: times as fast as before]({plot(path)})",
    ]
    return "\n".join(lines)


def gains_table(rows: list[dict[str, Any]], notes: list[str]) -> list[str]:
    """A line for each model and dtype, a column for each kind of work."""
    lines: dict[str, dict[str, list[str]]] = {}
    for (panel, case), contenders in by_case(rows).items():
        both = [contenders[name] for name in ("before", "use_kernels")]
        ms = [row["milliseconds"] for row in both]
        shares = [products_share(notes, f"{panel}: {case}: {row['contender']}: ") for row in both]
        work, tokens = re.split(" of | after ", case.removesuffix(" tokens"))
        cells = {work: f"{'→'.join(map(digits, ms))} ({ms[0] / ms[1]:.1f}×), {'→'.join(shares)}"}
        if both[0]["peak_mib"] is not None:
            cells["MiB"] = "→".join(f"{row['peak_mib']:.0f}" for row in both)
        for title, cell in cells.items():
            found = lines.setdefault(panel, {}).setdefault(title, [])
            found.append(cell if tokens == "1024" else f"of {tokens}: {cell}")
    titles = list(dict.fromkeys(title for line in lines.values() for title in line))
    return [
        f"| 1024 tokens | {' | '.join(titles)} |",
        "|---" * (1 + len(titles)) + "|",
        *(
            f"| {panel} | {' | '.join('; '.join(line.get(title, [])) for title in titles)} |"
            for panel, line in lines.items()
        ),
    ]


def products_share(notes: list[str], beginning: str) -> str:
    """The matrix products' share of a time, from the last note that begins so."""
    note = next(note for note in reversed(notes) if note.startswith(beginning))
    share = re.match(r"products (\d+%)", note.removeprefix(beginning))
    return share[1] if share else "0%"


def section_of_systems(path: Path, document: dict[str, Any]) -> str:
    rows, trials = document["rows"], document["setting"]["trials"]
    training = []
    for task, trial in trials.items():
        length = trial["task"]["length"]
        counts = [row["parameters"][task] for row in rows if task in row["parameters"]]
        seeds = {len(row["tasks"][task]["scores"]) for row in rows if task in row["tasks"]}
        training.append(
            f"{task}: {trial['steps']} steps of {trial['rows']}×{length} tokens, "
            f"{min(counts) / 1e6:.3f}–{max(counts) / 1e6:.3f} M weights, rates "
            f"{', '.join(f'{rate:g}' for rate in trial['learning_rates'])}, "
            f"seeds {'/'.join(map(str, sorted(seeds)))}"
        )
    lines = [
        f"**{TITLES['compare']}**, trained alike: bits per byte of held-out text, the share of "
        "values recalled by their keys (MQAR), of symbols copied, and of states tracked beyond "
        "the length trained on (parity of bits; S3, swaps of three letters: guessing gives a half "
        "and a sixth); mean over the seeds±half of their range. The best of "
        "the rates. Then tokens per second and kB of cache of the model for text. Sliding windows "
        "are an eighth of the sequence. "
        f"{'; '.join(training)}. {place(document)}",
        "",
        *systems_table(rows),
        "",
        *recall_table(rows, list(trials)),
        f"![{TITLES['compare']}: scores, speed and memory]({plot(path)})",
    ]
    return "\n".join(lines)


SCORES = {  # by task: title and digits
    "text": ("bits per byte", 3),
    "recall": ("recall", 2),
    "copy": ("copied", 2),
    "parity": ("parity", 2),
    "S3": ("S3", 2),
}


def systems_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each system; empty where something was not measured."""
    contexts = list(dict.fromkeys(c for row in rows for c in row["times"].get("cache_bytes", ())))
    ends = contexts[:: max(len(contexts) - 1, 1)]  # the first and the last
    titles = [
        "system",
        *(title for title, _ in SCORES.values()),
        "tokens/s, training",
        *(f"tokens/s, after {context}" for context in contexts),
        *(f"kB after {context}" for context in ends),
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        times = row["times"]
        training = times.get("training_tokens_per_second")
        speeds, sizes = (times.get(k, {}) for k in ("decoding_tokens_per_second", "cache_bytes"))
        cells = [
            row["system"],
            *(scores_cell(row["tasks"].get(task), digits) for task, (_, digits) in SCORES.items()),
            f"{training:.0f}" if training else "",
            *(f"{speeds[context]:.0f}" if speeds else "" for context in contexts),
            *(f"{sizes[context] / 1000:.0f}" if sizes else "" for context in ends),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def recall_table(rows: list[dict[str, Any]], trials: list[str]) -> list[str]:
    """A line for each system that was trained for one of the trials named mqar_..."""
    tasks = [task for task in trials if task.startswith("mqar")]
    shown = [row for row in rows if any(task in row["tasks"] for task in tasks)]
    lines = [
        f"| {' | '.join(['system', *map(mqar_title, tasks)])} |",
        "|---" * (1 + len(tasks)) + "|",
    ]
    for row in shown:
        cells = [scores_cell(row["tasks"].get(task), 2) for task in tasks]
        lines.append(f"| {' | '.join([row['system'], *cells])} |")
    return ["MQAR by length, number of pairs and width:", "", *lines, ""] if tasks else []


def mqar_title(task: str) -> str:
    """As in mqar_64_4_d128: length, pairs and width."""
    _, length, pairs, width = task.split("_")
    return f"({length}, {pairs}), {width[0]} = {width[1:]}"


def scores_cell(result: dict[str, Any] | None, digits: int) -> str:
    """The mean, and half of the range where there are several seeds."""
    scores = result["scores"] if result else []
    if not scores:
        return ""
    mean = f"{statistics.fmean(scores):.{digits}f}"
    if len(scores) == 1:
        return mean
    return f"{mean}±{(max(scores) - min(scores)) / 2:.{digits}f}"


def page(text: str, results: dict[str, list[Result]]) -> str:
    """The text of docs/results.md with these results in it."""
    for bench in TITLES:
        text = with_block(text, bench, sections(results[bench]))
    return text


def section_of_errors(path: Path, document: dict[str, Any]) -> str:
    """Of the state after as many tokens as were read in every way, all alike."""
    rows = [row for row in document["rows"] if row["summands"] == "alike"]
    by_token = [row["tokens"] for row in rows if row["way"] == "token by token"]
    length, most = max(by_token), max(row["tokens"] for row in rows)
    trained = document["gradients"]
    gradients = {row["kind"]: row["error"] for row in trained}
    ways = list(dict.fromkeys((row["way"], row["states"]) for row in rows))
    titles = [f"{way}{'' if states == 'float32' else ', float64'}" for way, states in ways]
    lines = [
        f"**After {length:,} tokens that are alike**: the error of the state, relative to the same "
        f"in float64; then of one prompt of {most:,}; at last the worst error of gradients, of one "
        f"prompt of {trained[0]['tokens']:,} random tokens. {place(document)}",
        "",
        "| | " + " | ".join(titles) + f" | one prompt of {most:,} | gradients |",
        "|" + "---|" * (len(titles) + 3),
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        found = {
            (row["tokens"], (row["way"], row["states"])): row["state"]
            for row in rows
            if row["kind"] == kind
        }
        cells = [found[length, way] for way in ways] + [found[most, ways[0]], gradients[kind]]
        lines.append(f"| {kind} | " + " | ".join(f"{x:.0e}" for x in cells) + " |")
    return "\n".join([*lines, "", f"![Errors of states, by length]({plot(path)})"])


def section_of_positions(path: Path, document: dict[str, Any]) -> str:
    """Bits per byte of one text, by model and by how many tokens came before."""
    lengths = list(dict.fromkeys(row["tokens"] for row in document["rows"]))
    lines = [
        f"**Bits per byte of the same text after so many tokens**. {place(document)}",
        "",
        "| model, states | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|" + "---|" * (len(lengths) + 1),
    ]
    found: dict[str, list[str]] = {}
    for row in document["rows"]:
        name = f"{row['model']}, {row['states']}"
        found.setdefault(name, []).append(f"{row['bits_per_byte']:.4f}")
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in found.items()]
    return "\n".join([*lines, "", f"![Bits per byte, by position]({plot(path)})"])


def section_of_conversion(path: Path, document: dict[str, Any]) -> str:
    """For docs/converting.md: a table for each original."""
    sys.path.append(str(ROOT / "examples"))
    from convert_report import table as table_of_models

    lines = []
    for row in document["rows"]:
        training = row["training"]
        lines += [
            f"**{row['original']}**, {training['parameters'] / 1e6:.1f} M weights, trained with "
            f"{training['train_tokens']:,} tokens:",
            "",
            *table_of_models(row["models"]),
            "",
        ]
    return "\n".join([*lines, place(document), "", f"![What converting cost]({plot(path)})"])


def choices(document: dict[str, Any]) -> str:
    """The README's table of systems, from a comparison."""
    rows = {row["system"]: row for row in document["rows"]}
    contexts = list(rows["softmax"]["times"]["cache_bytes"])
    longest = contexts[-1]
    lines = [
        f"| preset | choose it for | bits per byte | recall | training, tokens/s | "
        f"memory after {int(longest):,} tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, purpose in CHOICES.items():
        scores, times = rows[name]["tasks"], rows[name]["times"]
        bits, recall = (statistics.fmean(scores[task]["scores"]) for task in ("text", "recall"))
        lines.append(
            f"| `{name}` | {purpose} | {bits:.2f} | {recall:.0%} | "
            f"{times['training_tokens_per_second']:,.0f} | "
            f"{times['cache_bytes'][longest] / 1000:,.0f} kB |"
        )
    return "\n".join(lines)


def draw_bars(path: Path, result: Path, document: dict[str, Any]) -> None:
    """The time of a token after a long context, a bar for each of five models.

    The times are those of a result of bench_decode.py.
    """
    pyplot = plotter()
    labels = {  # by contender
        "ours": "linear attention (this package)",
        "Mamba2": "Mamba-2 (Transformers)",
        "Llama, StaticCache": "Llama, static cache",
        "Llama": "Llama, default cache",
        "GPT-2": "GPT-2",
    }
    longest = by_case(document["rows"])["generate(), 1 row, float32", "1 x 16384 tokens"]
    times = [longest[contender]["milliseconds"] for contender in labels]
    figure, axis = pyplot.subplots(figsize=(7.5, 2.4), layout="constrained")
    bars = axis.barh(list(labels.values()), times, color=["C0", *["C1"] * 4])
    axis.bar_label(bars, [f"{time:.0f} ms" for time in times], padding=4)
    axis.set(title="Time per generated token, after 16,384 tokens of context", xlabel="ms")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, metadata={"Source": result.name, "Software": None})
    pyplot.close(figure)


def draw_picture(path: Path, result: Path, document: dict[str, Any]) -> None:
    """Memory, and time per token, against the context: linear attention beside softmax.

    The times are those of a result of bench_decode.py; memory follows from the models' sizes.
    """
    pyplot = plotter()
    curves = {  # contender: label, model, style
        "Llama": ("softmax (Llama)", "Llama", {"color": "C1"}),
        "Llama, StaticCache": ("softmax, preallocated cache", "Llama", {"color": "C1", "ls": "--"}),
        "ours": ("linear (this package)", "ours", {"color": "C0", "lw": 2.5}),
    }
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    for contender, (label, model, style) in curves.items():
        points = sorted(
            (row["x"], row["milliseconds"])
            for row in document["rows"]
            if (row["panel"], row["contender"]) == ("generate(), 1 row, float32", contender)
        )
        contexts, milliseconds = zip(*points, strict=True)
        time.plot(contexts, milliseconds, marker="o", ms=4, label=label, **style)
        megabytes = [cache_bytes(model, context) / 1e6 for context in contexts]
        if style.get("ls") is None:  # the other cache holds the same
            memory.plot(contexts, megabytes, marker="o", ms=4, **style)
            note(memory, contexts[-1], megabytes[-1], "MB")
        note(time, contexts[-1], milliseconds[-1], "ms")
    memory.set(title="Memory of what was read", ylabel="MB", xlabel="tokens of context")
    time.set(title="Time per generated token", ylabel="ms", xlabel="tokens of context")
    for axis in (memory, time):
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xticks([0, 4096, 8192, 12288, 16384])
        axis.margins(y=0.12)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    time.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Source": result.name, "Software": None})
    pyplot.close(figure)


def note(axis, x: float, y: float, unit: str) -> None:
    """Writes the value above the last point of a curve."""
    text = f"{y:,.1f} {unit}" if y < 10 else f"{y:,.0f} {unit}"
    axis.annotate(text, (x, y), (4, 5), textcoords="offset points", ha="right", fontsize="small")


def with_block(text: str, name: str, content: str) -> str:
    """The text with other content between the markers of that name."""
    begin = f"<!-- {name}: begin, written by benchmarks/report.py -->"
    end = f"<!-- {name}: end -->"
    if begin not in text or end not in text:
        sys.exit(f"a page lacks the lines {begin} and {end}")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    results = newest_results()
    missing = [bench for bench in (*TITLES, CONVERSION) if bench not in results]
    if missing:
        sys.exit(f"no results of {', '.join(missing)} in {RESULTS}: run these benchmarks first")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    text = CONVERTING.read_text(encoding="utf-8")
    text = with_block(text, CONVERSION, sections(results[CONVERSION]))
    CONVERTING.write_text(text, encoding="utf-8")
    draw_bars(BARS, *results["decode"][0])
    draw_picture(PICTURE, *results["decode"][0])
    shutil.copyfile(results["upstream"][0][0].with_suffix(".png"), GAINS)
    text = README.read_text(encoding="utf-8")
    text = with_block(text, "choices", choices(results["compare"][0][1]))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
