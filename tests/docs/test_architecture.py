# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""docs/architecture.md says which room may import which; the files keep to it."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import hf_linear_attention
from tiny import VARIANTS, random_ids, tiny_model

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hf_linear_attention"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in PACKAGE.rglob("*.py")
}
# Who alone may import what is below these, beside themselves.
IMPORTERS = {
    "ops.compiled": {"ops.backends", "__main__", "extras.speedup"},
    "remote": {"__init__", "model.saving"},
}
UPWARD = {("model.saving", "remote.code")}


def rows() -> list[list[str]]:
    """The rooms of each row, the uppermost first."""
    table = re.search(r"\| rooms \| hold \|\n.*\n((?:\|.*\n)+)", PAGE)
    assert table is not None
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table[1].splitlines()]


def imports_of(name: str) -> Iterator[str]:
    """Modules of the package that one imports, in functions too."""
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = ".".join([*name.split(".")[: -node.level], *(node.module or "").split(".")])
        base = base.strip(".")
        for alias in node.names:
            of = f"{base}.{alias.name}".strip(".")
            yield next(x for x in (of, base, f"{base}.__init__".strip(".")) if x in MODULES)


def room_of(module: str) -> str:
    return module.split(".")[0] if "." in module else ""


def test_the_table_lists_every_room():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(name for row in rows() for name in row) == sorted(rooms)
    assert {name for name in MODULES if not room_of(name)} == {"__init__", "__main__", "releases"}


def test_rooms_import_from_rows_below_only():
    place = {room: index for index, row in enumerate(rows()) for room in row}
    arrows = {(room_of(name), room_of(x)) for name in MODULES for x in imports_of(name)}
    assert ("model", "mixers") in arrows and ("vllm", "model") in arrows
    for name in MODULES:
        for imported in imports_of(name):
            ours, theirs = room_of(name), room_of(imported)
            if ours and ours != theirs and imported not in ("releases", "__init__"):
                is_down = place[theirs] > place[ours]
                assert is_down or (name, imported) in UPWARD, f"{name} imports {imported}"


def test_of_the_package_itself_a_module_asks_for_the_version_alone():
    for name, path in MODULES.items():
        if name not in ("__main__", "__init__"):
            for line in re.findall(r"^ *from \.+ import (.*)$", path.read_text("utf-8"), re.M):
                if "__init__" in imports_of(name):
                    assert line == "__version__", f"{name} imports {line} from the package"


def test_modules_of_a_room_import_each_other_in_no_circle():
    imports: dict[str, set[str]] = {}
    for name in MODULES:
        if not name.endswith("__init__"):
            others = {x for x in imports_of(name) if not x.endswith("__init__")}
            imports[name] = {x for x in others if (name, x) not in UPWARD}
    assert list(TopologicalSorter(imports).static_order())  # or else it raises a CycleError


def test_some_rooms_have_few_visitors():
    for room, visitors in IMPORTERS.items():
        for name in MODULES:
            if not name.startswith(room + "."):
                asked = [x for x in imports_of(name) if x.startswith(room + ".")]
                assert not asked or name in visitors, f"{name} imports {asked}"


@pytest.mark.parametrize("variant", ["paper", "preset_gated_deltanet"])
def test_a_step_of_training_enters_as_few_files_as_the_page_says(variant):
    numbers = re.search(r"enters (\d+) files .* linear attention and (\d+) with Gated Delta", PAGE)
    assert numbers is not None
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant]).train()
    ids, entered = random_ids(2, 16), set()

    def step():
        model(ids, labels=ids, use_cache=False).loss.backward()

    def look(frame, event, _):
        entered.add(Path(frame.f_code.co_filename))

    step()
    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    installed = Path(hf_linear_attention.__file__).parent
    files = sorted(path for path in entered if installed in path.parents)
    assert files and len(files) <= int(numbers[1 if variant == "paper" else 2]), files


def test_the_files_that_the_pages_name_exist():
    for page in ("architecture.md", "adding_a_recurrence.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
            if "NAME" not in name:
                assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{page}: {name}"
        for folder in re.findall(r"`((?:csrc|tests|ops|mixers|upstream)[\w/]*)/?`", text):
            if "NAME" not in folder:
                assert (ROOT / folder).exists() or (PACKAGE / folder).exists(), f"{page}: {folder}"
