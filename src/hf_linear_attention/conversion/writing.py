# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Folders that appear only when they are complete."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_empty(out: Path) -> None:
    """Raises a FileExistsError if `out` is anything but a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} must be a new or an empty folder")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that is renamed to `out` at the end. A killed process leaves
    no `out`.

    Raises:
        OSError: the folder can't be written, or `out` is not empty.
    """
    check_empty(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / out.name
        made.mkdir()
        yield made
        if out.exists():
            out.rmdir()
        made.rename(out)
