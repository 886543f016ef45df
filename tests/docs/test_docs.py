# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The Python in docs/, run page by page, in order, as a reader would; and where pages link to."""

import re
from pathlib import Path

import pytest

from new_python import run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SNIPPETS = {
    page.name: re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.M)
    for page in sorted(DOCS.glob("*.md"))
}
PAGES = [name for name, snippets in SNIPPETS.items() if snippets]


def test_there_are_pages_with_snippets():
    assert "generation.md" in PAGES


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_runs(page, tmp_path):
    result = run_python("-c", "\n".join(SNIPPETS[page]), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


README = ROOT / "README.md"
ALL_PAGES = [
    README,
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/README.md",
    *sorted(DOCS.glob("*.md")),
]


def headings(page: Path) -> set[str]:
    """As GitHub names them in addresses."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8"))
    assert links or page != README
    for link in links:
        address, _, heading = link.partition("#")
        target = (page.parent / address).resolve() if address else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def test_the_readme_leads_to_every_page():
    links = set(re.findall(r"\]\((docs/[^)#]+)", README.read_text("utf-8")))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= links
