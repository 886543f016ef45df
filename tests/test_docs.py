# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The pages in docs/: their Python runs, and their tables say what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attention.presets import PRESETS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ["presets", "feature_maps_and_decays", "encoders"]


def page_text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_python_snippet_runs(page, tmp_path):
    snippets = re.findall(r"^```python\n(.*?)^```", page_text(page), re.DOTALL | re.MULTILINE)
    assert snippets
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(snippets)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def preset_rows() -> list[str]:
    rows = ["| preset | fields | layers | source | what differs |", "|---|---|---|---|---|"]
    for name, preset in PRESETS.items():
        fields = ", ".join(f"`{field}={value!r}`" for field, value in preset.fields.items())
        layers = ", ".join(kind.removesuffix("_attention") for kind in preset.layer_pattern)
        rows.append(f"| `{name}` | {fields} | {layers} | {preset.source} | {preset.differs} |")
    return rows


def test_the_table_of_presets_is_theirs():
    assert "\n".join(preset_rows()) in page_text("presets")
