# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Answers that end before a text of a client's: `stop` of the OpenAI API.

The engine knows tokens, and ends at those that end a text. So what it says of such a request passes
through here on its way to the server, which is given only what no stop string can begin with.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus


class UntilStop:
    """Takes a request's outputs, with all tokens so far, and hands them on to `callback`: up to the
    first of `stops`, as tokens whose text ends there; then it calls `cancel`.

    tokenizer: of the library tokenizers.
    is_stream: whether callback is to see tokens as they come, and not the last output alone.
    """

    def __init__(
        self,
        callback: Callable[[GenerationOutput], None],
        stops: Sequence[str],
        tokenizer: Any,
        is_stream: bool,
        cancel: Callable[[], None],
    ):
        self.callback, self.stops, self.tokenizer = callback, stops, tokenizer
        self.is_stream, self.cancel = is_stream, cancel
        # Clients see no special tokens; but who stops at one has it looked for.
        special = [x.content for x in tokenizer.get_added_tokens_decoder().values() if x.special]
        self.skips = not any(x in stop for x in special for stop in stops)
        self.stream = DecodeStream([], skip_special_tokens=self.skips)
        self.text = ""
        self.ends: list[int] = []  # of the text, after each token
        self.has_ended = False

    def __call__(self, output: GenerationOutput) -> None:
        if self.has_ended:
            return
        tokens = output.generated_tokens
        has_left = output.status is RequestStatus.PENDING  # says the manager of a client
        is_last = output.is_finished() or has_left
        for token in tokens[len(self.ends) :]:
            if (at := self._add(token)) is not None:
                self._end(output, at, is_last)
                return
        self.has_ended = is_last
        if is_last:
            self.callback(output)
        elif self.is_stream:
            self.callback(dataclasses.replace(output, generated_tokens=tokens[: self._sure()]))

    def _add(self, token: int) -> int | None:
        """Where a stop string begins in the text, with this token's."""
        before = len(self.text)
        self.text += self.stream.step(self.tokenizer, token) or ""
        self.ends.append(len(self.text))
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        return min((at for at in found if at >= 0), default=None)

    def _sure(self) -> int:
        """How many tokens have no character of the end that a stop string may begin with."""
        longest = max(map(len, self.stops))
        for at in range(max(0, len(self.text) - longest + 1), len(self.text)):
            if any(stop.startswith(self.text[at:]) for stop in self.stops):
                return self._until(at)
        return self._until(len(self.text))

    def _until(self, at: int) -> int:
        """How many tokens give the text up to there; none that begins a later character."""
        number = bisect.bisect_right(self.ends, at)
        while number > 0 and self.ends[number - 1] == (self.ends[number - 2] if number > 1 else 0):
            number -= 1
        return number

    def _end(self, output: GenerationOutput, at: int, is_last: bool) -> None:
        kept = output.generated_tokens[: self._until(at)]
        tokens = self._with_rest(kept, at)
        self.has_ended = True
        if not is_last:
            self.cancel()
        finished = RequestStatus.FINISHED
        self.callback(dataclasses.replace(output, generated_tokens=tokens, status=finished))

    def _with_rest(self, kept: list[int], at: int) -> list[int]:
        """With tokens for the characters before a stop string that begins within a token."""
        rest = self.text[self.ends[len(kept) - 1] if kept else 0 : at]
        if not rest:
            return kept
        tokenizer = self.tokenizer
        ways = [tokenizer.encode(rest, add_special_tokens=False).ids]
        ways += [[tokenizer.token_to_id(x) for x in pieces] for pieces in ([rest], rest)]
        for way in ways:
            if None not in way and self._decoded(kept + way) == self.text[:at]:
                return kept + way
        return kept

    def _decoded(self, tokens: list[int]) -> str:
        stream = DecodeStream([], skip_special_tokens=self.skips)
        return "".join(stream.step(self.tokenizer, token) or "" for token in tokens)
