# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What every test runs under: a fixed seed, and uninitialised memory that shows itself."""

import gc

import pytest
import torch

from hf_linear_attention.decode import conditions
from hf_linear_attention.decode import layers as decode_layers
from hf_linear_attention.fast import linear, quantized, rms_norm
from hf_linear_attention.upstream import experts

pytest_plugins = ["tiers"]  # which of them run, and in which order


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_not_looked_through():
    """What was imported stays, and more with every module: to look through it would take each call
    of the garbage collector, which engines and caches make, a second or two.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """In deterministic mode `torch.empty` holds NaN, so that a test which reads it fails. Where
    there is a GPU torch only warns of sums that it can't compute otherwise.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def tokens_are_recorded_at_once(monkeypatch):
    """So that whatever generates some tokens goes through their recordings."""
    monkeypatch.setattr(decode_layers, "TOKENS_BEFORE", 0)


@pytest.fixture
def one_thread():
    """For models so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new_compiler():
    """So that no frame that earlier tests compiled counts against the number of times that one may
    be compiled again.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def shapes_given_to(monkeypatch):
    """Called with the name of an op that a layer calls, returns the shapes of x that the op is
    given from then on. Tokens are not recorded meanwhile, for recordings call no function.
    """
    monkeypatch.setattr(conditions, "ARE_TOKENS_RECORDED", False)
    callers = {
        "few_rows_product": linear,
        "many_rows_product": linear,
        "many_rows_product_in": linear,
        "int8_product": quantized,
        "int4_product": quantized,
        "compiled_rms_norm": rms_norm,
        "expert_product": experts,
    }

    def listen(name):
        shapes = []
        op = getattr(callers[name], name)

        def counted(x, *others):
            shapes.append(tuple(x.shape))
            return op(x, *others)

        monkeypatch.setattr(callers[name], name, counted)
        return shapes

    return listen
