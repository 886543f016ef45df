# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The Python in docs/, run page by page, in order, as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SNIPPETS = {
    page.name: re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.M)
    for page in sorted(DOCS.glob("*.md"))
}
PAGES = [name for name, snippets in SNIPPETS.items() if snippets]


def test_there_are_pages_with_snippets():
    assert "generation.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_runs(page, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(SNIPPETS[page])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
