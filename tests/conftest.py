# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What every test runs under: a fixed seed, and uninitialised memory that shows itself."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """In deterministic mode `torch.empty` holds NaN, so that a test which reads it fails."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def one_thread():
    """For models so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
