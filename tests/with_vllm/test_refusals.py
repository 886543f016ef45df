# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What can't be is said before a model is loaded."""

import os

import pytest
import vllm
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from hf_linear_attention.vllm import ARCHITECTURE, register
from in_vllm import LONGEST, make_model

SETTINGS = {
    "LoRA": ({"enable_lora": True}, "enable_lora"),
    "quantization": ({"quantization": "fp8"}, "quantization"),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "speculative",
    ),
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, "[Pp]ipeline parallelism"),
    "heads that ranks can't share": (
        {"tensor_parallel_size": 4},
        "num_key_value_heads=2 must be a multiple of tensor_parallel_size=4",
    ),
}
MODELS = {
    "cross attention": ({"add_cross_attention": True}, "add_cross_attention must be False"),
    "positions by the longest sequence": (
        {
            "position_embedding_type": "rotary",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        "rope_type must not be 'dynamic'",
    ),
    "heads of softmax that are too large": (
        {"layer_types": ["full_attention"] * 2 + ["linear_attention"], "head_dim": 520},
        "at most 512 features",
    ),
}


def test_another_release_of_vllm(monkeypatch, folder):
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    monkeypatch.setitem(MODELS_CONFIG_MAP, ARCHITECTURE, None)
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, None)
    register()
    assert MODELS_CONFIG_MAP[ARCHITECTURE] is None  # which that release may not have
    with pytest.raises(RuntimeError, match="made for vLLM 0.32, and this is 0.33.0"):
        ModelRegistry.models[ARCHITECTURE].load_model_cls()


def make_config(folder, **settings):
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, **settings
    ).create_engine_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("paper", num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, folder):
    settings, message = SETTINGS[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        make_config(folder, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    changes, message = MODELS[name]
    make_model("paper", **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path)


def test_more_tokens_than_learned_positions(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert make_config(folder, max_model_len=2 * LONGEST).model_config.max_model_len == 2 * LONGEST
    make_model("learned").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"at most max_position_embeddings={LONGEST}"):
        make_config(tmp_path, max_model_len=2 * LONGEST)


def test_threads_sleep_while_they_wait(folder, monkeypatch):
    monkeypatch.delenv("KMP_BLOCKTIME")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    make_config(folder)
    assert os.environ["KMP_BLOCKTIME"] == "0"
    assert os.environ["OMP_WAIT_POLICY"] == "active"  # as the user has it
