# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Counts of floating-point operations by torch.utils.flop_counter, against counts by hand."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hf_linear_attention import (
    delta_rule,
    delta_rule_step_,
    linear_attention,
    linear_attention_step_,
    selective_scan,
    short_convolution,
)
from hf_linear_attention.fast.linear import few_rows_product, many_rows_product
from hf_linear_attention.ops.compiled.library import ops
from hf_linear_attention.releases import CACHE
from tiny import VARIANTS, random_ids, tiny_model

TOKENS, HQ, HKV, K, V, CHANNELS, N, KERNEL = 2 * 7, 4, 2, 3, 5, 8, 6, 3
NOT_COUNTED = {  # nothing but what is done to numbers one by one; or other ops
    "add_sinusoids",
    "attention",  # as PyTorch's own on the CPU is not
    "attention_step_",
    "cross_entropy",
    "cross_entropy_backward",
    "decay_steps",
    "dequantize_int4",
    "elementwise_scan",
    "elementwise_scan_backward",
    "elementwise_scan_step_",
    "join_with_sums",
    "rg_lru",
    "rg_lru_backward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "make_recording",
    "run_recording",
    "rwkv7_keys",
    "rwkv7_read",
    "rwkv7_values",
    "squared_relu",
    "token_mix",
    "window_step_",
}


def flops_of(function, *args, **kwargs):
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def random(*shape):
    return torch.rand(2, 7, *shape)


def inputs_of_rules():
    """q, k, v and write strengths, where keys are shared by values."""
    return random(HKV, K), random(HKV, K), random(HQ, V), random(HQ)


SUMS = 2 * TOKENS * (HQ + HKV) * K  # by the column of a value
# Of calls without gradients: what they are, and the count.
CALLS = {
    "linear_attention": (
        lambda **kw: linear_attention(random(HQ, K), random(HKV, K), random(HKV, V), **kw),
        SUMS * (V + 1),
    ),
    "without z": (
        lambda **kw: linear_attention(
            random(HQ, K), random(HKV, K), random(HKV, V), normalize=False, **kw
        ),
        SUMS * V,
    ),
    "delta_rule": (lambda **kw: delta_rule(*inputs_of_rules(), **kw), 6 * TOKENS * HQ * K * V),
    "short_convolution": (
        lambda **kw: short_convolution(random(CHANNELS), torch.rand(CHANNELS, KERNEL), **kw),
        2 * TOKENS * CHANNELS * KERNEL,
    ),
    "selective_scan": (
        lambda **kw: selective_scan(
            *(random(CHANNELS), random(CHANNELS), -torch.rand(CHANNELS, N)),
            *(random(N), random(N)),
            **kw,
        ),
        4 * TOKENS * CHANNELS * N,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_count_is_that_of_the_recurrence_forward_and_backward(name):
    function, expected = CALLS[name]
    assert flops_of(function, backend="cpu") == expected

    def both_ways():
        leaves = []

        class Leaves(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                y = func(*args, **(kwargs or {}))
                if func is torch.rand:
                    leaves.append(y.requires_grad_())
                return y

        with Leaves():
            y = function(backend="cpu")
        y.sum().backward()
        assert all(x.grad is not None for x in leaves)

    assert flops_of(both_ways) == 3 * expected


def test_steps_and_products_are_counted():
    q, k, v, beta = (x[:, 0] for x in inputs_of_rules())
    state = torch.zeros(2, HQ, K, V)
    assert flops_of(delta_rule_step_, q, k, v, beta, state) == 6 * 2 * HQ * K * V
    sums = (torch.zeros(2, HKV, K, V), torch.zeros(2, HKV, K))
    of_queries = torch.rand(2, HQ, K), k, torch.rand(2, HKV, V)
    assert flops_of(linear_attention_step_, *of_queries, sums) == 2 * 2 * (HQ + HKV) * K * (V + 1)
    x, weight = torch.rand(3, 2, CHANNELS), torch.rand(N, CHANNELS)
    for product in (few_rows_product, many_rows_product):
        assert flops_of(product, x, weight, None) == 2 * 3 * 2 * CHANNELS * N
    weight.requires_grad_()
    both_ways = flops_of(lambda: many_rows_product(x, weight, None).sum().backward())
    assert both_ways == 2 * 2 * 3 * 2 * CHANNELS * N  # x has no gradient


def test_every_compiled_op_has_a_formula_or_none_for_a_reason():
    prefix = "hf_linear_attention::"
    names = {x.name for x in torch._C._jit_get_all_schemas() if x.name.startswith(prefix)}
    names = {name.removeprefix(prefix) for name in names}
    assert names - NOT_COUNTED == {name for name in names if getattr(ops, name) in flop_registry}
    assert names >= NOT_COUNTED


@pytest.mark.sample(7)
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_are_counted_alike_by_compiled_ops_and_others(variant, monkeypatch):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    memory = {}
    if model.config.add_cross_attention:
        memory["encoder_hidden_states"] = torch.zeros(2, 3, model.config.hidden_size)
    ids = random_ids(2, 6)
    with torch.no_grad():
        few_rows = flops_of(model, ids, **memory)
    counted = flops_of(model, ids, **memory)  # with gradients, of which compiled ops know
    assert few_rows == counted
    monkeypatch.setattr("hf_linear_attention.ops.backends.FORCED_BACKEND", "chunked")
    # To PyTorch a token of these is two, or chunks have three times as many tokens, which all meet.
    has_more = any(x in variant for x in ("rwkv7", "gdn2", "comba", "precond", "product"))
    most = 3 if has_more else 1.5
    assert counted / most < flops_of(model, ids, **memory) < most * counted


class Operations(TorchDispatchMode):
    """Their names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["paper", "preset_gated_deltanet"])
@torch.no_grad()
def test_every_product_of_a_generated_token_is_counted_and_seen(variant):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    linears = [x for x in model.modules() if isinstance(x, nn.Linear)]
    cache = model(random_ids(1, 3), use_cache=True)[CACHE]

    def step():
        model(random_ids(1, 1), **{CACHE: cache})

    counts = []
    for _ in range(20):  # tokens are recorded meanwhile
        step()
        counts.append(flops_of(step))
    assert len(set(counts)) == 1
    with Operations() as operations:
        step()
    assert operations.names.count("hf_linear_attention.linear.default") == len(linears)
    with FlopCounterMode(display=False) as counter:
        step()
    by_module = counter.get_flop_counts()
    head = by_module["LinearAttentionForCausalLM.lm_head"]
    assert sum(head.values()) == 2 * model.lm_head.weight.numel()
