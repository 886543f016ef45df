# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The experts of Transformers' recurrent models, by the compiled product of all at once."""

import copy
import importlib
import pickle
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig
from transformers.integrations import moe

from hf_linear_attention import use_kernels
from hf_linear_attention.fast.linear import MAX_ROWS
from hf_linear_attention.upstream.experts import Experts
from hf_linear_attention.upstream.families import REPLACEMENTS, made_class
from tiny import OtherTensor
from upstream_models import CONFIGS, is_here, tiny_upstream

OF_MODELS = {
    module.split(".")[2]: (module, name)
    for (module, name), replacement in REPLACEMENTS.items()
    if replacement.ours is Experts and is_here(module.split(".")[2])
}
TOLERANCE = {
    torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3,
}  # fmt: skip


@pytest.fixture
def compiled_calls(shapes_given_to):
    return shapes_given_to("expert_product")


def experts_of(model, dtype=torch.float32, **changes):
    """Experts of Transformers' class, and on our kernels with the same weights."""
    module, name = OF_MODELS[model]
    model_type = next(key for key in CONFIGS if key in (model, f"{model}_text"))
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type]).get_text_config()
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = getattr(importlib.import_module(module), name)(config)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    ours = copy.deepcopy(theirs.to(dtype))
    ours.__class__ = made_class(type(ours))
    return theirs, ours


def arguments_of(experts, tokens, top_k=2):
    """Hidden states, which experts each token has, and their weights."""
    weight = experts.down_proj
    hidden = torch.randn(tokens, weight.shape[1], dtype=torch.float64).to(weight.dtype)
    ranked = torch.rand(tokens, len(weight)).argsort(dim=1)
    return hidden, ranked[:, :top_k], torch.rand(tokens, top_k).to(weight.dtype)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("model", OF_MODELS)
@torch.no_grad()
def test_they_answer_as_transformers(model, dtype, implementation, compiled_calls):
    if implementation == "grouped_mm" and dtype == torch.float64:
        return  # which it does not take
    theirs, ours = experts_of(model, dtype)
    theirs.config._experts_implementation = implementation
    for tokens in (1, 2, 8):
        arguments = arguments_of(ours, tokens)
        y, expected = ours(*arguments), theirs(*arguments)
        assert y.dtype == expected.dtype
        adds_in_float32 = model.startswith("inkling2") and dtype == torch.float64
        tolerance = TOLERANCE[torch.float32 if adds_in_float32 else dtype]
        largest = expected.abs().max().item()
        torch.testing.assert_close(y, expected, rtol=0, atol=tolerance * largest)
    assert [rows for rows, _ in compiled_calls] == [2, 2, 4, 4, 16, 16]


@torch.no_grad()
def test_they_need_nothing_that_the_oldest_transformers_does_not_set(compiled_calls):
    theirs, ours = experts_of("qwen3_next")
    for name in ("_is_expert_parallel", "has_post_expert_norm"):  # later than 5.17
        vars(ours).pop(name, None)
    arguments = arguments_of(ours, tokens=2)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    assert len(compiled_calls) == 2


@torch.no_grad()
def test_the_number_of_experts_is_no_expert():
    _, ours = experts_of("qwen3_next")
    hidden, chosen, weights = arguments_of(ours, 3)
    is_none = torch.tensor([[True, False], [False, False], [True, True]])
    expected = ours(hidden, chosen, weights.masked_fill(is_none, 0))
    y = ours(hidden, chosen.masked_fill(is_none, len(ours.down_proj)), weights)
    torch.testing.assert_close(y, expected)
    assert y[0].any() and not y[2].any()
    assert ours(hidden[:0], chosen[:0], weights[:0]).shape == (0, 32)


@torch.no_grad()
def test_rows_of_other_tokens_change_nothing():
    _, ours = experts_of("qwen3_next")
    hidden, chosen, weights = arguments_of(ours, 7)
    together = ours(hidden, chosen, weights)
    alone = [ours(hidden[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(7)]
    torch.testing.assert_close(torch.cat(alone), together)


def with_gradients(experts):
    return torch.enable_grad(), experts, 2


def with_autocast(experts):
    return torch.autocast("cpu", torch.bfloat16), experts, 2


def with_many_tokens(experts):
    return nullcontext(), experts, MAX_ROWS[torch.float32] * len(experts.down_proj) // 2 + 1


def with_weights_of_a_subclass(experts):
    weight = experts.down_proj.detach().as_subclass(OtherTensor)
    experts.down_proj = torch.nn.Parameter(weight, requires_grad=False)
    return nullcontext(), experts, 2


def with_weights_that_lie_otherwise(experts):
    experts.down_proj.data = experts.down_proj.mT.contiguous().mT
    return nullcontext(), experts, 2


def with_experts_elsewhere(experts):
    experts._is_expert_parallel = True
    return nullcontext(), experts, 2


@pytest.mark.parametrize(
    "prepare",
    [
        with_gradients,
        with_autocast,
        with_many_tokens,
        with_weights_of_a_subclass,
        with_weights_that_lie_otherwise,
        with_experts_elsewhere,
    ],
)
@torch.no_grad()
def test_whatever_the_op_does_not_know_goes_the_usual_way(prepare, compiled_calls):
    theirs, ours = experts_of("qwen3_next")
    context, ours, tokens = prepare(ours)
    arguments = arguments_of(theirs, tokens)
    with context:
        y, expected = ours(*arguments), theirs(*arguments)
    torch.testing.assert_close(y, expected)
    assert not compiled_calls


def test_a_model_s_experts_run_compiled_until_that_is_undone(compiled_calls):
    model = tiny_upstream("qwen3_next")
    report = use_kernels(model)
    assert "experts" in {change.gist for change in report.changed}
    ids = torch.tensor([[5, 7, 9]])
    model.generate(ids, max_new_tokens=2, do_sample=False)
    layers = model.config.num_hidden_layers
    assert [rows for rows, _ in compiled_calls] == [3 * 2] * 2 * layers + [2] * 2 * layers
    copied = pickle.loads(pickle.dumps(model))
    assert sum(isinstance(module, Experts) for module in copied.modules()) == layers
    report.undo()
    compiled_calls.clear()
    with torch.no_grad():
        model(ids)
    assert not compiled_calls


@torch.no_grad()
def test_they_compile_into_one_graph():
    _, ours = experts_of("qwen3_next")
    arguments = arguments_of(ours, 3)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), ours(*arguments))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_way_to_multiply_that_somebody_has_registered_is_theirs(is_replaced, monkeypatch):
    name = "grouped_mm" if is_replaced else "mine"
    ways = dict(moe.ALL_EXPERTS_FUNCTIONS) | {name: lambda self, x, index, weights: 2 * x}
    for key, way in ways.items():
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, key, way)
    model = tiny_upstream("qwen3_next")
    ids = torch.tensor([[5, 7, 9]])
    with torch.no_grad():
        before = model(ids).logits
        model.set_experts_implementation(name)
        expected = model(ids).logits
        use_kernels(model)
        torch.testing.assert_close(model(ids).logits, expected)
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.parametrize("model_type", ["qwen3_next", "minimax"])
def test_changed_models_say_what_their_own_class_says_of_other_implementations(model_type):
    model = tiny_upstream(model_type)
    upstream = type(model)
    use_kernels(model)
    for asked in ("_can_set_attn_implementation", "_can_set_experts_implementation"):
        assert asked in vars(type(model))  # and no file is looked at
        assert getattr(model, asked)() == getattr(upstream, asked)()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
