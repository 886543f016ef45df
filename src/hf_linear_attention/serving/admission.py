# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What is refused of a request before it meets others in a batch, so that it fails alone.

Whatever would raise an error in a forward ends all requests of that batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The range of parameters that requests may have of their own.
Range = tuple[str, Callable[[Any], bool]]
SHARE: Range = "in (0, 1]", lambda value: 0 < value <= 1
FRACTION: Range = "in [0, 1)", lambda value: 0 <= value < 1
RANGES: dict[str, Range] = {
    "temperature": ("greater than 0", lambda value: value > 0),
    "top_k": ("from 1 to 2147483647", lambda value: 1 <= value < 2**31),  # an int32 in a batch
    "top_p": SHARE,
    "min_p": ("in [0, 1]", lambda value: 0 <= value <= 1),
    "typical_p": SHARE,
    "epsilon_cutoff": FRACTION,
    "eta_cutoff": FRACTION,
    "top_h": SHARE,
}


def check_range(name: str, value: Any) -> None:
    """Raises a ValueError for a parameter of sampling that is out of its range, or no number."""
    range_, is_in_range = RANGES.get(name, ("", lambda value: True))
    try:
        is_right = is_in_range(value)
    except TypeError:
        is_right = False
    if not is_right:
        raise ValueError(f"{name} must be {range_}, got {value!r}")


@dataclass(frozen=True)
class Admission:
    """What a model and its memory allow.

    Raises, when called with a request's state: ValueError, which says what is wrong.
    """

    vocab_size: int
    longest: float = math.inf  # in tokens that are read
    reason: str = ""  # for that
    may_be_endless: bool = True  # whether an end token alone may end an answer

    def __call__(self, request: Any) -> None:
        tokens, new = request.initial_tokens, request.max_new_tokens
        if not tokens:
            raise ValueError("a prompt must have at least one token, got none")
        # Of long prompts, which may be read in a few milliseconds, each token is not asked alone.
        are_integers = set(map(type, tokens)) == {int}
        if not are_integers or min(tokens) < 0 or max(tokens) >= self.vocab_size:
            wrong = [x for x in tokens if not is_integer(x) or not 0 <= x < self.vocab_size]
            if wrong:
                raise ValueError(
                    f"tokens must be integers from 0 to {self.vocab_size - 1}, got {wrong[0]!r}"
                )
        if new is not None and (not is_integer(new) or new < 1):
            raise ValueError(f"max_new_tokens must be None or an integer from 1 on, got {new!r}")
        has_end = any(token < self.vocab_size for token in request._eos_token_ids)
        if new is None and not (self.may_be_endless and has_end):
            raise ValueError(
                "max_new_tokens must be given where there is no end token in the vocabulary"
                f"{'' if self.may_be_endless else f', or {self.reason}'}; got None"
            )
        length = len(tokens) + (0 if new is None else new - 1)  # the last one is not read
        if length > self.longest:
            raise ValueError(
                f"prompt and answer must have at most {self.longest + 1} tokens, {self.reason}; "
                f"got a prompt of {len(tokens)} and max_new_tokens={new}"
            )
        for name, value in request.logit_processor_kwargs.items():
            check_range(name, value)


def is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
