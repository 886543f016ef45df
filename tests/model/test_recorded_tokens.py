# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The operations of a generated token, recorded and run again: the answers of the modules, and
those of the modules as they are now.
"""

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from hf_linear_attention import LinearAttentionCache
from hf_linear_attention.cache.layers import RecurrentLayer
from hf_linear_attention.decode import layers as decode_layers
from hf_linear_attention.decode.layers import recorded_tokens_of
from hf_linear_attention.decode.trace import Recorder
from hf_linear_attention.fast.rms_norm import RMSNorm
from hf_linear_attention.mixers.linear_attention import LinearAttention
from hf_linear_attention.ops.feature_maps import FeatureMap
from hf_linear_attention.releases import CACHE
from new_python import run_python
from tiny import VARIANTS, random_ids, shallow, tiny_model
from without_recordings import without_recordings

# Their decays for every channel are looked at, token by token: the normaliser of the one, and the
# states that the other copies for several queries, are PyTorch's.
NOT_RECORDED = ("per_channel", "preset_hgrn2")
WHOLE = "whole tokens"


def read(model, ids, cache, mode=torch.no_grad, **kwargs):
    with mode():
        return model(ids, past_key_values=cache, use_cache=True, **kwargs).logits


def answers(model, ids, cache=None, prompt=3, mode=torch.no_grad):
    """The logits of a prompt, and then of each token, (B, T, vocabulary)."""
    cache = LinearAttentionCache(model.config) if cache is None else cache
    pieces = ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)
    return torch.cat([read(model, piece, cache, mode) for piece in pieces], dim=1)


@pytest.fixture
def by_modules():
    return without_recordings(answers)


def uses(model):
    """Of the recordings of whole tokens, and of layers that follow each other, by the first, how
    often each was run.
    """
    tables = {WHOLE: recorded_tokens_of(model), **dict(enumerate(model.model.recorded_tokens))}
    return {k: [x.uses for x in v.recordings.values()] for k, v in tables.items() if v.recordings}


@pytest.mark.sample(52)
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (torch.float32, torch.no_grad),
        (torch.bfloat16, torch.no_grad),
        (torch.float32, torch.inference_mode),  # where torch does not take all operations apart
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_recordings_answer_as_modules_do_to_the_last_bit(variant, dtype, mode, by_modules):
    model, ids = tiny_model(dtype=dtype, **shallow(variant)), random_ids(2, 9)
    caches = [LinearAttentionCache(model.config) for _ in range(2)]
    found = answers(model, ids, caches[0], mode=mode)
    assert torch.equal(found, by_modules(model, ids, caches[1], mode=mode))
    growing = {"full_attention"} if model.config.softmax_mixer == "softmax" else set()
    types = {"linear_attention"} | growing
    may = [layer_type in types for layer_type in model.config.layer_types]
    first = [i for i, may_be in enumerate(may) if may_be and (i == 0 or not may[i - 1])]
    expected = {i: [0 if variant in NOT_RECORDED else 5] for i in first}
    if all(may):
        # Learned positions are compared with how many there are.
        if variant == "learned":
            expected = {WHOLE: [0], 0: [4]}
        else:
            expected = {WHOLE: [0], 0: [0]} if variant in NOT_RECORDED else {WHOLE: [5]}
    assert uses(model) == expected
    for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
        if isinstance(ours, RecurrentLayer):
            assert ours.num_tokens == theirs.num_tokens == 9
            assert all(torch.equal(x, theirs.tensors[name]) for name, x in ours.tensors.items())
        else:
            assert ours.get_seq_length() == theirs.get_seq_length() == 9
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


def test_a_model_records_once_for_all_its_caches(by_modules):
    model, ids = tiny_model(), random_ids(1, 6)
    first = answers(model, ids)
    assert torch.equal(answers(model, ids), first)
    assert uses(model) == {WHOLE: [5]}
    other = random_ids(3, 6)
    assert torch.equal(answers(model, other), by_modules(model, other))
    assert uses(model) == {WHOLE: [5, 2]}


def test_a_draft_of_the_first_layers_ends_with_the_norm(by_modules):
    """Of the same layers the whole model, which ends with a window, has a recording."""
    types = ["linear_attention", "linear_attention", "sliding_attention"]
    model = tiny_model(num_hidden_layers=3, layer_types=types, sliding_window=4)
    ids = random_ids(1, 6)
    whole = answers(model, ids)
    model.config.num_hidden_layers = 2
    draft = answers(model, ids)
    assert uses(model) == {WHOLE: [2], 0: [2]}
    assert torch.equal(draft, by_modules(model, ids))
    model.config.num_hidden_layers = 3
    assert torch.equal(answers(model, ids), whole)


class TwiceRMSNorm(RMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def set_weight(layer):
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight * 2)


def change_weight_in_place(layer):
    layer.mlp.up_proj.weight.data *= 2


def set_module(layer):
    layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, nn.Tanh())


def set_number(layer):
    layer.input_layernorm.variance_epsilon = 0.5


def set_forward(layer):
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * forward(x)


def set_class(layer):
    layer.post_attention_layernorm.__class__ = TwiceRMSNorm


def add_hook(layer):
    layer.mlp.register_forward_hook(lambda module, args, output: 2 * output)


def add_pre_hook(layer):
    layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def add_hook_of_layer(layer):
    layer.register_forward_hook(lambda module, args, output: 2 * output)


CHANGES = [
    *(set_weight, change_weight_in_place, set_module, set_number, set_forward, set_class),
    *(add_hook, add_pre_hook, add_hook_of_layer),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_tokens_counts_at_once(change, by_modules):
    model, ids = tiny_model(), random_ids(2, 8)
    cache = LinearAttentionCache(model.config)
    before = answers(model, ids[:, :6], cache)
    rest = copy.deepcopy(cache)
    with torch.no_grad():
        change(model.model.layers[1])
    changed = read(model, ids[:, 6:7], cache)
    expected = by_modules(model, ids[:, 6:], rest, prompt=1)
    assert torch.equal(changed, expected[:, :1])
    assert torch.equal(read(model, ids[:, 7:], cache), expected[:, 1:])
    assert not torch.equal(answers(model, ids[:, :6]), before)


def replace_a_layer(model):
    layers = model.model.layers
    layers[1] = copy.deepcopy(layers[1])
    change_weight_in_place(layers[1])


def replace_all_layers(model):
    model.model.layers = copy.deepcopy(model.model.layers)
    change_weight_in_place(model.model.layers[1])


def replace_the_last_norm(model):
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.mul_(2)


@pytest.mark.parametrize("change", [replace_a_layer, replace_all_layers, replace_the_last_norm])
@pytest.mark.parametrize("softmax_at", [None, 0, 2])
def test_layers_in_the_places_of_others_count_at_once(change, softmax_at):
    """Also where only layers that follow each other are recorded, and not the whole model."""
    types = ["full_attention" if i == softmax_at else "linear_attention" for i in range(3)]
    model, ids = tiny_model(num_hidden_layers=3, layer_types=types), random_ids(2, 8)
    cache = LinearAttentionCache(model.config)
    before = answers(model, ids[:, :6], cache)
    rest, of_before = copy.deepcopy(cache), [*model.model.layers, model.model.norm]
    with torch.no_grad():
        change(model)
    changed = read(model, ids[:, 6:7], cache)
    assert torch.equal(changed, without_recordings(read)(model, ids[:, 6:7], rest))
    assert not torch.equal(answers(model, ids[:, :6]), before)
    assert of_before  # somebody may have them still


def turn_weight(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()


def change_dtype_of_the_last_norm(model):
    model.model.norm.bfloat16()


@pytest.mark.parametrize("change", [turn_weight, change_dtype_of_the_last_norm])
def test_other_data_of_the_same_weight_count_at_once(change, by_modules):
    model, ids = tiny_model(), random_ids(2, 7)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :6], cache)
    change(model)
    expected = by_modules(model, ids[:, 6:], copy.deepcopy(cache))
    assert torch.equal(answers(model, ids[:, 6:], cache), expected)


def replace_lower_bounds(model):
    bounds = model.model.lower_bounds
    bounds.weight = nn.Parameter(torch.randn_like(bounds.weight))


def change_lower_bounds_in_place(model):
    model.model.lower_bounds.weight.data.normal_()


@pytest.mark.parametrize("change", [replace_lower_bounds, change_lower_bounds_in_place])
@pytest.mark.parametrize("second", ["linear_attention", "full_attention"])
def test_bounds_that_layers_share_count_at_once(change, second, by_modules):
    """They are no part of the layers that are recorded."""
    types = ["linear_attention", second, "linear_attention"]
    model, ids = tiny_model(**VARIANTS["preset_hgrn"], layer_types=types), random_ids(2, 8)
    cache = LinearAttentionCache(model.config)
    before = answers(model, ids[:, :6], cache)
    assert any(map(any, uses(model).values()))
    change(model)
    expected = by_modules(model, ids[:, 6:], copy.deepcopy(cache), prompt=1)
    assert torch.equal(answers(model, ids[:, 6:], cache, prompt=1), expected)
    assert not torch.equal(answers(model, ids[:, :6]), before)


def test_a_hook_of_all_modules_counts_at_once(by_modules):
    model, ids = tiny_model(), random_ids(2, 9)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :6], cache)
    rest = copy.deepcopy(cache)
    seen = []
    with register_module_forward_hook(lambda module, args, output: seen.append(module)):
        read(model, ids[:, 6:7], cache)
        assert model.model.layers[0].mlp.up_proj in seen
        read(model, ids[:, 7:8], cache)  # and is not recorded
        assert seen.count(model.model.layers[0].mlp.up_proj) == 2
    seen.clear()
    last = read(model, ids[:, 8:], cache)
    assert not seen
    assert torch.equal(last, by_modules(model, ids[:, 6:], rest, prompt=1)[:, 2:])


def test_a_hook_elsewhere_leaves_recordings_as_they_are():
    model, ids = tiny_model(), random_ids(2, 8)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :6], cache)
    assert uses(model) == {WHOLE: [2]}
    nn.Linear(1, 1).register_forward_hook(print)
    read(model, ids[:, 6:7], cache)
    assert uses(model) == {WHOLE: [3]}
    add_hook(model.model.layers[0])  # among those looked at, though not at the first chance
    read(model, ids[:, 7:], cache)
    assert uses(model) == {}


def set_embedding(model):
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight * 2)


def set_dtype_of_embedding(model):
    model.model.embed_tokens.to(torch.bfloat16)


def set_head(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)


def set_norm(model):
    model.model.norm.variance_epsilon = 0.5


def set_config(model):
    model.config.scale_embeddings = not model.config.scale_embeddings


def add_hook_of_model(model):
    model.model.register_forward_hook(
        lambda module, args, output: type(output)(2 * output.last_hidden_state)
    )


def add_hook_of_head(model):
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)


def set_forward_of_embedding(model):
    forward = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda x: 2 * forward(x)


CHANGES_AROUND_LAYERS = [
    *(set_embedding, set_dtype_of_embedding, set_head, set_norm, set_config),
    *(add_hook_of_model, add_hook_of_head, set_forward_of_embedding),
]


@pytest.mark.parametrize("change", CHANGES_AROUND_LAYERS)
def test_what_is_changed_around_the_layers_counts_at_once(change, by_modules):
    model, ids = tiny_model(tie_word_embeddings=False), random_ids(2, 7)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :6], cache)
    assert uses(model) == {WHOLE: [2]}
    rest = copy.deepcopy(cache)
    unchanged = read(model, ids[:, 6:], copy.deepcopy(cache))
    with torch.no_grad():
        change(model)
    changed = read(model, ids[:, 6:], cache)
    assert torch.equal(changed, by_modules(model, ids[:, 6:], rest, prompt=1))
    assert not torch.equal(changed, unchanged)


def test_hidden_states_that_the_config_asks_for_come_out():
    model, ids = tiny_model(), random_ids(1, 7)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :6], cache)
    model.config.output_hidden_states = True
    for _ in range(3):
        with torch.no_grad():
            outputs = model(ids[:, 6:], past_key_values=cache)
        assert len(outputs.hidden_states) == 4


def test_outputs_are_those_of_modules():
    model, ids = tiny_model(), random_ids(1, 6)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :5], cache)
    for return_dict in (True, False):
        with torch.no_grad():
            outputs = model(ids[:, 5:], past_key_values=cache, return_dict=return_dict)
        assert len(outputs) == 2 and outputs[1] is cache
    with torch.no_grad():
        outputs = model(ids[:, 5:], past_key_values=cache)
    assert uses(model) == {WHOLE: [4]}
    assert [*outputs] == ["logits", CACHE]
    assert outputs.loss is outputs.hidden_states is outputs.attentions is None
    assert torch.equal(copy.copy(outputs).logits, outputs["logits"])


@pytest.mark.parametrize("kind", ["sinusoidal", "rotary"])
def test_positions_that_are_given_count(kind):
    model, ids = tiny_model(position_embedding_type=kind), random_ids(2, 8)

    def with_positions():
        cache = LinearAttentionCache(model.config)
        found = [answers(model, ids[:, :6], cache)]
        for t, positions in ((6, [[9]]), (7, [[5], [70]])):
            positions = torch.tensor(positions)
            found.append(read(model, ids[:, t : t + 1], cache, position_ids=positions))
        return torch.cat(found, dim=1)

    assert torch.equal(with_positions(), without_recordings(with_positions)())
    assert uses(model) == {WHOLE: [3, 0]}


def test_a_tensor_may_be_token_and_position_at_once():
    """A recording must not take one for the other when they are two tensors again."""
    model = tiny_model(position_embedding_type="rotary")

    def with_one_tensor():
        cache, same = LinearAttentionCache(model.config), torch.tensor([[1]])
        for _ in range(4):
            read(model, same, cache, position_ids=same)
        return read(model, torch.tensor([[7]]), cache)

    assert torch.equal(with_one_tensor(), without_recordings(with_one_tensor)())
    assert uses(model) == {WHOLE: [2, 0]}


def test_inference_mode_comes_and_goes(by_modules):
    model, ids = tiny_model(), random_ids(1, 12)
    expected = by_modules(model, ids)
    cache = LinearAttentionCache(model.config)
    actual = [read(model, ids[:, :3], cache)]
    for t in range(3, 12):
        with torch.inference_mode(t // 3 % 2 == 1):
            actual.append(read(model, ids[:, t : t + 1], cache))
    assert torch.equal(torch.cat(actual, dim=1), expected)
    assert sum(uses(model)[WHOLE]) > 2


def test_another_forward_of_a_class_counts_at_once(monkeypatch):
    model, ids = tiny_model(), random_ids(1, 6)
    before = answers(model, ids)
    forward = LinearAttention.forward

    def twice(self, *args, **kwargs):
        mixed, nothing = forward(self, *args, **kwargs)
        return 2 * mixed, nothing

    with monkeypatch.context() as patch:
        patch.setattr(LinearAttention, "forward", twice)
        assert not torch.equal(answers(model, ids), before)
    assert torch.equal(answers(model, ids), before)


def test_a_copy_of_a_model_computes_with_its_own_weights():
    model, ids = tiny_model(), random_ids(1, 6)
    before = answers(model, ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert uses(other) == {}
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.zero_()
        assert not torch.equal(answers(other, ids), before)
        assert torch.equal(answers(model, ids), before)


def test_a_model_of_another_dtype_is_recorded_anew(by_modules):
    model, ids = tiny_model(dtype=torch.float32), random_ids(1, 6)
    answers(model, ids)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        assert torch.equal(answers(model, ids), by_modules(model, ids))
        assert {*uses(model)[WHOLE]} == {2}  # none of those from before


class Counting(FeatureMap):
    """Somebody else's: nobody knows what it does beside computing."""

    calls = 0

    def phi(self, x):
        Counting.calls += 1
        return x.exp()


def test_modules_of_others_always_run():
    model, ids = tiny_model(feature_map="softmax"), random_ids(1, 7)
    for layer in model.model.layers:
        layer.self_attn.feature_map = Counting(4, 4, 8)
    answers(model, ids)
    assert Counting.calls == 2 * 3 * 5
    assert uses(model) == {}


def test_only_tokens_that_are_all_alike_are_recorded():
    model, ids = tiny_model(), random_ids(2, 7)
    cache = LinearAttentionCache(model.config)
    read(model, ids[:, :1], cache)  # there is no state yet
    read(model, ids[:, 1:3], cache)
    mask = torch.tensor([[1], [0]])
    read(model, ids[:, 3:4], cache, attention_mask=mask)
    model(ids[:, 4:5], past_key_values=cache)  # with gradients
    with torch.autocast("cpu", torch.bfloat16):
        read(model, ids[:, 5:6], cache)
    model.train()
    read(model, ids[:, 6:], cache)
    model.eval()
    recording = LinearAttentionCache(model.config)
    recording.activate_past_recording()
    answers(model, ids, recording)
    recording.crop(-2)
    assert uses(model) == {}


def test_hooks_of_all_modules_are_called():
    model, ids = tiny_model(), random_ids(1, 6)
    answers(model, ids)
    called = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: called.append(module)
    )
    try:
        answers(model, ids)
    finally:
        handle.remove()
    assert called.count(model.model.layers[0].mlp) == 4
    assert uses(model) == {WHOLE: [2]}


def test_modules_that_became_recordable_are_found():
    model = tiny_model(num_hidden_layers=1)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    answers(model, random_ids(1, 5))
    assert uses(model) == {}
    hook.remove()
    answers(model, random_ids(1, 5))
    assert uses(model) == {WHOLE: [1]}


def test_hidden_states_of_layers_come_out(by_modules):
    model, ids = tiny_model(), random_ids(1, 6)
    answers(model, ids)
    expected = []
    for compute in (by_modules, answers):
        cache = LinearAttentionCache(model.config)
        compute(model, ids[:, :5], cache)
        with torch.no_grad():
            outputs = model(ids[:, 5:], past_key_values=cache, output_hidden_states=True)
        expected.append(torch.stack(outputs.hidden_states))
    assert expected[0].shape == (4, 1, 1, 32)
    assert torch.equal(*expected)


def test_a_graph_that_needs_a_state_as_it_was_is_told():
    model, ids = tiny_model(), random_ids(1, 6)
    cache = LinearAttentionCache(model.config)
    answers(model, ids[:, :5], cache)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    needs_it = (weight * cache.layers[0].tensors["kv"]).sum()
    read(model, ids[:, 5:], cache)
    assert uses(model) == {WHOLE: [2]}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        needs_it.backward()


def test_recordings_are_few_and_none_where_they_are_in_vain(monkeypatch):
    monkeypatch.setattr(decode_layers, "MOST_RECORDINGS", 4)
    model = tiny_model(num_hidden_layers=1)
    for rows in range(1, 7):
        answers(model, random_ids(rows, 5))
    assert uses(model) == {WHOLE: [1] * 4}  # of the last
    monkeypatch.setattr(decode_layers, "TOKENS_BEFORE", 2)
    model = tiny_model(num_hidden_layers=1)
    for rows in range(1, 7):  # none is remembered until it comes again
        answers(model, random_ids(rows, 5))
    assert uses(model) == {}
    assert len(recorded_tokens_of(model).seen) == 4
    answers(model, random_ids(6, 5))
    assert uses(model) == {WHOLE: [1]}
    assert len(recorded_tokens_of(model).seen) == 3


def test_weights_of_before_are_not_kept():
    """Not even by recordings for other numbers of rows, which may never come again."""
    model = tiny_model()
    for rows in (1, 2):
        answers(model, random_ids(rows, 6))
    projection = model.model.layers[0].mlp.up_proj
    before = weakref.ref(projection.weight)
    projection.weight = nn.Parameter(projection.weight.detach().clone())
    answers(model, random_ids(3, 6))
    assert uses(model) == {WHOLE: [2]}
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("variant", ["paper", "hybrid"])
def test_a_model_that_is_let_go_is_freed_at_once(variant):
    """Its weights, too, though its recordings are of them."""
    gc.collect()
    gc.disable()
    try:
        model = tiny_model(**VARIANTS[variant])
        answers(model, random_ids(1, 6))
        assert uses(model)
        kept = [weakref.ref(x) for x in (model, model.model, model.lm_head.weight)]
        del model
        assert [x() for x in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_cache_of_another_model_is_refused_after_a_recording():
    """A recording looks at shapes only, which may be those of another model's states."""
    ours, theirs = (tiny_model(decay=decay) for decay in ("retnet", "lightning"))
    ids, cache = random_ids(1, 6), LinearAttentionCache(theirs.config)
    answers(ours, ids)
    answers(theirs, ids, cache)
    with pytest.raises(ValueError, match=f"{CACHE} must be made for this model, with decay"):
        read(ours, ids[:, :1], cache)
    assert uses(ours) == {WHOLE: [2]}


def test_the_environment_turns_them_off():
    code = (
        "from hf_linear_attention.decode import conditions; print(conditions.ARE_TOKENS_RECORDED)",
        "HF_LINEAR_ATTENTION_RECORD_TOKENS",
    )
    for value, expected in (("0", "False"), ("1", "True"), ("", "True")):
        result = run_python("-c", code[0], **{code[1]: value})
        assert result.stdout.strip() == expected, result.stderr


def test_what_is_made_of_numbers_alone_is_made_once():
    x = torch.randn(4)
    recorder = Recorder([x])
    with recorder:
        powers = torch.exp(torch.arange(4.0) * 2)  # once
        counted = torch.arange(4.0)
        counted.add_(x)  # each time, since it is written to
        shared = torch.ones(4).view(2, 2)  # and what somebody might write to
        y = x * powers + counted + shared.flatten() + torch.rand(4) * 0
    run = recorder.function(y)
    names = [operation.function._schema.name for operation in recorder.operations]
    assert "aten::exp" not in names and "aten::rand" in names
    assert names.count("aten::arange") == 1
    for other in (x, torch.randn(4), torch.randn(4)):
        expected = other * torch.exp(torch.arange(4.0) * 2) + torch.arange(4.0) + other + 1
        assert torch.equal(run(other), expected)


def test_views_of_views_are_made_at_once_and_those_that_change_nothing_are_not():
    x = torch.arange(24.0).view(1, 1, 24)
    recorder = Recorder([x])
    with recorder:
        heads = (x + 1).view(1, 1, 4, 6).select(1, 0)
        rows = heads.transpose(1, 2).unsqueeze(0)  # no other shape of the same order
        y = heads.unsqueeze(1).view(1, 1, 24).view(1, 1, 24) * rows.sum()
    names = [operation.function._schema.name for operation in recorder.operations]
    expected = ["add", *["as_strided"] * 5, "sum", "mul"]
    assert [name.removeprefix("aten::") for name in names] == expected
    bases = [operation.arguments[0] for operation in recorder.operations[1:6]]
    assert len({*bases}) == 1  # the sum
    run = recorder.function(y)
    assert torch.equal(run(x), y)
    other = torch.randn(1, 1, 24)
    assert torch.equal(run(other), (other + 1) * (other + 1).sum())


def test_views_of_weights_are_made_once_and_what_is_computed_of_weights_each_time():
    x, weight = torch.randn(4), torch.randn(4, 1, 3)
    recorder = Recorder([x])
    with recorder:
        first, second, _ = weight.squeeze(1).unbind(1)
        y = first.exp() * x + second
    run = recorder.function(y)
    names = [operation.function._schema.name for operation in recorder.operations]
    assert names == ["aten::exp", "aten::mul", "aten::add"]
    for numbers in (weight.clone(), torch.randn(4, 1, 3)):
        weight.copy_(numbers)
        assert torch.equal(run(x), numbers[:, 0, 0].exp() * x + numbers[:, 0, 1])


@pytest.mark.parametrize("preset", ["gated_deltanet", "qwen3_next"])
def test_tokens_are_recorded_after_hidden_states_were_wanted(preset, by_modules):
    model, ids = tiny_model(**shallow(f"preset_{preset}")), random_ids(1, 9)
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(answers(model, ids), by_modules(model, ids))
    assert any(any(number) for number in uses(model).values())
    with torch.no_grad():  # whatever is recorded, they are all there
        cache = LinearAttentionCache(model.config)
        found = [
            model(token, past_key_values=cache, output_hidden_states=True).hidden_states
            for token in ids.split(1, dim=1)
        ]
    for i, expected in enumerate(wanted):
        actual = torch.cat([states[i] for states in found], dim=1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_tensor_in_the_place_of_a_number_is_seen(by_modules):
    model, ids = tiny_model(**VARIANTS["preset_gated_deltanet"]), random_ids(1, 9)
    answers(model, ids)
    heads = model.config.linear_num_value_heads
    model.model.layers[0].self_attn.largest_beta = torch.linspace(0.3, 0.9, heads)
    assert torch.equal(answers(model, ids), by_modules(model, ids))


def test_an_array_in_the_place_of_another_is_seen(by_modules):
    """Two arrays are neither equal nor not."""
    model, ids = tiny_model(), random_ids(1, 9)
    model.config.counts = np.zeros(2)
    answers(model, ids)
    model.config.counts = np.ones(2)
    assert torch.equal(answers(model, ids), by_modules(model, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_numbers_beside_tensors_of_any_kind_give_the_dtype_that_they_gave(dtype):
    x = torch.arange(1, 5).to(dtype)
    recorder = Recorder([x])
    with recorder:
        y = (x.sum() * 0.5 + 1) * (x + 0.1) * 3 + (x.amax() - 2)
    run = recorder.function(y)
    for other in (x, x * 7):
        expected = (other.sum() * 0.5 + 1) * (other + 0.1) * 3 + (other.amax() - 2)
        assert run(other).dtype == expected.dtype and torch.equal(run(other), expected)


@pytest.mark.parametrize("variant", ["hybrid", "softmax_first", "preset_softmax"])
def test_padding_before_texts_is_no_matter_of_a_trace_of_softmax_layers(variant):
    """A trace of tokens without padding was there before."""
    model, ids = tiny_model(**VARIANTS[variant]), random_ids(2, 5)
    padded = torch.cat([torch.full((2, 3), 0), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    how = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}

    def run(model):
        model.generate(padded, **how)
        return model.generate(padded, attention_mask=mask, **how)

    expected = without_recordings(run)(model)
    assert torch.equal(run(model), expected)
