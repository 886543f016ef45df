# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""use_kernels(model, state_in_fp64=True): sums of Transformers' recurrent layers in float64."""

import pytest
import torch

from hf_linear_attention import use_kernels
from tiny import tiny_model
from upstream_models import cache_name, cast, tiny_upstream

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_SUMS = ("qwen3_5_text", "kimi_linear", "mamba2", "minimax", "mamba")


def sums_of(cache) -> list[torch.Tensor]:
    states = [getattr(layer, "recurrent_states", {}) for layer in cache.layers]
    of_minimax = [x for x in getattr(cache, "linear_cache", []) if isinstance(x, torch.Tensor)]
    return of_minimax + [x for of_layer in states for x in of_layer.values() if x is not None]


def read(model, ids, pieces=3):
    cache, logits, name = None, [], cache_name(model)
    with torch.no_grad():
        for piece in ids.tensor_split(pieces, dim=1):
            given = {} if cache is None else {name: cache}
            outputs = model(piece, use_cache=True, **given)
            cache = outputs[name]
            logits.append(outputs.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", WITH_SUMS)
def test_sums_are_float64_and_answers_stay(model_type, dtype):
    model = cast(tiny_upstream(model_type), dtype)
    ids = torch.randint(1, 20, (2, 13), generator=torch.Generator().manual_seed(0))
    with use_kernels(model):
        expected, plain = read(model, ids)
    with use_kernels(model, state_in_fp64=True) as report:
        logits, cache = read(model, ids)
        assert "states in float64" in str(report)
    assert logits.dtype is expected.dtype
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    assert torch.float64 in {x.dtype for x in sums_of(cache)}
    assert torch.float64 not in {x.dtype for x in sums_of(plain)}
    with use_kernels(model):  # and what was undone leaves nothing behind
        assert torch.float64 not in {x.dtype for x in sums_of(read(model, ids)[1])}


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rwkv", "xlstm"])
def test_models_that_can_not_are_refused_and_stay(model_type):
    model = tiny_upstream(model_type)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="state_in_fp64 must be left out"):
        use_kernels(model, state_in_fp64=True)
    assert [type(module) for module in model.modules()] == classes


def test_a_model_of_this_package_has_it_in_its_config():
    with pytest.raises(ValueError, match="have it in their config"):
        use_kernels(tiny_model(), state_in_fp64=True)
    with pytest.raises(ValueError, match="state_in_fp64 must be a bool, got 'no'"):
        use_kernels(tiny_model(), state_in_fp64="no")
