# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The functions that Transformers routes to other packages, and those of ours that replace them: of
the same signature, with the same answers on the cases below, and with a source that has nothing
which these cases might not show.

Shapes: as in upstream/routed_functions.py.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.numerics import without_autocast
from .. import routed_functions as ours
from ..rebinding import Loaded, all_globals_of
from .source_reads import reads_of_function

ROUTES = "transformers.integrations.hub_kernels"  # where the functions are made that route
CELLS = ("func_name", "package", "torch_function", "implementation")
ON_CPU = ("cpu", "meta")
TOLERANCE = 1e-4  # of the largest number of an answer
# In the sources of those that are known: what is added to norms, a power, and tokens of a chunk.
KNOWN_NUMBERS = {1e-6, 0.5, 64.0}
CHANGED = ("state", "conv_state")  # arguments that change in place
# What a function may raise on arguments that are not for it.
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Routed(NamedTuple):
    """A function that Transformers routes."""

    name: str  # that of the other package's
    package: str
    in_torch: Any  # Transformers' own form, a function
    is_there: bool  # the other package's


def routed(value: Any) -> Routed | None:
    """What a global of a module of Transformers is, if it is such a function."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        value = _cells(type(value).forward).get("func")  # as the package `kernels` wraps it
    if not isinstance(value, FunctionType) or value.__globals__.get("__name__") != ROUTES:
        return None
    cells = _cells(value)
    name, package, in_torch, used = map(cells.get, CELLS)
    if isinstance(name, str) and isinstance(package, str) and isinstance(in_torch, FunctionType):
        return Routed(name, package, in_torch, used is not in_torch)
    return None


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(function, FunctionType):
        return {}
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


class Ours(NamedTuple):
    """One of ours, what it is, and cases on which it answers as Transformers' form."""

    function: Callable[..., Any]
    gist: str
    cases: Callable[["Random"], Iterator[dict[str, Any]]]


class Random:
    """Numbers from -1 to 1, the same each time."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        options: Any = {"dtype": torch.float32, "device": "cpu", "generator": self.generator}
        return torch.rand(shape, **options) * 2 - 1


def _convolutions(random: Random) -> Iterator[dict[str, Any]]:
    x, weight, bias = random(2, 3, 9), random(3, 4), random(3)
    yield {"hidden_states": x, "weight": weight, "bias": bias, "activation": "silu"}
    yield {"hidden_states": x[..., :2], "weight": weight}


def _convolved_tokens(random: Random) -> Iterator[dict[str, Any]]:
    for case in _convolutions(random):
        yield {**case, "hidden_states": random(2, 3, 1), "conv_state": random(2, 3, 4)}


def _delta_rules(T: int, per_channel: bool, random: Random) -> Iterator[dict[str, Any]]:
    B, H, K = 2, 4, 6
    V = K if per_channel else 5
    case = {
        "query": random(B, T, H, K),
        "key": random(B, T, H, K) / K,
        "value": random(B, T, H, V),
        "g": -random(B, T, H, *([K] if per_channel else [])).abs(),
        "beta": random(B, T, H).abs(),
        "initial_state": None,
        "output_final_state": False,
    }
    yield case
    case |= {"initial_state": random(B, H, K, V), "output_final_state": True}
    yield {**case, "use_qk_l2norm_in_kernel": True}
    if not per_channel:  # heads of keys may have several of values
        yield {**case, "query": random(B, T, 2, K), "key": random(B, T, 2, K) / K}


def _gated_delta_rules(random: Random) -> Iterator[dict[str, Any]]:
    return _delta_rules(70, False, random)  # more than a chunk


def _gated_delta_tokens(random: Random) -> Iterator[dict[str, Any]]:
    return _delta_rules(3, False, random)


def _kimi_delta_rules(random: Random) -> Iterator[dict[str, Any]]:
    return _delta_rules(70, True, random)


def _kimi_delta_tokens(random: Random) -> Iterator[dict[str, Any]]:
    return _delta_rules(3, True, random)


def _state_spaces(random: Random) -> Iterator[dict[str, Any]]:
    B, T, H, G, K, V = 2, 21, 4, 2, 5, 3
    case = {
        "hidden_states": random(B, T, H, V),
        "dt": random(B, T, H),
        "A": -random(H).abs(),
        "B": random(B, T, G, K),
        "C": random(B, T, G, K),
        "chunk_size": 8,
    }
    yield case
    yield {
        **case,
        "D": random(H),
        "dt_bias": random(H),
        "initial_states": random(B, H, V, K),
        "dt_softplus": True,
        "dt_limit": (0.4, 0.9),
        "return_final_states": True,
    }


def _state_space_tokens(random: Random) -> Iterator[dict[str, Any]]:
    B, H, G, K, V = 2, 4, 2, 5, 3
    case = {
        "state": random(B, H, V, K),
        "hidden_states": random(B, H, V),
        "dt": random(B, H, 1).expand(B, H, V),
        "A": -random(H, 1, 1).abs().expand(H, V, K),
        "B": random(B, G, K),
        "C": random(B, G, K),
        "dt_softplus": True,
    }
    yield case
    bias = random(H, 1).expand(H, V)
    yield {**case, "D": random(H, 1).expand(H, V), "dt_bias": bias, "z": random(B, H, V)}


def _selective_scans(random: Random) -> Iterator[dict[str, Any]]:
    B, T, C, N = 2, 9, 3, 5
    case = {
        "hidden_states": random(B, C, T),
        "dt": random(B, C, T),
        "A": -random(C, N).abs(),
        "B": random(B, N, T),
        "C": random(B, N, T),
        "delta_softplus": True,
    }
    yield case
    more = {"D": random(C), "z": random(B, C, T), "delta_bias": random(C)}
    yield {**case, **more, "return_last_state": True}


def _selective_tokens(random: Random) -> Iterator[dict[str, Any]]:
    B, C, N = 2, 3, 5
    case = {
        "state": random(B, C, N),
        "hidden_states": random(B, C),
        "dt": random(B, C),
        "A": -random(C, N).abs(),
        "B": random(B, N),
        "C": random(B, N),
        "dt_softplus": True,
    }
    yield case
    yield {**case, "D": random(C), "dt_bias": random(C), "z": random(B, C)}


CONVOLUTION = "short convolution"
DELTA, KIMI = "gated delta rule", "Kimi delta attention"
MAMBA, MAMBA2 = "Mamba's state space", "Mamba-2's state space"
# By the name of the other package's function; two of one name differ in their shapes.
BY_NAME: dict[str, tuple[Ours, ...]] = {
    "causal_conv1d_fn": (Ours(ours.causal_conv1d_fn, CONVOLUTION, _convolutions),),
    "causal_conv1d_update": (Ours(ours.causal_conv1d_update, CONVOLUTION, _convolved_tokens),),
    "chunk_gated_delta_rule": (Ours(ours.chunk_gated_delta_rule, DELTA, _gated_delta_rules),),
    "fused_recurrent_gated_delta_rule": (
        Ours(ours.fused_recurrent_gated_delta_rule, DELTA, _gated_delta_tokens),
    ),
    "chunk_kda": (Ours(ours.chunk_gated_delta_rule, KIMI, _kimi_delta_rules),),
    "fused_recurrent_kda": (Ours(ours.fused_recurrent_kda, KIMI, _kimi_delta_tokens),),
    "mamba_chunk_scan_combined": (Ours(ours.mamba_chunk_scan_combined, MAMBA2, _state_spaces),),
    "selective_scan_fn": (Ours(ours.selective_scan_fn, MAMBA, _selective_scans),),
    "selective_state_update": (
        Ours(ours.selective_state_update_of_mamba2, MAMBA2, _state_space_tokens),
        Ours(ours.selective_state_update_of_mamba, MAMBA, _selective_tokens),
    ),
}
# Whole layers at once, which Transformers has no form of: it returns None, and the layer goes on.
WHOLE_LAYERS = ("mamba_inner_fn", "mamba_split_conv1d_scan_combined")


_tried: dict[tuple[str, FunctionType], tuple[Ours | str, list[Loaded]]] = {}


def ours_for(name: str, in_torch: FunctionType) -> Ours | str:
    """Which of ours takes the place of a function of Transformers, or why none does; tried again
    where something that it calls has been replaced.
    """
    found, read = _tried.get((name, in_torch), (None, []))
    if found is None or not all(one.is_there for one in read):
        found = _found_for(name, in_torch)
        _tried[name, in_torch] = found, all_globals_of(in_torch)
    return found


def _found_for(name: str, in_torch: FunctionType) -> Ours | str:
    if name in WHOLE_LAYERS:
        if _returns_none(in_torch):
            return Ours(_nothing, "", lambda random: iter(()))
        return f"{in_torch.__name__} does something by itself"
    if name not in BY_NAME:
        return f"{in_torch.__name__} is none of those that are known"
    if (why := _why_unread(in_torch)) is not None:
        return why
    known = [one for one in BY_NAME[name] if _parameters(one.function)[1:] == _parameters(in_torch)]
    if not known:
        return f"{in_torch.__name__} has other parameters than those that are known"
    for one in known:
        answers = [answers_the_same(one.function, in_torch, x) for x in one.cases(Random())]
        if True in answers and False not in answers:
            return one
    return f"{in_torch.__name__} computes something else than ours"


def _why_unread(in_torch: FunctionType) -> str | None:
    """What may be in a function's source that no small inputs show."""
    reads = reads_of_function(in_torch)
    if reads is None:
        return f"{in_torch.__name__} has no source"
    found = [*sorted(reads.names), *map(str, sorted(reads.numbers - KNOWN_NUMBERS))]
    return f"{in_torch.__name__} reads {', '.join(found)}, which is unknown" if found else None


def stand_in(value: Any) -> Callable[..., Any] | None:
    """What takes the place of a function that Transformers routes, on the CPU, and elsewhere unless
    the other package's is there; None where nothing does.
    """
    found = routed(value)
    one = None if found is None else ours_for(found.name, found.in_torch)
    return _stand_in(value) if isinstance(one, Ours) else None


@functools.cache
def _stand_in(value: Callable[..., Any]) -> Callable[..., Any]:
    found = routed(value)
    assert found is not None
    one = ours_for(found.name, found.in_torch)
    assert isinstance(one, Ours)
    function, in_torch, is_there = one.function, found.in_torch, found.is_there

    @functools.wraps(in_torch)
    def by_ours(*args: Any, **kwargs: Any) -> Any:
        return function(in_torch, *args, **kwargs)

    @functools.wraps(in_torch)
    def by_ours_or_theirs(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        is_chosen = is_there or "forward" in vars(value)  # where `kernels` puts its choice
        if is_chosen and first.device.type not in ON_CPU and ours.bounds_now() is None:
            return value(*args, **kwargs)
        return function(in_torch, *args, **kwargs)

    return by_ours_or_theirs if is_there or isinstance(value, nn.Module) else by_ours


def _nothing(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """So that the layer goes on by its other functions."""


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


def _returns_none(function: FunctionType) -> bool:
    """Whether that is all that its code does."""
    opnames = {one.opname for one in dis.get_instructions(function)}
    if not opnames <= {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}:
        return False
    needed = [x for _, kind, x in _parameters(function) if kind in (0, 1)]
    return function(*[None] * len(needed)) is None


def answers_the_same(
    one: Callable[..., Any], in_torch: FunctionType, case: dict[str, Any]
) -> bool | None:
    """None where Transformers' form takes no such arguments."""

    def answers(function: Callable[..., Any], *first: Any) -> list[Any]:
        """And what became of the arguments."""
        given = {name: x.clone() if name in CHANGED else x for name, x in case.items()}
        answer = function(*first, **given)
        return [*(answer if isinstance(answer, tuple) else (answer,)), *given.values()]

    with torch.no_grad(), without_autocast("cpu"):
        try:
            theirs = answers(in_torch)
        except FAILURES:
            return None
        mine = answers(one, in_torch)
    return len(mine) == len(theirs) and all(map(_is_close, mine, theirs))


def _is_close(mine: Any, theirs: Any) -> bool:
    if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor):
        return type(mine) is type(theirs)
    if mine.shape != theirs.shape:
        return False
    largest = theirs.abs().max().item() if theirs.numel() else 0
    return bool(((mine - theirs).abs() <= TOLERANCE * largest).all())  # false of a NaN
