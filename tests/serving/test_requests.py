# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What requests to Transformers' continuous batching may ask for, do, and do wrong."""

import asyncio
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from engines import NEW_TOKENS, PROMPTS, alone, engine, results, tokens_of, wait_until
from hf_linear_attention.serving import guard, over_http
from tiny import VARIANTS, VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = {"pure": VARIANTS["gated"], "hybrid": VARIANTS["hybrid"]}
ENDLESS = 100_000


@pytest.fixture(scope="module")
def models():
    return {name: tiny_model(**fields) for name, fields in MODELS.items()}


@pytest.fixture(params=MODELS)
def model(request, models):
    return models[request.param]


def test_requests_lose_their_memory_to_others_and_begin_again(models, monkeypatch):
    model, lost = models["hybrid"], []
    with engine(model, {"num_blocks": 12, "safety_margin": 0.0}, max_new_tokens=40) as manager:
        scheduler = manager.batch_processor.scheduler
        add = scheduler.add_waiting_request

        def noted(state):
            lost.append(state._true_initial_tokens > 0)
            add(state)

        monkeypatch.setattr(scheduler, "add_waiting_request", noted)
        answers = tokens_of(results(manager, manager.add_requests(PROMPTS[:5])))
    assert any(lost)
    assert answers == [alone(model, prompt, 40) for prompt in PROMPTS[:5]]


def test_a_pure_model_has_as_many_requests_at_a_time_as_slots(models):
    model = models["pure"]
    with engine(model, {"num_blocks": 1}) as manager:
        allocator = manager.batch_processor.cache.cache_allocators["linear_attention"]
        assert allocator.num_blocks < len(PROMPTS)
        answers = tokens_of(results(manager, manager.add_requests(PROMPTS)))
    assert answers == [alone(model, prompt) for prompt in PROMPTS]


def test_several_sequences_of_a_prompt(model):
    """Of one token as well, where there is nothing to copy."""
    prompts = PROMPTS[:4]
    with engine(model, num_return_sequences=3, do_sample=True, top_k=1) as manager:
        ids = manager.add_requests(prompts)
        all_ids = [f"{i}{child}" for i in ids for child in ("", "__child#0", "__child#1")]
        answers = tokens_of(results(manager, all_ids))
    assert answers == [alone(model, prompt) for prompt in prompts for _ in range(3)]


def test_each_request_has_its_own_end(model):
    prompt = PROMPTS[1]
    expected = alone(model, prompt, 20)
    with engine(model) as manager:
        ids = [
            manager.add_request(prompt, max_new_tokens=1),
            manager.add_request(prompt, max_new_tokens=20),
            manager.add_request(prompt, max_new_tokens=20, eos_token_id=expected[4]),
        ]
        answers = tokens_of(results(manager, ids))
    assert answers == [expected[:1], expected, expected[: expected.index(expected[4]) + 1]]


def test_tokens_are_streamed_as_they_come(model):
    with engine(model) as manager:
        request_id = manager.add_request(PROMPTS[0], streaming=True)
        outputs = list(manager.request_id_iter(request_id))
    expected = alone(model, PROMPTS[0])
    assert [output.generated_tokens for output in outputs] == [
        expected[: n + 1] for n in range(len(expected))
    ]


def test_a_handler_gets_what_was_ready_before_it(model):
    """As in `transformers serve`, which asks first and listens then."""
    outputs = []

    async def listen():
        request_id = manager.add_request(PROMPTS[0], streaming=True)
        wait_until(lambda: manager.output_router.output_queue.qsize() > 2)
        manager.register_result_handler(request_id, outputs.append)
        while not (outputs and outputs[-1].is_finished()):
            await asyncio.sleep(0.001)

    with engine(model) as manager:
        asyncio.run(listen())
        assert manager.output_router.output_queue.empty()
    assert [len(output.generated_tokens) for output in outputs] == list(range(1, NEW_TOKENS + 1))
    assert outputs[-1].generated_tokens == alone(model, PROMPTS[0])


def test_a_cancelled_request_leaves_its_memory_and_listeners(model):
    outputs = []

    async def listen():
        request_id = manager.add_request(PROMPTS[1], streaming=True, max_new_tokens=endless)
        manager.register_result_handler(request_id, outputs.append)
        while not outputs:
            await asyncio.sleep(0.001)
        manager.cancel_request(request_id)
        wait_until(lambda: not manager.batch_processor.has_pending_requests())

    endless = 300 if "full_attention" in model.config.layer_types else ENDLESS
    with engine(model) as manager:
        asyncio.run(listen())
        assert tokens_of(results(manager, manager.add_requests(PROMPTS[:2]))) == [
            alone(model, prompt) for prompt in PROMPTS[:2]
        ]
    assert outputs and not outputs[-1].is_finished()


def test_sampling_is_each_request_s_own_where_the_settings_say_so(model):
    with engine(
        model, {"per_request_processors": True}, do_sample=True, temperature=2.0, top_k=5
    ) as manager:
        greedy = manager.add_request(PROMPTS[0], top_k=1)
        hot = manager.add_request(PROMPTS[0], temperature=1e6, top_k=VOCAB_SIZE, max_new_tokens=30)
        answers = tokens_of(results(manager, [greedy, hot]))
    assert answers[0] == alone(model, PROMPTS[0])
    assert len(set(answers[1])) > 5


def test_top_k_may_be_more_than_there_are_tokens(model):
    """As in generate(): there it means all of them, be it the settings' own or a request's."""
    sampling = {"do_sample": True, "temperature": 1e-4, "top_k": VOCAB_SIZE + 1}
    with engine(model, {"per_request_processors": True}, **sampling) as manager:
        ids = [manager.add_request(PROMPTS[0]), manager.add_request(PROMPTS[1], top_k=10**6)]
        answers = tokens_of(results(manager, ids))
    assert answers == [alone(model, prompt) for prompt in PROMPTS[:2]]


WRONG = {
    "empty": ([], {}, "a prompt must have at least one token"),
    "unknown": ([3, VOCAB_SIZE], {}, f"tokens must be integers from 0 to {VOCAB_SIZE - 1}, got 41"),
    "negative": ([-1], {}, "tokens must be integers from 0"),
    "text": (["a"], {}, "tokens must be integers from 0 .* got 'a'"),
    "none_new": ([3], {"max_new_tokens": 0}, "max_new_tokens must be None or .* got 0"),
    "length_of_text": ([3], {"max_new_tokens": "9"}, "max_new_tokens must be None or .* got '9'"),
    "temperature": ([3], {"temperature": 0.0}, r"temperature must be greater than 0, got 0\.0"),
    "top_k": ([3], {"top_k": 0}, "top_k must be from 1 to 2147483647, got 0"),
    "large_top_k": ([3], {"top_k": 2**31}, "top_k must be from 1 to .*, got 2147483648"),
    "top_p": ([3], {"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1\.5"),
    "other": ([3], {"wrong": 1}, "Unknown logit_processor_kwargs: {'wrong'}"),
}


def test_what_a_request_does_wrong_fails_it_alone(model):
    sampling = {"do_sample": True, "temperature": 2.0, "top_k": 1, "top_p": 0.9}
    with engine(model, {"per_request_processors": True}, **sampling) as manager:
        right = manager.add_requests(PROMPTS[:2])
        wrong = [manager.add_request(ids, **options) for ids, options, _ in WRONG.values()]
        right += manager.add_requests(PROMPTS[2:4])
        *outputs, again = results(manager, [*right, *wrong, manager.add_request(PROMPTS[0])])
    expected = [alone(model, prompt) for prompt in PROMPTS[:4]]
    assert tokens_of([*outputs[:4], again]) == [*expected, expected[0]]
    for output, (_, _, message) in zip(outputs[4:], WRONG.values(), strict=True):
        assert output.error is not None
        assert re.search(message, output.error)


def test_a_refused_request_fails_with_all_its_sequences(model):
    """`generate_batch` waits for each of them, without end."""
    with engine(model, num_return_sequences=2, do_sample=True, top_k=1) as manager:
        ids = manager.add_requests([PROMPTS[0], [VOCAB_SIZE]])
        all_ids = [f"{i}{child}" for i in ids for child in ("", "__child#0")]
        *right, refused, child = results(manager, all_ids)
    assert tokens_of(right) == [alone(model, PROMPTS[0])] * 2
    for output in (refused, child):
        assert output.error.startswith("tokens must be integers from 0")


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_prompt_may_be_an_array(kind, model):
    """As in Transformers' engine."""
    with engine(model) as manager:
        ids = manager.add_requests([kind(prompt) for prompt in PROMPTS[:2]])
        outputs = results(manager, ids)
    assert tokens_of(outputs) == [alone(model, prompt) for prompt in PROMPTS[:2]]


def test_an_id_that_is_in_use_is_refused(model):
    """Two requests of one id would share memory and answers, and fail all of their batch."""
    with engine(model) as manager:
        with manager.pause():  # so that none of them ends meanwhile
            manager.add_request(PROMPTS[0], request_id="mine")
            with pytest.raises(ValueError, match="a request with the id 'mine' is under way"):
                manager.add_request(PROMPTS[1], request_id="mine")
        assert tokens_of(results(manager, ["mine"])) == [alone(model, PROMPTS[0])]
        manager.add_request(PROMPTS[1], request_id="mine")  # which is free again
        assert tokens_of(results(manager, ["mine"])) == [alone(model, PROMPTS[1])]


@pytest.mark.parametrize(
    ("fields", "settings", "longest"),
    [
        (VARIANTS["learned"], {}, 65),  # the last token has no position, as nobody reads it
        (VARIANTS["hybrid"], {"num_blocks": 4}, None),
    ],
    ids=["positions", "pages"],
)
def test_a_request_that_would_not_fit_fails_alone(fields, settings, longest):
    model = tiny_model(**fields)
    with engine(model, settings) as manager:
        admit = manager.batch_processor.scheduler.admit
        longest = longest or admit.longest + 1
        ids = [
            manager.add_request(PROMPTS[0], max_new_tokens=longest - len(PROMPTS[0]) + 1),
            manager.add_request(PROMPTS[0], max_new_tokens=longest - len(PROMPTS[0])),
            manager.add_request(PROMPTS[1]),
        ]
        too_long, fits, other = results(manager, ids)
    message = f"prompt and answer must have at most {longest} tokens"
    assert too_long.error.startswith(message) and not too_long.generated_tokens
    assert tokens_of([fits, other]) == [
        alone(model, PROMPTS[0], longest - len(PROMPTS[0])),
        alone(model, PROMPTS[1]),
    ]


@pytest.mark.parametrize(
    "end", [-1, VOCAB_SIZE, 7], ids=["no_end_token", "none_of_the_vocabulary", "positions"]
)
def test_an_answer_needs_an_end(end):
    fields = VARIANTS["learned"] if end == 7 else {}
    with engine(tiny_model(**fields), max_new_tokens=None, eos_token_id=end) as manager:
        (output,) = results(manager, [manager.add_request(PROMPTS[0])])
    assert "max_new_tokens must be given where there is no end token" in output.error
    assert ("or for which there are learned positions" in output.error) == (end == 7)


@pytest.mark.parametrize("sequences", [1, 2])
def test_an_error_in_a_forward_ends_its_batch_and_not_the_server(model, sequences, monkeypatch):
    forward, is_broken = type(model.model).forward, True

    def broken(self, *args, **kwargs):
        if is_broken:
            raise RuntimeError("out of luck")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", broken)
    sampling = {"num_return_sequences": sequences, "do_sample": True, "top_k": 1}
    with engine(model, **sampling) as manager:
        ids = manager.add_requests(PROMPTS[:2])
        ids += [f"{i}__child#0" for i in ids] if sequences > 1 else []
        outputs = results(manager, ids)
        assert [output.error for output in outputs] == ["out of luck"] * len(ids)
        is_broken = False
        manager.num_return_sequences = 1
        assert tokens_of(results(manager, manager.add_requests(PROMPTS[:2]))) == [
            alone(model, prompt) for prompt in PROMPTS[:2]
        ]


def test_a_request_that_outgrows_the_memory_fails_alone(models):
    """Without a limit of its own nobody can know before."""
    model = models["hybrid"]
    answer = alone(model, PROMPTS[0], 100)  # of more tokens than there are pages
    never = {"max_new_tokens": None, "eos_token_id": min(set(range(VOCAB_SIZE)) - set(answer))}
    with engine(model, {"num_blocks": 4}, **never) as manager:
        (output,) = results(manager, [manager.add_request(PROMPTS[0])])
        assert "No requests can be scheduled" in output.error
        again = manager.add_request(PROMPTS[0], max_new_tokens=5)
        assert tokens_of(results(manager, [again])) == [alone(model, PROMPTS[0], 5)]
    assert 5 < len(output.generated_tokens) < len(answer)
    assert output.generated_tokens == answer[: len(output.generated_tokens)]


REFUSED = {
    "use_async_batching": {"use_async_batching": True},
    "use_cuda_graph": {"use_cuda_graph": True},
    "default_compile_level": {"default_compile_level": 1},
    "cpu_offload_space": {"cpu_offload_space": 1.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_states_do_not_allow_are_refused(name, model):
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"layers with states needs settings without.*{name}"):
        with engine(model, REFUSED[name]):
            pass
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("ends", [True, False])
def test_prompts_wait_for_those_that_come_with_them(ends, monkeypatch):
    """Until all of them are here, but only so long, if one never comes."""
    monkeypatch.setattr(guard, "MOST_PATIENCE", 600 if ends else 0.1)
    with engine(tiny_model(), max_new_tokens=3) as manager:
        manager._patience = 600 if ends else 0.1
        monkeypatch.setattr(over_http.asyncio, "current_task", lambda: None)
        over_http.ARRIVALS.begin()
        try:
            request = manager.add_request(PROMPTS[0])
            if ends:
                time.sleep(0.2)
                assert manager.output_router.output_queue.empty()
                over_http.ARRIVALS.end()
            assert len(tokens_of(results(manager, [request]))[0]) == 3
        finally:
            over_http.ARRIVALS.end()


@pytest.mark.parametrize("sampling", [None, "of each request"])
def test_stop_strings_are_heeded_where_requests_have_settings_of_their_own(sampling):
    """A model's generation_config may have some: elsewhere its requests are none that stream."""
    requested = over_http.Requested(GenerationConfig(), {"stop_strings": "w1"}, {}, None)
    token = over_http.REQUESTED.set(requested)
    try:
        manager = SimpleNamespace(sampling=sampling)
        assert guard.GuardedManager.heeds_stop_strings(manager) == (sampling is not None)
    finally:
        over_http.REQUESTED.reset(token)
