# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Writes the newest results into the README, between its two marker comments.

    python benchmarks/report.py

Of each benchmark it takes the newest full set in benchmarks/results/, or the newest short one where
there is none.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness import QUIET, RESULTS

README = RESULTS.parents[1] / "README.md"
BEGIN = "<!-- benchmarks: begin, written by benchmarks/report.py -->"
END = "<!-- benchmarks: end -->"
TITLES = {
    "ops": "The op",
    "decode": "Generation",
    "training": "Training step",
}
PANELS = {  # how those begin that the README shows; the files have all
    "ops": ("forward, float32", "forward + backward, float32"),
    "decode": (
        "generate(), 1 row, float32",
        "generate(), 1 row, bfloat16",
        "generate(), 8 rows, float32",
        "generate(), 32 rows, float32",
        "prompt, float32",
    ),
    "training": ("training step",),
}


def newest_results() -> dict[str, tuple[Path, dict[str, Any]]]:
    """By benchmark: the file and what it holds."""
    found = [(path, json.loads(path.read_text())) for path in RESULTS.glob("*.json")]
    found = [item for item in found if item[1]["is_complete"]]
    found.sort(key=lambda item: (item[1]["is_full"], item[1]["date"]))
    newest = {document["bench"]: (path, document) for path, document in found}
    return {bench: newest[bench] for bench in TITLES if bench in newest}


def section(path: Path, document: dict[str, Any]) -> str:
    bench, machine = document["bench"], document["machine"]
    plot = path.with_suffix(".png").relative_to(README.parent)
    headline = [row for row in document["rows"] if row["panel"].startswith(PANELS[bench])]
    disturbance = max(row["disturbance"] for row in headline)
    lines = [
        f"**{TITLES[bench]}**: median ms, and in brackets how many times as long as "
        f"{document['baseline']}. {machine['cpu']}, threads: {machine['threads']}, kernels for "
        f"{machine['kernels']}, PyTorch {machine['torch']}, Transformers "
        f"{machine['transformers']}, commit {document['commit']}, {document['date'][:10]}."
        + (
            f" Other processes took up to {disturbance:.0%} of the machine."
            if disturbance > QUIET
            else ""
        ),
        "",
        *table(headline, document["baseline"]),
        "",
        f"![{TITLES[bench]}: times on logarithmic axes]({plot})",
    ]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]], baseline: str) -> list[str]:
    """A line for each case, a column for each contender."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["panel"], row["case"]), {})[row["contender"]] = row
    lines = [f"| | {' | '.join(contenders)} |", "|---" * (1 + len(contenders)) + "|"]
    for (panel, case), by_contender in cases.items():
        cells = [cell(by_contender.get(name), baseline) for name in contenders]
        lines.append(f"| {panel}: {case} | {' | '.join(cells)} |")
    return lines


def cell(row: dict[str, Any] | None, baseline: str) -> str:
    if row is None:
        return ""
    time = (
        f"{row['milliseconds']:.3g}" if row["milliseconds"] < 100 else f"{row['milliseconds']:.0f}"
    )
    return time if row["contender"] == baseline else f"{time} ({row['ratio']:.1f}×)"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"{README} lacks the lines {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    results = newest_results()
    if not results:
        sys.exit(f"no results in {RESULTS}: run the benchmarks first")
    sections = "\n\n".join(section(path, document) for path, document in results.values())
    README.write_text(f"{before}{BEGIN}\n{sections}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
