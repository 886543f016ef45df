# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' continuous batching gives each request what `generate()` gives it alone."""

import pytest
from transformers import GenerationConfig

from engines import PROMPTS, alone, engine, results, tokens_of
from tiny import VARIANTS, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = {
    "paper": {},  # elu+1
    "retnet": {**VARIANTS["preset_retnet"], "num_key_value_heads": 2, "linear_rotary": True},
    "gated": VARIANTS["gated"],  # a decay for each token, convolutions, grouped heads
    "aaren": VARIANTS["aaren"],  # a running maximum
    "favor+": VARIANTS["preset_performer"],
    "gated_deltanet": VARIANTS["preset_gated_deltanet"],
    "gated_deltaproduct": VARIANTS["preset_gated_deltaproduct"],  # three steps for each token
    "precond_gdn": VARIANTS["preset_precond_gdn"],  # sums of squared keys beside its state
    "mamba2": VARIANTS["preset_mamba2"],
    "kimi_linear": VARIANTS["preset_kimi_linear"],  # beside latent attention
    "hybrid": VARIANTS["hybrid"],  # beside full attention, and a sliding window
}
SETTINGS = {
    "at_once": {},
    "in_pieces": {"max_batch_tokens": 16},
    "little_memory": {"num_blocks": 7, "max_batch_tokens": 40, "safety_margin": 0.0},
    "prefill_first": {"scheduler_type": "prefill_first", "max_requests_per_batch": 3},
}


@pytest.fixture(scope="module")
def models():
    """By name a model and what it answers to PROMPTS one by one."""
    made = {}

    def get(name: str):
        if name not in made:
            model = tiny_model(**MODELS[name])
            made[name] = model, [alone(model, prompt) for prompt in PROMPTS]
        return made[name]

    return get


@pytest.mark.sample(5)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(name, settings, models):
    model, expected = models(name)
    with engine(model, SETTINGS[settings]) as manager:
        for _ in range(2 if settings == "at_once" else 1):  # slots hold what was before
            assert tokens_of(results(manager, manager.add_requests(PROMPTS))) == expected


@pytest.mark.parametrize("name", ["gated", "hybrid"])
def test_a_long_prompt_is_read_in_pieces_beside_others(name, models):
    model, expected = models(name)
    prompt = random_ids(3000).tolist()
    with engine(model, {"max_batch_tokens": 256, "num_blocks": 1000}) as manager:
        first, *others = manager.add_requests([prompt, *PROMPTS[:3]])
        assert tokens_of(results(manager, [first, *others])) == [
            alone(model, prompt),
            *expected[:3],
        ]


@pytest.mark.parametrize("left_out", [{"num_beams": 3}, {"stop_strings": ["a"]}, {"max_time": 1.0}])
def test_settings_that_are_left_out_are_named(left_out):
    (name,) = left_out
    with pytest.warns(UserWarning, match=f"continuous batching leaves out {name}="):
        tiny_model().init_continuous_batching(GenerationConfig(max_new_tokens=2, **left_out))
