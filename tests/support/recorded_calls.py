# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plugin of pytest that writes down what the tests ask of the native ops, and what these answer.

    RECORDED_CALLS=calls.bin PYTHONPATH=tests/support python -m pytest -p recorded_calls tests/ops

tests/native/replay.cpp reads the file, and says how it is laid out. Calls of the same shapes,
dtypes and options are written once; what raises, and what is very large, is not.
"""

import ctypes
import os
import struct

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

NOT_RECORDED = ("make_recording", "run_recording")  # ops that call torch's
MAX_BYTES = 1 << 20
DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
# Of the largest number among a call's results, since gradients may be what is left of much larger
# ones: sums in another order, and for two of them a last bit that rounds otherwise. The least
# precise tensor of a call decides.
TOLERANCES = {
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}
TENSOR, OPTIONAL_TENSOR, INTEGER, NUMBER, BOOLEAN = range(5)
NUMBERS = {"int": (INTEGER, "<q"), "float": (NUMBER, "<d"), "bool": (BOOLEAN, "<q")}


def span(x: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def packed_tensor(x: torch.Tensor | None) -> bytes:
    if x is None:
        return struct.pack("<i", -1)
    dims = (*x.shape, *x.stride())
    head = struct.pack(f"<ii{len(dims)}qq", DTYPES[x.dtype], x.dim(), *dims, span(x))
    return head + ctypes.string_at(x.data_ptr(), span(x))


def packed_argument(argument: torch._C.Argument, value: object) -> bytes:
    kind = str(argument.type)
    if "Tensor" in kind:
        number = OPTIONAL_TENSOR if kind.startswith("Optional") else TENSOR
        return struct.pack("<i", number) + packed_tensor(value)
    number, layout = NUMBERS[kind]
    return struct.pack("<i", number) + struct.pack(layout, value)


class Recorder(TorchDispatchMode):
    """Appends to the file every call of a native op that is unlike all before it.

    max_bytes: of a call's tensors.
    """

    def __init__(self, file, max_bytes: int = MAX_BYTES):
        super().__init__()
        self.file, self.max_bytes = file, max_bytes
        self.seen: set[tuple] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "hf_linear_attention" or func._opname in NOT_RECORDED:
            return func(*args, **(kwargs or {}))
        schema = func._schema
        values = list(args) + [
            (kwargs or {}).get(argument.name, argument.default_value)
            for argument in schema.arguments[len(args) :]
        ]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        is_real = all(
            type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"
            for x in tensors
        )
        key = (func, *map(likeness, values)) if is_real else None
        if not is_real or key in self.seen or sum(map(span, tensors)) > self.max_bytes:
            return func(*args, **(kwargs or {}))
        self.seen.add(key)
        name = func._opname.encode()
        call = struct.pack("<4si", b"CALL", len(name)) + name + struct.pack("<i", len(values))
        for argument, value in zip(schema.arguments, values, strict=True):
            call += packed_argument(argument, value)
        answer = func(*args, **(kwargs or {}))
        results = answer if isinstance(answer, tuple) else (answer,)
        call += struct.pack("<i", len(results))
        call += b"".join(packed_tensor(as_contiguous(x)) for x in results)
        floats = [x.dtype for x in tensors if x.dtype in TOLERANCES]
        call += struct.pack("<d", max(TOLERANCES[dtype] for dtype in floats))
        changed = [
            (i, values[i])
            for i, argument in enumerate(schema.arguments)
            if argument.is_write and values[i] is not None
        ]
        call += struct.pack("<i", len(changed))
        for i, x in changed:
            call += struct.pack("<i", i) + packed_tensor(as_contiguous(x))
        self.file.write(call)
        return answer


def likeness(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    return value


def as_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with item.config.stash[RECORDER]:
        return (yield)


RECORDER = pytest.StashKey[Recorder]()


def pytest_configure(config):
    config.stash[RECORDER] = Recorder(open(os.environ["RECORDED_CALLS"], "wb"))


def pytest_unconfigure(config):
    config.stash[RECORDER].file.close()
