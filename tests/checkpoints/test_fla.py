# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of flash-linear-attention (fla) compute with us what they compute there.

`tests/data/fla` has folders that fla has made and saved, the logits of its kernels in Triton's
interpreter, and those of its own loops in float64 (`tests/support/fla_folders.py` wrote them).
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from hf_linear_attention import from_checkpoint
from hf_linear_attention.checkpoints.family import rules_of, swapped
from hf_linear_attention.checkpoints.files import read_config
from hf_linear_attention.checkpoints.load import load_checkpoint
from hf_linear_attention.checkpoints.tables import FAMILIES, family_of
from hf_linear_attention.mixers.parts.decays import FixedDecay

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = Path(__file__).parents[1] / "data" / "fla"
CASES = sorted(path.name for path in FOLDERS.iterdir())


def expected(case):
    return load_file(FOLDERS / case / "expected.safetensors")


def in_float64(case):
    """A model, and its report. RetNet's constants, which both packages keep in float32, exactly."""
    model, report = load_checkpoint(FOLDERS / case, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, FixedDecay):
            module.log_decay = torch.tensor(module.values, dtype=torch.float64)
    return model.eval(), report


def test_there_is_a_folder_of_every_family():
    kinds = {from_checkpoint_type(case) for case in CASES}
    assert kinds == FAMILIES.keys() - {"rwkv7"}  # whose are in test_rwkv7_checkpoints.py


def from_checkpoint_type(case):
    return load_checkpoint(FOLDERS / case).report.model_type


@pytest.mark.parametrize("case", CASES)
def test_logits_are_flas_and_every_weight_and_key_has_its_place(case):
    model, report = in_float64(case)
    tensors = expected(case)
    with torch.no_grad():
        logits = model(tensors["input_ids"]).logits
    torch.testing.assert_close(logits, tensors["logits"], rtol=0, atol=1e-10)
    torch.testing.assert_close(logits.float(), tensors["kernels"], rtol=0, atol=2e-5)
    stored = load_file(FOLDERS / case / "model.safetensors")
    assert {*report.copied, *report.folded, *report.left_out} == stored.keys()
    assert report.not_read == ()


@pytest.mark.parametrize(
    "case",
    [
        *("gated_deltanet", "gated_deltaproduct", "comba", "precond_gated_deltanet", "gla"),
        *("mamba3", "rwkv6"),
    ],
)
def test_gradients_are_flas(case):
    model, _ = in_float64(case)
    config = read_config(str(FOLDERS / case), {})
    family = family_of(config)
    rules = {rule.theirs: rule for rule in rules_of(family, family.read(config))}
    tensors = expected(case)
    ids = tensors["input_ids"]
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {x.removeprefix("gradient:"): y for x, y in tensors.items() if "gradient" in x}
    assert len(gradients) >= 8
    for name, gradient in gradients.items():
        _, parts, rows = rules[name]
        ours = torch.cat([model.get_parameter(part).grad for part in parts])
        gradient = gradient if rows is None else swapped(gradient, rows)
        torch.testing.assert_close(ours, gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_cached_tokens_are_flas_too(case):
    model, _ = in_float64(case)
    tensors = expected(case)
    cache, logits = None, []
    with torch.no_grad():
        for ids in tensors["input_ids"].split([5, *[1] * 7], dim=1):
            output = model(ids, past_key_values=cache, use_cache=True)
            cache = output.get("cache", output.get("past_key_values"))
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), tensors["logits"], rtol=0, atol=1e-10)


def test_the_dtype_is_the_checkpoints_or_the_one_asked_for():
    assert from_checkpoint(FOLDERS / "gla").dtype == torch.bfloat16
    assert from_checkpoint(FOLDERS / "gla", dtype="float32").dtype == torch.float32
