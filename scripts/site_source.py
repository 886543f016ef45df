# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Lays out what the site is made of (mkdocs.yml): the pages as they lie here, so that their links
hold, the files that they link to, and a page with the public functions and classes.

    python scripts/site_source.py      # into build/site_source; make site goes on from there
"""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site_source"
PACKAGE = ROOT / "src" / "hf_linear_attention"
API = Path("docs/api.md")


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    return [path.relative_to(ROOT) for path in [*found, *sorted((ROOT / "docs").glob("*.md"))]]


def linked_from(page: Path) -> Iterator[Path]:
    """Files and folders that a page links to, by their paths from the root."""
    text = (ROOT / page).read_text("utf-8")
    for address in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        yield (ROOT / page.parent / address).resolve().relative_to(ROOT)


def public_names() -> dict[str, list[str]]:
    """What `import hf_linear_attention` offers: functions, then classes."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {
        "Functions": [name for name in names if name[0].islower()],
        "Classes": [name for name in names if name[0].isupper()],
    }


def api_page() -> str:
    """In the words of mkdocstrings, which puts signatures and docstrings there."""
    lines = ["# Functions and classes", ""]
    for title, names in public_names().items():
        lines += [f"## {title}", ""]
        lines += [f"::: hf_linear_attention.{name}\n" for name in names]
    return "\n".join(lines)


def main() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    wanted = {path for page in pages() for path in (page, *linked_from(page))}
    for path in sorted(wanted):
        target = SOURCE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(ROOT / path, target)
    (SOURCE / API).write_text(api_page(), encoding="utf-8")
    print(f"{len(wanted) + 1} files and folders in {SOURCE}")


if __name__ == "__main__":
    main()
