# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Folders that are there when they are whole."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_empty(out: Path) -> None:
    """Raises a FileExistsError where a folder can't be written without losing something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} must be a new or an empty folder")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end: whoever is killed before leaves none.

    Raises:
        OSError: it can't be written, or there is something already.
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
