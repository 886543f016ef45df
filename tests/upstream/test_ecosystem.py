# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Changed models under accelerate, PEFT, TRL and torchao, one of each family. DDP and FSDP2 are in
tests/training/test_distributed.py.
"""

import copy
import warnings
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.ao.nn.quantized import dynamic as nnqd
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.utils import TorchAOBaseTensor

from hf_linear_attention import use_kernels
from hf_linear_attention.upstream import replacements
from sft import PACKED, sft_trainer
from upstream_models import ONE_OF_EACH, VOCAB_SIZE, close, tiny_upstream

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def original(request):
    """A model as Transformers makes it; tests change copies."""
    return tiny_upstream(request.param)


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (2, 11))


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def generated(model, ids):
    return model.generate(ids, max_new_tokens=5, do_sample=False)


def classes(model):
    return [type(module) for module in model.modules()]


# accelerate: device_map and offloading


def on_two_devices(model, folder):
    """As device_map does: the layers on the disk, all else in memory."""
    places = {}
    for name, part in model.named_children():
        for path in [f"{name}.{child}" for child, _ in part.named_children()] or [name]:
            places[path] = "disk" if path.endswith("layers") else "cpu"
    assert {"disk", "cpu"} == set(places.values())
    dispatch_model(model, places, main_device="cpu", offload_dir=folder)


PLACES = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "two devices": on_two_devices,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("place", PLACES)
def test_use_kernels_before_and_after_the_parts_are_placed(original, ids, place, tmp_path):
    want = logits(original, ids)
    early, late = copy.deepcopy(original), copy.deepcopy(original)
    reports = [use_kernels(early)]
    for model in (early, late):
        PLACES[place](model, tmp_path / str(model is late))
    reports.append(use_kernels(late))
    assert classes(early) == classes(late) != classes(original)
    assert str(reports[0]) == str(reports[1])
    for model, report in zip((early, late), reports, strict=True):
        assert any(weight.is_meta for weight in model.parameters())
        close(logits(model, ids), want)
        assert torch.equal(generated(model, ids), generated(original, ids))
        close(logits(copy.deepcopy(model), ids), want)
        report.undo()
        assert classes(model) == classes(original)
        assert torch.equal(logits(model, ids), want)  # by Transformers' own forwards again


def test_a_model_whose_hooks_are_removed_still_changes(ids):
    model = tiny_upstream("mamba2")
    want, before = logits(model, ids), classes(model)
    cpu_offload(model, execution_device="cpu")
    remove_hook_from_module(model, recurse=True)
    report = use_kernels(model)
    assert not report.left
    close(logits(model, ids), want)
    report.undo()
    assert classes(model) == before and torch.equal(logits(model, ids), want)


@pytest.mark.parametrize("is_hooked_first", [True, False])
def test_another_forward_on_a_module_itself_is_left_alone(is_hooked_first, ids):
    model = tiny_upstream("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    if is_hooked_first:
        cpu_offload(model, execution_device="cpu")
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)
    if not is_hooked_first:
        cpu_offload(model, execution_device="cpu")
    want = logits(model, ids)
    report = use_kernels(model)
    assert not report.changed and "its forward was replaced on the module itself" in str(report)
    assert torch.equal(logits(model, ids), want)


def test_layers_that_are_brought_to_another_device_are_left_to_a_package_there():
    model = tiny_upstream("qwen3_5_text")
    cpu_offload(model, execution_device="cpu")
    model.model.layers[0].linear_attn._hf_hook.execution_device = "cuda:0"
    with mock.patch.object(replacements.importlib.util, "find_spec", return_value=True):
        assert "Transformers runs it on fla there" in str(use_kernels(model))


# PEFT and gradient checkpointing

# PEFT refuses them on out_proj, and Transformers computes dt_proj without (see test_mended.py).
NO_ADAPTERS = {"mamba": ["out_proj", "dt_proj"], "mamba2": ["out_proj"]}


def test_lora_on_every_projection_trains_alike(original, ids):
    left_out = NO_ADAPTERS.get(original.config.model_type)
    adapter = LoraConfig(
        target_modules="all-linear", exclude_modules=left_out, init_lora_weights=False
    )

    def adapted(model):
        torch.manual_seed(1)
        return get_peft_model(model, adapter)

    theirs, ours = adapted(copy.deepcopy(original)), copy.deepcopy(original)
    use_kernels(ours)
    ours = adapted(ours)
    losses = [model(input_ids=ids, labels=ids).loss for model in (ours, theirs)]
    close(*losses)
    for loss in losses:
        loss.backward()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (their.grad is None)
        if mine.grad is not None:
            close(mine.grad, their.grad, 2e-3)


def test_gradient_checkpointing_changes_no_gradient(original, ids):
    model = copy.deepcopy(original).train()
    use_kernels(model)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    want = gradients()
    model.gradient_checkpointing_enable()
    for mine, their in zip(gradients(), want, strict=True):
        torch.testing.assert_close(mine, their)


def test_prompts_of_peft_are_read_once(original, ids):
    """PEFT before 0.22 finds no cache of Transformers 5.24, and in that of states no tokens."""
    model = copy.deepcopy(original)
    use_kernels(model)
    sizes = {"num_attention_heads": 1, "num_layers": 1, "token_dim": model.config.hidden_size}
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    model = get_peft_model(model, prompts).eval()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    cached = model.generate(**inputs, **options)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))
    with pytest.raises(ValueError, match="can't draft tokens for a model with prompts of PEFT"):
        model.generate(**inputs, **options, prompt_lookup_num_tokens=2)


# TRL


@pytest.mark.sample(3)
def test_sft_with_packing_takes_the_step_of_an_unchanged_model_without(original, tmp_path):
    def step(model, **options):
        trainer = sft_trainer(model, tmp_path, **options)
        (batch,) = trainer.get_train_dataloader()
        loss = trainer.train().training_loss
        steps = [after - before for after, before in zip(*weights(model, original), strict=True)]
        return loss, steps, batch["input_ids"]

    def weights(*models):
        return [[weight.detach() for weight in model.parameters()] for model in models]

    theirs, ours = copy.deepcopy(original), copy.deepcopy(original)
    use_kernels(ours)
    want, wanted, rows = step(theirs, max_length=16)
    got, steps, row = step(ours, **PACKED["bfd"])
    assert len(rows) == 8 and len(row) == 1
    assert got == pytest.approx(want, rel=1e-5)
    for mine, their in zip(steps, wanted, strict=True):
        close(mine, their, 2e-3)


# torchao


def test_quantized_weights_before_and_after(original, ids):
    theirs, late, early = (copy.deepcopy(original) for _ in range(3))
    use_kernels(early)
    for ours in (late, early):
        quantize_(ours, Int8WeightOnlyConfig())
    use_kernels(late)
    assert classes(late) == classes(early)
    with torch.no_grad():  # the same rounding, since Transformers' Mamba takes no such weights
        for name, module in late.named_modules():
            if isinstance(module, nn.Linear):
                assert isinstance(module.weight, TorchAOBaseTensor)
                theirs.get_submodule(name).weight.copy_(module.weight.dequantize())
    want = logits(theirs, ids)
    assert (logits(original, ids) - want).abs().max() > 1e-3 * want.abs().max()
    for ours in (early, late):
        close(logits(ours, ids), want)
        assert torch.equal(generated(ours, ids), generated(theirs, ids))


# Quantisers that look for torch.nn.Linear by that class


def test_quantisers_find_all_linear_layers_of_a_changed_model(original, ids):
    theirs, ours = copy.deepcopy(original), copy.deepcopy(original)
    use_kernels(ours)
    logits(ours, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantisation will go
        theirs, ours = (
            torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
            for model in (theirs, ours)
        )
    quantised = [
        {name for name, x in model.named_modules() if isinstance(x, nnqd.Linear)}
        for model in (theirs, ours)
    ]
    assert quantised[0] == quantised[1] != set()
