# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Adds what the installed Transformers' recurrent layers read, where their fingerprints are known,
to upstream/proof/known_reads.py. Run it once for each release whose fingerprints were added.
"""

import importlib
from pathlib import Path

from hf_linear_attention.upstream.families import REPLACEMENTS, replacement_for
from hf_linear_attention.upstream.proof import known_reads
from hf_linear_attention.upstream.proof.source_reads import merged, reads_of


def main() -> None:
    known = dict(known_reads.KNOWN)
    for module, name in REPLACEMENTS:
        try:
            upstream = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # in another release
            continue
        replacement = replacement_for(upstream)
        assert replacement is not None
        if replacement.is_recurrent and replacement.knows(upstream):
            ours = replacement.ours.__name__
            known[ours] = merged(known.get(ours), reads_of(upstream, replacement.functions))
    write(known)


def write(known: dict[str, known_reads.Known]) -> None:
    path = Path(known_reads.__file__)
    before = path.read_text().split("KNOWN: dict", 1)[0]
    rows = [
        f'    "{name}": Known(\n{lines_of(one.always)}{lines_of(one.sometimes)}'
        f"        {one.numbers},\n    ),\n"
        for name, one in sorted(known.items())
    ]
    path.write_text(f"{before}KNOWN: dict[str, Known] = {{\n{''.join(rows)}}}\n")


def lines_of(words: str) -> str:
    """A string over lines of 100 columns."""
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) > 84:
            lines.append("")
        lines[-1] += f"{word} "
    return "".join(f'        "{line}"\n' for line in lines).rstrip("\n") + ",\n"


if __name__ == "__main__":
    main()
