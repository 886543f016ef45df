# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tests of calls that are made up: as many as there are seeds, in one test."""

from collections.abc import Callable

import pytest
import torch


def over_seeds(count: int) -> Callable:
    """Calls a test with every seed from 0 on. What it raises says with which."""

    def decorate(test: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for seed in range(count):
                torch.manual_seed(0)
                try:
                    test(seed)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"with seed {seed}: {error}") from error

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        run.__module__, run.__qualname__ = test.__module__, test.__qualname__
        return run

    return decorate
