# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching of checkpoints with their code, recurrences of users, and what can't be."""

import asyncio
import gc
import json
import sys
import threading

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBGenerateManager
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from engines import NEW_TOKENS, PROMPTS, alone, engine, results, tokens_of
from hf_linear_attention import LinearAttentionForCausalLM
from hf_linear_attention.mixers.facts import REGISTERED_MIXERS
from hf_linear_attention.serving import requirements
from moving_average import MovingSumMixer
from saved_models import WITHOUT_PACKAGE, run, word_tokenizer
from tiny import HYBRID, VARIANTS, VOCAB_SIZE, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATE_BATCH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
try:
    outputs = model.generate_batch(
        json.loads(sys.argv[2]),
        GenerationConfig(max_new_tokens=int(sys.argv[3]), do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(page_size=8, num_blocks=100),
    )
    print(json.dumps([output.generated_tokens for output in outputs.values()]))
except NotImplementedError as error:
    print(json.dumps(str(error)))
"""

THREADS = """
import json, os, time
import torch
from hf_linear_attention.serving.guard import release_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
torch.ones(2**20).exp()
busy = threads()
release_threads()
deadline = time.monotonic() + 60
while threads() == busy and time.monotonic() < deadline:
    time.sleep(0.001)
released = threads()
torch.ones(2**20).exp()
print(json.dumps([busy - released, busy - threads()]))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model, and what it answers to PROMPTS."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(dtype=torch.float32, **VARIANTS["hybrid"])
    model.save_pretrained(folder)
    return folder, [alone(model, prompt) for prompt in PROMPTS]


def test_a_checkpoint_s_code_uses_the_installed_package(saved, tmp_path):
    folder, expected = saved
    arguments = folder, json.dumps(PROMPTS), NEW_TOKENS
    assert run(GENERATE_BATCH, *arguments, modules=tmp_path) == expected


def test_without_the_package_an_error_says_so(saved, tmp_path):
    arguments = saved[0], json.dumps(PROMPTS), NEW_TOKENS
    error = run(WITHOUT_PACKAGE + GENERATE_BATCH, *arguments, modules=tmp_path)
    assert "needs the package hf-linear-attention" in error


@pytest.mark.parametrize("layers", [{}, {"layer_types": HYBRID, "sliding_window": 5}])
def test_a_recurrence_of_a_user_is_served(layers, monkeypatch):
    monkeypatch.setitem(REGISTERED_MIXERS, "moving_sum", MovingSumMixer)
    model = tiny_model(mixer="moving_sum", **layers)
    with engine(model, {"max_batch_tokens": 20}) as manager:
        answers = tokens_of(results(manager, manager.add_requests(PROMPTS)))
    assert answers == [alone(model, prompt) for prompt in PROMPTS]


def test_a_model_of_half_precision_keeps_its_sums_in_float32():
    model = tiny_model(dtype=torch.bfloat16, **VARIANTS["gated"])
    with engine(model) as manager:
        states = manager.batch_processor.cache.cache_allocators["linear_attention"].states
        assert {name: x.dtype for name, x in states[0].items()} == {
            "kv": torch.float32,
            **dict.fromkeys(("q_conv", "k_conv", "v_conv"), torch.bfloat16),
        }
        answers = tokens_of(results(manager, manager.add_requests(PROMPTS[:3])))
    assert all(len(answer) == NEW_TOKENS for answer in answers)


def test_other_models_see_transformers_as_it_was():
    with engine(tiny_model()):
        assert "linear_attention" not in paged_cache.ATTN_TYPE_TO_ALLOCATOR


def test_generate_leads_here_too():
    model = tiny_model()
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1}
    outputs = model.generate(torch.tensor([PROMPTS[0]]), cache_implementation="paged", **options)
    assert outputs.flatten().tolist() == PROMPTS[0] + alone(model, PROMPTS[0], 5)


def test_a_manager_is_kept_for_later():
    model = tiny_model(**VARIANTS["hybrid"])
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    settings = ContinuousBatchingConfig(page_size=8, num_blocks=50)
    expected = [alone(model, prompt) for prompt in PROMPTS[:3]]
    for _ in range(2):
        outputs = model.generate_batch(PROMPTS[:3], config, settings, persistent_manager=True)
        assert tokens_of(list(outputs.values())) == expected
    model.destroy_cached_continuous_batching_manager()


def test_the_thread_that_waits_for_an_engine_leaves_it_the_cores(tmp_path):
    assert run(THREADS, modules=tmp_path) == [1, 0]


class Patient(threading.Event):
    """Is not in a hurry: whoever waits for it has to be woken."""

    def wait(self, timeout=None):
        return super().wait(60)


def test_an_idle_engine_ends_at_once_and_what_was_there_before_is_no_garbage_of_its():
    model = tiny_model()
    with engine(model, start=False) as manager:
        manager._wake_up_loop = Patient()
        manager.start()
        assert gc.get_freeze_count() > 0
        answers = tokens_of(results(manager, manager.add_requests(PROMPTS[:2])))
        manager.stop(timeout=30)
        assert not manager.is_running()
        assert gc.get_freeze_count() == 0
        manager.warmup()  # the pages that the end of the test looks at
    assert answers == [alone(model, prompt) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize(
    "missing", ["cache_allocators", "model_runner"], ids=["allocators", "runner"]
)
def test_with_another_transformers_an_error_says_so(missing, monkeypatch):
    engine_of_ours = "hf_linear_attention.serving"
    for name in [name for name in sys.modules if name.startswith(engine_of_ours)]:
        monkeypatch.delitem(sys.modules, name)
    module = f"transformers.generation.continuous_batching.{missing}"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotImplementedError, match="a release of Transformers that it was made for"):
        tiny_model().init_continuous_batching()


@pytest.fixture
def looked_at_anew():
    requirements.check_release.cache_clear()
    yield
    requirements.check_release.cache_clear()


def no_arguments(self):
    self.cb_config = None


LACKING = {
    "no_method": (
        (ContinuousBatchingManager, "_generation_step", None),
        "has no ContinuousBatchingManager._generation_step",
    ),
    "arguments": (
        (paged_cache.PagedAttentionCache, "update", lambda self, states, layer_idx: None),
        r"has PagedAttentionCache.update\(states, layer_idx\), not \(key_states, value_states, ",
    ),
    "attributes": (
        (ModelRunner, "__init__", no_arguments),
        "has no ModelRunner.do_sample; no ModelRunner.inputs_and_outputs; ",
    ),
    "batch": (
        (PagedAttentionArgs, "__annotations__", PagedAttentionArgs.__annotations__ | {"new": int}),
        "has 'new' in PagedAttentionArgs",
    ),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_a_release_lacks_or_has_otherwise_is_named(what, monkeypatch, looked_at_anew):
    (cls, name, value), message = LACKING[what]
    if value is None:
        monkeypatch.delattr(cls, name)
    else:
        monkeypatch.setattr(cls, name, value)
    with pytest.raises(NotImplementedError, match=message):
        tiny_model().init_continuous_batching()


def test_a_release_is_judged_by_what_it_has_and_not_by_its_number(monkeypatch, looked_at_anew):
    monkeypatch.setattr(transformers, "__version__", "6.0.0")
    model = tiny_model()
    with engine(model) as manager:
        assert tokens_of(results(manager, manager.add_requests(PROMPTS[:1]))) == [
            alone(model, PROMPTS[0])
        ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [True, False], ids=["on_and_off", "off_and_on"])
@pytest.mark.parametrize("variant", ["gated", "hybrid"])
def test_inference_mode_may_come_and_go_between_sessions(variant, first):
    model, prompts = tiny_model(**VARIANTS[variant]), [random_ids(300).tolist(), *PROMPTS[:3]]
    expected = [alone(model, prompt) for prompt in prompts]
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    settings = ContinuousBatchingConfig(page_size=8, num_blocks=80)
    for mode in (first, not first):
        with torch.inference_mode(mode):
            outputs = model.generate_batch(prompts, config, settings, persistent_manager=True)
        assert tokens_of(list(outputs.values())) == expected
    model.destroy_cached_continuous_batching_manager()


def test_what_has_no_slots_is_refused():
    cross = tiny_model(add_cross_attention=True)
    with pytest.raises(NotImplementedError, match="without cross attention"):
        cross.init_continuous_batching()
    old = tiny_model()
    lacking = (
        {"slot_cache": property(lambda self: self.missing)},
        {"forward": lambda self, input_ids, **kwargs: None},  # which would swallow the cache
    )
    for body in lacking:
        old.__class__ = type("OldModel", (LinearAttentionForCausalLM,), body)
        with pytest.raises(NotImplementedError, match="a checkpoint's code of a newer"):
            old.init_continuous_batching()


def test_in_transformers_serve_a_client_hangs_up_and_a_wrong_request_fails():
    """By the class of `transformers serve` that talks to the engine."""
    model, tokenizer = tiny_model(**VARIANTS["gated"]), word_tokenizer()
    endless = GenerationConfig(max_new_tokens=10**6, do_sample=False, eos_token_id=-1)
    server = CBGenerateManager()
    server.init_cb(model, endless)

    async def clients():
        def ask(tokens: list[int], name: str):
            inputs = {"input_ids": tokens}
            return server.generate_streaming(model, tokenizer, inputs, endless, name)

        texts, streamer = ask(PROMPTS[0], "hangs up")
        assert (await texts.get()).strip() == f"w{alone(model, PROMPTS[0])[0]}"
        wrong, _ = ask([VOCAB_SIZE], "wrong")
        assert "tokens must be integers" in (await wrong.get()).msg
        streamer.cancel()
        few = GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=-1)
        right = {"input_ids": PROMPTS[1]}
        _, _, tokens = await server.generate_non_streaming(model, tokenizer, right, few, "right")
        assert tokens == alone(model, PROMPTS[1])
        with pytest.raises(RuntimeError, match="a prompt must have at least one token"):
            await server.generate_non_streaming(model, tokenizer, {"input_ids": []}, few, "empty")

    try:
        asyncio.run(clients())
        cache = server.scheduler.cache
        cache.pool.try_to_free_sectors()
        assert not server.scheduler.has_pending_requests()
        assert cache.compute_free_capacity() == 1
        assert not server._cb.output_router.result_handlers
    finally:
        server.stop()
