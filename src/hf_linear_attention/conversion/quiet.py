# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Silence, where others would say of their own accord what we say, or nobody needs."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, and without logs of that level and below."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
