# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What layers do with one generated token: its operations, recorded once, and then run without the
modules around them, whose Python takes longer than small operations do.

Every operation is the one that the modules called, with the same arguments but for the tensors that
are another token's or another state's: answers are the same to the last bit. Only where a view is
made of a view, the last one is made at once, and none where it is what there was.

Shapes: B batch, C hidden size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .backends import forced_backend
from .linear import products_in_use

# A recording takes as long as some ten tokens gain by it, so what comes that often is recorded.
TOKENS_BEFORE = 8
MOST_RECORDINGS = 64  # of a layer: for batches of other sizes, say

KNOWN_PACKAGES = ("torch.nn.", "transformers.activations", "transformers.models.")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Operation(NamedTuple):
    """A line of a recording; tensors and constants go by names."""

    function: str
    arguments: str
    reads: tuple[str, ...]
    results: tuple[str, ...]
    is_mutable: bool  # whether it writes to what it is given


class Recorder(TorchDispatchMode):
    """While it is on, notes every operation on tensors.

    inputs: the tensors that are others in another token. All else is a constant.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.inputs = [f"x{i}" for i in range(len(inputs))]
        self.tensors = dict(zip(map(id, inputs), self.inputs, strict=True))  # names
        self.kept: list[Any] = list(inputs)  # so that no other tensor gets the same id
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[int, str] = {}
        self.operations: list[Operation] = []
        self.viewed: dict[int, Tensor] = {}  # by a view's id, what it is a view of
        # Whether they would be the same for another token: unless an operation gives a number, or
        # as many as numbers say, which what follows may depend on, or writes to what is not given.
        self.is_valid = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reads: list[str] = []
        arguments = [self._written(x, reads) for x in args]
        arguments += [f"{name}={self._written(x, reads)}" for name, x in kwargs.items()]
        self.is_valid &= all(map(self._is_given, written_by(func, args, kwargs)))
        self.is_valid &= not depends_on_numbers(func, args)
        result = func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else [result]
        if not reads and not any(isinstance(x, Tensor) for x in results):
            return result  # of dtypes, say
        if not func._schema.is_mutable and any(result is x for x in args):
            return result  # which was of the dtype, say, that it was to be made
        if self._is_given(args[0] if args else None) and is_reshape(func, args[0], result):
            self._note_view(args[0], result)
            return result
        names = tuple(map(self._named, results))
        self.operations.append(
            Operation(
                self._constant(func),
                ", ".join(arguments),
                tuple(reads),
                names if isinstance(result, Tensor) else (*names, ""),  # a comma makes a tuple
                func._schema.is_mutable,
            )
        )
        return result

    def _note_view(self, x: Tensor, result: Tensor) -> None:
        base = self.viewed.get(id(x), x)
        name = self.tensors[id(base)]
        if result.shape == base.shape:
            self.kept.append(result)
            self.tensors[id(result)] = name
        else:
            view = self._constant(torch.ops.aten.view.default)
            arguments = f"{name}, {list(result.shape)}"
            names = (self._named(result),)
            self.operations.append(Operation(view, arguments, (name,), names, False))
        self.viewed[id(result)] = base

    def _written(self, x: Any, reads: list[str]) -> str:
        """An argument as Python writes it, by names."""
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(self._written(y, reads) for y in x)}]"
        if not self._is_given(x):
            return self._constant(x)
        reads.append(self.tensors[id(x)])
        return reads[-1]

    def _is_given(self, x: Any) -> bool:
        """Whether x is an input, or a result."""
        return isinstance(x, Tensor) and id(x) in self.tensors

    def _constant(self, x: Any) -> str:
        if id(x) not in self.constant_names:
            self.kept.append(x)
            name = f"c{len(self.constants)}"
            self.constant_names[id(x)], self.constants[name] = name, x
        return self.constant_names[id(x)]

    def _named(self, result: Any) -> str:
        """The name of a result, from now on."""
        if not isinstance(result, Tensor):
            self.is_valid = False
            return "_"
        name = f"t{len(self.kept)}"
        self.kept.append(result)
        self.tensors[id(result)] = name
        return name

    def function(self, result: Tensor) -> Callable[..., Tensor]:
        """What has been recorded, as a function of the inputs."""
        outcome = self.tensors[id(result)]
        lines, wanted = [f"    return {outcome}"], {outcome}
        for operation in reversed(self.operations):
            if not (operation.is_mutable or wanted.intersection(operation.results)):
                continue
            read_last = sorted(set(operation.reads) - wanted)
            unread = sorted({name for name in operation.results if name} - wanted)
            call = f"{operation.function}({operation.arguments})"
            if any(operation.results):
                call = f"{', '.join(operation.results)} = {call}"
            names = ", ".join([*read_last, *unread])
            lines.append(f"    {call}; del {names}" if names else f"    {call}")
            wanted.update(operation.reads)
        source = "\n".join([f"def run({', '.join(self.inputs)}):", *reversed(lines)])
        # What torch registered, without the Python around it.
        namespace = {name: getattr(x, "_op", x) for name, x in self.constants.items()}
        exec(compiled(source), namespace)
        return namespace["run"]


@functools.lru_cache(maxsize=256)
def compiled(source: str) -> CodeType:
    """The same for all layers that do the same, with other constants."""
    return compile(source, "<recorded token>", "exec")


def is_reshape(operation: Any, x: Tensor, result: Any) -> bool:
    """Whether the result has the numbers of x, in their order, in another shape."""
    return (
        operation.is_view
        and isinstance(result, Tensor)
        and result.dtype == x.dtype
        and result.numel() == x.numel()
        and x.is_contiguous()
        and result.is_contiguous()
    )


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


class Recording:
    """What a layer does with a token, or `run` None where that can't be recorded; as long as it is
    what it was when this was made.
    """

    def __init__(self, layer: nn.Module):
        modules = list(layer.modules())
        self.attributes = [vars(module) for module in modules]
        self.attributes_then = list(map(_copied, self.attributes))
        self.owners: list[dict[str, Any]] = [
            owner for module in modules for owner in (module._parameters, module._buffers)
        ]
        self.tensors_then = list(self._tensors())
        self.classes = list({type(module) for module in modules})
        self.forwards_then = list(self._forwards())
        self.run: Callable[..., Tensor] | None = None
        self.uses = 0

    def is_current(self) -> bool:
        """Whether the layer would still do the same."""
        return (
            all(map(is_, self._tensors(), self.tensors_then))
            and all(map(is_, self._forwards(), self.forwards_then))
            and self.attributes == self.attributes_then
        )

    def _tensors(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self.owners))

    def _forwards(self) -> Iterator[Callable]:
        return map(attrgetter("forward"), self.classes)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes, and copies of what may change without being replaced."""
    return {
        name: x.copy() if isinstance(x, (dict, list, set)) else x for name, x in attributes.items()
    }


class RecordedTokens:
    """The recordings of one layer, by all that its operations depend on: of tensors and of all
    else. A copy of the layer, whose weights are others, has none.
    """

    def __init__(self) -> None:
        self.recordings: dict[tuple, Recording] = {}
        self.seen: dict[tuple, int] = {}  # how many tokens, of what has no recording

    def __reduce__(self):
        return RecordedTokens, ()

    def clear(self) -> None:
        self.recordings, self.seen = {}, {}

    def run(
        self,
        layer: nn.Module,
        cache: Any,
        inputs: list[Tensor],
        by_modules: Callable[[], Tensor],
        constants: tuple = (),
    ) -> Tensor:
        """What `layer` makes of a token, for which its own recordings are used.

        Args:
            cache: the layer's, with a state.
            inputs: the other tensors that another token has others of.
            by_modules: computes it where there is no recording yet, or can be none.
            constants: what else it depends on.
        """
        state = cache.read()
        inputs = [*inputs, *state.values()]
        given = (
            forced_backend(),
            *products_in_use(),
            *constants,
            *state,
            *[(x.dtype, x.shape, x.stride()) for x in inputs],
        )
        recording = self.recordings.get(given)
        if recording is not None and recording.is_current():
            if recording.run is None:
                return by_modules()
            recording.uses += 1
            result = recording.run(*inputs)
            cache.step_was_taken()
            return result
        self.recordings.pop(given, None)
        if not self._comes_often(given) or not can_be_recorded(layer):
            return by_modules()
        recording, recorder = Recording(layer), Recorder(inputs)
        with recorder:
            result = by_modules()
        if recorder.is_valid and isinstance(result, Tensor):
            recording.run = recorder.function(result)
        put(self.recordings, given, recording)
        return result

    def _comes_often(self, given: tuple) -> bool:
        """Counts a token; whether there were TOKENS_BEFORE since it was last true."""
        number = self.seen.get(given, 0)
        if number >= TOKENS_BEFORE:
            self.seen.pop(given, None)
            return True
        put(self.seen, given, number + 1)
        return False


def put(table: dict, key: tuple, value: Any) -> None:
    """In a table of MOST_RECORDINGS at most, in which there is no room for the oldest then."""
    if key not in table and len(table) >= MOST_RECORDINGS:
        table.pop(list(table)[0], None)  # another thread may use it, too
    table[key] = value


def can_be_recorded(layer: nn.Module) -> bool:
    """Whether all modules are such as compute the same things every time, and nobody listens."""
    own_package = f"{__name__.rpartition('.')[0]}."
    known = (own_package, *KNOWN_PACKAGES)
    return all(
        type(module).__module__.startswith(known)
        and not module.training
        and "forward" not in vars(module)
        and not any(isinstance(x, Tensor) for x in vars(module).values())
        and (module is layer or not any(getattr(module, hooks) for hooks in HOOKS))
        for module in layer.modules()
    )
