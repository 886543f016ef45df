# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Snapshots: what a model remembers of a prompt's first tokens, found again by these tokens.

They lie at multiples of EVERY tokens, and before the last token of a prompt, so that the same
prompt again reads one token, and one that goes on reads what is new. Prompts of up to EVERY tokens
have none: they are read in one forward. At the end of LONG ones, where another question may follow
the same text, they lie at multiples of FINE tokens, which costs such a prompt little.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EVERY = 256  # a state is as large as the keys and values of 32 tokens, with heads of 64
LONG = 16 * EVERY
FINE = EVERY // 4


def next_stop(position: int, length: int, may_be_fine: bool = True) -> int:
    """Where a piece that begins at a position of a prompt ends at the latest."""
    last = length - 1
    if length <= EVERY or position >= last:
        return length
    step = FINE if may_be_fine and is_fine(position, length) else EVERY
    return min((position // step + 1) * step, last)


def is_stop(position: int, length: int) -> bool:
    """Whether a snapshot is taken where so many tokens of a prompt have been read."""
    step = FINE if is_fine(position, length) else EVERY
    return EVERY <= position < length and (position % step == 0 or position == length - 1)


def is_fine(position: int, length: int) -> bool:
    """Whether a position is among a long prompt's last tokens: EVERY, or up to twice as many."""
    return length >= LONG and position >= start_of(length - EVERY)


def start_of(stop: int) -> int:
    """The multiple of EVERY before a stop: what a snapshot there builds on."""
    return (stop - 1) // EVERY * EVERY


class Prompt:
    """The tokens of a prompt, and the keys of its beginnings: hashes that nobody makes to collide
    (BLAKE2b, 128 bits).
    """

    def __init__(self, tokens: Sequence[int]):
        self.tokens = array("i", tokens)
        self.hashes = [hashlib.blake2b(digest_size=16)]  # of the first 0, EVERY, 2 EVERY, ...
        for stop in range(EVERY, len(tokens), EVERY):
            longer = self.hashes[-1].copy()
            longer.update(self.tokens[stop - EVERY : stop])
            self.hashes.append(longer)

    def key(self, stop: int) -> bytes:
        """Of the first `stop` tokens, fewer than all."""
        number, rest = divmod(stop, EVERY)
        if rest == 0:
            return self.hashes[number].digest()
        longer = self.hashes[number].copy()
        longer.update(self.tokens[stop - rest : stop])
        return longer.digest()

    def __deepcopy__(self, memo: Any) -> "Prompt":
        return self  # nothing changes it


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Of the first `stop` tokens of a prompt: the states after them, the keys and values that a
    sliding window holds, and those of full attention for the tokens from `start` on.
    """

    key: bytes  # of these tokens
    parent: bytes  # of the first `start`
    start: int  # `start_of(stop)`
    stop: int
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


class SnapshotStore:
    """Snapshots by key, in so many bytes; what was not used for longest goes first.

    Args:
        needs_all: whether one is of use only with all that lie before it, because each has keys and
            values of its own tokens. Then those before it count as used whenever it is, just after
            it, and none goes before what needs it.
    """

    def __init__(self, max_bytes: int, needs_all: bool):
        self.max_bytes, self.needs_all = max_bytes, needs_all
        self.clear()

    def clear(self) -> None:
        self.held: OrderedDict[bytes, Snapshot] = OrderedDict()  # used last: at the end
        # of those at no multiple of EVERY, by their parents' keys: where each ends, by its key
        self.tails: dict[bytes, dict[bytes, int]] = {}
        self.nbytes = 0

    def longest(self, prompt: Prompt, limit: int) -> list[Snapshot]:
        """The one of most tokens, `limit` of the prompt at most, and all before it that it needs,
        in order; [] where there is none.
        """
        path: list[Snapshot | None] = []
        for stop in range(EVERY, limit + 1, EVERY):
            found = self.held.get(prompt.key(stop))
            if found is None and self.needs_all:
                break
            path.append(found)
        for number in range(len(path), 0, -1):
            last = self._longest_tail(prompt, number * EVERY, limit) or path[number - 1]
            if last is not None:
                self._touch(last.key)
                before = path[: last.start // EVERY] if self.needs_all else []
                return [x for x in (*before, last) if x is not None]
        return []

    def _longest_tail(self, prompt: Prompt, start: int, limit: int) -> Snapshot | None:
        tails = self.tails.get(prompt.key(start), {})
        for stop in sorted({stop for stop in tails.values() if stop <= limit}, reverse=True):
            if (key := prompt.key(stop)) in tails:
                return self.held[key]
        return None

    def wants(self, prompt: Prompt, stop: int) -> bool:
        """Whether a snapshot there is new, and of use."""
        if (key := prompt.key(stop)) in self.held:
            self._touch(key)
            return False
        start = start_of(stop)
        return not self.needs_all or start == 0 or prompt.key(start) in self.held

    def add(self, snapshots: Iterable[Snapshot]) -> list[Snapshot]:
        """Holds these, the one used last at the end; returns those that had to go for them."""
        keys = []
        for new in snapshots:
            keys.append(new.key)
            self.held[new.key] = new
            self.nbytes += new.nbytes
            if new.stop % EVERY != 0:
                self.tails.setdefault(new.parent, {})[new.key] = new.stop
        for key in keys:
            self._touch(key)
        gone = []
        while self.nbytes > self.max_bytes:
            gone.append(self._pop())
        return gone

    def _touch(self, key: bytes) -> None:
        while key in self.held:
            self.held.move_to_end(key)
            if not self.needs_all:
                return
            key = self.held[key].parent

    def _pop(self) -> Snapshot:
        _, oldest = self.held.popitem(last=False)
        self.nbytes -= oldest.nbytes
        if tails := self.tails.get(oldest.parent):
            tails.pop(oldest.key, None)
            if not tails:
                del self.tails[oldest.parent]
        return oldest
