# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a cast of the whole model, or loading it in another dtype, does to its values: those that
nobody learns keep their digits, and those that are learned have the dtype that was asked for.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from hf_linear_attention import LinearAttentionForCausalLM
from hf_linear_attention.mixers.parts.rotary import RotaryEmbedding
from tiny import VARIANTS, random_ids, shallow, tiny_config, tiny_model


def half_models(model, dtype, folder):
    """How a user comes to a model in half precision, and the model."""
    yield "cast", copy.deepcopy(model).to(dtype)
    model.save_pretrained(folder / "float32")
    yield "loaded", LinearAttentionForCausalLM.from_pretrained(folder / "float32", dtype=dtype)
    copy.deepcopy(model).to(dtype).save_pretrained(folder / "half")
    yield "loaded", LinearAttentionForCausalLM.from_pretrained(folder / "half", dtype="auto")
    yield "made", AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.bfloat16) for variant in VARIANTS),
        *((f"preset_{name}", torch.float16) for name in ("performer", "minimax", "kda")),
    ],
)
def test_half_precision_rounds_what_is_learned_and_nothing_else(variant, dtype, tmp_path):
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    logits = []
    for how, half in half_models(model, dtype, tmp_path):
        assert half.dtype == dtype
        for name, x in half.named_buffers():
            assert x.dtype == torch.float32, (how, name)
            # random features are drawn anew
            assert torch.equal(x, buffers[name]) or (how == "made" and "projection" in name), name
        keeps = how != "cast"  # as Transformers' Kimi Linear
        for name, x in half.named_parameters():
            is_kept = name.endswith("decay.dt_bias") and model.config.decay == "kda"
            is_kept = keeps and (is_kept or name.endswith("_lora.bias"))  # RWKV-7's
            assert x.dtype == (torch.float32 if is_kept else dtype), (how, name)
        if how != "made":
            with torch.no_grad():
                logits.append(half.to(dtype)(random_ids(1, 9)).logits)
    assert all(torch.equal(y, logits[0]) for y in logits)


def test_a_cast_there_and_back_leaves_what_is_not_learned_as_it_was():
    for variant in ("preset_performer", "preset_retnet", "hybrid"):
        model = tiny_model(dtype=torch.float32, **shallow(variant))
        before = {name: x.clone() for name, x in model.named_buffers()}
        with torch.device("meta"):
            empty = LinearAttentionForCausalLM(model.config)
        assert all(x.is_meta for x in empty.bfloat16().parameters())
        after = model.half().double().bfloat16().float()
        assert before.keys() == {name for name, _ in after.named_buffers()}
        for name, x in after.named_buffers():
            assert torch.equal(x, before[name])


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_a_late_position_is_turned_alike_after_a_cast(rope_type):
    """An angle is a frequency, of 8 digits in bfloat16, times a position."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    config = tiny_config(position_embedding_type="rotary", head_dim=16, rope_parameters=rope)
    positions = torch.tensor([[0, 1, 300, 5000]])
    whole, half = RotaryEmbedding(config), RotaryEmbedding(config).bfloat16()
    x = torch.zeros(1, 4, 16)
    for _ in range(2):  # the second time the longest of before is known
        for exact, rounded in zip(whole(x, positions), half(x.bfloat16(), positions), strict=True):
            torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0)
        half.half()


def kda_in_bfloat16(folder):
    tiny_model(dtype=torch.float32, **shallow("preset_kda")).save_pretrained(folder)
    return LinearAttentionForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def all_bfloat16(model):
    return model.bfloat16(), None


def in_float32_and_computed_in_bfloat16(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return model.float(), policy


def with_float32_frozen(model):
    for x in model.parameters():
        x.requires_grad_(x.dtype == torch.bfloat16)
    return model, None


@pytest.mark.parametrize(
    "way", [all_bfloat16, in_float32_and_computed_in_bfloat16, with_float32_frozen]
)
def test_fsdp2_trains_what_was_loaded_in_bfloat16(way, tmp_path):
    model, policy = way(kda_in_bfloat16(tmp_path).train())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": policy}
        for part in (*model.model.layers, model):
            fully_shard(part, **{name: x for name, x in options.items() if x is not None})
        ids = random_ids(2, 9)
        model(ids, labels=ids).loss.backward()
        for name, x in model.named_parameters():
            assert not x.requires_grad or x.grad.to_local().isfinite().all(), name
    finally:
        dist.destroy_process_group()
