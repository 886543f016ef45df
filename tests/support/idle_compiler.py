# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A C++ compiler that only makes the files that it is asked for, so that a build is soon done."""

from pathlib import Path

SCRIPT = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


def idle_compiler(folder: Path) -> Path:
    compiler = folder / "c++"
    compiler.write_text(SCRIPT)
    compiler.chmod(0o755)
    return compiler
