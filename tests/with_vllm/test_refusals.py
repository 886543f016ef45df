# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What can't be is said before a model is loaded."""

import os
import sys

import pytest
import vllm
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.v1.attention.backends import utils as backend_utils

from hf_linear_attention.vllm import ARCHITECTURE, is_known, register, settings
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


def forget(monkeypatch):
    """What was registered, until the end of a test."""
    register()  # as vLLM does once, when a config is made
    monkeypatch.setitem(MODELS_CONFIG_MAP, ARCHITECTURE, None)
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, None)


def other_reader(block_tables, seq_lens, kv_cache_spec):
    """With an argument of another name, and one that is gone."""


CHANGES = {
    "a name": (
        lambda patch: patch.delattr(backend_utils, "mamba_get_block_table_tensor"),
        ["vllm.v1.attention.backends.utils.mamba_get_block_table_tensor"],
    ),
    "arguments": (
        lambda patch: patch.setattr(backend_utils, "mamba_get_block_table_tensor", other_reader),
        [
            "vllm.v1.attention.backends.utils.mamba_get_block_table_tensor(block_table)",
            "vllm.v1.attention.backends.utils.mamba_get_block_table_tensor(mamba_cache_mode)",
        ],
    ),
    "a field": (
        lambda patch: patch.delitem(ForwardContext.__annotations__, "attn_metadata"),
        ["vllm.forward_context.ForwardContext.attn_metadata"],
    ),
    "a module": (
        lambda patch: patch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None),
        ["vllm.v1.attention.backends.registry.MambaAttentionBackendEnum"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_release_that_lacks_what_the_plugin_uses_is_refused_by_name(name, monkeypatch):
    change, lacking = CHANGES[name]
    forget(monkeypatch)
    change(monkeypatch)
    register()
    assert MODELS_CONFIG_MAP[ARCHITECTURE] is None  # which that release may not have
    with pytest.raises(RuntimeError, match="made for vLLM 0.32 and 0.33, and this is") as refused:
        ModelRegistry.models[ARCHITECTURE].load_model_cls()
    assert f"without {', '.join(lacking)}: install" in str(refused.value)


def test_a_release_that_nobody_has_read_is_warned_of(monkeypatch, folder):
    said = []
    monkeypatch.setattr(
        settings.logger, "warning", lambda *words: said.append(words[0] % words[1:])
    )
    for version in ("0.32.0", "0.33.1", "0.34.0"):
        assert said == []
        monkeypatch.setattr(vllm, "__version__", version)
        forget(monkeypatch)
        register()
        assert ModelRegistry.models[ARCHITECTURE].module_name == "hf_linear_attention.vllm.model"
        make_config(folder)
    assert "made for vLLM 0.32 and 0.33, and this is 0.34.0" in said[0]


@pytest.mark.parametrize(("version", "known"), [("0.33.0+cpu", True), ("0.330.1", False)])
def test_releases_that_were_read_are_known(version, known):
    assert is_known(version) == known


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
