# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching of Transformers' own recurrent models on our kernels."""

import math
import operator

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
)

from engines import alone, engine, results, tokens_of, wait_until
from hf_linear_attention import use_kernels, use_kernels_everywhere
from hf_linear_attention.cache.slots import SlotBatch, SlotCache
from hf_linear_attention.upstream.layers.parts import take_cache
from hf_linear_attention.upstream.recorded_layers import RecordedLayer, _recordings
from upstream_models import CONFIGS, VOCAB_SIZE, is_here, tiny_upstream
from wrapper_models import GENERATING, tiny_wrapper

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSED = {
    "glm5_next": "Glm5NextTextModel: its softmax layers choose keys by an indexer",
    "inkling2_loop_text": "Inkling2LoopTextModel: convolutions beside its softmax layers",
    "inkling2_text": "Inkling2TextModel: convolutions beside its softmax layers",
    "inkling_text": "InklingTextModel: convolutions beside its softmax layers",
    "qwen4_exp_text": "Qwen4ExpTextModel: its softmax layers choose keys by an indexer",
    "zamba": "ZambaModel: its softmax layers are one module",
    "zaya": "ZayaModel: convolutions beside its softmax layers",
    "zamba2": "Zamba2Model: its softmax layers are one module",
}
SERVED = [name for name in CONFIGS if name not in REFUSED]
PURE, HYBRID = "mamba2", "falcon_h1"  # the latter with both in each layer
# Prompts of 1 to 60 tokens, some of which are read in pieces.
PIECES = {"max_batch_tokens": 16}


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCAB_SIZE - 4, (length,), generator=generator).tolist()


NEW_TOKENS = 5
PROMPTS = [random_prompt(length) for length in (5, 60, 1, 17, 2)]


def answers_of_generate(model) -> list[list[int]]:
    return [alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def answers_of_engine(manager) -> list[list[int]]:
    return tokens_of(results(manager, manager.add_requests(PROMPTS, NEW_TOKENS)))


def changed(model_type: str, **changes):
    """A model that use_kernels has changed, and what it answers to PROMPTS."""
    model = tiny_upstream(model_type, **changes)
    use_kernels(model)
    return model, answers_of_generate(model)


def poison(manager) -> None:
    """Makes all that slots hold NaN, as if others had left it there."""
    allocator = manager.batch_processor.cache.cache_allocators["linear_attention"]
    for state in allocator.states.values():
        for x in state.values():
            x.fill_(math.nan)


@pytest.mark.sample(5)
@pytest.mark.parametrize("model_type", SERVED)
def test_tokens_are_those_of_generate(model_type):
    model, expected = changed(model_type)
    with engine(model, PIECES) as manager:
        poison(manager)
        assert answers_of_engine(manager) == expected


def test_tokens_of_slots_are_recorded():
    model, expected = changed(PURE)
    layers = [module for module in model.modules() if isinstance(module, RecordedLayer)]

    def uses() -> list[int]:
        of_layers = map(_recordings.__getitem__, layers)
        return [sum(one.uses for one in x.tokens.recordings.values()) for x in of_layers]

    before = uses()
    with engine(model) as manager:
        assert answers_of_engine(manager) == expected
        assert answers_of_engine(manager) == expected
    assert layers and all(map(operator.gt, uses(), before))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 14, "max_batch_tokens": 40, "safety_margin": 0.0},
        {"scheduler_type": "prefill_first", "max_requests_per_batch": 2},
    ],
    ids=["little_memory", "two_at_a_time"],
)
@pytest.mark.parametrize("model_type", [PURE, HYBRID])
def test_slots_pass_from_one_request_to_the_next(model_type, settings):
    model, expected = changed(model_type)
    with engine(model, settings) as manager:
        assert answers_of_engine(manager) == expected


@pytest.mark.parametrize("model_type", [PURE, HYBRID])
def test_a_request_is_cancelled_beside_others(model_type):
    model, expected = changed(model_type)
    with engine(model, PIECES) as manager:
        endless = manager.add_request(PROMPTS[0], streaming=True, max_new_tokens=300)
        wait_until(lambda: not manager.output_router.output_queue.empty())
        others = manager.add_requests(PROMPTS[1:], NEW_TOKENS)
        manager.cancel_request(endless)
        assert tokens_of(results(manager, others)) == expected[1:]


WINDOWED = {"lfm3": "conv", "lara_mini": "linear_attention"}  # and what their other layers are


@pytest.mark.parametrize("model_type", [name for name in WINDOWED if is_here(name)])
def test_softmax_layers_may_have_a_window(model_type):
    layers = [WINDOWED[model_type], "sliding_attention", "full_attention"]
    config = {"layer_types": layers, "num_hidden_layers": 3, "sliding_window": 5}
    model, expected = changed(model_type, **config)
    with engine(model, PIECES) as manager:
        assert answers_of_engine(manager) == expected


def test_a_model_that_might_have_softmax_layers_needs_none():
    model = tiny_upstream("qwen3_5_text", layer_types=["linear_attention"] * 2)
    use_kernels(model)
    model.generation_config.use_cache = False  # Transformers' can't be counted without them
    expected = answers_of_generate(model)
    with engine(model, PIECES) as manager:
        assert answers_of_engine(manager) == expected


def test_a_model_that_sees_is_served_as_far_as_it_reads_text():
    text = tiny_upstream("qwen3_5_text")
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config=text.config.to_dict(),
        vision_config={**sizes, "out_hidden_size": text.config.hidden_size},
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.model.language_model, model.lm_head = text.model, text.lm_head
    expected = answers_of_generate(text)
    use_kernels(model)
    with engine(model, PIECES) as manager:
        assert answers_of_engine(manager) == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", GENERATING)
def test_models_around_recurrent_ones_are_served_as_far_as_they_read_text(model_type):
    model = tiny_wrapper(model_type)
    expected = answers_of_generate(model)
    use_kernels(model)
    with engine(model, PIECES) as manager:
        poison(manager)
        assert answers_of_engine(manager) == expected


def test_adapters_are_served():
    options = {"target_modules": ["in_proj_qkv", "q_proj"], "init_lora_weights": False}
    model = get_peft_model(tiny_upstream("qwen3_5_text"), LoraConfig(**options)).eval()
    use_kernels(model)
    ids = torch.tensor(PROMPTS[1:2])
    expected = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    with engine(model, PIECES) as manager:
        assert answers_of_engine(manager)[1] == expected[0, ids.shape[1] :].tolist()


def test_sums_are_in_float32_and_windows_in_the_model_s_dtype():
    model = tiny_upstream("bamba").to(torch.bfloat16)
    use_kernels(model)
    with engine(model) as manager:
        states = manager.batch_processor.cache.cache_allocators["linear_attention"].states
        dtypes = {name: x.dtype for name, x in states[0].items()}
        assert dtypes == {"kv": torch.float32, "conv": torch.bfloat16} and list(states) == [0]
        answers = answers_of_engine(manager)
    assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(PROMPTS)


@pytest.mark.parametrize("model_type", [name for name in REFUSED if is_here(name)])
def test_what_cannot_be_served_is_refused_and_says_why(model_type):
    model = tiny_upstream(model_type)
    use_kernels(model)
    with pytest.raises(NotImplementedError, match=f"can't serve {REFUSED[model_type]}"):
        model.init_continuous_batching()


def test_a_layer_that_was_left_alone_is_named():
    model = tiny_upstream("qwen3_5_text", layer_types=["linear_attention"] * 2)
    layer = model.model.layers[1].linear_attn
    layer.__class__ = type("Mine", (type(layer),), {})
    assert "a subclass of Qwen3_5GatedDeltaNet" in str(use_kernels(model))
    message = r"can't serve Qwen3_5TextModel: layers.1.linear_attn \(Mine\) is Transformers' own"
    with pytest.raises(NotImplementedError, match=message):
        model.init_continuous_batching()


def test_a_layer_s_memory_is_in_slots_beside_which_it_may_be_given_pages():
    slots, pages = SlotCache({}, SlotBatch.of([0], [1], [True], torch.device("cpu"))), object()
    assert take_cache(pages, {"cache_params": slots, "T": 3}) == (slots, {"T": 3})


def test_another_mask_of_softmax_layers_is_refused():
    model = tiny_upstream("minimax", sliding_window=4)
    use_kernels(model)
    with pytest.raises(NotImplementedError, match="its config has a sliding_window"):
        model.init_continuous_batching()


def test_a_model_on_several_devices_is_refused():
    model = tiny_upstream("mamba2")
    use_kernels(model)
    model.backbone.norm_f.to("meta")
    with pytest.raises(NotImplementedError, match="on several devices: cpu, meta"):
        model.init_continuous_batching()


def test_undo_brings_back_transformers_engine_and_forgets_ours():
    model, before = tiny_upstream("mamba2"), GenerationMixin.init_continuous_batching
    report = use_kernels(model)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    settings = ContinuousBatchingConfig(page_size=8, num_blocks=50)
    expected = answers_of_generate(model)[:2]
    for _ in range(2):
        outputs = model.generate_batch(PROMPTS[:2], config, settings, persistent_manager=True)
        assert tokens_of(list(outputs.values())) == expected
    report.undo()
    assert type(model).init_continuous_batching is before
    assert type(model).__module__.startswith("transformers.")
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_requests_after_undo_fail_and_say_so():
    model = tiny_upstream("mamba2")
    report = use_kernels(model)
    with engine(model) as manager:
        report.undo()
        (output,) = results(manager, [manager.add_request(PROMPTS[0])])
    assert output.error == "what use_kernels did to the model was undone while it is served"


def test_everywhere_begins_with_continuous_batching_too():
    model = tiny_upstream("lfm2")
    before = GenerationMixin.init_continuous_batching
    with use_kernels_everywhere() as everywhere:
        with engine(model, PIECES) as manager:
            answers = answers_of_engine(manager)
        assert "short convolution" in str(everywhere.reports[model])
        assert answers == answers_of_generate(model)
    assert GenerationMixin.init_continuous_batching is before
