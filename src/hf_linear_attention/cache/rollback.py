# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Rollback in a cache of fixed size: the state before the last few tokens, and their inputs.

Shapes: B batch, T time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..recurrences.interface import Inputs, Recurrence, State

# How many of the last tokens crop() can remove while a cache records. Drafts are shorter than the
# first number; with it a long prompt is not kept whole. The second, smaller one holds for tokens
# that an earlier crop() left: an assistant with another tokenizer comes back to a few of them.
RECORDED_TOKENS = 1024
RECORDED_TOKENS_AFTER_CROP = 16
TAKES_NOTHING_BACK = "a static cache takes no tokens back: use a LinearAttentionCache"


class Recorded(NamedTuple):
    """What a layer read in one forward, or in several one after the other."""

    num_tokens: int
    key_mask: Tensor | None  # (B, T), False for padding
    parts: list[tuple[Recurrence, Inputs]]  # for each recurrence of the layer, in its order

    def cut(self, start: int, stop: int) -> "Recorded":
        """Tokens [start, stop)."""
        return self.map(lambda x: x[:, start:stop])._replace(num_tokens=stop - start)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Recorded":
        parts = [(one, one.tokens_of(inputs, function)) for one, inputs in self.parts]
        key_mask = None if self.key_mask is None else function(self.key_mask)
        return Recorded(self.num_tokens, key_mask, parts)

    def tensors(self) -> Iterator[Tensor]:
        if self.key_mask is not None:
            yield self.key_mask
        for _, inputs in self.parts:
            yield from (x for x in inputs if x is not None)


def join_in_time(forwards: list[Recorded]) -> Recorded:
    """Several forwards as one."""
    parts = []
    for same_part in zip(*(forward.parts for forward in forwards), strict=True):
        recurrence, first = same_part[0]
        pieces = zip(*(inputs for _, inputs in same_part), strict=True)
        joined = type(first)(*map(_cat, pieces))
        same = {name: getattr(first, name) for name in recurrence.parameters}
        parts.append((recurrence, joined._replace(**same)))
    masks = [forward.key_mask for forward in forwards]
    if any(mask is not None for mask in masks):  # where there is none, all tokens are real
        masks = [
            _all_real(forward) if mask is None else mask
            for mask, forward in zip(masks, forwards, strict=True)
        ]
    return Recorded(sum(forward.num_tokens for forward in forwards), _cat(masks), parts)


def _cat(pieces: Sequence[Tensor | None]) -> Tensor | None:
    given = [x for x in pieces if x is not None]
    return torch.cat(given, dim=1) if given else None


def _all_real(forward: Recorded) -> Tensor:
    some = next(forward.tensors())
    return some.new_ones(some.shape[0], forward.num_tokens, dtype=torch.bool)


class Recording:
    """The state before the last few tokens, and what was read since: enough to take them back.

    `before` holds the tensors of a RecurrentLayer as they were then, nothing before the first
    token; nobody changes them in place.
    """

    def __init__(self, before: State):
        self.before = before
        self.forwards: list[Recorded] = []
        self.num_tokens = 0  # that can be taken back

    def append(self, forward: Recorded) -> None:
        """Takes note of a forward; the inputs need not be those that are recorded only."""
        parts = [(recurrence, recurrence.recorded(inputs)) for recurrence, inputs in forward.parts]
        self.forwards.append(forward._replace(parts=parts))
        self.num_tokens += forward.num_tokens
        self._fold_all_but(RECORDED_TOKENS)

    def remove_last(self, n: int) -> State:
        """Takes back n tokens; returns the state before them."""
        self._keep(0, self.num_tokens - n)
        state = self._state_after(self.num_tokens)
        self._fold_all_but(RECORDED_TOKENS_AFTER_CROP)
        return dict(state)

    def confirm(self) -> None:
        """No token but the last few will be taken back."""
        self._fold_all_but(RECORDED_TOKENS_AFTER_CROP)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self.before = {name: function(x) for name, x in self.before.items()}
        self.forwards = [forward.map(function) for forward in self.forwards]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.before.values()
        for forward in self.forwards:
            yield from forward.tensors()

    def _fold_all_but(self, n: int) -> None:
        """Moves `before` on, so that the last n tokens can be removed. Not done for each token."""
        if self.num_tokens > 2 * n:
            self.before = self._state_after(self.num_tokens - n)
            self._keep(self.num_tokens - n, self.num_tokens)

    def _state_after(self, n: int) -> State:
        """The layer's tensors after the first n of these tokens."""
        if n == 0:
            return self.before
        read = join_in_time(self.forwards).cut(0, n)
        after: State = {}
        for recurrence, inputs in read.parts:
            after |= recurrence.replay(inputs, self.before, read.key_mask)
        return after

    def _keep(self, start: int, stop: int) -> None:
        """Only these tokens, in copies: the rest is not to be kept in memory."""
        if self.forwards:
            kept = join_in_time(self.forwards).cut(start, stop)
            self.forwards, self.num_tokens = [kept.map(Tensor.clone)], stop - start


K = TypeVar("K")


def remove_last(recordings: Mapping[K, Recording], tokens_to_remove: int) -> dict[K, State]:
    """Takes the last -tokens_to_remove tokens back, which all of these have read; the states before
    them. Of 0 there are none, and no token but the last few will be taken back.

    Raises:
        RuntimeError: fewer were recorded.
    """
    n = abs(tokens_to_remove)
    recorded = min((one.num_tokens for one in recordings.values()), default=0)
    if n > recorded:
        raise RuntimeError(
            f"crop({tokens_to_remove}) can't be: {recorded} tokens can be removed. Call "
            "activate_past_recording() before reading those that may have to go"
        )
    if n > 0:
        return {key: one.remove_last(n) for key, one in recordings.items()}
    for one in recordings.values():
        one.confirm()
    return {}


def check_crop_of(tokens_to_remove: int, num_tokens: int, removable: int) -> None:
    """Raises an error where a layer can't remove so many of the num_tokens that it has read."""
    if tokens_to_remove > 0:
        raise ValueError(
            "tokens_to_remove must be 0, or negative to remove so many tokens, got "
            f"{tokens_to_remove}"
        )
    if -tokens_to_remove > removable and num_tokens > 0:
        raise RuntimeError(
            f"crop({tokens_to_remove}) can't be: of the {num_tokens} tokens read, {removable} can "
            "be removed. Call activate_past_recording() before reading those that may have to go, "
            f"the last {RECORDED_TOKENS} at most"
        )


class Rollback:
    """Of a layer with recurrences: takes back the last tokens, those read while it records."""

    is_croppable = True
    recording: Recording | None = None
    tensors: State
    num_tokens: Any

    @property
    def may_change(self) -> bool:
        """Whether the tensors may change in place, because crop() won't need them."""
        if self.recording is None:
            return True
        before = self.recording.before
        return not any(tensor is before.get(name) for name, tensor in self.tensors.items())

    @property
    def record_past(self) -> bool:
        """Whether the last tokens can be removed. generate() may set it to False when it ends."""
        return self.recording is not None

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if not value:
            self.recording = None
        elif self.recording is None:
            self.recording = Recording(dict(self.tensors) if self.num_tokens > 0 else {})

    def activate_past_recording(self) -> None:
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises an error if crop() would."""
        recorded = 0 if self.recording is None else self.recording.num_tokens
        check_crop_of(tokens_to_remove, self.num_tokens, recorded)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens, read while recording."""
        self.check_crop(tokens_to_remove)
        if self.recording is None or self.num_tokens == 0:
            return
        if tokens_to_remove < 0:
            self.tensors = self.recording.remove_last(-tokens_to_remove)
            self.num_tokens += tokens_to_remove
        else:
            self.recording.confirm()


class WindowRollback:
    """The same of a layer of sliding-window attention, as often as of the others."""

    keys: Tensor
    values: Tensor
    cumulative_length: int
    sliding_window: int
    is_initialized: bool
    get_seq_length: Callable[[], int]

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises an error if crop() would."""
        num_tokens = self.get_seq_length()
        removable = self.keys.shape[-2] if self.is_initialized else 0
        if removable < num_tokens:  # the next token must see a whole window
            removable -= self.sliding_window - 1
        check_crop_of(tokens_to_remove, num_tokens, removable)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens: as long as nothing has left the window any,
        then those read while recording.
        """
        self.check_crop(tokens_to_remove)
        if self.cumulative_length == 0:
            return
        stop = self.keys.shape[-2] + tokens_to_remove
        start = max(stop - (self.sliding_window - 1) - RECORDED_TOKENS_AFTER_CROP, 0)
        self.keys, self.values = self.keys[:, :, start:stop], self.values[:, :, start:stop]
        self.cumulative_length += tokens_to_remove
