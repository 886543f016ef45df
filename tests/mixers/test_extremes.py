# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Parameters so large or small that an infinity could meet a zero: finite where a loop in float64
is, forward and backward, on every backend.
"""

import copy

import pytest
import torch

from hf_linear_attention import delta_rule
from hf_linear_attention.ops import backends
from tiny import random_ids, shallow, tiny_model

# What decays, write strengths and weights of parts are made of, by the end of the name.
EXTREMES = {
    "A_log": [-300, -104, -90, 0, 60, 80, 88, 89, 95, 105, 300],
    "dt_bias": [-1e4, -300, -110, -104, -100, -90, 0, 30, 90, 1e4],
    "theta": [-1e4, -300, -104, -90, 0, 30, 1e4, 1e20],
    "log_factor": [-1e4, -300, -90, 0, 90, 300, 1e4],
    "lower_bounds.weight": [-1e4, -300, -90, 0, 20, 90, 1e4],
    "gk_proj.1.bias": [-1e30, -1e4, -90, 0, 90, 1e4],
    "D": [0, 1e-30, 1e3],
}
VARIANTS = ("preset_mamba2", "preset_gated_deltanet", "preset_kda", "preset_gla", "preset_hgrn2")
VARIANTS += ("gated", "window", "dpfp")


def make_extreme(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        end = next((end for end in EXTREMES if name.endswith(f".{end}")), None)
        if end is not None:
            values = torch.tensor(EXTREMES[end], dtype=parameter.dtype)
            chosen = torch.randint(len(values), parameter.shape, generator=generator)
            parameter.data.copy_(values[chosen])


def results_of(model, ids):
    model.zero_grad()
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": outputs.logits.detach(), **gradients}


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_parameters_give_finite_numbers_where_float64_does(variant, monkeypatch):
    for seed in range(2):
        model = tiny_model(dtype=torch.float32, seed=seed, **shallow(variant))
        make_extreme(model, seed)
        ids = random_ids(1, 6, seed=seed)
        for dtype in (torch.float32, torch.bfloat16):
            low = copy.deepcopy(model).to(dtype)
            monkeypatch.setattr(backends, "FORCED_BACKEND", "reference")
            exact = results_of(copy.deepcopy(low).double(), ids)
            for backend in ("reference", "chunked", "cpu"):
                monkeypatch.setattr(backends, "FORCED_BACKEND", backend)
                for name, x in results_of(low, ids).items():
                    is_in_range = exact[name].abs() < 1e30  # and no NaN
                    assert x[is_in_range].isfinite().all(), (backend, seed, name)


def test_a_rate_out_of_float32_s_range_forgets_all_or_nothing():
    """Where the step is of some size, and where it is 0."""
    for variant in ("gated", "preset_mamba2", "preset_kda"):
        model = tiny_model(dtype=torch.float32, **shallow(variant))
        mixer = model.model.layers[0].self_attn
        owner = mixer if hasattr(mixer, "A_log") else mixer.decay
        x = torch.zeros(1, 3, 32)
        owner.A_log.data.fill_(200.0)
        for bias, expected in ((-1.0, -1e20), (-1e4, -1e-30)):
            owner.dt_bias.data.fill_(bias)
            log_decay = mixer._steps(x, None)[0] if owner is mixer else owner(x)
            is_right = log_decay <= expected if bias == -1 else log_decay >= expected
            assert is_right.all(), variant


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
def test_long_keys_that_are_normed_have_finite_gradients(backend):
    """They meet gradients as large, of a state that is."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, 5, 2, 6, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for of, to in (("reference", torch.float64), (backend, dtype)):
            q, k, v, dy = (
                z.to(dtype).to(to)
                for z in x * torch.tensor([1e17, 1e17, 1e6, 1e17]).view(4, 1, 1, 1, 1)
            )
            leaves = [z.requires_grad_() for z in (q, k, v)]
            y = delta_rule(*leaves, torch.full((1, 5, 2), 0.5), normalize_qk=True, backend=of)
            results.append(torch.autograd.grad(y, leaves, dy))
        for actual, exact in zip(results[1], results[0], strict=True):
            assert exact.isfinite().all() and actual.isfinite().all()
            error = (actual.double() - exact).abs().max() / exact.abs().max()
            assert error < (1e-4 if dtype == torch.float32 else 2e-2)
