# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tokens are drawn by their probabilities; and a request whose logits are NaN ends with an error,
and no other with it.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState

from engines import NEW_TOKENS, PROMPTS, alone, engine, results, tokens_of
from hf_linear_attention.serving.broken_rows import NO_TOKEN, RowSampler
from hf_linear_attention.serving.sampling import KEY, Sampling, drawn
from tiny import VARIANTS, VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = 60  # tokens: not at an end before it is poisoned
MODELS = {
    "pure": (VARIANTS["gated"], 3),
    "hybrid": (VARIANTS["hybrid"], 60),
    "latent": (VARIANTS["preset_kimi_linear"], 60),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """A model, settings of the engine, and what generate() answers to the first PROMPTS."""
    fields, num_blocks = MODELS[request.param]
    model = tiny_model(**fields)
    return model, {"num_blocks": num_blocks}, [alone(model, ids, LONG) for ids in PROMPTS[:3]]


def poison(manager, request_id: str) -> None:
    """Makes all that a slot holds NaN."""
    slots = manager.batch_processor.cache.cache_allocators["linear_attention"]
    with manager.pause():
        slot = slots.slot_of(request_id)
        for parts in slots.states.values():
            for part in parts.values():
                part[slot] = torch.nan


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "drawn"])
def test_a_poisoned_slot_fails_its_request_alone(case, sampling):
    model, settings, expected = case
    with engine(model, settings, max_new_tokens=LONG, **sampling) as manager:
        ids = [
            manager.add_request(PROMPTS[0]),
            manager.add_request(PROMPTS[1], max_new_tokens=5 * LONG, streaming=True),
            manager.add_request(PROMPTS[2]),
        ]
        assert manager.get_result(timeout=60).request_id == ids[1]
        poison(manager, ids[1])
        first, broken, third = results(manager, ids)
        assert broken.error == NO_TOKEN
        common = min(len(broken.generated_tokens), LONG)
        assert broken.generated_tokens[:common] == expected[1][:common]
        assert tokens_of([first, third]) == [expected[0], expected[2]]


def test_memory_begins_at_zero_whatever_was_in_it(case):
    model, settings, expected = case
    with engine(model, settings) as manager:
        with manager.pause():
            manager.batch_processor.cache.cache_tensor.fill_(255)  # NaN as a number of any size
        outputs = results(manager, manager.add_requests(PROMPTS[:3]))
    assert tokens_of(outputs) == [tokens[:NEW_TOKENS] for tokens in expected]


def test_a_temperature_that_leaves_no_numbers_fails_its_request_alone():
    model, sampling = tiny_model(), {"do_sample": True, "temperature": 2.0, "top_k": 5}
    with engine(model, {"per_request_processors": True}, **sampling) as manager:
        ids = [
            manager.add_request(PROMPTS[0], top_k=1),
            manager.add_request(PROMPTS[1], temperature=1e-44),
        ]
        right, broken = results(manager, ids)
    assert tokens_of([right]) == [alone(model, PROMPTS[0])]
    assert broken.error == NO_TOKEN


GREEDY, DRAWN = GenerationConfig(do_sample=False), GenerationConfig(do_sample=True, top_k=1)


def test_a_row_of_no_numbers_is_found_whatever_the_rows_beside_it():
    samplings = [Sampling(tiny_model(), config) for config in (GREEDY, DRAWN, GREEDY, DRAWN)]
    logits = torch.randn(4, VOCAB_SIZE)
    expected = logits.argmax(-1).tolist()
    logits[2, 3] = torch.nan
    requests = [
        SimpleNamespace(
            state=SimpleNamespace(logit_processor_kwargs={KEY: sampling}), has_new_token=True
        )
        for sampling in samplings
    ]

    def sample(scores, output_ids):
        assert runner.do_sample
        output_ids[0] = torch.multinomial(scores[0].softmax(-1), 1)[:, 0]

    runner = SimpleNamespace(
        _sample=sample,
        pad_inputs=False,
        return_logprobs=False,
        cb_config=SimpleNamespace(use_async_batching=False),
        inputs_and_outputs=SimpleNamespace(requests_in_batch=requests),
    )
    tokens, sampler = torch.zeros(2, 4, dtype=torch.int32), RowSampler(runner, samplings[0])
    runner._sample(logits[None], tokens)
    assert sampler.broken == [2]
    assert [tokens[0, row].item() for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]


def test_a_request_that_loses_its_memory_keeps_its_sampling():
    sampling = Sampling(tiny_model(), DRAWN)
    state = RequestState("lost", initial_tokens=[1, 2], logit_processor_kwargs={KEY: sampling})
    again = state.create_equivalent_initial_request()
    assert again.logit_processor_kwargs[KEY] is sampling


@pytest.mark.parametrize("V", [7, 512, 1300])
def test_tokens_are_drawn_by_their_probabilities(V, monkeypatch):
    generator = torch.Generator().manual_seed(V)
    probabilities = torch.rand(V, generator=generator)
    probabilities[torch.randperm(V, generator=generator)[: V // 2]] = 0
    numbers = torch.linspace(0, 1, 20_000, dtype=torch.float64)
    numbers[-1] = 1 - 2**-53  # the largest below 1
    monkeypatch.setattr(torch, "rand", lambda *sizes, **_: numbers[:, None])
    tokens = drawn(probabilities.expand(len(numbers), -1))[:, 0]
    upto = probabilities.double().cumsum(0)
    # as far from a border as sums of float32 in a block are
    sure = [number * upto[-1] + shift for number in numbers for shift in (-1e-4, 1e-4)]
    low, high = torch.searchsorted(upto, torch.stack(sure), right=True).view(-1, 2).unbind(1)
    assert ((low <= tokens) & (tokens <= high)).all() and (tokens == low).float().mean() > 0.9
    assert (probabilities[tokens] > 0).all()


def test_drawn_tokens_have_the_rates_of_their_probabilities():
    probabilities = torch.zeros(1, 1025)
    probabilities[0, [3, 511, 512, 1024]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    generator = torch.Generator().manual_seed(0)
    tokens = drawn(probabilities.expand(10_000, -1), generator)
    rates = torch.bincount(tokens[:, 0], minlength=1025) / len(tokens)
    torch.testing.assert_close(rates, probabilities[0], atol=0.015, rtol=0)
