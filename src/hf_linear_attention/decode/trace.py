# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A trace: operations on tensors, recorded while they run, and turned into a function that repeats
them.

Every operation is the one that was called, with the same arguments but for the tensors that are
others the next time: answers are the same to the last bit. Only a view is made of its tensor at
once, whatever there was between, and none where it is what there was. The compiled library calls
what it knows itself, all that follow each other in one call of its own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops.backends import has_compiled, native_op

can_record = native_op("can_record")
native_recording = native_op("recording")
IS_COMPILED = has_compiled()

AS_STRIDED = torch.ops.aten.as_strided.default  # all views, here
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # of what nobody else has
LARGE_WEIGHT = 65536  # numbers; products with so many are worth several threads


class Operation(NamedTuple):
    """One call. Tensors and constants go by names."""

    function: Any  # torch's OpOverload
    arguments: list[Any]  # names, and lists of these
    keywords: dict[str, Any]
    results: tuple[str, ...]  # "_" for what is no tensor
    is_tuple: bool  # what it returns

    @property
    def reads(self) -> set[str]:
        return set(_flat([*self.arguments, *self.keywords.values()]))


class Call(NamedTuple):
    """A line of a recording's source."""

    function: str
    arguments: str
    reads: set[str]
    results: tuple[str, ...]
    is_tuple: bool

    def __str__(self) -> str:
        results = ", ".join(self.results) + "," * self.is_tuple
        call = f"{self.function}({self.arguments})"
        return f"{results} = {call}" if self.results else call


class Recorder(TorchDispatchMode):
    """While it is on, notes every operation on tensors.

    inputs: the tensors that are others the next time. All else is a constant.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.inputs = [f"x{i}" for i in range(len(inputs))]
        # By name, which keeps all of it: no other tensor gets the same id.
        self.values: dict[str, Any] = dict(zip(self.inputs, inputs, strict=True))
        self.names = {id(x): name for name, x in self.values.items()}  # of inputs and results
        self.constant_names: dict[int, str] = {}
        self.numbers: set[str] = set()  # constants that are numbers, and tensors here
        self.operations: list[Operation] = []
        self.not_read: list[Tensor] = []
        self.viewed: dict[int, Tensor] = {}  # by a view's id, what it is a view of
        # Whether they would be the same the next time: unless an operation gives a number, or as
        # many as numbers say, which what follows may depend on, or writes to what is not given.
        self.is_valid = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        args = self._with_tensors(func, args)
        reads_given = any(map(self._is_given, _flat([*args, *kwargs.values()])))
        arguments = [self._name_of(x) for x in args]
        keywords = {name: self._name_of(x) for name, x in kwargs.items()}
        self.is_valid &= all(map(self._is_given, written_by(func, args, kwargs)))
        self.is_valid &= not depends_on_numbers(func, args)
        result = func(*args, **kwargs)
        is_tuple = isinstance(result, (tuple, list))
        results = result if is_tuple else [result]
        if not reads_given and not any(isinstance(x, Tensor) for x in results):
            return result  # of dtypes, say
        if func.is_view and not reads_given:
            return result  # of a constant, whose numbers it shares: one, too
        if not func._schema.is_mutable and any(result is x for x in args):
            return result  # which was of the dtype, say, that it was to be made
        if self._is_given(args[0] if args else None) and are_views(func, args[0], results):
            for view in results:
                self._note_view(args[0], view)
            return result
        names = tuple(map(self._new_name, results))
        self.operations.append(Operation(func, arguments, keywords, names, is_tuple))
        return result

    def _with_tensors(self, operation: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Arguments, with a tensor for each number that is added to one of floats, say: one without
        dimensions, which changes no dtype but that of others without.
        """
        given = [x for x in args if isinstance(x, Tensor)]
        if not any(x.dim() for x in given) or not all(x.is_floating_point() for x in given):
            return args
        args = list(args)
        for i, argument in enumerate(operation._schema.arguments[: len(args)]):
            if type(args[i]) in (int, float) and str(argument.type) == "Tensor":
                args[i] = torch.tensor(args[i], dtype=torch.float64)
                self.numbers.add(self._constant(args[i]))
        return args

    def _note_view(self, x: Tensor, view: Tensor) -> None:
        base = self.viewed.get(id(x), x)
        name = self.names[id(base)]
        offset = view.storage_offset() - base.storage_offset()
        if (view.shape, view.stride(), offset) == (base.shape, base.stride(), 0):
            self.values[f"v{len(self.values)}"] = view
            self.names[id(view)] = name
        else:
            layout = [[*view.shape], [*view.stride()], offset]
            arguments = [name, *map(self._name_of, layout)]
            names = (self._new_name(view),)
            self.operations.append(Operation(AS_STRIDED, arguments, {}, names, False))
        self.viewed[id(view)] = base

    def _is_given(self, x: Any) -> bool:
        """Whether x is an input, or a result."""
        return isinstance(x, Tensor) and id(x) in self.names

    def _name_of(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._name_of(y) for y in x]
        return self.names[id(x)] if self._is_given(x) else self._constant(x)

    def _constant(self, x: Any) -> str:
        self.is_valid &= all(x is not other for other in self.not_read)
        if id(x) not in self.constant_names:
            name = self.constant_names[id(x)] = f"c{len(self.constant_names)}"
            self.values[name] = x
        return self.constant_names[id(x)]

    def _new_name(self, result: Any) -> str:
        """Of a result, from now on."""
        if not isinstance(result, Tensor):
            self.is_valid = False
            return "_"
        name = self.names[id(result)] = f"t{len(self.values)}"
        self.values[name] = result
        return name

    def may_not_read(self, *tensors: Tensor) -> None:
        """Says of tensors that they are others the next time, and no inputs: nothing recorded may
        depend on them.
        """
        self.not_read.extend(tensors)  # which keeps them: no other gets the same id

    # ---- as a function ----

    def function(self, result: Tensor) -> Callable[..., Tensor]:
        """What has been recorded, as a function of the inputs."""
        outcome = self.names[id(result)]
        constants = {*self.constant_names.values(), *self._made_of_numbers()}
        self.operations = [x for x in self.operations if not constants.issuperset(x.results)]
        lines, wanted = [f"    return {outcome}"], {outcome}
        for are_native, group in reversed(self._groups(outcome)):
            if are_native:
                calls = [self._native_call(group, wanted, constants)]
            else:
                calls = [*map(self._call, group)]
            for call in reversed(calls):
                given = {name for name in call.reads if name[0] != "c"} - constants
                unused = [*sorted(given - wanted), *sorted({*call.results} - {"_"} - wanted)]
                lines.append(f"    {call}; del {', '.join(unused)}" if unused else f"    {call}")
                wanted |= given
        source = "\n".join([f"def run({', '.join(self.inputs)}):", *reversed(lines)])
        constants.update(self.constant_names.values())
        # What torch registered, without the Python around it.
        values = {name: self.values[name] for name in constants}
        namespace = {name: getattr(x, "_op", x) for name, x in values.items()}
        exec(compiled(source), namespace)
        return namespace.pop("run")  # else it would hold itself, until garbage is collected

    def _made_of_numbers(self) -> set[str]:
        """Results that no tensor goes into, and that nobody writes to: the same every time."""
        shared = [x for x in self.operations if x.function._schema.is_mutable or x.function.is_view]
        may_change = set().union(*(x.reads for x in shared))
        made: set[str] = set()
        for operation in self.operations:
            tensors = {x for x in operation.reads if isinstance(self.values[x], Tensor)}
            tensors -= self.numbers
            is_chance = torch.Tag.nondeterministic_seeded in operation.function.tags
            if tensors <= made and not is_chance and may_change.isdisjoint(operation.results):
                made.update(operation.results)
        return made

    def _groups(self, outcome: str) -> list[tuple[bool, list[Operation]]]:
        """What has an effect on the outcome, or on what is given; and whether the compiled library
        calls it, several operations in a row.
        """
        wanted, needed = {outcome}, []
        for operation in reversed(self.operations):
            if operation.function._schema.is_mutable or wanted.intersection(operation.results):
                wanted |= operation.reads
                needed.append(operation)
        groups = [(k, list(group)) for k, group in groupby(reversed(needed), self._is_native)]
        return [(are_native and len(group) > 1, group) for are_native, group in groups]

    def _is_native(self, operation: Operation) -> bool:
        tensors = [x for x in map(self.values.get, operation.reads) if isinstance(x, Tensor)]
        results = [self.values[name] for name in operation.results if name != "_"]
        return (
            IS_COMPILED
            # torch's sums, say, are laid out as what is added, and the library's are not
            and (operation.function is AS_STRIDED or all(x.is_contiguous() for x in results))
            and all(type(x) in (Tensor, nn.Parameter) and x.is_cpu for x in tensors)
            and can_record(operation.function, self._native_arguments(operation))
        )

    def _native_arguments(self, operation: Operation) -> list[Any]:
        """Names of tensors, and all else as it is, in the order of the schema."""
        schema = operation.function._schema.arguments
        names = [argument.name for argument in schema]
        given = dict(zip(names, operation.arguments, strict=False)) | operation.keywords
        return [
            self._native_argument(given[x.name]) if x.name in given else x.default_value
            for x in schema
        ]

    def _native_argument(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self._native_argument(y) for y in x]
        return x if isinstance(self.values[x], Tensor) else self.values[x]

    def _call(self, operation: Operation) -> Call:
        function, arguments, keywords, results, is_tuple = operation
        written = [*map(_text, arguments), *(f"{k}={_text(x)}" for k, x in keywords.items())]
        name = self._constant(view_of if function is AS_STRIDED else function)
        return Call(name, ", ".join(written), operation.reads, results, is_tuple)

    def _native_call(
        self, group: list[Operation], wanted: set[str], constant_names: set[str]
    ) -> Call:
        """All of a group, of whose results some are wanted."""
        calls = [(x.function, self._native_arguments(x), x.results) for x in group]
        made = [name for x in group for name in x.results]
        reads = set().union(*(x.reads for x in group)).difference(made)
        tensors = {name: self.values[name] for name in sorted(reads)}
        tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
        constants = {name: x for name, x in tensors.items() if name in constant_names}
        given = [name for name in tensors if name not in constants]
        is_large = any(x.numel() >= LARGE_WEIGHT for x in constants.values())
        results = tuple(name for name in made if name in wanted)
        function = native_recording(calls, given, results, is_large, constants)
        return Call(self._constant(function), f"[{', '.join(given)}]", {*given}, results, True)


def _flat(x: Any) -> Iterator[Any]:
    """What is in lists and tuples, and in those within them."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _flat(y)
    else:
        yield x


def _text(x: Any) -> str:
    """An argument as Python writes it, by names."""
    return f"[{', '.join(map(_text, x))}]" if isinstance(x, list) else x


@functools.lru_cache(maxsize=256)
def compiled(source: str) -> CodeType:
    """The same for all layers that do the same, with other constants."""
    return compile(source, "<recorded operations>", "exec")


def are_views(operation: Any, x: Tensor, results: Sequence[Any]) -> bool:
    """Whether all that it returns are other looks at numbers of x. What its schema says is not
    enough: `to` and `reshape`, which inference mode does not take apart, may copy.
    """
    return (operation.is_view or operation is UNSAFE_VIEW) and all(
        isinstance(view, Tensor)
        and view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        and view.dtype == x.dtype
        and view.layout is x.layout is torch.strided
        and not (view.is_conj() or view.is_neg())
        for view in results
    )


def view_of(x: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """A look at numbers of x; the offset is from its first one."""
    return x.as_strided(size, stride, x.storage_offset() + offset)


def depends_on_numbers(operation: Any, args: Sequence[Any]) -> bool:
    """Whether it gives a number, or as many as some number says."""
    if operation is torch.ops.aten.index.Tensor:  # by places, or by a mask
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    tags = operation.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def written_by(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those of its arguments that an operation writes to."""
    arguments = operation._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return [given[name] for name in written if given.get(name) is not None]
