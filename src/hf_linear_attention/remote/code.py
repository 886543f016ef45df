# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The two files of code in a model's folder: how they are put together, and when they are written.

They are made of the package's own modules, by generator.py; contents.py says what is in them.
"""

import ast
import gc
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..model.saving import CONFIGURATION, MODELING
from .contents import (
    BASES_LEFT_OUT,
    FIELDS_LEFT_OUT,
    METHODS_LEFT_OUT,
    METHODS_LEFT_OUT_IF_IDLE,
    STAND_INS,
    answers_for,
    definitions_left_out,
    known_values,
    parameters_left_out,
    rows_for,
    unknown_fields,
)
from .generator import Bundle, Definition, Omissions, Sources, leave_out

# Of what these files ask the package for: the name of the module that has it. One that no longer
# reads models of an older format has no module of that name.
FORMAT = "format_1"
# The modules that they are made of, with all that those need of others.
MADE_OF = {CONFIGURATION: "model.configuration", MODELING: "model.modeling"}
HEADER = '''\
# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""{doc}

Made by hf-linear-attention {version} from its own modules, of which it holds the parts that a model
of this folder's config needs, in PyTorch alone. Where the package is installed, its classes, with
compiled kernels, take the place of these: see the end. `pip install hf-linear-attention`

Other files that comments name are the package's.
"""
'''
DOCS = {
    CONFIGURATION: "The configuration of a linear-attention language model.",
    MODELING: "A linear-attention language model: its layers, cache, generation and heads.",
}
FOOTER = """
try:
    from hf_linear_attention.remote.{format} import {names}
except ImportError:
{effects}
"""


def write_code(folder: str | Path, config: PreTrainedConfig, *names: str) -> None:
    """Writes those of the two files into a folder, which may have to be made, for models of a
    config. Where a file is in the folder's place, Transformers says so.
    """
    if not Path(folder).is_file():
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = code_for(config)
        for name in names:
            Path(folder, f"{name}.py").write_text(files[name], "utf-8")


def code_for(config: PreTrainedConfig) -> dict[str, str]:
    """Both files' texts, by their names without ".py"."""
    rows = {name: frozenset(keys) for name, keys in rows_for(config).items()}
    return _code_for(
        frozenset(answers_for(config).items()),
        frozenset(rows.items()),
        frozenset(unknown_fields(config) | FIELDS_LEFT_OUT),
        frozenset(parameters_left_out(config)),
        frozenset(definitions_left_out(config)),
        tuple(known_values(config).items()),
    )


@lru_cache(maxsize=16)
def _code_for(
    answers: frozenset[tuple[str, Any]],
    rows: frozenset[tuple[str, frozenset[Any]]],
    fields: frozenset[str],
    parameters: frozenset[str],
    definitions: frozenset[str],
    known: tuple[tuple[str, tuple[Any, ...]], ...],
) -> dict[str, str]:
    omissions = Omissions(
        answers=dict(answers),
        rows=dict(rows),
        methods=METHODS_LEFT_OUT,
        bases=BASES_LEFT_OUT,
        fields=fields,
        parameters=parameters,
        definitions=definitions,
        values={"KNOWN": dict(known)},
    )
    with without_garbage_collection():
        configuration = Bundle(sources(), omissions)
        configuration.add_module(MADE_OF[CONFIGURATION])
        modeling = Bundle(sources(), omissions, without=configuration.definitions)
        modeling.add_module(MADE_OF[MODELING])
        bundles = {CONFIGURATION: configuration, MODELING: modeling}
        leave_out_idle_methods(*bundles.values())
        return {name: text_of(name, bundle) for name, bundle in bundles.items()}


def leave_out_idle_methods(*bundles: Bundle) -> None:
    """Leaves out what `METHODS_LEFT_OUT_IF_IDLE` names and none of the definitions calls."""

    def idle_methods() -> set[str]:
        whole = "\n".join(x.source for bundle in bundles for x in bundle.definitions)
        counts = Counter(re.findall(r"\w+", whole))
        return {name for name in METHODS_LEFT_OUT_IF_IDLE if counts[name] == 1}

    while idle := idle_methods():  # one may have been called by another alone
        for bundle in bundles:
            for own in bundle.needed.values():
                for line, x in own.items():
                    if any(f"def {name}(" in x.source for name in idle):
                        own[line] = x._replace(source=leave_out(x.source, idle, (), ()))


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Syntax trees have so many nodes that all of PyTorch would be searched for garbage several
    times, which takes four times as long as all else here.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@lru_cache(maxsize=1)
def sources() -> Sources:
    return Sources(Path(__file__).parent.parent, STAND_INS)


def text_of(name: str, bundle: Bundle) -> str:
    """A file's whole text."""
    from .. import __version__

    exported = {*import_module(f"..{MADE_OF[name]}", __package__).__all__}
    exported -= bundle.omissions.definitions
    parts = [HEADER.format(doc=DOCS[name], version=__version__)]
    parts.append("\n" + "\n".join(import_lines(bundle)) + "\n")
    before = ""
    for definition in bundle.definitions:
        if definition.module != before:
            parts += heading(bundle.sources.module(definition.module).doc, not before)
            before = definition.module
        parts.append(spacing(definition, parts[-1]) + definition.source + "\n")
    effects = "\n".join("    " + line for x in bundle.effects for line in x.source.splitlines())
    names = ", ".join(sorted(exported))
    if len(names) > 50:
        names = "(\n" + "".join(f"        {name},\n" for name in sorted(exported)) + "    )"
    parts.append("\n" + FOOTER.format(format=FORMAT, names=names, effects=effects or "    pass"))
    return "".join(parts).rstrip() + "\n"


def heading(doc: str, is_first: bool) -> list[str]:
    """A module's description, as comments in front of its definitions."""
    paragraphs = doc.split("\n\n")
    kept = [x for n, x in enumerate(paragraphs) if n == 0 or x.startswith("Shapes:")]
    lines = [line for x in kept for line in textwrap.wrap(x, 98)]
    return ["\n" if is_first else "\n\n", *(f"# {line}\n" for line in lines)]


def spacing(definition: Definition, before: str) -> str:
    is_block = re.search(r"^(class|def|@)", definition.source, re.MULTILINE) is not None
    return "\n\n" if is_block or "\n    " in before else "\n"


def import_lines(bundle: Bundle) -> list[str]:
    """All that a file imports: the standard library, then others, then the other file."""
    whole: set[str] = set()
    named: dict[str, set[str]] = {}
    for name, node in bundle.external.items():
        if isinstance(node, ast.Import):
            (alias,) = (x for x in node.names if name in (x.asname, x.name.split(".")[0]))
            whole.add(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
        else:
            (alias,) = (x for x in node.names if name in (x.asname, x.name))
            text = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
            named.setdefault(node.module or "", set()).add(text)
    groups: list[list[str]] = [[], []]
    for module in sorted(whole):
        groups[is_outside(module)].append(f"import {module}")
    for module in sorted(named):
        groups[is_outside(module)] += from_lines(module, named[module])
    source = "\n".join(x.source for x in (*bundle.definitions, *bundle.effects))
    elsewhere = bundle.elsewhere & {*re.findall(r"\w+", source)}  # idle methods used others
    if elsewhere:
        groups.append(from_lines("." + CONFIGURATION, elsewhere))
    return "\n\n".join("\n".join(group) for group in groups if group).split("\n")


def is_outside(module: str) -> bool:
    return module.split(".")[0] not in sys.stdlib_module_names


def place_of(name: str) -> tuple[int, str]:
    """Among imported names, as linters have it: constants, classes, all else."""
    is_constant = name.isupper() and len(name) > 1
    return 0 if is_constant else 1 if name[0].isupper() else 2, name


def from_lines(module: str, names: Iterable[str]) -> list[str]:
    renamed = sorted(name for name in names if " as " in name)
    ordered = sorted({*names} - {*renamed}, key=place_of)
    lines = [f"from {module} import {name}" for name in renamed]
    line = f"from {module} import {', '.join(ordered)}"
    if not ordered:
        return lines
    if len(line) <= 100:
        return [line, *lines]
    return [f"from {module} import (", *(f"    {name}," for name in ordered), ")", *lines]
