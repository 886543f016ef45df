# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Generated tokens of Transformers' layers around our recurrent ones, recorded and run again."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from hf_linear_attention import use_kernels
from hf_linear_attention.decode import conditions
from hf_linear_attention.upstream.experts import Experts
from hf_linear_attention.upstream.recorded_layers import (
    RecordedLayer,
    _recordings,
    given_beside,
    states_in,
)
from hf_linear_attention.upstream.recorded_models import _traces
from upstream_models import CONFIGS, ONE_OF_EACH, VOCAB_SIZE, cache_name, cast, tiny_upstream
from without_recordings import without_recordings

# Their recurrent layers also attend, have several convolutions, or another cache.
NOT_RECORDED = {
    "falcon_h1",
    "inkling_text",
    "inkling2_text",
    "inkling2_loop_text",
    "minimax",
    "xlstm",
    "zaya",
}
# Layer by layer: softmax layers keep vectors that keys are made of, choose keys, or are beside a
# recurrence.
NOT_WHOLE = NOT_RECORDED | {
    "bailing_hybrid",
    "glm5_next",
    "kimi_linear",
    "qwen4_exp_text",
    "zamba",
    "zamba2",
}
OFTEN_RECORDED = sorted(set(ONE_OF_EACH) - NOT_RECORDED)


def changed(model_type, dtype=torch.float32):
    model = cast(tiny_upstream(model_type), dtype)
    use_kernels(model)
    return model


def random_ids(B, T):
    return torch.randint(2, VOCAB_SIZE - 4, (B, T), generator=torch.Generator().manual_seed(0))


class Reader:
    """Reads tokens with a cache, and counts them."""

    def __init__(self, model):
        self.model, self.cache, self.count = model, {}, 0

    def __call__(self, ids, **kwargs):
        if self.model.config.model_type == "bamba":  # which would count from 0 again
            kwargs["position_ids"] = torch.arange(self.count, self.count + ids.shape[1])[None]
        self.count += ids.shape[1]
        with torch.no_grad():
            output = self.model(ids, use_cache=True, **self.cache, **kwargs)
        name = cache_name(self.model)
        self.cache = {name: output[name]}
        return output.logits


def answers(model, ids, prompt=3):
    """The logits of a prompt, and then of each token, (B, T, vocabulary)."""
    read = Reader(model)
    pieces = ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)
    return torch.cat([read(piece) for piece in pieces], dim=1)


@pytest.fixture
def by_modules():
    return without_recordings(answers)


def whole_of(model):
    """The recordings of a model within, and how often each was run."""
    traces = [_traces[module] for module in model.modules() if module in _traces]
    return [one for trace in traces for one in trace.tokens.recordings.values()]


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, RecordedLayer)]


def uses(model):
    """Of each layer's recordings, how often each was run."""
    of_layers = map(_recordings.get, layers_of(model))
    return [x and [one.uses for one in x.tokens.recordings.values()] for x in of_layers]


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_recordings_answer_as_modules_do_to_the_last_bit(model_type, dtype, by_modules):
    model, ids = changed(model_type, dtype), random_ids(2, 9)
    expected = by_modules(model, ids)
    assert torch.equal(answers(model, ids), expected)
    assert torch.equal(answers(model, ids), expected)
    if model_type in NOT_RECORDED:
        assert layers_of(model) == []
    else:
        assert len(layers_of(model)) == sum(
            hasattr(type(x), "recurrences") for x in model.modules()
        )
    if model_type not in NOT_WHOLE:
        assert [one.uses for one in whole_of(model) if one.run is not None] == [11]
    elif model_type in OFTEN_RECORDED:
        first = 0 if whole_of(model) else 1  # a token is tried whole before
        assert all(numbers == [10 + first] for numbers in uses(model))


@pytest.mark.parametrize("are_all_multiplied_at_once", [True, False])
def test_experts_that_numbers_choose_are_chosen_anew(are_all_multiplied_at_once, by_modules):
    model = changed("qwen3_next")
    for module in model.modules():
        if isinstance(module, Experts):
            module._is_expert_parallel = not are_all_multiplied_at_once
    for seed in range(4):
        ids = torch.randint(
            2, VOCAB_SIZE - 4, (2, 9), generator=torch.Generator().manual_seed(seed)
        )
        assert torch.equal(answers(model, ids), by_modules(model, ids))
    # Python that goes through the chosen ones can't be recorded.
    assert [one.uses for one in whole_of(model)] == [23 if are_all_multiplied_at_once else 0]


@pytest.mark.parametrize("model_type", OFTEN_RECORDED)
def test_undone_nothing_is_recorded_and_pickles_forget(model_type):
    model, ids = tiny_upstream(model_type), random_ids(1, 6)
    classes = [type(module) for module in model.modules()]
    with use_kernels(model):
        before = answers(model, ids)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert set(uses(other)) == {None} and not whole_of(other)
            with torch.no_grad():
                other.get_output_embeddings().weight.mul_(2)
                layers_of(other)[0].register_parameter("more", nn.Parameter(torch.ones(1)))
            assert torch.equal(answers(other, ids), before * 2)
        assert [name for name, _ in model.named_modules() if "record" in name] == []
    assert [type(module) for module in model.modules()] == classes
    assert not layers_of(model) and not whole_of(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("model_type", OFTEN_RECORDED)
def test_weights_and_dtypes_that_change_count_at_once(model_type, by_modules):
    model, ids = changed(model_type), random_ids(2, 6)
    before = answers(model, ids)
    weight = next(x for x in layers_of(model)[0].parameters() if x.dim() == 2)
    with torch.no_grad():
        weight.mul_(-2)
    assert not torch.equal(answers(model, ids), before)
    assert torch.equal(answers(model, ids), by_modules(model, ids))
    model.to(torch.bfloat16)
    assert torch.equal(answers(model, ids), by_modules(model, ids))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2"])
def test_a_model_that_nobody_has_is_freed(model_type):
    """Recordings are kept by layers and models, and must not be what keeps these."""
    model, number = changed(model_type), len(_recordings) + len(_traces)
    answers(model, random_ids(1, 9))
    assert any(one.uses for one in whole_of(model))
    layers = [*map(weakref.ref, layers_of(model))]
    weights = [weakref.ref(next(layer().parameters())) for layer in layers]
    del model
    gc.collect()
    assert {x() for x in (*layers, *weights)} == {None}
    assert len(_recordings) + len(_traces) <= number


def test_padding_drafts_and_gradients_are_left_to_the_modules(by_modules):
    model, ids = changed("qwen3_5_text"), random_ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :2] = 0
    results = []
    for recorded in (True, False):
        read = Reader(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conditions, "ARE_TOKENS_RECORDED", recorded)
            pieces = [read(ids[:, :4], attention_mask=mask[:, :4])]
            pieces += [
                read(ids[:, t : t + 1], attention_mask=mask[:, : t + 1]) for t in range(4, 8)
            ]
        results.append(torch.cat(pieces, dim=1))
    assert torch.equal(*results)

    read = Reader(model)
    read(ids[:, :4])
    (cache,) = read.cache.values()
    cache.activate_past_recording()
    first = [read(ids[:, 4:5]), read(ids[:, 5:6])]
    cache.crop(-2)
    again = [read(ids[:, 4:5]), read(ids[:, 5:6])]
    assert torch.equal(torch.cat(first), torch.cat(again))
    with torch.enable_grad():
        loss = model(ids[:, 6:7], **read.cache).logits.sum()
    loss.backward()
    assert all(x.grad is not None for x in layers_of(model)[0].mlp.parameters())


def test_all_that_a_layer_is_given_counts():
    model = changed("qwen3_5_text")
    read = Reader(model)
    read(random_ids(1, 3))
    (cache,) = read.cache.values()
    x, y = torch.ones(1), torch.ones(2)
    one = given_beside(cache, (None,), {"a": (x, y), "cache": cache, "scale": 2.0})
    assert one.tensors[0] is x and one.tensors[1] is y
    for args, kwargs in (
        ((), {"a": (x, y), "cache": cache, "scale": 2.0}),
        ((None,), {"a": (x, y), "cache": cache, "scale": 3.0}),
        ((None,), {"b": (x, y), "cache": cache, "scale": 2.0}),
        ((None,), {"a": (x, y), "cache": cache}),
    ):
        assert given_beside(cache, args, kwargs).constants != one.constants
    assert given_beside(cache, (object(),), {"cache": cache}) is None
    assert states_in(cache, 0).cached is cache.layers[0]
    assert states_in(cache, 1) is None  # of keys and values, which grow


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "granitemoehybrid"])
def test_forks_beams_and_pieces_between_tokens_count(model_type, by_modules):
    """Whatever becomes of a cache between tokens, the next one goes on from that."""
    model = changed(model_type)

    def run(model, ids):
        read, logits = Reader(model), []
        logits.append(read(ids[:, :5]))
        for t in range(5, 40):
            piece = ids[:, t : t + (3 if t % 11 == 0 else 1)]
            logits.append(read(piece)[:, -1])
            (cache,) = read.cache.values()
            if t % 7 == 0:
                cache.reorder_cache(torch.tensor([1, 1]))
            if t % 9 == 0:  # a fork goes its own way
                fork = Reader(model)
                fork.cache, fork.count = copy.deepcopy(read.cache), read.count
                logits.append(fork(ids[:, :1])[:, -1])
                logits.append(fork(ids[:, 1:2])[:, -1])
            if t == 20:
                read.cache = copy.deepcopy(read.cache)
        return torch.cat([x.flatten() for x in logits])

    ids = random_ids(2, 45)
    expected = without_recordings(run)(model, ids)
    assert torch.equal(run(model, ids), expected)
    assert max(one.uses for one in whole_of(model)) > 25


def test_a_whole_model_that_depends_on_numbers_of_tokens_is_not_recorded(by_modules):
    """Transformers' Python may look at how many tokens a cache has: the first trace is wrong then,
    and is found out at the next token, by which nothing was given that is wrong.
    """
    model = changed("qwen3_5_text")
    rotary = type(model.model.rotary_emb)
    before = rotary.forward

    def by_number(self, x, position_ids):
        count = position_ids.numpy().max().item()  # no operation of torch's says so
        return tuple(y * (1 + count) for y in before(self, x, position_ids))

    ids = random_ids(1, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "forward", by_number)
        expected = by_modules(model, ids)
        assert torch.equal(answers(model, ids), expected)
        assert [one.run for one in whole_of(model)] == [None]
    assert not torch.equal(answers(model, ids), expected)


def test_a_model_that_returns_more_than_hidden_states_is_left_to_its_modules(by_modules):
    model, ids = changed("mamba2"), random_ids(1, 6)
    plain = answers(model, ids)
    read = Reader(model)
    read(ids[:, :3])
    for t in range(3, 6):
        with torch.no_grad():
            output = model(ids[:, t : t + 1], output_hidden_states=True, **read.cache)
        assert len(output.hidden_states) == len(model.backbone.layers) + 1
        assert torch.equal(output.logits[:, 0], plain[:, t])
    assert torch.equal(answers(model, ids), plain)
    model.config.output_hidden_states = True
    read = Reader(model)
    with torch.no_grad():
        read(ids[:, :3])
        output = model(ids[:, 3:4], **read.cache)
    assert output.hidden_states is not None


def test_outputs_are_of_the_models_own_class():
    model = changed("qwen3_5_text")
    read, ids = Reader(model), random_ids(1, 8)
    read(ids[:, :4])
    kinds = []
    with torch.no_grad():
        for t in range(4, 8):
            output = model.model(ids[:, t : t + 1], **read.cache)
            kinds.append((type(output), [*output]))
            assert output[cache_name(model)] is [*read.cache.values()][0]
            assert output[0] is output.last_hidden_state
    assert len(set(map(str, kinds))) == 1
    assert whole_of(model)[0].uses == 3


def plain_loop(model, ids, mask_of=lambda t: None, prompt=4):
    """Tokens one by one, with no positions, and masks (1, ...) by the number of the token."""
    name, cache, logits = cache_name(model), None, []
    with torch.no_grad():
        for piece in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            mask = None if cache is None else mask_of(len(logits))
            given = {} if cache is None else {name: cache}
            output = model(piece, use_cache=True, attention_mask=mask, **given)
            cache = output[name]
            logits.append(output.logits[:, -1])
    return torch.stack(logits, dim=1), cache


@pytest.mark.parametrize("model_type", OFTEN_RECORDED)
def test_tokens_without_positions_and_with_short_masks_are_what_modules_give(model_type):
    model, ids = changed(model_type), random_ids(1, 12)
    masks = {
        "none": lambda t: None,
        "of the token alone": lambda t: torch.ones(1, 1, dtype=torch.long),
        "of all": lambda t: torch.ones(1, 4 + t, dtype=torch.long),
    }
    for name, mask_of in masks.items():
        expected, _ = without_recordings(plain_loop)(model, ids, mask_of)
        actual, _ = plain_loop(model, ids, mask_of)
        assert torch.equal(actual, expected), name


def test_layers_that_a_config_leaves_out_stay_as_they_are():
    model, ids = changed("qwen3_5_text"), random_ids(1, 20)
    layers = model.config.num_hidden_layers

    def run(model, ids):
        _, cache = plain_loop(model, ids[:, :8])
        logits = []
        with torch.no_grad():
            for number in (1, layers):
                model.config.num_hidden_layers = number
                for t in range(8, 14):
                    output = model(ids[:, t : t + 1], **{cache_name(model): cache})
                    logits.append(output.logits)
        return torch.cat(logits, dim=1)

    expected = without_recordings(run)(model, ids)
    assert torch.equal(run(model, ids), expected)


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_a_token_out_of_range_is_named(token):
    model, ids = changed("qwen3_5_text"), random_ids(1, 10)
    _, cache = plain_loop(model, ids)
    given = {"use_cache": True, "attention_mask": None, cache_name(model): cache}
    with torch.no_grad(), pytest.raises(IndexError, match=f"input_ids .*got {token} to"):
        model(torch.full_like(ids, token)[:, :1], **given)
