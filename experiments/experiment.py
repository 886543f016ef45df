# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the experiments share: the flags, what is written of a result, and where the benchmarks' and
examples' modules are, which can be imported after this one.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "benchmarks"), str(HERE.parent / "examples")]
import harness  # noqa: E402


def parser(description: str | None, runs_of: str | None = None) -> argparse.ArgumentParser:
    """The flags of all experiments; with `runs_of`, the folder where that one keeps what is done,
    and goes on from.
    """
    assert description is not None
    flags = harness.parser(description, ("short", "full", "smallest", "gpu"))
    flags.set_defaults(results=HERE / "results")
    if runs_of is None:
        flags.add_argument(
            "--resume", action="store_true", help="go on with a run of today that was interrupted"
        )
    else:
        runs = HERE.parent / "outputs" / runs_of
        flags.add_argument("--runs", type=Path, default=runs, help="what is done, to go on from")
    return flags


def publish(
    flags: argparse.Namespace,
    name: str,
    commits: Iterable[str],
    figures: dict[str, Any],
    plot: Callable[[Path], None],
) -> None:
    """Writes the JSON of an experiment, and its picture beside it by plot(path)."""
    path = harness.write_result(flags.results, name, flags.setting, commits, figures)
    plot(path.with_suffix(".png"))
    print(f"wrote {path} and .png")
