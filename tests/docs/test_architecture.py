# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""docs/architecture.md says which file may import which; the files keep to it."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hf_linear_attention"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
# Its front door, its command, and what it offers to 0.1's checkpoints.
STAYS = {"__init__", "__main__", "_ops"}
# Which files alone may import a folder.
IMPORTERS = {
    "native": {"backends"},
    "reference": {"backends"},
    "remote": {"configuration_linear_attention", "modeling_linear_attention"},
}


def rows() -> list[list[str]]:
    table = re.search(r"\| row \| files \|\n.*\n((?:\|.*\n)+)", PAGE)
    assert table is not None
    return [re.findall(r"`(\w+)`", line.split("|")[2]) for line in table[1].splitlines()]


def imports_of(path: Path) -> set[str]:
    """Modules of the package, folders by their name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module == "hf_linear_attention":
            found |= {alias.name for alias in node.names}
    return found


def test_the_table_lists_every_file_outside_of_folders():
    files = {path.stem for path in PACKAGE.glob("*.py")} - STAYS
    listed = [name for row in rows() for name in row]
    assert sorted(listed) == sorted(files)


def test_files_import_from_rows_below_only():
    place = {name: index for index, row in enumerate(rows()) for name in row}
    for name, index in place.items():
        for imported in imports_of(PACKAGE / f"{name}.py"):
            if imported in place:
                assert place[imported] > index, f"{name} imports {imported}"
            else:
                assert name in IMPORTERS.get(imported, ()), f"{name} imports {imported}"


def test_folders_import_each_other_in_no_circle():
    """At any place of a file, a function's body among them."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    imports: dict[str, set[str]] = {folder: set() for folder in folders}
    for path in PACKAGE.rglob("*/*.py"):
        folder, *inner = path.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1 + len(inner):
                names = [node.module] if node.module else [x.name for x in node.names]
                imports[folder] |= {name.split(".")[0] for name in names} & folders
    assert imports["vllm"] and imports["for_transformers"]
    assert list(TopologicalSorter(imports).static_order())  # or else it raises a CycleError


def test_the_files_that_the_pages_name_exist():
    for page in ("architecture.md", "adding_a_recurrence.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
            if "NAME" not in name:
                assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{page}: {name}"
        for folder in re.findall(r"`((?:csrc|tests|native|reference)[\w/]*)/?`", text):
            if "NAME" not in folder:
                assert (ROOT / folder).exists() or (PACKAGE / folder).exists(), f"{page}: {folder}"
