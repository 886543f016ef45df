# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""States by slot: a batch whose rows have their states anywhere in a larger buffer of them. What
may be asked of an op, and how one does it whose kernel does not.

Nothing here waits for a device, so that a CUDA graph may hold it.

Shapes: B rows of a batch; a state has any dimensions behind that of rows or slots.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import is_readable
from .tokens import behind


def check_slots(name: str, state: Tensor) -> None:
    """A state that a step changes: rows or slots, contiguous each, and apart."""
    if not state[:1].is_contiguous():
        raise ValueError(f"each slot of {name} must be contiguous, got strides {state.stride()}")
    if len(state) > 1 and state.stride(0) < state[0].numel():
        raise ValueError(f"the slots of {name} must not overlap, got strides {state.stride()}")


def num_slots(state: Any, state_indices: Tensor | None, rows: int) -> int:
    """How many states there must be: one for each of the rows, or any number by index."""
    first = state if isinstance(state, Tensor) else state[0]
    return rows if state_indices is None or first.dim() == 0 else first.shape[0]


def check_state_indices(
    state_indices: Tensor, rows: int, slots: int, q: Tensor, of: str = "q"
) -> None:
    """Which slot has the state of each row; values only where they are readable. of: q's name."""
    if tuple(state_indices.shape) != (rows,):
        raise ValueError(
            f"state_indices must have shape {(rows,)}, got {tuple(state_indices.shape)}"
        )
    if state_indices.dtype != torch.int32:
        raise ValueError(f"state_indices must be torch.int32, got {state_indices.dtype}")
    if state_indices.device != q.device:
        raise ValueError(
            f"state_indices must be on {of}'s device {q.device}, got {state_indices.device}"
        )
    if is_readable(state_indices):
        seen = set()
        for index in state_indices.tolist():
            if not -1 <= index < slots:
                raise ValueError(f"state_indices must be from -1 to {slots - 1}, got {index}")
            if index in seen:
                raise ValueError(f"state_indices must differ from each other, got {index} twice")
            if index >= 0:
                seen.add(index)


def rows_with_a_slot(state_indices: Tensor, key_mask: Tensor | None) -> Tensor:
    """key_mask (B,), false also where an index is -1."""
    has_slot = state_indices >= 0
    return has_slot if key_mask is None else has_slot & key_mask


def read_slots(state: Tensor, state_indices: Tensor) -> Tensor:
    """Copies (B, ...) of the slots that indices name; anything where there is none."""
    if len(state) == 0:
        return state.new_zeros(len(state_indices), *state.shape[1:])
    return state.index_select(0, state_indices.clamp(min=0))


def clear_rows_(rows: Tensor, which: Tensor) -> None:
    """Makes rows (B, ...) zero where `which` (B,) is true, also those that hold NaN."""
    if is_readable(which):
        rows.index_fill_(0, which.nonzero()[:, 0], 0)  # looks at no other row
    else:
        rows.masked_fill_(behind(which, rows), 0)


def write_slots_(state: Tensor, state_indices: Tensor, rows: Tensor) -> None:
    """Writes rows (B, ...) to the slots that indices name."""
    if min(len(state), len(rows)) == 0:
        return
    has_slot = state_indices >= 0
    if is_readable(state_indices):
        if not has_slot.all():
            state_indices, rows = state_indices[has_slot], rows[has_slot]
        state.index_copy_(0, state_indices.long(), rows)
        return
    # To leave rows out would wait for the device to say which. One without a slot writes what the
    # first that has one writes, to the same place; where none has one, what is there.
    every_row = torch.arange(len(rows), device=rows.device)
    row = torch.where(has_slot, every_row, has_slot.int().argmax())
    indices = state_indices[row]
    there = read_slots(state, indices)
    rows = torch.where(behind(has_slot[row], rows), rows[row], there)
    state.index_copy_(0, indices.clamp(min=0).long(), rows)


def step_on_slots_(
    step_: Callable[..., Tensor], arguments: Any, state: Any, state_indices: Tensor | None
) -> Tensor:
    """step_(arguments, state), which changes rows of a state, a tensor or several, in place; with
    `state_indices` those that they name. Whoever has no slot must be masked: `rows_with_a_slot`.
    """
    if state_indices is None:
        return step_(arguments, state)
    rows = map_state(lambda x: read_slots(x, state_indices), state)
    y = step_(arguments, rows)
    map_state(lambda x, its_rows: write_slots_(x, state_indices, its_rows), state, rows)
    return y


def map_state(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """What a function makes of a state's tensor, or a tuple of that for each of its tensors, None
    where there is none.
    """
    if isinstance(state, Tensor):
        return function(state, *others)
    return tuple(
        None if x is None else function(x, *rest) for x, *rest in zip(state, *others, strict=True)
    )
