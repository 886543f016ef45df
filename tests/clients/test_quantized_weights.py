# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models with torchao's weights of 8 and 4 bits: quantised, saved and loaded by Transformers, and
run by our products of few rows, alone and through use_kernels.
"""

import pytest
import torch
from torchao.quantization import (
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)
from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    LinearAttentionForSequenceClassification,
    pack_int4_weights,
    use_kernels,
)
from hf_linear_attention.fast import quantized
from hf_linear_attention.fast.quantized import FEW_ROWS
from tiny import random_ids, tiny_config

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=41)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
MAMBA2 = dict(SIZES, num_heads=4, head_dim=32, state_size=16, n_groups=1, eos_token_id=None)
CONFIGS = {
    "ours": lambda: tiny_config(**SIZES),
    "Llama": lambda: AutoConfig.for_model("llama", **SIZES, **HEADS),
    "Mamba-2": lambda: AutoConfig.for_model("mamba2", **MAMBA2),
}
BITS = {
    8: lambda: Int8WeightOnlyConfig(set_inductor_config=False),
    4: lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32), MappingType.ASYMMETRIC),
}


def quantised(name, bits, folder):
    """A model after it was quantised, saved and loaded by Transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    model.save_pretrained(folder / "model")
    config = TorchAoConfig(BITS[bits](), modules_to_not_convert=[])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=config)
    if bits == 4:
        assert pack_int4_weights(model) == len(quantised_weights(model))
    model.save_pretrained(folder / "quantised")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "quantised")
    for before, after in zip(*map(quantised_weights, (model, loaded)), strict=True):
        assert type(before) is type(after)
        names, _ = before.__tensor_flatten__()
        assert all(torch.equal(getattr(before, x), getattr(after, x)) for x in names)
    return loaded.eval()


def quantised_weights(model):
    weights = [x for x in model.parameters() if quantized.bits_of(x) is not None]
    assert len(weights) >= 5
    return weights


@torch.no_grad()
def of_numbers(model):
    """The same model with plain weights, which are what the quantised ones stand for."""
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        bits = quantized.bits_of(parameter)
        if bits == 4:
            parameter = quantized.dequantize_int4(parameter)
        elif bits == 8:
            parameter = parameter.dequantize()
        plain.get_parameter(name).copy_(parameter)
    return plain


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_models_answer_as_with_the_numbers_that_the_bits_stand_for(
    name, bits, tmp_path, shapes_given_to
):
    model = quantised(name, bits, tmp_path)
    plain = of_numbers(model)
    report = use_kernels(model)
    weights = len(quantised_weights(model))
    if name != "ours":  # which is so by itself
        assert str(report).count(f"product of few rows, {bits} bits") == 1
        assert sum(change.gist.endswith(f"{bits} bits") for change in report.changed) == weights
    calls = shapes_given_to(f"int{bits}_product")
    for tokens in (5, FEW_ROWS + 6):  # the second by torchao's way, or as floats
        ids = random_ids(1, tokens)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-3)
    assert len(calls) == weights
    ids = random_ids(2, 3)
    wanted = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(model.generate(ids, **wanted), plain.generate(ids, **wanted))
    assert len(calls) == (1 + 8) * weights


def test_a_model_without_recurrent_layers_is_undone(tmp_path):
    model = quantised("Llama", 8, tmp_path)
    before = [(type(module), set(vars(module))) for module in model.modules()]
    ids = random_ids(1, 5)
    with torch.no_grad():
        expected = model(ids).logits
        with use_kernels(model):
            assert [(type(module), set(vars(module))) for module in model.modules()] != before
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before


@pytest.mark.parametrize("preset", ["gated_deltanet", "kda", "gla", "mamba2", "qwen3_next"])
@torch.no_grad()
def test_presets_multiply_packed_weights_in_all_their_layers(preset):
    fields = {**SIZES, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LinearAttentionForCausalLM(LinearAttentionConfig.from_preset(preset, **fields)).eval()
    quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(16), MappingType.ASYMMETRIC))
    ids = random_ids(1, 5)
    expected = model(ids).logits
    assert pack_int4_weights(model) > 4
    largest = expected.abs().max().item()
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0.02 * largest)


@torch.no_grad()
def test_a_classifier_keeps_the_layer_that_torchao_multiplies():
    config = LinearAttentionConfig.from_preset("gated_deltanet", num_attention_heads=2, **SIZES)
    model = LinearAttentionForSequenceClassification(config).eval()
    quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(16), MappingType.ASYMMETRIC))
    expected = model(random_ids(1, 5)).logits
    pack_int4_weights(model)
    torch.testing.assert_close(model(random_ids(1, 5)).logits, expected, rtol=0.05, atol=0.02)
