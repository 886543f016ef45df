# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Caches without the package take no token back, which speculative decoding asks for."""

from typing import Any, NamedTuple

from ..needs_package import needs_package

TAKES_NOTHING_BACK = "a static cache takes no tokens back"


class Recorded(NamedTuple):  # what a layer read in one forward
    num_tokens: int
    key_mask: Any
    parts: list[Any]  # for each recurrence, which comes first, its inputs


class Rollback:
    is_croppable = False
    may_change = True  # in place
    record_past = False
    activate_past_recording: Any = needs_package("speculative decoding")
    crop: Any = needs_package("crop()")


class WindowRollback:
    pass
