# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""From modules of the package to one file that does what they do: the definitions that are needed,
in the order of their imports, as they were written.

What a file has no use for is left out (`Omissions`). Branches go by the names in their conditions,
of variables, attributes and functions, whose values are known: `if not config.add_cross_attention:`
becomes its body where that is false.
"""

import ast
import itertools
import re
import symtable
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple


class Definition(NamedTuple):
    """A statement of a module that gives names their meaning."""

    module: str
    first_line: int  # in the module, that of comments right above included
    names: tuple[str, ...]
    source: str


class Module:
    """One module of the package, by its name below the package: "mixers.delta_rule"."""

    def __init__(self, name: str, path: Path):
        self.name = name
        source = path.read_text("utf-8")
        self.lines = source.splitlines()
        self.tree = ast.parse(source)
        self.imported: dict[str, str] = {}  # names, and the modules of the package that have them
        self.external: dict[str, ast.ImportFrom | ast.Import] = {}
        self.definitions: list[Definition] = []
        self.effects: list[Definition] = []  # statements without names, as calls that register
        last_line = 0
        for node in self.tree.body:
            self._read(node, last_line)
            last_line = node.end_lineno or last_line

    def _read(self, node: ast.stmt, last_line: int) -> None:
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            self._read_relative(node)
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            for alias in node.names:
                self.external[alias.asname or alias.name.split(".")[0]] = node
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            names = tuple(names_given(node))
            if "__all__" in names:
                return
            first = self._first_line(node, last_line)
            source = "\n".join(self.lines[first - 1 : node.end_lineno])
            definition = Definition(self.name, first, names, source)
            (self.definitions if names else self.effects).append(definition)

    def _read_relative(self, node: ast.ImportFrom) -> None:
        room = self.name.split(".")[: -node.level]
        module = ".".join([*room, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            if alias.asname is not None or node.module is None:
                raise ValueError(
                    f"{self.name}: an import of what travels must name it as it is, got "
                    f"{ast.unparse(node)!r}"
                )
            self.imported[alias.name] = module

    def _first_line(self, node: ast.stmt, last_line: int) -> int:
        """The first line of a statement, or of the comments right above it."""
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(x.lineno for x in decorators)])
        while first - 1 > last_line and self.lines[first - 2].startswith("#"):
            first -= 1
        return first

    def definition_of(self, name: str) -> Definition | None:
        return next((x for x in self.definitions if name in x.names), None)

    def has(self, name: str) -> bool:
        known = self.imported, self.external
        return self.definition_of(name) is not None or any(name in x for x in known)

    @cached_property
    def doc(self) -> str:
        return ast.get_docstring(self.tree) or ""


def names_given(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (x.id for x in ast.walk(target) if isinstance(x, ast.Name))


def names_used(source: str) -> set[str]:
    """The names of its module that a statement looks up."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (is_module or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    named = {
        name
        for node in ast.walk(ast.parse(source))
        for annotation in annotations_of(node)
        for constant in ast.walk(annotation)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
        for name in re.findall(r"\w+", constant.value)
    }
    return {*walk(symtable.symtable(source, "definition", "exec"))} | named


def annotations_of(node: ast.AST) -> Iterator[ast.expr]:
    for field in ("annotation", "returns"):
        if getattr(node, field, None) is not None:
            yield getattr(node, field)


class Places:
    """Where the nodes of a syntax tree are in their source."""

    def __init__(self, source: str):
        self.lines = source.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]

    def at(self, line: Any, column: Any) -> int:  # columns are of bytes
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        begin = self.at(node.lineno, node.col_offset)
        return begin, self.at(node.end_lineno, node.end_col_offset)


def fold(source: str, constants: Mapping[str, Any]) -> str:
    """A statement without the branches that never run where `constants` are as they say."""
    whole = source
    while constants.keys() & {*re.findall(r"\w+", source)}:
        found: list[tuple[int, int, str]] = []
        for start, stop, text in sorted(edits(source, constants), key=lambda x: (x[0], -x[1])):
            if not found or start >= found[-1][1]:  # not within one that is applied anyhow
                found.append((start, stop, text))
        if not found:
            break
        for start, stop, text in reversed(found):
            source = source[:start] + text + source[stop:]
    return leave_out_unreachable(source) if source != whole else source


def leave_out_unreachable(source: str) -> str:
    """A statement without those that stand behind a return or a raise."""
    for block in blocks_of(ast.parse(source)):
        for last in block[:-1]:
            if isinstance(last, ast.Return | ast.Raise):
                span = Places(source).span
                begin, end = span(last)[1], span(block[-1])[1]
                return leave_out_unreachable(source[:begin] + source[end:])
    return source


def blocks_of(tree: ast.AST) -> Iterator[list[Any]]:
    """All lists of statements in a tree, the outermost first."""
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list) and block:
                yield block


def edits(source: str, constants: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Places in a source and the texts that stand for them, the outermost first."""
    places = Places(source)
    lines, starts, span = places.lines, places.starts, places.span

    def text(node: ast.expr) -> str:
        return source[slice(*span(node))]

    tree = ast.parse(source)
    alone = {id(block[0]) for block in blocks_of(tree) if len(block) == 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            truth = truth_of(node.test, constants)
            if truth is not None:
                begin, end, remains = _edit_of_if(node, truth, lines, starts)
                if not remains and id(node) in alone:
                    remains = " " * node.col_offset + "pass\n"
                yield begin, end, remains
        elif isinstance(node, ast.Assign) and is_known(node.targets[0], constants):
            yield starts[node.lineno - 1], starts[node.end_lineno or node.lineno], ""
        elif isinstance(node, ast.IfExp):
            truth = truth_of(node.test, constants)
            if truth is not None:
                yield *span(node), text(node.body if truth else node.orelse)
        elif isinstance(node, ast.BoolOp):
            known = [truth_of(value, constants) for value in node.values]
            idle = isinstance(node.op, ast.And)
            rest = [x for x, truth in zip(node.values, known, strict=True) if truth is not idle]
            if rest and len(rest) < len(node.values) and truth_of(node, constants) is None:
                word = " and " if idle else " or "
                yield *span(node), word.join(map(text, rest))


def _edit_of_if(
    node: ast.If, truth: bool, lines: list[str], starts: list[int]
) -> tuple[int, int, str]:
    """The `if` of a known truth, with comments right above it, and the branch that remains."""
    branch = node.body if truth else node.orelse
    is_elif = lines[node.lineno - 1].lstrip().startswith("elif")
    first, last = node.lineno, node.end_lineno or node.lineno
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    if not branch:
        while not is_elif and lines[first - 2].strip().startswith("#"):
            first -= 1
        return starts[first - 1], starts[last], ""
    block = lines[branch[0].lineno - 1 : branch[-1].end_lineno]
    begin = branch[0].lineno - 1  # comments above the first statement of the branch
    while lines[begin - 1].strip().startswith("#"):
        begin -= 1
        block.insert(0, lines[begin])
    inner = block[0][: len(block[0]) - len(block[0].lstrip())]
    if is_elif:
        if isinstance(branch[0], ast.If) and not truth:
            return starts[first - 1], starts[last], "".join(block)  # the next elif
        body = [f"{indent}else:\n", *block]
        return starts[first - 1], starts[last], "".join(body)
    shift = len(inner) - len(indent)
    body = [line[shift:] if line.strip() else line for line in block]
    if body[0].lstrip().startswith("elif"):
        body[0] = body[0].replace("elif", "if", 1)
    return starts[first - 1], starts[last], "".join(body)


def truth_of(node: ast.expr, constants: Mapping[str, Any]) -> bool | None:
    """Whether a condition holds; None where `constants` do not say."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth_of(node.operand, constants)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        known = [truth_of(value, constants) for value in node.values]
        decides = not isinstance(node.op, ast.And)
        if decides in known:
            return decides
        return None if None in known else not decides
    if isinstance(node, ast.Call):
        is_class = name_of(node.func) == "isinstance"
        return constants.get(name_of(node.args[1] if is_class else node.func))
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
        value, other = constants.get(name_of(node.left), ...), node.comparators[0].value
        operator = type(node.ops[0])
        if value is None and other is None and operator in (ast.Is, ast.IsNot):
            return operator is ast.Is
        if isinstance(value, str) and operator in (ast.Eq, ast.NotEq):
            return (value == other) is (operator is ast.Eq)
    answer = constants.get(name_of(node))
    return answer if isinstance(answer, bool) else None


def is_known(target: ast.expr, constants: Mapping[str, Any]) -> bool:
    """Whether `constants` say all that is ever written there."""
    is_none = isinstance(target, ast.Attribute) and constants.get(target.attr, ...) is None
    return is_none or truth_of(target, constants) is not None


def name_of(node: ast.expr) -> str:
    """The last name of a variable, an attribute or a called function; "" of anything else."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.NamedExpr):
        return name_of(node.target)
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def leave_out(
    source: str, methods: Collection[str], bases: Collection[str], fields: Collection[str]
) -> str:
    """A class without some of its methods, bases and fields."""
    if re.search(r"^class ", source, re.MULTILINE) is None:
        return source
    (statement,) = ast.parse(source).body
    assert isinstance(statement, ast.ClassDef)
    lines, last_line = source.splitlines(), 0
    dropped: set[int] = set()
    for node in statement.body:
        is_method = isinstance(node, ast.FunctionDef) and node.name in methods
        is_field = isinstance(node, ast.AnnAssign) and name_of(node.target) in fields
        if is_method or is_field:
            first = last_line + 1 if is_method else node.lineno
            last = node.end_lineno or 0
            before = next(n for n in range(first - 1, 0, -1) if n not in dropped)
            is_last = is_field and (not lines[last:] or not lines[last] or is_comment(lines[last]))
            while is_last and before > last_line and is_comment(lines[before - 1]):
                first, before = before, before - 1  # what is said of this field, and of no other
            if is_field and not lines[before - 1] and not lines[last]:
                last += 1  # of the blank lines around it, or around several, one
            dropped |= {*range(first, last + 1)}
        last_line = node.end_lineno or 0
    dropped |= {*lines_about(lines, fields)}
    kept_bases = [base for base in statement.bases if name_of(base) not in bases]
    if len(kept_bases) < len(statement.bases):
        first, last = statement.lineno, statement.body[0].lineno
        while not lines[last - 1].rstrip().endswith(":"):
            last -= 1
        inside = ", ".join(map(ast.unparse, kept_bases))
        lines[first - 1] = (
            f"class {statement.name}({inside}):" if inside else f"class {statement.name}:"
        )
        dropped |= {*range(first + 1, last + 1)}
    return "\n".join(line for n, line in enumerate(lines, 1) if n not in dropped)


def is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def leave_out_idle_methods(source: str) -> str:
    """A class without methods that only call those of the bases, with all that they are given."""
    tree = ast.parse(source)
    idle = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and len(node.body) == 1
        if ast.unparse(node.body[0]).removeprefix("return ")
        == f"super().{node.name}({', '.join(x.arg for x in node.args.args[1:])})"
    }
    return leave_out(source, idle, (), ()) if idle else source


def lines_about(lines: list[str], fields: Collection[str]) -> Iterator[int]:
    """Of a docstring: the numbers of lines that describe these fields alone."""
    of_these, indent = False, 0
    for number, line in enumerate(lines, 1):
        entry = re.match(r" {4,8}(\w+(?:, \w+)*):", line)
        if entry is not None and not (of_these and entry.start(1) > indent):
            of_these, indent = {*entry[1].split(", ")} <= {*fields}, entry.start(1)
        elif not line.startswith(" " * (indent + 4)):
            of_these = False
        if of_these:
            yield number


def keep_rows(source: str, keys: Collection[Any]) -> str:
    """The statement of a table, a dict or a tuple as it stands, with some of its keys alone."""
    table = getattr(ast.parse(source).body[0], "value", None)
    if isinstance(table, ast.Dict):
        rows = [*zip(table.keys, table.values, strict=True)]
    elif isinstance(table, ast.Tuple):
        rows = [(x, x) for x in table.elts]
    else:
        raise ValueError(f"a table must be a dict or a tuple as it stands, got {source[:60]!r}")
    kept = [
        (k, v)
        for k, v in rows
        if k is None or (k.value if isinstance(k, ast.Constant) else name_of(k)) in keys
    ]
    lines, first, last = source.splitlines(), table.lineno, table.end_lineno or 0
    brackets = "{}" if isinstance(table, ast.Dict) else "()"
    before = "\n".join([*lines[: first - 1], lines[first - 1][: table.col_offset]])
    if first == last or not kept:
        items = [ast.get_source_segment(source, v) or "" for _, v in kept]
        if isinstance(table, ast.Dict):
            keys_kept = [ast.get_source_segment(source, k) for k, _ in kept if k is not None]
            items = [f"{k}: {v}" for k, v in zip(keys_kept, items, strict=True)]
        elif len(items) == 1:
            items.append("")
        return before + brackets[0] + ", ".join(items).rstrip(" ") + brackets[1]
    dropped: set[int] = set()
    last_line = first
    for row in rows:
        end = row[1].end_lineno or 0
        if row not in kept:
            dropped |= {*range(last_line + 1, end + 1)}
        last_line = end
    return "\n".join(line for n, line in enumerate(lines, 1) if n not in dropped)


def leave_out_arguments(source: str, names: Collection[str]) -> str:
    """A statement whose calls are given nothing under these names, and whose functions have no
    parameters of these.
    """
    if not {*names} & {*re.findall(r"\w+", source)}:
        return source
    places = Places(source)
    cuts: list[tuple[int, int]] = []
    for node in ast.walk(ast.parse(source)):
        items = [(x, places.span(a)[0], places.span(b)[1]) for x, a, b in given(node)]
        kept = [x for x, _, _ in items if x not in names]
        if items and not kept and isinstance(node, ast.Call):
            cuts.append((places.span(node.func)[1] + 1, places.span(node)[1] - 1))
        for i, (name, begin, end) in enumerate(items if kept else ()):
            if name in names and kept[0] in [x for x, _, _ in items[:i]]:
                cuts.append((items[i - 1][2], end))
            elif name in names:  # the first ones
                cuts.append((begin, items[i + 1][1]))
    for begin, end in sorted(cuts, reverse=True):
        source = source[:begin] + source[end:]
    return SHORT_SIGNATURE.sub(join_if_it_fits, source)


def given(node: ast.AST) -> Iterator[tuple[str | None, Any, Any]]:
    """Arguments of a call, or parameters of a function: names, and the nodes that they begin and
    end with.
    """
    if isinstance(node, ast.Call):
        yield from ((None, x, x) for x in node.args)
        yield from ((x.arg, x, x) for x in node.keywords)
    elif isinstance(node, ast.FunctionDef):
        args = [*node.args.posonlyargs, *node.args.args]
        defaults = [*[None] * (len(args) - len(node.args.defaults)), *node.args.defaults]
        both = zip([*args, *node.args.kwonlyargs], [*defaults, *node.args.kw_defaults], strict=True)
        yield from ((x.arg, x, default or x) for x, default in both)


# Of a function whose parameters have a line of their own: the line before, that one, the next.
SHORT_SIGNATURE = re.compile(r"^( *def \w+\()\n +([^\n]*[^,\n])\n *(\)[^\n]*)$", re.MULTILINE)


def join_if_it_fits(found: re.Match) -> str:
    line = "".join(found.groups())
    return line if len(line) <= 100 else found[0]


class Sources:
    """The package's modules, read once."""

    def __init__(self, package: Path, replaced: Mapping[str, str]):
        """replaced: modules that others stand for in what travels, by their names."""
        self.package = package
        self.replaced = replaced
        self.modules: dict[str, Module] = {}

    def standing_for(self, name: str) -> str:
        return self.replaced.get(name, name)

    def module(self, name: str) -> Module:
        name = self.standing_for(name)
        if name not in self.modules:
            path = self.package / (name.replace(".", "/") + ".py")
            self.modules[name] = Module(name, path)
        return self.modules[name]


class Omissions(NamedTuple):
    """What is left out of definitions."""

    answers: Mapping[str, Any]  # of variables and attributes that branches ask for
    rows: Mapping[str, Collection[Any]]  # of tables: the keys that stay
    methods: Collection[str]
    bases: Collection[str]
    fields: Collection[str]  # of the config and of tables, and their description
    parameters: Collection[str]  # of functions
    values: Mapping[str, Any]  # of variables
    definitions: frozenset[str] = frozenset()  # of whole modules, by name

    def of(self, definition: Definition) -> str:
        """The source of a definition without that."""
        source = leave_out(definition.source, self.methods, self.bases, self.fields)
        source = fold(source, self.answers).rstrip()  # where an `if` ended it
        source = leave_out_idle_methods(source)
        source = leave_out_arguments(source, self.parameters)
        for name in definition.names:
            if name in self.rows:
                source = keep_rows(source, self.rows[name])
                source = leave_out_arguments(source, self.fields)
            if name in self.values:
                items = "".join(f"    {k!r}: {v!r},\n" for k, v in self.values[name].items())
                source = source.replace("{}", "{\n" + items.replace("'", '"') + "}")
        return source


class Bundle:
    """The definitions that some names need, in the order in which a file can have them."""

    def __init__(self, sources: Sources, omissions: Omissions, without: Iterable[Definition] = ()):
        self.sources = sources
        self.omissions = omissions
        self.without = {(x.module, x.names) for x in without}
        self.needed: dict[str, dict[int, Definition]] = {}  # by module, then by line
        self.effects: list[Definition] = []
        self.elsewhere: set[str] = set()  # names of `without` that are used
        self.external: dict[str, ast.ImportFrom | ast.Import] = {}
        self.owners: dict[str, str] = {}

    def add_module(self, name: str) -> None:
        """All of a module, its effects too, and of others what it needs."""
        module = self.sources.module(name)
        for definition in module.definitions:
            if not self.omissions.definitions & {*definition.names}:
                self._add(module, definition)
        for effect in module.effects:
            self._add_used(module, effect.source)
            self.effects.append(effect)

    def _add(self, module: Module, definition: Definition) -> None:
        if (definition.module, definition.names) in self.without:
            return
        own = self.needed.setdefault(module.name, {})
        if definition.first_line in own:
            return
        for name in definition.names:
            if self.owners.setdefault(name, module.name) != module.name:
                raise ValueError(f"{module.name} and {self.owners[name]} both define {name}")
        source = self.omissions.of(definition)
        own[definition.first_line] = definition._replace(source=source)
        self._add_used(module, source)

    def _add_used(self, module: Module, source: str) -> None:
        for name in sorted(names_used(source)):
            self._add_name(module, name)

    def _add_name(self, module: Module, name: str) -> None:
        definition = module.definition_of(name)
        if definition is not None:
            if (definition.module, definition.names) in self.without:
                self.elsewhere.add(name)
            else:
                self._add(module, definition)
        elif name in module.imported:
            other = self.sources.module(module.imported[name])
            if not other.has(name):
                raise ValueError(f"{module.name} imports {name}, which {other.name} does not have")
            self._add_name(other, name)
        elif name in module.external:
            self.external[name] = module.external[name]

    @property
    def definitions(self) -> list[Definition]:
        """In the order of imports, and in each module in its own."""
        order: dict[str, None] = {}

        def visit(name: str) -> None:
            imported = self.sources.module(name).imported.values()
            for other in map(self.sources.standing_for, dict.fromkeys(imported)):
                if other in self.needed and other not in order:
                    visit(other)
            order[name] = None

        for name in self.needed:
            visit(name)
        return [x for name in order for _, x in sorted(self.needed[name].items())]
