# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""From a public function to the backend that computes it: the same way for every op.

Kernels check what they are given. So Python checks before backends of PyTorch, and behind a kernel
that has refused something, to say which argument was wrong.

Shapes: B batch, T time, N sequences: as many as `cu_seqlens` bounds, else B.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import Implementation, Missing, choose
from .checks import check_cu_seqlens, check_key_mask, is_readable
from .numerics import needs_grad
from .slots import check_state_indices, num_slots, rows_with_a_slot, step_on_slots_

# A NamedTuple of ops/arguments.py, and a tensor or a tuple of them.
Arguments = Any
State = Any
Implementations = Mapping[str, Implementation | Missing]

REFUSED = (RuntimeError, ValueError, TypeError, KeyError, IndexError)  # an argument, by a kernel
OF_NO_TOKEN = ("weight", "bias", "A", "D")


class Op(NamedTuple):
    """What the calls of an op need to know of it. The checks raise a ValueError that names the
    argument.
    """

    function: str  # the public one
    # (arguments, has_time) -> them in the dtypes that backends of PyTorch take
    check_arguments: Callable[[Arguments, bool], Arguments]
    # (name, state, arguments, rows), the last the number of rows or slots; `in_place`: it changes
    check_state: Callable[..., None]
    # Who computes it. They may raise an IndexError where arguments have too few dimensions.
    for_sequences: Callable[[Arguments], Implementations]
    for_tokens: Callable[[Arguments], Implementations]


def run(
    op: Op,
    arguments: Arguments,
    cu_seqlens: Tensor | None,
    initial_state: State | None,
    backend: str | None,
) -> tuple[Tensor, State]:
    """y and the last state of whole sequences."""
    q = arguments[0]
    try:
        chosen = choose(op.for_sequences(arguments), backend, q.device, q.dtype)
        if chosen.checks:
            return chosen.run(arguments, cu_seqlens, initial_state)
    except REFUSED:
        check_sequences(op, arguments, cu_seqlens, initial_state, False)
        raise
    arguments, cu_seqlens = check_sequences(
        op, arguments, cu_seqlens, initial_state, chosen.reads_cu_seqlens
    )
    return chosen.run(arguments, cu_seqlens, initial_state)


def step_(
    op: Op,
    arguments: Arguments,
    state: State,
    state_indices: Tensor | None,
    backend: str | None,
) -> Tensor:
    """y of one token for every row; the state changes in place, in its slots with indices."""
    if torch.is_grad_enabled():
        refuse_lost_gradient(op.function, "_step_", arguments, state)
    q = arguments[0]
    try:  # this runs once per layer and token
        chosen = choose(op.for_tokens(arguments), backend, q.device, q.dtype)
        if chosen.checks:
            return chosen.step_(arguments, state, state_indices)
    except REFUSED:
        check_token(op, arguments, state, state_indices)
        raise
    arguments = check_token(op, arguments, state, state_indices)
    if chosen.finds_slots:
        return chosen.step_(arguments, state, state_indices)
    return step_on_slots_(chosen.step_, arguments, state, state_indices)


def step_by(run: Callable[..., tuple[Tensor, State]]) -> Callable[[Arguments, State], Tensor]:
    """A step by what runs over sequences, here of one token."""

    def step_(arguments: Arguments, state: State) -> Tensor:
        with_time = {
            name: x[:, None]
            for name, x in arguments._asdict().items()
            if isinstance(x, Tensor) and name not in OF_NO_TOKEN
        }
        y, after = run(arguments._replace(**with_time), None, state)
        pairs = [(state, after)] if isinstance(state, Tensor) else zip(state, after, strict=True)
        for x, its_next in pairs:
            if x is not None:
                x.copy_(its_next)
        return y[:, 0]

    return step_


def through(
    implementations: Implementations,
    run: Callable[..., tuple[Tensor, State]],
    step_: Callable[..., Tensor],
    run_in_slots: Callable[..., Tensor] | None = None,
    **changed: bool,
) -> Implementations:
    """The backends of another table, by functions that are given theirs to call."""

    def of(theirs: Implementation) -> Implementation:
        in_slots = None
        if run_in_slots is not None and theirs.run_in_slots is not None:
            in_slots = partial(run_in_slots, theirs.run_in_slots)
        of_sequences, of_token = partial(run, theirs.run), partial(step_, theirs.step_)
        return theirs._replace(run=of_sequences, step_=of_token, run_in_slots=in_slots, **changed)

    return {
        name: theirs if isinstance(theirs, Missing) else of(theirs)
        for name, theirs in implementations.items()
    }


def refuse_lost_gradient(function: str, suffix: str, arguments: Arguments, state: State) -> None:
    """Asked by what stands in place of a function and has no gradient."""
    states = [state] if isinstance(state, Tensor) else state
    if needs_grad(*(x for x in (*arguments, *states) if isinstance(x, Tensor))):
        raise RuntimeError(
            f"{function}{suffix} updates its state in place and has no gradient: "
            f"call it under torch.no_grad(), or use {function}"
        )


def check_sequences(
    op: Op,
    arguments: Arguments,
    cu_seqlens: Tensor | None,
    initial_state: State | None,
    reads_cu_seqlens: bool,
) -> tuple[Arguments, Tensor | None]:
    """All about sequences; the arguments and bounds in the dtypes that backends take."""
    checked = op.check_arguments(arguments, True)
    q, name = arguments[0], arguments._fields[0]
    rows = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q, reads_cu_seqlens or is_readable(cu_seqlens), name)
        rows = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.to(torch.int32)
    if initial_state is not None:
        op.check_state("initial_state", initial_state, arguments, rows)
    return checked, cu_seqlens


def check_token(
    op: Op, arguments: Arguments, state: State, state_indices: Tensor | None
) -> Arguments:
    """All about one token; the arguments in the dtypes that backends take, key_mask without the
    rows that have no slot.
    """
    q, name = arguments[0], arguments._fields[0]
    rows = q.shape[0] if q.dim() > 0 else 0
    slots = num_slots(state, state_indices, rows)
    if state_indices is not None and q.dim() > 0:
        check_state_indices(state_indices, rows, slots, q, name)
        key_mask = check_key_mask(arguments.key_mask, q, name, features=q.dim() - 1)
        arguments = arguments._replace(key_mask=rows_with_a_slot(state_indices, key_mask))
    checked = op.check_arguments(arguments, False)
    op.check_state("state", state, arguments, slots, in_place=True)
    return checked
