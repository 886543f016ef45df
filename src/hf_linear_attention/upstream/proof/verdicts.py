# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The verdicts of proofs, kept in a file, so that each replacement is tried once.

`HF_LINEAR_ATTENTION_CACHE_DIR` names the folder, and keeps nothing where it is empty.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = "HF_LINEAR_ATTENTION_CACHE_DIR"
FILE = "proved_on_tiny_models.json"

_known: dict[str, str | None] = {}  # in this process


def key_of(*facts: Any) -> str:
    """Of all that a verdict depends on."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()


def recall(key: str) -> tuple[bool, str | None]:
    """Whether there is a verdict, and why it is not equal; None where it is."""
    if key not in _known:
        found = _read().get(key, "")
        if found != "":
            _known[key] = found
    return key in _known, _known.get(key)


def keep(key: str, why: str | None, in_file: bool) -> None:
    """For later calls; in_file: and for other processes, where the file can be written."""
    _known[key] = why
    path = _path()
    if path is None or not in_file:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({**_read(), key: why}, file, indent=1)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise


def _path() -> Path | None:
    folder = os.environ.get(FOLDER)
    if folder is None:
        above = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        return Path(above) / "hf_linear_attention" / FILE
    return Path(folder) / FILE if folder else None


def _read() -> dict[str, str | None]:
    """What the file says; {} where there is none, or one that nobody can read."""
    path = _path()
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: why for key, why in found.items() if why is None or (isinstance(why, str) and why)}
