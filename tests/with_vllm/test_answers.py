# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""vLLM gives many requests at once the tokens that `generate()` gives each alone."""

import json
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from in_vllm import PROMPTS, START, alone, engine, make_model, metric, outputs, tokens_of
from tiny import random_ids

VERSION_0_1 = Path(__file__).resolve().parents[1] / "data" / "checkpoint_0_1_0" / "aaren"
# All mixers and their convolutions, decays of each kind, and softmax layers of each kind.
MODELS = [
    "paper",
    "gated",
    "aaren",
    "learned",
    "hybrid",
    "softmax_first",
    "preset_gated_deltanet",
    "preset_mamba2",
    "preset_hgrn",
    "preset_hgrn2",
    "preset_performer",  # has a buffer in its checkpoint
    "preset_kimi_linear",
    "preset_rwkv7",
    "preset_rwkv6",
    "preset_mamba3",
    "preset_gated_deltaproduct",
    "preset_comba",
    "preset_precond_gdn",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes a variant, saves it once, and answers all prompts by generate()."""
    made = {}

    def save(variant, **changes):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            model = make_model(variant, **changes)
            model.save_pretrained(folder)
            expected = [alone(model, prompt) for prompt in PROMPTS]
            assert len({tuple(tokens) for tokens in expected}) > len(PROMPTS) // 2
            made[variant] = folder, expected
        return made[variant]

    return save


@pytest.mark.parametrize("variant", MODELS)
def test_prompts_in_pieces(variant, saved):
    folder, expected = saved(variant)
    with engine(folder, max_num_batched_tokens=16) as llm:
        assert tokens_of(outputs(llm, PROMPTS)) == expected


@pytest.mark.parametrize("variant", MODELS)
def test_prompts_that_begin_alike(variant, saved):
    folder, expected = saved(variant)
    settings = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 48}
    with engine(folder, **settings) as llm:
        for reads_again in (False, True):
            answers = outputs(llm, PROMPTS)
            assert tokens_of(answers) == expected
            shared = min(answer.num_cached_tokens for answer in answers if is_of_start(answer))
            assert (shared == 64) == reads_again


def is_of_start(answer) -> bool:
    return answer.prompt_token_ids[: len(START)] == START


@pytest.mark.parametrize("variant", ["paper", "hybrid"])
def test_requests_that_lose_their_memory_begin_again(variant, saved):
    folder, _ = saved(variant)
    model = make_model(variant)
    prompts = [random_ids(30, seed=seed).tolist() for seed in range(6)]
    expected = [alone(model, prompt) for prompt in prompts]
    settings = {"block_size": 32, "num_gpu_blocks_override": 14, "disable_log_stats": False}
    with engine(folder, max_num_seqs=6, max_model_len=64, **settings) as llm:
        assert tokens_of(outputs(llm, prompts)) == expected
        preempted = metric(llm, "vllm:num_preemptions")
        assert (preempted > 0) == (variant == "hybrid")  # a state does not grow


def test_a_checkpoints_code_is_not_needed_but_may_be_trusted(saved):
    folder, expected = saved("gated")
    with engine(folder, trust_remote_code=True) as llm:
        assert tokens_of(outputs(llm, PROMPTS)) == expected


def test_checkpoints_of_version_0_1():
    """Where Aaren's query had another name."""
    saved = json.loads((VERSION_0_1 / "expected.json").read_text())
    (prompt,), (tokens,) = saved["input_ids"], saved["tokens"]
    expected = tokens[len(prompt) :]
    with engine(VERSION_0_1, max_model_len=len(tokens)) as llm:
        assert tokens_of(outputs(llm, [prompt], len(expected))) == [expected]


def test_half_precision(saved):
    """Scores are near; states stay float32."""
    folder, _ = saved("hybrid")
    model = make_model("hybrid").bfloat16()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[3]])).logits[0, -1].float()
    with engine(folder, dtype="bfloat16") as llm:
        settings = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPTS[3]}], settings, use_tqdm=False)
        for token, score in answer.outputs[0].logprobs[0].items():
            assert abs(score.logprob - logits.log_softmax(-1)[token]) < 0.1
