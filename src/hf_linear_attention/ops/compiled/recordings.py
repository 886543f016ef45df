# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Operations that the compiled library calls one after another, without Python and torch's
dispatcher between them, in threads that stay together.
"""

import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .library import delete_recording, ops, recordable_operations

_numbers = {name: number for number, name in enumerate(recordable_operations())}
_run_recording = ops.run_recording.default._op  # what torch registered, without Python around it


class Operation(NamedTuple):
    """One call. Tensors go by names, which are strings. The offset of `as_strided` counts from the
    first number of the tensor.
    """

    function: torch._ops.OpOverload
    arguments: Sequence[Any]  # by position, all that have names, too
    results: Sequence[str]


def can_record(function: torch._ops.OpOverload, arguments: Sequence[Any]) -> bool:
    """Whether `recording` takes it."""
    return _name(function) in _numbers and _encoded(function, arguments, str.__len__) is not None


def recording(
    operations: Sequence[Operation],
    given: Sequence[str],
    wanted: Sequence[str],
    in_team: bool,
    constants: Mapping[str, Tensor] = MappingProxyType({}),
) -> Callable[[list[Tensor]], list[Tensor]]:
    """What runs operations that `can_record` accepts, on tensors of the CPU.

    Args:
        given: names of the tensors that it is called with.
        wanted: of those that it returns.
        constants: the other tensors, by name, which it keeps. What is written to them meanwhile, or
            where their numbers lie, is seen.
        in_team: whether the threads stay together meanwhile, those that wait awake; worth it where
            products are large.
    """
    places = dict(zip([*given, *constants], count(), strict=False))
    calls: list[int] = []
    for function, arguments, results in operations:
        encoded = _encoded(function, arguments, places.__getitem__)
        assert encoded is not None and len(results) == len(function._schema.returns)
        calls += [_numbers[_name(function)], *encoded]
        places.update(zip(results, count(len(places)), strict=False))
    outcome = [places[name] for name in wanted]
    code = torch.tensor([in_team, len(given), len(outcome), *outcome, *calls])
    number = ops.make_recording(code, [*constants.values()])
    run = partial(_run_recording, number)
    weakref.finalize(run, delete_recording, number.item()).atexit = False
    return run


def _name(function: torch._ops.OpOverload) -> str:
    schema = function._schema
    return f"{schema.name}.{schema.overload_name}".removesuffix(".")


def _encoded(
    function: torch._ops.OpOverload, arguments: Sequence[Any], place: Callable[[str], int]
) -> list[int] | None:
    """The integers that stand for arguments; None where there are none for one."""
    code: list[int] = []
    for argument, value in zip_longest(function._schema.arguments, arguments, fillvalue=_MISSING):
        if value is _MISSING:
            value = argument.default_value
        encode = _ENCODERS.get(str(argument.real_type))
        integers = None if encode is None else encode(value, argument.default_value, place)
        if integers is None:
            return None
        code += integers
    return code


_MISSING: Any = object()


def _tensor(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    return [place(x)] if isinstance(x, str) else None


def _optional_tensor(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    return [-1] if x is None else _tensor(x, default, place)


def _integer(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    return [int(x)] if isinstance(x, int) else None


def _float(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    bits = struct.pack("d", x) if isinstance(x, (int, float)) else None
    return None if bits is None else list(struct.unpack("q", bits))


def _integers(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    are_integers = isinstance(x, list) and all(type(y) is int for y in x)
    return [len(x), *x] if are_integers else None


def _tensors(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    are_tensors = isinstance(x, list) and all(isinstance(y, str) for y in x)
    return [len(x), *map(place, x)] if are_tensors else None


def _contiguous(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    return [] if x in (None, torch.contiguous_format) else None


def _dtype(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    return [_DTYPES[x]] if x in _DTYPES else None


def _only_the_default(x: Any, default: Any, place: Callable[[str], int]) -> list[int] | None:
    return [] if type(x) is type(default) and x == default else None


# By types of a schema: of a value, its default and the place of a tensor, its integers.
_ENCODERS = {
    "Tensor": _tensor,
    "Optional[Tensor]": _optional_tensor,
    "int": _integer,
    "bool": _integer,
    "float": _float,
    "List[int]": _integers,
    "List[Tensor]": _tensors,
    "number": _only_the_default,
    "Optional[int]": _integer,
    "Optional[ScalarType]": _dtype,
    "Optional[Layout]": _only_the_default,
    "Optional[Device]": _only_the_default,
    "Optional[bool]": _only_the_default,
    "Optional[MemoryFormat]": _contiguous,
}
# torch's numbers for them
_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
